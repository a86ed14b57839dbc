"""The listings: values, filters, cursor pages, on both databases."""

from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from kdatune_api.rows import GpuOut
from kdatune_api.rows import MeasurementOut
from kdatune_api.rows import ProfileOut
from kdatune_api.rows import PromotionOut
from kdatune_api.rows import RunOut
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewProfile

MODELS = {
    "/v1/measurements": MeasurementOut,
    "/v1/promotions": PromotionOut,
    "/v1/runs": RunOut,
    "/v1/profiles": ProfileOut,
    "/v1/gpus": GpuOut,
}
H20 = KNOWN_GPUS["NVIDIA H20"]


def items(client, path, **params):
    body = client.get(path, params=params).json()
    for item in body["items"]:
        TypeAdapter(MODELS[path]).validate_python(item)
        assert set(item) == set(MODELS[path].model_fields)
    return body["items"]


def test_an_empty_store_has_one_empty_page(client):
    for path in MODELS:
        response = client.get(path)
        assert response.json() == {"items": [], "next_cursor": None}
        assert response.headers["cache-control"] == "no-store"


def test_measurements_say_what_was_measured(client, shelf, helpers):
    run_id = shelf.run()
    good = shelf.measure(run_id=run_id, p20_us=600.5, p80_us=620.75, sample_count=15, registers=128, o_error_ratio=0.25)
    bad = shelf.measure(kernel="k2", outcome="timeout", median_us=None, detail="killed after 120 s")
    assert [i["id"] for i in items(client, "/v1/measurements")] == [bad, good]
    (one,) = items(client, "/v1/measurements", run_id=run_id)
    config = helpers.configs_for(helpers.SHAPE, helpers.H200, 1)[0]
    expected = {
        "id": good,
        "run_id": run_id,
        "kernel": "kda",
        "gpu_name": "NVIDIA H200",
        "shape": to_json(helpers.SHAPE),
        "shape_key": "N=1,H=96,T=8192",
        "config": to_json(config),
        "outcome": "ok",
        "median_us": 610.25,
        "p20_us": 600.5,
        "p80_us": 620.75,
        "sample_count": 15,
        "registers": 128,
        "o_error_ratio": 0.25,
        "spills": None,
        "estimated": False,
    }
    assert {key: one[key] for key in expected} == expected
    assert one["measured_at"].endswith("Z")
    (two,) = items(client, "/v1/measurements", outcome="timeout")
    assert (two["config"], two["median_us"], two["detail"]) == (to_json(config.k2), None, "killed after 120 s")


def test_filters_are_all_applied(client, shelf, helpers):
    small = shape_of(1, 8, 1024)
    ids = {
        "h200": shelf.measure(),
        "small": shelf.measure(small),
        "k1": shelf.measure(kernel="k1"),
        "h20": shelf.measure(gpu=H20),
        "failed": shelf.measure(outcome="incorrect"),
    }

    def found(**params):
        return {item["id"] for item in items(client, "/v1/measurements", **params)}

    assert found() == set(ids.values())
    assert found(gpu="NVIDIA H20") == {ids["h20"]}
    assert found(kernel="k1") == {ids["k1"]}
    assert found(shape="N=1,H=8,T=1024") == {ids["small"]}
    assert found(shape="T=1024, N=1 ,H=8,HV=8,dtype=bf16") == {ids["small"]}
    assert found(outcome="incorrect") == {ids["failed"]}
    assert found(gpu="NVIDIA H200", kernel="kda", outcome="ok") == {ids["h200"], ids["small"]}
    assert found(gpu="Nobody") == set()
    assert found(run_id=2_000_000_000) == set()


