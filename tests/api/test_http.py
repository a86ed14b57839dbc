"""HTTP itself: problem documents, request ids, limits, health, metrics, documentation."""

import json
import logging
import re
import socket
from pathlib import Path

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from kdatune_api.app import create_app
from kdatune_api.logs import JsonLines
from kdatune_api.middleware import MAX_TARGET_BYTES
from kdatune_api.problems import PROBLEMS
from kdatune_api.problems import Problem
from kdatune_kernels import __version__
from kdatune_migrations import VERSION_TABLE
from kdatune_migrations import head
from kdatune_tuner.settings import Settings
from kdatune_tuner.store.engine import upgrade

OPENAPI = Path(__file__).parent / "openapi.json"
RESOLVE = "/v1/configs/resolve?gpu=NVIDIA+H200&N=1&H=96&T=8192"


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v2/gpus", "/v1/gpus/", "/healthz/", "/v1/configs", "/%2F", "/%00"])
def test_no_such_path(local, is_problem, path):
    assert "see /docs" in is_problem(local.get(path), 404)["detail"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", RESOLVE, "GET"),
        ("DELETE", "/v1/gpus", "GET"),
        ("GET", "/v1/demand", "POST"),
        ("PUT", "/healthz", "GET"),
    ],
)
def test_a_wrong_method_names_the_right_ones(local, is_problem, method, path, allow):
    response = local.request(method, path)
    is_problem(response, 405)
    assert response.headers["allow"] == allow


def test_a_problem_is_what_the_schema_says(local):
    for path in ("/nothing", "/v1/gpus?limit=0", "/v1/snapshots/A/B"):
        Problem.model_validate_json(local.get(path).content, strict=True)


def test_an_unexpected_error_is_a_problem_and_its_text_stays_inside(local_url, is_problem, caplog):
    app = create_app(Settings(database_url=local_url))

    @app.get("/boom")
    def boom() -> None:
        raise ZeroDivisionError("secret detail")

    with TestClient(app) as client, caplog.at_level(logging.ERROR, "kdatune.api"):
        response = client.get("/boom", headers={"X-Request-ID": "find-me"})
    problem = is_problem(response, 500)
    assert "secret" not in response.text
    assert problem["request_id"] == "find-me"
    assert "secret detail" in caplog.text


def test_a_path_and_query_that_are_too_long(local, is_problem):
    room = MAX_TARGET_BYTES - len("/v1/gpusgpu=")
    is_problem(local.get(f"/v1/gpus?gpu={'x' * room}"), 422, "invalid-request")
    is_problem(local.get(f"/v1/gpus?gpu={'x' * (room + 1)}"), 414, "query-too-long")
    is_problem(local.get("/" + "x" * MAX_TARGET_BYTES), 414, "query-too-long")


def test_bodies_are_bounded_everywhere(local_url, is_problem):
    app = create_app(Settings(database_url=local_url, max_body_bytes=2048))

    @app.post("/echo")
    async def echo(body: dict[str, str]) -> dict[str, str]:
        return body

    with TestClient(app) as client:
        assert client.post("/echo", json={"a": "x" * 1000}).status_code == 200
        is_problem(client.post("/echo", json={"a": "x" * 3000}), 413, "body-too-large")
        is_problem(client.post("/v1/demand", json={"a": "x" * 3000}), 413, "body-too-large")


