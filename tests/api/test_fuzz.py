"""Whatever the query, the path or the body: never a 5xx, and every refusal is a problem document.

KDATUNE_FUZZ_EXAMPLES: examples of each test, other ones every time. Without it: 150, always the same ones.
"""

import os
from typing import Annotated
from urllib.parse import parse_qsl
from urllib.parse import quote
from urllib.parse import urlencode

from fastapi import FastAPI
from fastapi import Query
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kdatune_api.problems import install_problem_handlers
from kdatune_api.routes.configs import plain_query
from kdatune_api.schemas import ResolveQuery
from kdatune_kernels.spec import KNOWN_GPUS

NAMES = [
    "gpu",
    "kernel",
    "N",
    "H",
    "T",
    "HV",
    "K",
    "V",
    "dtype",
    "varlen",
    "longest_tokens",
    "initial_state",
    "final_state",
]
NAMES += [
    "state_v_first",
    "state_dtype",
    "sm_count",
    "compute_capability",
    "limit",
    "cursor",
    "order",
    "shape",
    "outcome",
]
NAMES += ["run_id", "measurement_id", "stage", "state", "decision"]
VALUES = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", "0", "1", "96", "8192", "-1", "true", "none", "bf16", "kda", "ok", "newest", "9.0", "1e9", "NaN"]
    ),
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.sampled_from(sorted(KNOWN_GPUS)),
    st.sampled_from(["N=1,H=8,T=64", "N=1", "N=1,H=8,T=64,varlen=true"]),
)
QUERIES = st.one_of(
    st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=8), VALUES), max_size=10).map(urlencode),
    st.binary(max_size=60).map(quote),
    st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#"), max_size=60),
)
PATHS = [
    "/v1/configs/resolve",
    "/v1/measurements",
    "/v1/promotions",
    "/v1/runs",
    "/v1/profiles",
    "/v1/gpus",
    "/v1/demand",
    "/v1/regressions",
]
PATHS += [
    "/v1/snapshots/NVIDIA%20H200",
    "/healthz",
    "/readyz",
    "/version",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/nope",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)

fuzz = settings(
    max_examples=int(os.environ.get("KDATUNE_FUZZ_EXAMPLES", "150")),
    derandomize="KDATUNE_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def sound(response):
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["status"] == response.status_code
    return response


@given(st.sampled_from(PATHS), QUERIES)
@fuzz
def test_any_query(client, path, query):
    sound(client.get(f"{path}?{query}"))


@given(
    st.fixed_dictionaries(
        {"gpu": VALUES, "N": VALUES, "H": VALUES, "T": VALUES}, optional=dict.fromkeys(NAMES[5:17], VALUES)
    )
)
@fuzz
def test_any_request_for_a_config(client, params):
    sound(client.get(f"/v1/configs/resolve?{urlencode(params)}"))


read = FastAPI()
install_problem_handlers(read)  # FastAPI's own repeats what was not given, which need not be JSON


@read.get("/read")
def read_as_fastapi_does(query: Annotated[ResolveQuery, Query()]) -> ResolveQuery:
    return query


reader = TestClient(read)


@given(
    st.fixed_dictionaries(
        {"gpu": VALUES, "N": VALUES, "H": VALUES, "T": VALUES}, optional=dict.fromkeys(NAMES[5:17], VALUES)
    ).map(urlencode)
    | st.sampled_from(["gpu=a&N=1&H=1&T=1", "gpu=a+b%20c&N=01&H=1&T=1", "gpu=a&N=1&H=1&T=1&T=1", "gpu=a&N=&H=1&T=1&x"])
    | QUERIES
)
@fuzz
def test_a_query_is_read_alike_with_and_without_fastapi(text):
    ours = plain_query(text.encode())
    theirs = reader.get(f"/read?{text}")
    if ours is not None:
        assert ours == ResolveQuery.model_validate_json(theirs.content)
    elif theirs.status_code == 200:
        names = [name for name, _ in parse_qsl(text, keep_blank_values=True)]
        assert len(set(names)) < len(names)


@given(st.text(max_size=80).map(lambda t: quote(t, safe="")) | st.binary(max_size=40).map(quote))
@fuzz
def test_any_gpu_name(client, name):
    sound(client.get(f"/v1/snapshots/{name}"))


@given(st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"]), st.sampled_from(PATHS))
@fuzz
def test_any_method(client, method, path):
    response = client.request(method, path)
    assert response.status_code < 500


@given(
    JSON
    | st.fixed_dictionaries(
        {"items": st.lists(st.fixed_dictionaries({}, optional={"gpu": JSON, "shape": JSON, "count": JSON}))}
    )
)
@fuzz
def test_any_demand(client, body):
    sound(
        client.post("/v1/demand", json=body)
        if finite(body)
        else client.post("/v1/demand", content=repr(body).encode("utf-8", "replace"))
    )


@given(
    st.sampled_from(
        ["If-None-Match", "Accept-Encoding", "X-Request-ID", "Content-Type", "Host", "Accept", "Content-Length"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40),
)
@fuzz
def test_any_header(client, name, value):
    headers = [(name.encode(), value.encode("latin-1"))]
    sound(client.get("/v1/snapshots/NVIDIA%20H200", headers=headers))
    sound(client.get("/nope", headers=headers))


def finite(value):
    if isinstance(value, float):
        return value - value == 0
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    return all(map(finite, value)) if isinstance(value, list) else True
