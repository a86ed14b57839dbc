"""What is written comes back unchanged, twice the same is once, and what makes no sense is refused."""

import dataclasses
import math
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from datetime import timezone

import pytest
from sqlalchemy import Engine
from sqlalchemy import text

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewProfile


def test_gpu_build_and_problem_are_stored_once(engine: Engine, world) -> None:
    with writing(engine) as s:
        assert writes.put_gpu(s, world.gpu) == world.gpu_id
        assert writes.put_build(s, world.build) == world.build_id
        assert writes.put_problem(s, "kda", world.shape) == world.problem_id
        assert writes.put_problem(s, "k1", world.shape) != world.problem_id
        for table, rows in (("gpu", 1), ("build", 1), ("problem", 2)):
            assert s.scalar(text(f"SELECT count(*) FROM {table}")) == rows


@pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=lambda g: g.name)
def test_every_known_gpu_comes_back_equal(engine: Engine, gpu) -> None:
    with writing(engine) as s:
        writes.put_gpu(s, gpu)
        assert queries.gpus(s) == [gpu]
        assert queries.find_gpu(s, gpu.name) == gpu


def test_each_part_of_a_gpus_identity_makes_another_one(engine: Engine) -> None:
    gpu = gpu_of("NVIDIA H200", "9.0", 132, 1000)
    others = [
        dataclasses.replace(gpu, name="NVIDIA H200 NVL"),
        dataclasses.replace(gpu, compute_capability="9.1"),
        dataclasses.replace(gpu, sm_count=78),
        dataclasses.replace(gpu, memory_bytes=2000),
        dataclasses.replace(gpu, mig_profile="3g.40gb"),
    ]
    with writing(engine) as s:
        assert len({writes.put_gpu(s, g) for g in (gpu, *others, gpu)}) == 6


def test_limits_reported_anew_replace_the_stored_ones_but_unknown_does_not(engine: Engine) -> None:
    first = gpu_of("NVIDIA H200", "9.0", 132, 1000, l2_bytes=0)
    with writing(engine) as s:
        writes.put_gpu(s, first)
        writes.put_gpu(s, dataclasses.replace(first, l2_bytes=60 << 20))
        writes.put_gpu(s, first)
        assert queries.gpus(s) == [dataclasses.replace(first, l2_bytes=60 << 20)]


@pytest.mark.parametrize("name", ["a\x00b", "\ud800"])
def test_a_gpu_name_that_no_database_can_hold_is_refused(engine: Engine, name: str) -> None:
    gpu = dataclasses.replace(KNOWN_GPUS["NVIDIA H200"], name=name)
    with pytest.raises(StoreError, match=r"gpu: name=.* holds characters that no database keeps"), writing(engine) as s:
        writes.put_gpu(s, gpu)
    with reading(engine) as s:
        assert queries.find_gpu(s, name) is None


def test_the_largest_gpu_comes_back_equal(engine: Engine) -> None:
    most = (1 << 60) - 1
    gpu = Gpu("x" * 500, "999.99", (1 << 20) - 1, most, most, most, most, most, "7g.80gb")
    with writing(engine) as s:
        writes.put_gpu(s, gpu)
        assert queries.gpus(s) == [gpu]


def test_a_measurement_comes_back_field_by_field(engine: Engine, world) -> None:
    with writing(engine) as s:
        run_id = world.run(s)
        new = world.new(
            run_id=run_id,
            detail="checked twice",
            median_us=610.1999999999999,
            p20_us=0.1 + 0.2,
            p80_us=1e300,
            sample_count=15,
            o_error_ratio=0.003956358476936266,
            state_error_ratio=0.0,
            requested_num_warps=4,
            effective_num_warps=12,
            registers=168,
            spills=0,
            smem_bytes=80280,
            occupancy_pct=18.75,
            sm_clock_mhz=1980.0,
            throttle_reasons="sw_power_cap",
            regime="L2-cold, CUDA graph",
            estimated=True,
            measured_at=datetime(2026, 11, 29, 22, 31, 7, 123456, tzinfo=UTC),
        )
        row_id = writes.add_measurement(s, new)
    with reading(engine) as s:
        row = queries.find_measurement(s, row_id)
    assert {f.name: getattr(row, f.name) for f in dataclasses.fields(new)} == dataclasses.asdict(new)
    assert (row.id, row.gpu_name, row.shape) == (row_id, world.gpu.name, world.shape)
    assert type(row.outcome) is Outcome


