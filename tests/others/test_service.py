"""Kernels of others over HTTP: resolved, in snapshots, in listings, posted, missed, rolled back, and on the dashboard."""

import json
import sys
from collections.abc import Iterator
from datetime import UTC
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from kdatune_api import champions as champions_module
from kdatune_api.app import create_app
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.spec import INTERPRETER
from kdatune_kernels.spec import to_json
from kdatune_kernels.tunable import Installed
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_tuner.backend_others import OtherReplayBackend
from kdatune_tuner.recording_others import load_other_recording
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import access
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuned
from kdatune_tuner.tune_others import OtherTuner

RECORDING = Path(__file__).parent.parent / "data" / "rmsnorm-interpreter.jsonl.gz"
RESOLVE = "/v1/configs/resolve"
CARD = INTERPRETER.name


@pytest.fixture
def tuned(engine: Engine, rmsnorm: Installed) -> Tuned:
    """The first shape of the recording, tuned into the database."""
    backend = OtherReplayBackend(rmsnorm, load_other_recording(RECORDING))
    return OtherTuner(engine, backend, Options(kernel="rmsnorm"), rmsnorm).tune(backend.default_shapes()[0])


@pytest.fixture
def client(database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(champions_module, "PATIENCE_SECONDS", 60.0)
    with TestClient(create_app(Settings(database_url=database_url), check_every_seconds=0.0)) as client:
        yield client


def resolve(client: TestClient, shape: str, kernel: str = "rmsnorm", **more: str) -> Any:
    return client.get(RESOLVE, params={"gpu": CARD, "kernel": kernel, "shape": shape, **more})


def test_resolved_exactly_and_near_by(tuned: Tuned, client: TestClient) -> None:
    assert isinstance(tuned.best, OtherConfig)
    exact = resolve(client, "rows=8,columns=500").json()
    assert exact["config"] == tuned.best.json()
    assert (exact["match"], exact["gpu_level"], exact["stale"]) == ("exact", "exact", False)
    assert (exact["measured_us"], exact["default_us"]) == (tuned.best_us, tuned.default_us)
    assert exact["estimated"] is False
    assert exact["provenance"]["shape"] == {"columns": 500, "dtype": "bf16", "rows": 8}
    assert exact["requested"]["shape_key"] == "columns=500,dtype=bf16,rows=8"
    assert resolve(client, "dtype=bf16,columns=500,rows=8").json() == exact
    assert resolve(client, "rows=8,columns=400").json()["match"] == "bucket"
    assert resolve(client, "rows=6,columns=1000").json()["match"] == "nearest"
    far = resolve(client, "rows=4096,columns=500").json()
    assert (far["match"], far["provenance"]) == ("default", None)
    assert far["config"] == {"rows_per_program": 1, "block_columns": 512, "num_warps": 2}
    assert resolve(client, "rows=8,columns=500,dtype=fp16").json()["match"] == "default"


def test_what_cannot_be_resolved_is_named(tuned: Tuned, client: TestClient) -> None:
    for query, parameter, told in (
        ({"shape": "rows=8"}, "shape", "the shape of rmsnorm lacks columns"),
        ({"shape": "rows=8,columns=x"}, "shape", "columns of rmsnorm must be a whole number, not 'x'"),
        ({"shape": "rows=8,columns=8,depth=1"}, "shape", "rmsnorm has no shape field depth"),
        ({}, "shape", "is missing"),
        ({"shape": "rows=8,columns=500", "kernel": "Rms"}, "kernel", "String should match pattern"),
        ({"shape": "rows=8,columns=500", "kernel": "k2"}, "kernel", "k2 is a stage of kda"),
        ({"shape": "rows=8,columns=500", "N": "1"}, None, "shape is given, and N beside it"),
    ):
        answer = client.get(RESOLVE, params={"gpu": CARD, "kernel": "rmsnorm", **query})
        assert answer.status_code == 422, query
        (error,) = [e for e in answer.json()["errors"] if e.get("parameter") == parameter]
        assert told in error["detail"]
    refused = resolve(client, "rows=8,columns=500,dtype=int8")
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:kdatune:problem:unsupported")
    assert "dtype int8 is none of bf16, fp16, fp32" in refused.json()["detail"]


def test_kda_takes_a_shape_key_too(client: TestClient) -> None:
    by_key = client.get(RESOLVE, params={"gpu": "NVIDIA H200", "shape": "N=1,H=96,T=8192,varlen=true"}).json()
    spelled = client.get(RESOLVE, params={"gpu": "NVIDIA H200", "N": 1, "H": 96, "T": 8192, "varlen": "true"}).json()
    assert by_key == spelled
    wrong = client.get(RESOLVE, params={"gpu": "NVIDIA H200", "shape": "N=1,H=96"}).json()
    assert wrong["errors"] == [{"parameter": "shape", "detail": "the shape lacks T; write e.g. N=1,H=96,T=8192"}]


def test_a_snapshot_carries_it_beside_kdas(tuned: Tuned, client: TestClient) -> None:
    document = client.get(f"/v1/snapshots/{CARD}").json()
    assert document["champions"] == []
    (entry,) = document["others"]
    assert (entry["kernel"], entry["config"]) == ("rmsnorm", tuned.best.json())  # type: ignore[union-attr]
    snapshot = parse_snapshot(json.dumps(document))
    assert [c.config for c in snapshot.others] == [tuned.best]
    document["others"].append({**entry, "config": {"a": []}})
    (skipped,) = parse_snapshot(document).skipped
    assert "a must be null" in skipped.reason
    del document["others"]
    assert parse_snapshot(document).others == ()
    assert client.get("/v1/snapshots/NVIDIA%20H200").json()["others"] == []


def test_a_promotion_is_seen_without_reading_everything(tuned: Tuned, client: TestClient, engine: Engine) -> None:
    before = resolve(client, "rows=8,columns=500").json()
    with reading(engine) as s:
        (promotion,) = queries.page_promotions(s)
    with writing(engine) as s:
        _, token = access.create_token(s, "t", list(access.Scope), access.Caller("a test"))
    undone = client.post(
        f"/v1/promotions/{promotion.id}/rollback",
        json={"reason": "a test"},
        headers={"Authorization": f"Bearer {token}"},
    )
    assert undone.json() == {"generation": 2, "config": None}
    after = resolve(client, "rows=8,columns=500").json()
    assert (before["match"], after["match"], after["generation"]) == ("exact", "default", 2)


def test_without_the_kernel_by_exact_key_only(
    tuned: Tuned, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [p for p in sys.path if "installed" not in p])
    registry.cache_clear()
    assert registry().get("rmsnorm") is None
    exact = resolve(client, "columns=500,dtype=bf16,rows=8").json()
    assert (exact["match"], exact["config"]) == ("exact", tuned.best.json())  # type: ignore[union-attr]
    for shape in ("columns=400,dtype=bf16,rows=8", "columns=500,rows=8"):
        near = resolve(client, shape)
        assert near.status_code == 404
        assert near.json()["type"] == "urn:kdatune:problem:unknown-kernel"
        assert "kernel rmsnorm: it is not installed here" in near.json()["detail"]
    assert resolve(client, "a=1", kernel="softmax").status_code == 404
    assert client.get("/v1/measurements", params={"kernel": "rmsnorm", "limit": 1}).json()["items"]
    assert "rmsnorm" in client.get("/configs").text


def test_listed(tuned: Tuned, client: TestClient) -> None:
    for path, count in (("measurements", 48), ("promotions", 1), ("runs", 2), ("profiles", 0)):
        items = client.get(f"/v1/{path}", params={"kernel": "rmsnorm", "limit": 500}).json()["items"]
        assert len(items) == count, path
        assert {item["shape_key"] for item in items} <= {"columns=500,dtype=bf16,rows=8"}
        of_shape = {"kernel": "rmsnorm", "shape": "rows=8,columns=500", "limit": 500}
        assert client.get(f"/v1/{path}", params=of_shape).json()["items"] == items
        assert client.get(f"/v1/{path}", params={"kernel": "softmax"}).json()["items"] == []
        assert client.get(f"/v1/{path}", params={"kernel": "rmsnorm", "shape": "rows=8"}).status_code == 422


def test_demand_and_quarantine(rmsnorm: Installed, client: TestClient, engine: Engine) -> None:
    config = {"rows_per_program": 2, "block_columns": 512, "num_warps": 4}
    item = {"gpu": CARD, "kernel": "rmsnorm", "shape": {"rows": 8, "columns": 9}, "count": 3}
    quarantined = {**item, "quarantined": {"config": config, "reason": "out of registers"}}
    told = client.post("/v1/demand", json={"items": [item, quarantined]}).json()
    assert (told["key_count"], told["quarantined_count"]) == (1, 1)
    with reading(engine) as s:
        (row,) = queries.demand(s)
        assert (row.kernel, row.shape, row.count) == (
            "rmsnorm",
            OtherShape({"rows": 8, "columns": 9, "dtype": "bf16"}),
            6,
        )
    (listed,) = client.get("/v1/quarantined", params={"kernel": "rmsnorm"}).json()["items"]
    assert (listed["config"], listed["reason"]) == (config, "out of registers")
    for bad, pointer in (
        ({"shape": {"rows": 8}}, "/items/0/shape"),
        ({"shape": {"rows": 8, "columns": [1]}}, "/items/0/shape"),
        ({"quarantined": {"config": {"a": {}}, "reason": ""}}, "/items/0/quarantined/config"),
    ):
        answer = client.post("/v1/demand", json={"items": [{**item, **bad}]})
        assert answer.status_code == 422
        assert [e["pointer"] for e in answer.json()["errors"]] == [pointer]


def post_results(client: TestClient, token: str, config: dict[str, Any], **changes: Any) -> Any:
    backend = load_other_recording(RECORDING)
    result = {
        "kernel": "rmsnorm",
        "shape": {"rows": 8, "columns": 500},
        "config": config,
        "outcome": "ok",
        "median_us": 12.5,
        "measured_at": datetime.now(UTC).isoformat(),
    }
    body = {"gpu": to_json(backend.gpu), "build": to_json(backend.build), "results": [result | changes]}
    return client.post("/v1/results", json=body, headers={"Authorization": f"Bearer {token}"})


def test_posted_results_are_checked_by_the_kernel(rmsnorm: Installed, client: TestClient, engine: Engine) -> None:
    with writing(engine) as s:
        _, token = access.create_token(s, "t", list(access.Scope), access.Caller("a test"))
    good = {"rows_per_program": 2, "block_columns": 512, "num_warps": 4}
    assert post_results(client, token, good).json()["stored_count"] == 1
    for config, changes, pointer, told in (
        ({**good, "num_warps": 3}, {}, "/results/0/config", "refused: num_warps=3 is not one of 1, 2, 4, 8, 16"),
        ({**good, "block_columns": 8192}, {}, "/results/0/config", "refused: block_columns=8192 is mostly empty"),
        (good, {"shape": {"rows": 8}}, "/results/0/shape", "the shape of rmsnorm lacks columns"),
        (good, {"kernel": "softmax"}, "/results/0/kernel", "softmax is not installed here"),
        (good, {"o_error_ratio": 1.5}, "/results/0", "that is outcome incorrect"),
    ):
        answer = post_results(client, token, config, **changes)
        assert answer.status_code == 422, answer.text
        assert any(e["pointer"] == pointer and told in e["detail"] for e in answer.json()["errors"]), answer.text
    with reading(engine) as s:
        (row,) = queries.page_measurements(s)
        assert json.loads(row.config_json) == good


def test_the_dashboard_lists_it(tuned: Tuned, client: TestClient) -> None:
    for path in ("/", "/configs", "/studies", "/profiles", "/trends", "/waves", "/compare"):
        assert client.get(path).status_code == 200, path
    (row,) = client.get("/configs", params={"download": "others.json"}).json()["items"]
    assert (row["kernel"], row["shape"]) == ("rmsnorm", "columns=500,dtype=bf16,rows=8")
    assert (row["measured_us"], row["config"]) == (tuned.best_us, tuned.best.text)  # type: ignore[union-attr]
    runs = client.get("/studies", params={"download": "runs.json"}).json()["items"]
    assert [run["kernel"] for run in runs] == ["rmsnorm", "rmsnorm"]
    assert "/studies/Triton" not in client.get("/studies").text  # the page of a study knows KDA's configs only
    for path in (f"/configs/{CARD}/columns=500,dtype=bf16,rows=8", f"/studies/{CARD}/columns=500,dtype=bf16,rows=8"):
        assert client.get(path).status_code in (404, 422), path


def test_a_kernel_whose_sources_changed_makes_it_stale(
    tuned: Tuned, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Installed, "kernel_hash", lambda _: "0" * 16)
    told = resolve(client, "rows=8,columns=500").json()
    assert told["stale"]
    assert told["stale_reason"].endswith("those installed here are 0000000000000000")


def test_a_kernel_that_fails_costs_its_own_answers_only(
    tuned: Tuned, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a mistake of theirs")

    for name in ("config_ok", "default"):
        monkeypatch.setattr(type(registry().require("rmsnorm").kernel), name, fails)
    answer = resolve(client, "rows=8,columns=500")
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:kdatune:problem:unsupported")
    assert "default of kernel rmsnorm (rmsnorm-kernel 1.0) failed" in answer.json()["detail"]
    assert "RuntimeError: a mistake of theirs" in answer.json()["detail"]
    assert client.get(RESOLVE, params={"gpu": "NVIDIA H200", "N": 1, "H": 96, "T": 8192}).status_code == 200
