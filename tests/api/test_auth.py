"""Tokens: who may write, who may read, what is refused and how, and where the service will not start."""

import logging
import re
import subprocess
import sys
from datetime import timedelta

import pytest
from starlette.testclient import TestClient

from kdatune_api.app import create_app
from kdatune_api.auth import is_local
from kdatune_api.auth import listening_host
from kdatune_kernels.errors import StoreError
from kdatune_tuner.exposure import is_loopback
from kdatune_tuner.exposure import refuse_strangers
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import access
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import utc_now

WRITES = [
    ("/v1/results", "results:write"),
    ("/v1/promotions/1/rollback", "promotions:write"),
    ("/v1/regressions/1/acknowledge", "regressions:write"),
]
READS = [
    "/v1/gpus",
    "/v1/configs/resolve?gpu=NVIDIA+H200&N=1&H=1&T=1",
    "/v1/snapshots/NVIDIA%20H200",
    "/docs",
    "/metrics",
]
BY = access.Caller("a test")
ANY = "0.0.0.0"  # noqa: S104 - nothing is bound to it


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(("path", "scope"), WRITES)
def test_a_write_without_a_token_is_refused_and_says_how(client, is_problem, caplog, path, scope):
    with caplog.at_level(logging.WARNING, "kdatune.api"):
        response = client.post(path, json={})
    assert "kdatune token create" in is_problem(response, 401, "unauthenticated")["detail"]
    assert response.headers["www-authenticate"] == 'Bearer realm="kdatune"'
    assert [r.getMessage() for r in caplog.records] == ["refused: no token"]
    assert caplog.records[0].fields == {"method": "POST", "path": path, "client": "testclient"}


@pytest.mark.parametrize(("path", "scope"), WRITES)
def test_a_token_of_another_scope_is_refused(client, make_token, is_problem, path, scope):
    others = [other for other in access.Scope if other != scope]
    response = client.post(path, json={}, headers=bearer(make_token(*others)))
    assert scope in is_problem(response, 403, "forbidden")["detail"]
    assert (
        response.headers["www-authenticate"] == f'Bearer realm="kdatune", error="insufficient_scope", scope="{scope}"'
    )
    # with the scope it is the body that is wrong
    is_problem(client.post(path, json={"what": 1}, headers=bearer(make_token(scope))), 422, "invalid-request")


@pytest.mark.parametrize(
    "change",
    [
        lambda token: token[:-1] + ("A" if token[-1] != "A" else "B"),
        lambda token: token[:17] + "A" * 43,
        lambda token: "kdt_" + "0" * 12 + token[16:],
        lambda token: token + "A",
        lambda token: token[:-1],
        lambda token: token.upper(),
        lambda token: "",
        lambda token: "x" * 5000,
        lambda token: "' OR 1=1 --",
        lambda token: f"{token} {token}",
        lambda token: token[4:16],
    ],
)
def test_a_wrong_token_is_refused(client, make_token, is_problem, change):
    response = client.post("/v1/results", json={}, headers=bearer(change(make_token())))
    is_problem(response, 401, "unauthenticated")
    assert 'error="invalid_token"' in response.headers["www-authenticate"]


def test_other_schemes_and_two_headers_are_refused(client, make_token, is_problem):
    token = make_token()
    for value in (f"Basic {token}", token, f"Bearer{token}", f"Token {token}", f"Bearer: {token}"):
        is_problem(client.post("/v1/results", json={}, headers={"Authorization": value}), 401, "unauthenticated")
    twice = [("Authorization", f"Bearer {token}"), ("Authorization", f"Bearer {token}")]
    is_problem(client.post("/v1/results", json={}, headers=twice), 401, "unauthenticated")
    is_problem(
        client.post("/v1/results", json={}, headers={"Authorization": f"bearer   {token}"}), 422, "invalid-request"
    )


def test_a_token_ends_when_it_is_revoked_and_at_its_end(client, engine, make_token, is_problem):
    token = make_token()
    is_problem(client.post("/v1/results", json={}, headers=bearer(token)), 422, "invalid-request")
    with writing(engine) as s:
        access.revoke_token(s, token.split("_")[1], BY)
    is_problem(client.post("/v1/results", json={}, headers=bearer(token)), 401, "unauthenticated")
    short = make_token(expires_at=utc_now() + timedelta(hours=1))
    is_problem(client.post("/v1/results", json={}, headers=bearer(short)), 422, "invalid-request")
    with writing(engine) as s:
        s.get(access.TokenModel, 2).expires_at = utc_now() - timedelta(seconds=1)
    is_problem(client.post("/v1/results", json={}, headers=bearer(short)), 401, "unauthenticated")


def test_who_may_not_write_learns_nothing_about_the_body(local, is_problem):
    json_type = {"Content-Type": "application/json"}
    for body in (b"{", b"[]", b" " * (2 << 20), b"\xff"):
        is_problem(local.post("/v1/results", content=body, headers=json_type), 401, "unauthenticated")
    is_problem(local.post("/v1/results?a=1", content=b"{}"), 401, "unauthenticated")


def test_the_database_never_holds_the_token(engine, database_url, make_token, tmp_path):
    token = make_token()
    with engine.connect() as connection:
        row = connection.exec_driver_sql("SELECT * FROM token").fetchone()
    secret = token.rpartition("_")[2] if token.count("_") == 2 else token[17:]
    assert not any(secret in str(value) for value in row)
    assert re.fullmatch(r"kdt_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", token)


