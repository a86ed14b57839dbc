"""POST /v1/demand: misses are stored, batches are bounded, nothing malformed gets in."""

import json
import logging

import pytest

from kdatune_kernels.demand import Demand
from kdatune_kernels.demand import Refusal
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.queries import demand

URL = "/v1/demand"


def stored(shelf):
    with reading(shelf.engine) as s:
        return {(row.gpu_name, row.kernel, row.shape.key()): row.count for row in demand(s)}


def test_misses_are_counted(client, shelf, helpers):
    item = {"gpu": "NVIDIA H200", "kernel": "kda", "shape": to_json(helpers.SHAPE), "count": 3}
    answer = client.post(URL, json={"items": [item, item, {**item, "gpu": "Other", "count": 1}]})
    assert (answer.status_code, answer.json()) == (
        200,
        {"item_count": 3, "key_count": 2, "quarantined_count": 0, "left_out_count": 0},
    )
    client.post(URL, json={"items": [{**item, "count": 4}]})
    assert stored(shelf) == {
        ("NVIDIA H200", "kda", "N=1,H=96,T=8192"): 10,
        ("Other", "kda", "N=1,H=96,T=8192"): 1,
    }


def test_a_shape_may_leave_out_its_defaults(client, shelf):
    item = {"gpu": "NVIDIA H200", "shape": {"N": 2, "H": 4, "T": 640, "varlen": True}}
    assert client.post(URL, json={"items": [item]}).status_code == 200
    assert stored(shelf) == {("NVIDIA H200", "kda", "N=2,H=4,T=640,varlen=true"): 1}


def test_what_a_launcher_sends_is_understood(client, shelf, helpers, caplog):
    config = helpers.configs_for(helpers.SHAPE, helpers.H200, 1)[0]
    missed = Demand("NVIDIA H200", shape_of(1, 8, 64), 5)
    failed = Demand("NVIDIA H200", helpers.SHAPE, 1, Refusal(config, "launch failed: out of resources"))
    with caplog.at_level(logging.WARNING, "kdatune.api"):
        answer = client.post(URL, json={"items": [missed.item(), failed.item()]})
    assert (answer.status_code, answer.json()["quarantined_count"]) == (200, 1)
    (record,) = [r for r in caplog.records if "cannot use" in r.getMessage()]
    assert record.fields == {
        "gpu": "NVIDIA H200",
        "shape": "N=1,H=96,T=8192",
        "config_hash": digest(config),
        "reason": "launch failed: out of resources",
    }
    assert len(stored(shelf)) == 2
    assert "kdatune_quarantined_reports_total 1.0" in client.get("/metrics").text