@pytest.mark.parametrize("given", ["abc", "A-b_c.9", "x" * 64])
def test_a_request_id_is_echoed(local, given):
    for path in ("/healthz", "/nothing", RESOLVE):
        assert local.get(path, headers={"X-Request-ID": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a\tb", "<script>", "a;b", b"\xff\xfe"], ids=repr)
def test_a_strange_request_id_is_replaced(local, given):
    response = local.get("/healthz", headers={"X-Request-ID": given})
    assert re.fullmatch(r"[0-9a-f]{16}", response.headers["x-request-id"])
    assert response.headers["x-request-id"] != local.get("/healthz").headers["x-request-id"]


def test_every_answer_carries_the_common_headers(local):
    for path in ("/healthz", "/nothing", RESOLVE, "/docs", "/metrics"):
        headers = local.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert re.fullmatch(r"app;dur=\d+\.\d\d", headers["server-timing"])
        assert len(headers.get_list("x-request-id")) == 1


def test_health_asks_no_database(homeless):
    assert homeless.get("/healthz").json() == {"status": "ok"}
    version = {"version": __version__, "api": "v1", "snapshot_schema": 1, "schema_revision": head()}
    assert homeless.get("/version").json() == version


@pytest.mark.parametrize(
    "path", ["/readyz", RESOLVE, "/v1/snapshots/NVIDIA%20H200", "/v1/gpus", "/v1/runs", "/v1/demand"]
)
def test_without_a_database_it_says_what_to_do(homeless, is_problem, path):
    item = {"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 1, "T": 1}}
    response = homeless.post(path, json={"items": [item]}) if path == "/v1/demand" else homeless.get(path)
    assert "kdatune db upgrade" in is_problem(response, 503, "database-unavailable")["detail"]
    assert response.headers["retry-after"] == "5"


def test_ready_says_the_schema_and_generation(client, shelf):
    generation = shelf.promote().generation
    assert client.get("/readyz").json() == {"status": "ok", "schema_revision": head(), "generation": generation}


def test_a_service_may_start_before_its_database(database_url, is_problem):
    with TestClient(create_app(Settings(database_url=database_url), check_every_seconds=0.0)) as client:
        is_problem(client.get("/readyz"), 503, "database-unavailable")
        is_problem(client.get(RESOLVE), 503, "database-unavailable")
        upgrade(database_url)
        assert client.get("/readyz").status_code == 200
        assert client.get(RESOLVE).status_code == 200


def test_a_schema_that_changed_under_the_service_is_not_ready(client, engine, is_problem):
    assert client.get("/readyz").status_code == 200
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    assert "9999" in is_problem(client.get("/readyz"), 503, "database-unavailable")["detail"]


def test_a_database_server_that_is_gone(is_problem):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # kept to the end, so that nobody else listens on it
        url = f"postgresql://user:s3cret@127.0.0.1:{closed.getsockname()[1]}/test"
        with TestClient(create_app(Settings(database_url=url))) as client:
            for path in ("/readyz", RESOLVE, "/v1/gpus"):
                problem = is_problem(client.get(path), 503, "database-unavailable")
                assert "s3cret" not in json.dumps(problem)
            assert client.get("/healthz").status_code == 200


def test_metrics_count_by_route_not_by_path(local_url):
    with TestClient(create_app(Settings(database_url=local_url))) as client:
        for path in (RESOLVE, RESOLVE, "/v1/snapshots/NVIDIA%20H200", "/v1/snapshots/A/B", "/secret/path", "/healthz"):
            client.get(path)
        client.request("BREW", "/healthz")
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = set(response.text.splitlines())

    def count(method, route, status):
        return f'kdatune_http_requests_total{{method="{method}",route="{route}",status="{status}"}} '

    assert count("GET", "/v1/configs/resolve", 200) + "2.0" in lines
    assert count("GET", "/v1/snapshots/{gpu:path}", 200) + "1.0" in lines
    assert count("GET", "/v1/snapshots/{gpu:path}", 404) + "1.0" in lines
    assert count("GET", "unmatched", 404) + "1.0" in lines
    assert count("OTHER", "/healthz", 405) + "1.0" in lines
    assert 'kdatune_http_request_duration_seconds_count{route="/v1/configs/resolve"} 2.0' in lines
    assert 'kdatune_resolve_answers_total{match="default"} 2.0' in lines
    assert 'kdatune_champion_reloads_total{what="all"} 1.0' in lines
    assert "secret" not in response.text


def test_one_log_line_a_request(local, caplog):
    with caplog.at_level(logging.INFO, "kdatune.api"):
        local.get(RESOLVE, headers={"X-Request-ID": "line-1"})
        local.get("/healthz")
    lines = [record for record in caplog.records if record.getMessage() == "request"]
    assert len(lines) == 1
    assert set(lines[0].fields) == {"method", "path", "status", "duration_us"}
    assert (lines[0].fields["path"], lines[0].fields["status"]) == ("/v1/configs/resolve", 200)
    written = json.loads(JsonLines().format(lines[0]))
    assert (written["level"], written["logger"], written["status"]) == ("info", "kdatune.api", 200)


def test_the_documentation_loads_nothing_from_elsewhere(local):
    response = local.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"<script|https?://|<link|<img", response.text)
    for path in local.get("/openapi.json").json()["paths"]:
        assert path in response.text
    for problem in PROBLEMS:
        assert problem.uri in response.text


def test_the_contract_is_the_committed_one(local):
    """To accept a change: python -m kdatune_api.openapi > tests/api/openapi.json"""
    assert local.get("/openapi.json").json() == json.loads(OPENAPI.read_text())


def test_every_operation_declares_its_problems():
    document = json.loads(OPENAPI.read_text())
    assert "HTTPValidationError" not in document["components"]["schemas"]
    operations = [(path, method, op) for path, methods in document["paths"].items() for method, op in methods.items()]
    assert len(operations) == 17
    for path, _, operation in operations:
        statuses = {int(status) for status in operation["responses"]}
        assert {422, 500} <= statuses, path
        assert not path.startswith("/v1/") or 503 in statuses
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                schema = {"$ref": "#/components/schemas/Problem"}
                assert response["content"] == {"application/problem+json": {"schema": schema}}


def test_every_number_carries_its_unit():
    """Dimensions, ids, counts, ratios and generations are numbers without one; all others say theirs in their name."""
    units = ("_us", "_pct", "_bytes", "_seconds", "_mhz", "_count", "_id", "_warps", "_trials")
    plain = {"id", "generation", "seed", "registers", "spills", "gain", "gain_low", "gain_high", "status", "schema"}
    ratios = {"o_error_ratio", "state_error_ratio", "barrier_stall_per_issue", "expected_regret", "nearest_regret"}
    knobs = {"K1Config", "K2Config", "Shape", "Gpu"}  # fields of kdatune_kernels.spec, named there
    for name, schema in json.loads(OPENAPI.read_text())["components"]["schemas"].items():
        for key, value in schema.get("properties", {}).items():
            types = {value.get("type"), *(choice.get("type") for choice in value.get("anyOf", ()))}
            if types & {"integer", "number"} and name.partition("-")[0] not in knobs:
                assert key.endswith(units) or key in plain | ratios | {"count", "snapshot_schema"}, (name, key)