def test_pages_hold_every_row_once(client, shelf):
    ids = [shelf.measure() for _ in range(7)]
    for limit in (1, 3, 7, 500):
        assert walk(client, limit, "oldest") == (ids, -(-7 // limit))
        assert walk(client, limit, "newest") == (ids[::-1], -(-7 // limit))


def walk(client, limit, order):
    """The ids of all pages, and how many pages there were."""
    seen, cursor, pages = [], None, 0
    while True:
        params = {"limit": limit, "order": order} | ({"cursor": cursor} if cursor else {})
        body = client.get("/v1/measurements", params=params).json()
        assert 0 < len(body["items"]) <= limit
        seen += [item["id"] for item in body["items"]]
        pages, cursor = pages + 1, body["next_cursor"]
        if cursor is None:
            return seen, pages


def test_a_row_added_between_two_pages_repeats_nothing(client, shelf):
    ids = [shelf.measure() for _ in range(4)]
    first = client.get("/v1/measurements", params={"limit": 2}).json()
    shelf.measure()
    second = client.get("/v1/measurements", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [item["id"] for item in first["items"] + second["items"]] == ids[::-1]


def test_a_cursor_keeps_its_filters(client, shelf, is_problem):
    for kernel in ("k1", "kda", "k1", "kda"):
        shelf.measure(kernel=kernel)
    params = {"kernel": "kda", "limit": 1}
    cursor = client.get("/v1/measurements", params=params).json()["next_cursor"]
    (item,) = items(client, "/v1/measurements", cursor=cursor, **params)
    assert item["kernel"] == "kda"
    # how many rows a page holds may change on the way
    assert items(client, "/v1/measurements", cursor=cursor, kernel="kda", limit=500) == [item]
    for path, other in (
        ("/v1/measurements", {"limit": 1}),
        ("/v1/measurements", {"kernel": "k1", "limit": 1}),
        ("/v1/measurements", {"kernel": "kda", "limit": 1, "order": "oldest"}),
        ("/v1/runs", {"kernel": "kda", "limit": 1}),
    ):
        problem = is_problem(client.get(path, params={"cursor": cursor, **other}), 422, "invalid-request")
        assert [e["parameter"] for e in problem["errors"]] == ["cursor"]


BAD_CURSORS = [
    "",
    "x",
    "====",
    "MS4xLmFiYw",
    "MS4wLmFiYw",
    "Mi4xLmFiYw",
    "MS4tMS5hYmM",
    "w6nDqcOp",
    "MS45OTk5OTk5OTk5OTk5LmFiYw",
    "né",
    "\x00",
    "a" * 200,
    "a" * 201,
]


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize("cursor", BAD_CURSORS, ids=ascii)
def test_a_bad_cursor_is_a_422(local, is_problem, path, cursor):
    problem = is_problem(local.get(path, params={"cursor": cursor}), 422, "invalid-request")
    assert [e["parameter"] for e in problem["errors"]] == ["cursor"]


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize(
    "params",
    [
        {"limit": "0"},
        {"limit": "501"},
        {"limit": "1e2"},
        {"limit": "-5"},
        {"order": "random"},
        {"gpu": ""},
        {"gpu": "a\x00"},
        {"gpu": "x" * 201},
        {"colour": "red"},
    ],
    ids=str,
)
def test_what_cannot_be_read_is_named(local, is_problem, path, params):
    problem = is_problem(local.get(path, params=params), 422, "invalid-request")
    assert [e["parameter"] for e in problem["errors"]] == list(params)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v1/measurements", {"outcome": "fine"}),
        ("/v1/measurements", {"run_id": "0"}),
        ("/v1/measurements", {"run_id": "99999999999999999999"}),
        ("/v1/measurements", {"run_id": "2147483648"}),
        ("/v1/measurements", {"shape": "N=1"}),
        ("/v1/measurements", {"shape": "N=1,H=2,T=3,HV=3"}),
        ("/v1/measurements", {"kernel": "K3"}),
        ("/v1/promotions", {"decision": "yes"}),
        ("/v1/runs", {"state": "lost"}),
        ("/v1/profiles", {"stage": "kda"}),
        ("/v1/profiles", {"measurement_id": "x"}),
        ("/v1/gpus", {"kernel": "kda"}),
    ],
    ids=str,
)
def test_a_filter_that_cannot_be_read_is_named(local, is_problem, path, params):
    problem = is_problem(local.get(path, params=params), 422, "invalid-request")
    assert [e["parameter"] for e in problem["errors"]] == list(params)


def test_promotions_are_the_whole_history(client, shelf, helpers):
    first, second = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    served = shelf.promote(config=first)
    tie = shelf.promote(config=second, decision="tie")
    with writing(shelf.engine) as s:
        writes.rollback(s, 1, "slower in production")
    rollback, other, promoted = items(client, "/v1/promotions")
    expected = {
        "kernel": "kda",
        "gpu_name": "NVIDIA H200",
        "shape_key": "N=1,H=96,T=8192",
        "measurement_id": served.measurement_id,
        "baseline_measurement_id": None,
        "config": to_json(first),
        "measured_us": 610.25,
        "default_us": 625.5,
        "gain": 1.025,
        "gain_low": 1.011,
        "gain_high": 1.032,
        "decision": "promoted",
        "reason": "paired run",
        "generation": served.generation,
    }
    assert {key: promoted[key] for key in expected} == expected
    assert (other["decision"], other["generation"]) == ("tie", tie.generation)
    assert (rollback["decision"], rollback["config"], rollback["config_hash"]) == ("rollback", None, None)
    assert rollback["baseline_measurement_id"] == served.measurement_id
    assert [i["id"] for i in items(client, "/v1/promotions", decision="tie")] == [other["id"]]


def test_runs_say_how_they_ended(client, shelf):
    run_id = shelf.run(budget_trials=200, budget_seconds=600.0, seed=7, optuna_version="5.0.0", sampler="tpe")
    running = shelf.run(replace(shape_of(1, 8, 64), varlen=True))
    with writing(shelf.engine) as s:
        writes.finish_run(s, run_id, outcome_counts={"ok": 190, "resource": 10}, gpu_seconds=12.5, state="done")
    (done,) = items(client, "/v1/runs", state="done")
    assert (done["id"], done["outcome_counts"], done["gpu_seconds"]) == (run_id, {"ok": 190, "resource": 10}, 12.5)
    assert (done["budget_trials"], done["budget_seconds"], done["seed"], done["sampler"]) == (200, 600.0, 7, "tpe")
    assert done["finished_at"].endswith("Z")
    (other,) = items(client, "/v1/runs", state="running")
    assert (other["id"], other["outcome_counts"], other["finished_at"]) == (running, None, None)
    assert other["shape_key"] == "N=1,H=8,T=64,varlen=true"


def test_profiles_hold_counters_or_a_reason_and_never_zero(client, shelf):
    measurement_id = shelf.measure()
    counters = {"smsp__issue_active.avg.pct": {"value": 41.5, "unit": "%"}}
    with writing(shelf.engine) as s:
        profiled = NewProfile(
            measurement_id=measurement_id,
            stage="k1",
            counters=counters,
            issue_active_pct=41.5,
            barrier_stall_per_issue=0.75,
            ncu_version="2026.3.1",
        )
        writes.add_profile(s, profiled)
        refused = NewProfile(measurement_id=measurement_id, stage="k2", unavailable_reason="ERR_NVGPUCTRPERM")
        writes.add_profile(s, refused)
    unavailable, available = items(client, "/v1/profiles", measurement_id=measurement_id)
    assert (available["counters"], available["issue_active_pct"]) == (counters, 41.5)
    assert (available["barrier_stall_per_issue"], available["unavailable_reason"]) == (0.75, None)
    assert (unavailable["counters"], unavailable["issue_active_pct"]) == (None, None)
    assert (unavailable["barrier_stall_per_issue"], unavailable["unavailable_reason"]) == (None, "ERR_NVGPUCTRPERM")
    assert [i["stage"] for i in items(client, "/v1/profiles", stage="k2", gpu="NVIDIA H200")] == ["k2"]


def test_gpus_are_those_that_something_was_measured_on(client, shelf, helpers):
    shelf.measure()
    shelf.measure(gpu=H20)
    listed = items(client, "/v1/gpus", order="oldest")
    assert [item["gpu"] for item in listed] == [to_json(helpers.H200), to_json(H20)]
    assert [item["gpu"]["name"] for item in items(client, "/v1/gpus", gpu="NVIDIA H20")] == ["NVIDIA H20"]