def test_a_count_is_bounded_for_each_report(client, shelf):
    item = {"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 1, "T": 1}, "count": (1 << 53) - 1}
    assert client.post(URL, json={"items": [item, item]}).status_code == 200
    assert list(stored(shelf).values()) == [1_000_000]


def test_a_thousand_items_are_a_batch(client, shelf, is_problem):
    items = [{"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 1, "T": t}} for t in range(1001)]
    assert client.post(URL, json={"items": items[:1000]}).json()["key_count"] == 1000
    problem = is_problem(client.post(URL, json={"items": items}), 422, "invalid-request")
    assert [e["pointer"] for e in problem["errors"]] == ["/items"]
    is_problem(client.post(URL, json={"items": []}), 422, "invalid-request")


GOOD = {"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 1, "T": 1}, "count": 1}
BAD_ITEMS = {
    "gpu missing": ({"shape": GOOD["shape"]}, "/items/1/gpu"),
    "gpu empty": (GOOD | {"gpu": ""}, "/items/1/gpu"),
    "gpu long": (GOOD | {"gpu": "x" * 201}, "/items/1/gpu"),
    "gpu a number": (GOOD | {"gpu": 5}, "/items/1/gpu"),
    "gpu with NUL": (GOOD | {"gpu": "a\0b"}, "/items/1/gpu"),
    "kernel unknown": (GOOD | {"kernel": "K9"}, "/items/1/kernel"),
    "shape missing": ({"gpu": "NVIDIA H200"}, "/items/1/shape"),
    "shape a text": (GOOD | {"shape": "N=1,H=1,T=1"}, "/items/1/shape"),
    "shape null": (GOOD | {"shape": None}, "/items/1/shape"),
    "shape without T": (GOOD | {"shape": {"N": 1, "H": 1}}, "/items/1/shape"),
    "shape with a text": (GOOD | {"shape": {"N": "1", "H": 1, "T": 1}}, "/items/1/shape"),
    "shape with a float": (GOOD | {"shape": {"N": 1.0, "H": 1, "T": 1}}, "/items/1/shape"),
    "shape with a bool": (GOOD | {"shape": {"N": True, "H": 1, "T": 1}}, "/items/1/shape"),
    "shape of more": (GOOD | {"shape": {"N": 1, "H": 1, "T": 1, "X": 1}}, "/items/1/shape"),
    "shape too large": (GOOD | {"shape": {"N": 1, "H": 1, "T": 1 << 41}}, "/items/1/shape"),
    "HV no multiple": (GOOD | {"shape": {"N": 1, "H": 2, "T": 1, "HV": 3}}, "/items/1/shape"),
    "count zero": (GOOD | {"count": 0}, "/items/1/count"),
    "count a text": (GOOD | {"count": "1"}, "/items/1/count"),
    "count a bool": (GOOD | {"count": True}, "/items/1/count"),
    "count huge": (GOOD | {"count": 1 << 53}, "/items/1/count"),
    "more fields": (GOOD | {"note": "x"}, "/items/1/note"),
    "field with a slash": (GOOD | {"a/b~c": "x"}, "/items/1/a~1b~0c"),
    "no object": ([], "/items/1"),
    "config unknown": (GOOD | {"quarantined": {"config": {"k1": {}}, "reason": "x"}}, "/items/1/quarantined/config"),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_a_bad_item_is_named_and_nothing_is_stored(local, local_shelf, is_problem, name):
    item, pointer = BAD_ITEMS[name]
    problem = is_problem(local.post(URL, json={"items": [GOOD, item]}), 422, "invalid-request")
    assert [e["pointer"] for e in problem["errors"]] == [pointer]
    assert stored(local_shelf) == {}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b"null", 422),
        (b"NaN", 422),
        (b'{"items": 5}', 422),
        (b'{"items": [], "more": 1}', 422),
        (b"\xff", 400),
        (b'{"items": [{"gpu": "\\ud800", "shape": {"N": 1, "H": 1, "T": 1}}]}', 422),
        (b"[" * 100_000, 400),
        (b'{"items": ' + b"9" * 10_000 + b"}", 400),
    ],
    ids=lambda v: str(v)[:30],
)
def test_a_body_that_cannot_be_read_is_refused(local, is_problem, body, status):
    response = local.post(URL, content=body, headers={"Content-Type": "application/json"})
    is_problem(response, status, "invalid-request" if status == 422 else None)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/xml", ""])
def test_a_body_that_is_not_json_is_refused(local, is_problem, content_type):
    body = json.dumps({"items": [GOOD]}).encode()
    is_problem(local.post(URL, content=body, headers={"Content-Type": content_type}), 415, "not-json")


def test_the_body_is_bounded(local, is_problem):
    limit = 256 << 10
    padding = b" " * (limit - len(json.dumps({"items": [GOOD]})))
    headers = {"Content-Type": "application/json"}
    fits = json.dumps({"items": [GOOD | {"gpu": ""}]}).encode() + padding[: -len("NVIDIA H200")]
    is_problem(local.post(URL, content=fits[:limit], headers=headers), 422, "invalid-request")
    too_large = json.dumps({"items": [GOOD]}).encode() + padding + b" "
    is_problem(local.post(URL, content=too_large, headers=headers), 413, "body-too-large")
    # sent in chunks, without saying how much will come
    chunks = (b" " * 1024 for _ in range(257))
    is_problem(local.post(URL, content=chunks, headers=headers), 413, "body-too-large")


def test_a_query_is_refused(local, is_problem):
    is_problem(local.post(f"{URL}?dry_run=1", json={"items": [GOOD]}), 422, "invalid-request")


def test_many_errors_are_counted_not_listed(local, is_problem):
    problem = is_problem(local.post(URL, json={"items": [{}] * 100}), 422, "invalid-request")
    assert (len(problem["errors"]), problem["errors_left_out_count"]) == (20, 180)