def test_absent_is_none_and_never_zero(engine: Engine, world) -> None:
    with writing(engine) as s:
        writes.add_measurement(s, world.new(outcome=Outcome.RESOURCE, median_us=None, detail="needs 300000 bytes"))
        (row,) = queries.page_measurements(s)
    absent = {k for k, v in dataclasses.asdict(row).items() if v is None}
    assert absent >= {"median_us", "p20_us", "p80_us", "sample_count", "o_error_ratio", "registers", "occupancy_pct"}


def test_timestamps_are_kept_in_utc(engine: Engine, world) -> None:
    local = datetime(2026, 11, 30, 4, 1, 0, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    with writing(engine) as s:
        row_id = writes.add_measurement(s, world.new(measured_at=local))
    with reading(engine) as s:
        stored = queries.find_measurement(s, row_id).measured_at
    assert stored == local
    assert stored.utcoffset() == timedelta(0)


def test_a_time_without_zone_is_refused(engine: Engine, world) -> None:
    naive = datetime(2026, 11, 29)  # noqa: DTZ001 the naive value is what is tested
    with pytest.raises(Exception, match="no time zone"), writing(engine) as s:
        writes.add_measurement(s, world.new(measured_at=naive))


@pytest.mark.parametrize("ratio", [math.nan, math.inf])
def test_a_ratio_that_is_not_finite_is_none_on_both_databases(engine: Engine, world, ratio: float) -> None:
    with writing(engine) as s:
        new = world.new(outcome=Outcome.INCORRECT, median_us=None, o_error_ratio=ratio)
        row_id = writes.add_measurement(s, new)
    with reading(engine) as s:
        assert queries.find_measurement(s, row_id).o_error_ratio is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config_json": "{"}, "is not JSON"),
        ({"config_json": '{"a": 1}'}, "is not in canonical form"),
        ({"config_json": '{"a":1}'}, "is of another config"),
        ({"config_hash": "0" * 16}, "is of another config"),
        ({"median_us": None}, "is ok but has no median_us"),
        ({"median_us": 0.0}, r"median_us=0.0 of config \w+ is not a time"),
        ({"p80_us": math.inf}, "p80_us=inf"),
        ({"median_us": math.nan}, "median_us=nan"),
        ({"outcome": "fine"}, "unknown outcome 'fine'; use one of ok, compile_error"),
        ({"registers": 1 << 31}, "registers=2147483648 of config .* is out of range"),
        ({"spills": -1}, "spills=-1"),
        ({"kernel": "K3"}, "unknown kernel 'K3'; use one of k1, k2, kda"),
    ],
)
def test_a_measurement_that_makes_no_sense_is_refused(engine: Engine, world, changes, says: str) -> None:
    with pytest.raises(StoreError, match=says), writing(engine) as s:
        writes.add_measurement(s, world.new(**changes))


def test_the_database_itself_refuses_an_ok_without_time(engine: Engine, world) -> None:
    with writing(engine) as s:
        writes.add_measurement(s, world.new())
    with pytest.raises(StoreError, match="ck_measurement_ok_has_time"), writing(engine) as s:
        s.execute(text("UPDATE measurement SET median_us = NULL"))
    with pytest.raises(StoreError, match="ck_measurement_outcome"), writing(engine) as s:
        s.execute(text("UPDATE measurement SET outcome = 'fine'"))


def test_output_of_a_tool_is_stored_whatever_it_holds(engine: Engine, world) -> None:
    with writing(engine) as s:
        new = world.new(outcome=Outcome.COMPILE_ERROR, median_us=None, detail="ptxas\x00 fatal \udcff")
        row_id = writes.add_measurement(s, new)
    with reading(engine) as s:
        assert queries.find_measurement(s, row_id).detail == "ptxas\ufffd fatal ?"


def test_a_run_opens_and_closes_once(engine: Engine, world) -> None:
    with writing(engine) as s:
        run_id = world.run(s)
        (run,) = queries.page_runs(s)
        assert (run.state, run.outcome_counts, run.gpu_seconds, run.finished_at) == ("running", None, None, None)
        assert (run.trigger, run.backend, run.sampler, run.seed) == ("cli", "replay", "TPESampler", 7)
        assert (run.budget_trials, run.budget_seconds, run.optuna_version) == (200, 600.0, "5.0.0")
        s.expire_all()
        writes.finish_run(s, run_id, outcome_counts={Outcome.OK: 3, "timeout": 1}, gpu_seconds=12.5, state="done")
        (run,) = queries.page_runs(s)
        assert (run.state, run.outcome_counts, run.gpu_seconds) == ("done", {"ok": 3, "timeout": 1}, 12.5)
        assert run.finished_at >= run.started_at
        with pytest.raises(StoreError, match=f"run {run_id} is not running"):
            writes.finish_run(s, run_id, outcome_counts={}, gpu_seconds=0.0, state="done")
        with pytest.raises(StoreError, match="state 'running' is not an end; use one of done, failed, interrupted"):
            writes.finish_run(s, run_id, outcome_counts={}, gpu_seconds=0.0, state="running")
        with pytest.raises(StoreError, match=r"unknown outcome\(s\) fine"):
            writes.finish_run(s, run_id, outcome_counts={"fine": 1}, gpu_seconds=0.0, state="done")


