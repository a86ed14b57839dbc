"""Strangers: path tricks, SQL in every field, huge and slow requests. Refused or answered, never a 5xx, nothing written."""

import asyncio
import json
import logging
import socket

import pytest
from sqlalchemy import text

from kdatune_api import middleware
from kdatune_api.app import create_app
from kdatune_api.middleware import MAX_HEADER_BYTES
from kdatune_api.middleware import MAX_HEADERS
from kdatune_tuner.settings import Settings
from kdatune_tuner.store.models import Base

SQL = [
    "'",
    '"',
    "' OR '1'='1",
    "'; DROP TABLE promotion; --",
    "1; DELETE FROM measurement",
    "1 UNION SELECT token_hash FROM token",
    "%' AND 1=1 --",
    "\\'; SELECT pg_sleep(10); --",
    "${jndi:ldap://x}",
    "{{7*7}}",
    "$(touch /tmp/x)",
    "__import__('os').system('x')",
    "!!python/object/apply:os.system ['x']",
]
PATHS = [
    "/../../etc/passwd",
    "/..%2f..%2fetc%2fpasswd",
    "/v1/snapshots/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/snapshots/%2e%2e/%2e%2e/etc/passwd",
    "/v1/snapshots/....//....//etc/passwd",
    "/static/../app.py",
    "/static/..%2fapp.py",
    "/static/%2e%2e%2fapp.py",
    "/static//etc/passwd",
    "/static/..%5capp.py",
    "/v1/profiles/..%2f..%2fetc%2fpasswd/report",
    "/v1/promotions/1%2frollback",
    "/v1/promotions/../results",
    "/v1/snapshots/a%00b",
    "/v1/snapshots/%ff%fe",
    "/v1/snapshots/%",
    "/v1/snapshots/%zz",
    "/v1/gpus;jsessionid=1",
    "/v1/gpus/.git/config",
    "/.env",
    "/V1/GPUS",
    "/v1/gpus?gpu=%00",
    "/openapi.json/../../app.py",
]


@pytest.fixture
def counts(local_shelf):
    """How many rows every table has."""

    def count():
        with local_shelf.engine.connect() as connection:
            return {name: connection.scalar(text(f"SELECT count(*) FROM {name}")) for name in Base.metadata.tables}

    return count


@pytest.fixture
def nothing_written(counts):
    before = counts()
    yield
    assert counts() == before


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("path", PATHS)
def test_path_tricks_lead_nowhere(local, path):
    for method in ("GET", "POST"):
        response = local.request(method, path)
        assert response.status_code in (200, 303, 307, 308, 400, 401, 404, 405, 415, 422), response.text
        assert "root:" not in response.text
        assert "def create_app" not in response.text
        if response.status_code == 200:  # /static//etc/passwd and the like are taken as what they read
            assert path.startswith(("/v1/snapshots/", "/v1/gpus"))


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("evil", SQL)
def test_sql_in_every_query_field_is_text(local, evil):
    document = local.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for parameter in methods.get("get", {}).get("parameters", ()):
            if parameter["in"] != "query":
                continue
            needed = {"gpu": "NVIDIA H200", "N": "1", "H": "8", "T": "64"} if path.endswith("resolve") else {}
            url = path.replace("{gpu}", "NVIDIA%20H200").replace("{profile_id}", "1")
            response = local.get(url, params=needed | {parameter["name"]: evil})
            assert response.status_code in (200, 404, 422), (path, parameter["name"], response.text)
            if response.status_code == 200 and "items" in response.json():
                assert response.json()["items"] == []
    assert local.get(f"/v1/snapshots/{evil}").status_code in (404, 422)


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("evil", SQL)
def test_sql_in_every_header_is_text(local, evil):
    for name in (
        "Authorization",
        "X-Request-ID",
        "If-None-Match",
        "Accept-Encoding",
        "Cookie",
        "Host",
        "X-Forwarded-For",
    ):
        assert local.get("/v1/gpus", headers={name: evil}).status_code in (200, 400)
        refused = local.post("/v1/results", json={}, headers={name: evil})
        assert refused.status_code == 401


def test_sql_in_a_demand_is_stored_as_it_reads(client, shelf):
    evil = "'; DROP TABLE demand; --"
    item = {"gpu": evil, "shape": {"N": 1, "H": 1, "T": 1}}
    assert client.post("/v1/demand", json={"items": [item]}).status_code == 200
    with shelf.engine.connect() as connection:
        assert connection.scalar(text("SELECT gpu_name FROM demand")) == evil
    for field in ("kernel", "shape", "count"):
        assert client.post("/v1/demand", json={"items": [item | {field: evil}]}).status_code == 422


@pytest.mark.usefixtures("nothing_written")
def test_headers_are_bounded(local, is_problem, caplog):
    many = [(f"X-{i}", "x") for i in range(MAX_HEADERS + 1)]
    with caplog.at_level(logging.INFO, "kdatune.api"):
        is_problem(local.get("/v1/gpus", headers=many), 431, "headers-too-large")
        is_problem(local.get("/v1/gpus", headers={"X-Long": "x" * MAX_HEADER_BYTES}), 431, "headers-too-large")
    assert [r.fields["status"] for r in caplog.records if r.getMessage() == "request"] == [431, 431]
    assert local.get("/v1/gpus", headers={"X-Long": "x" * (MAX_HEADER_BYTES // 2)}).status_code == 200


@pytest.mark.usefixtures("nothing_written")
def test_a_body_that_drips_is_given_up_on(local_url, monkeypatch):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
    app = create_app(Settings(database_url=local_url))
    sent = []

    async def ask():
        drops = iter([{"type": "http.request", "body": b"{", "more_body": True}])

        async def receive():
            drop = next(drops, None)
            if drop is None:
                await asyncio.sleep(3600)
            return drop

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"x"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/demand", "raw_path": b"/v1/demand", "query_string": b"", "headers": headers, "root_path": "",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9),
        }  # fmt: skip
        await asyncio.wait_for(app(scope, receive, send), 60)

    asyncio.run(ask())
    app.state.service.close()
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["type"] == "urn:kdatune:problem:body-too-slow"


@pytest.mark.usefixtures("nothing_written")
def test_a_compressed_body_is_not_inflated(local, is_problem):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    is_problem(local.post("/v1/demand", content=b"\x1f\x8b\x08\x00", headers=headers), 400)


def test_host_and_forwarding_headers_lead_nowhere(local):
    response = local.get("/v1/gpus/", headers={"Host": "evil.example", "X-Forwarded-Host": "evil.example"})
    assert response.status_code == 404
    assert "evil" not in json.dumps(dict(response.headers))
    assert socket.gethostname() not in json.dumps(dict(response.headers))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"items": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the body is nested too deeply"),
        (b'{"items": "\xff"}', "the body is not JSON in UTF-8"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(local, is_problem, body, says):
    answer = local.post("/v1/demand", content=body, headers={"Content-Type": "application/json"})
    assert is_problem(answer, 400)["detail"] == says