def test_reads_are_open_unless_they_are_closed(database_url, engine, make_token, is_problem):
    token = make_token("demand:write")
    with TestClient(create_app(Settings(database_url=database_url), check_every_seconds=0.0)) as client:
        assert {client.get(path).status_code for path in READS} == {200}
    closed = Settings(database_url=database_url, open_reads=False)
    with TestClient(create_app(closed, check_every_seconds=0.0)) as client:
        for path in [*READS, "/nope", "/openapi.json"]:
            is_problem(client.get(path), 401, "unauthenticated")
            assert client.head(path).status_code == 401
            is_problem(client.get(path, headers=bearer("kdt_nope")), 401, "unauthenticated")
        for _ in range(2):
            assert {client.get(path, headers=bearer(token)).status_code for path in READS} == {200}
        assert {client.get(path).status_code for path in ("/healthz", "/readyz", "/version")} == {200}
        item = {"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 1, "T": 1}}
        assert client.post("/v1/demand", json={"items": [item]}).status_code == 200


ITEM = {"items": [{"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 1, "T": 1}}]}


def test_demand_needs_a_token_where_it_is_not_from_this_machine(database_url, make_token, is_problem):
    settings = Settings(database_url=database_url)
    with TestClient(create_app(settings), base_url="http://10.0.0.5:8321") as client:
        is_problem(client.post("/v1/demand", json=ITEM), 401, "unauthenticated")
        is_problem(client.post("/v1/demand", json=ITEM, headers=bearer(make_token("results:write"))), 403, "forbidden")
        assert client.post("/v1/demand", json=ITEM, headers=bearer(make_token("demand:write"))).status_code == 200
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8321") as client:
        assert client.post("/v1/demand", json=ITEM).status_code == 200
        for header in ("X-Forwarded-For", "Forwarded"):
            is_problem(client.post("/v1/demand", json=ITEM, headers={header: "10.0.0.5"}), 401, "unauthenticated")
        # a token that is sent must be a good one
        is_problem(client.post("/v1/demand", json=ITEM, headers=bearer("kdt_nope")), 401, "unauthenticated")
    with TestClient(create_app(Settings(database_url=database_url, open_demand=False))) as client:
        is_problem(client.post("/v1/demand", json=ITEM), 401, "unauthenticated")


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        (ANY, False),
        ("::", False),
        ("10.0.0.5", False),
        ("::ffff:10.0.0.5", False),
        ("fe80::1%eth0", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_which_addresses_are_of_this_machine(host, inside):
    assert is_loopback(host) is inside
    assert is_local({"type": "http", "headers": [], "server": (host, 80)}) is inside


def test_a_unix_socket_is_of_this_machine():
    assert is_local({"type": "http", "headers": [], "server": ("/run/kdatune.sock", None)})
    assert is_local({"type": "http", "headers": [], "server": None})


def test_the_address_is_found_where_uvicorn_is_told_it(monkeypatch):
    monkeypatch.delenv("UVICORN_HOST", raising=False)
    settings = Settings(host="127.0.0.1")
    uvicorn = "/usr/lib/python3/site-packages/uvicorn/__main__.py"
    assert listening_host(settings, [uvicorn, "app", "--host", ANY]) == ANY
    assert listening_host(settings, ["uvicorn", "--host=::"]) == "::"
    assert listening_host(settings, ["gunicorn", "-b", f"{ANY}:80"]) == ANY
    assert listening_host(settings, ["uvicorn", "app"]) == "127.0.0.1"
    assert listening_host(settings, ["kdatune", "serve", "--host", ANY]) == "127.0.0.1"
    monkeypatch.setenv("UVICORN_HOST", ANY)
    assert listening_host(settings, ["uvicorn", "app"]) == ANY


def test_others_are_let_in_only_where_a_token_exists(engine, make_token):
    refuse_strangers(lambda: engine, "127.0.0.1")
    with pytest.raises(StoreError, match=r"not started on 0\.0\.0\.0: .*`kdatune token create"):
        refuse_strangers(lambda: engine, ANY)
    token = make_token()
    refuse_strangers(lambda: engine, ANY)
    with writing(engine) as s:
        access.revoke_token(s, token.split("_")[1], BY)
    with pytest.raises(StoreError, match="no token is configured"):
        refuse_strangers(lambda: engine, "::")


def test_the_app_does_not_start_for_strangers_without_a_token(database_url, engine, make_token):
    exposed = Settings(database_url=database_url, host=ANY)
    with pytest.raises(StoreError, match="no token is configured"), TestClient(create_app(exposed)):
        pass
    make_token()
    with TestClient(create_app(exposed)) as client:
        assert client.get("/healthz").status_code == 200


def test_nor_where_it_cannot_tell(tmp_path):
    exposed = Settings(database_url=f"sqlite:///{tmp_path}/none.db", host=ANY)
    with pytest.raises(StoreError, match="cannot be told"), TestClient(create_app(exposed)):
        pass


def test_uvicorn_itself_does_not_start_for_strangers(local_url, tmp_path):
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "kdatune_api.app:create_app",
        "--factory",
        "--host",
        ANY,
        "--port",
        "0",
    ]
    done = subprocess.run(
        command,
        env={"KDATUNE_DATABASE_URL": local_url, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 3
    assert "no token is configured" in done.stderr
    assert "running on" not in done.stderr


def test_what_a_token_does_is_in_the_audit(engine, make_token):
    token = make_token("results:write")
    with writing(engine) as s:
        access.revoke_token(s, token.split("_")[1], access.Caller("someone", None, "req-1"))
    with reading(engine) as s:
        newest, oldest = access.page_audit(s)
    assert (oldest.actor, oldest.action, oldest.detail) == (
        "a test",
        "token.create",
        {"name": "tester", "scopes": ["results:write"]},
    )
    assert (newest.actor, newest.action, newest.request_id) == ("someone", "token.revoke", "req-1")
    assert newest.target == oldest.target == f"token {token.split('_')[1]}"