def test_a_profile_holds_counters_or_the_reason(engine: Engine, world) -> None:
    counters = {"smsp__issue_active.avg.pct_of_peak": {"value": 41.5, "unit": "%"}, "zero": {"value": 0, "unit": ""}}
    with writing(engine) as s:
        measurement_id = writes.add_measurement(s, world.new())
        full = NewProfile(
            measurement_id=measurement_id,
            stage="k1",
            counters=counters,
            issue_active_pct=41.5,
            barrier_stall_per_issue=0.0,
            ncu_version="2026.3.1",
        )
        none = NewProfile(measurement_id=measurement_id, stage="k2", unavailable_reason="ERR_NVGPUCTRPERM")
        for new in (full, none):
            writes.add_profile(s, new)
        rows = queries.page_profiles(s)
    for new, row in zip((full, none), rows, strict=True):
        assert {f.name: getattr(row, f.name) for f in dataclasses.fields(new)} == dataclasses.asdict(new)
        assert (row.kernel, row.gpu_name, row.shape) == ("kda", world.gpu.name, world.shape)
    assert rows[1].issue_active_pct is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "either counters or the reason"),
        ({"counters": {}, "unavailable_reason": "no permission"}, "either counters or the reason"),
        ({"stage": "k3", "counters": {}}, "unknown stage 'k3'; use one of k1, k2"),
        ({"counters": {"m": {"value": 1.0}}}, "counter m must be"),
        ({"counters": {"m": {"value": math.nan, "unit": "%"}}}, "counter m must be"),
        ({"counters": {"m": {"value": None, "unit": "%"}}}, "counter m must be"),
        ({"unavailable_reason": "no permission", "issue_active_pct": 0.0}, "ck_profile_unavailable_is_null"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(engine: Engine, world, changes, says: str) -> None:
    with writing(engine) as s:
        measurement_id = writes.add_measurement(s, world.new())
    with pytest.raises(StoreError, match=says), writing(engine) as s:
        writes.add_profile(s, NewProfile(**{"measurement_id": measurement_id, "stage": "k1"} | changes))


def test_the_database_itself_refuses_a_profile_without_counters_and_reason(engine: Engine, world) -> None:
    with writing(engine) as s:
        measurement_id = writes.add_measurement(s, world.new())
        writes.add_profile(s, NewProfile(measurement_id=measurement_id, stage="k1", counters={}))
    with pytest.raises(StoreError, match="ck_profile_counters_or_reason"), writing(engine) as s:
        s.execute(text("UPDATE profile SET counters = NULL"))


def test_demand_adds_up_by_key(engine: Engine) -> None:
    shape = shape_of(N=6, H=64, T=8192, varlen=True, longest_tokens=3063, initial_state=False)
    with writing(engine) as s:
        writes.report_demand(s, "NVIDIA H20", "kda", shape, 2)
        writes.report_demand(s, "NVIDIA H200", "kda", shape, 1)
    with writing(engine) as s:
        writes.report_demand(s, "NVIDIA H20", "kda", shape, 40)
    with reading(engine) as s:
        first, second = queries.demand(s)
        assert queries.demand(s, "NVIDIA H20") == [first]
        assert queries.demand(s, "A/B\x00") == []
    assert (first.gpu_name, first.count, first.shape) == ("NVIDIA H20", 42, shape)
    assert first.last_seen_at > first.first_seen_at
    assert (second.gpu_name, second.count) == ("NVIDIA H200", 1)


@pytest.mark.parametrize(("name", "count"), [("NVIDIA H20", 0), ("NVIDIA H20", 1_000_001), ("a\x00", 1)])
def test_demand_that_makes_no_sense_is_refused(engine: Engine, name: str, count: int) -> None:
    with pytest.raises(StoreError, match="demand"), writing(engine) as s:
        writes.report_demand(s, name, "kda", shape_of(1, 1, 1), count)
