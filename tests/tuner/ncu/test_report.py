"""The reader on reports of a real card."""

import dataclasses
import math

import pytest

from kdatune_tuner.ncu.collect import STAGES
from kdatune_tuner.ncu.collect import Stage
from kdatune_tuner.ncu.metrics import BY_FIELD
from kdatune_tuner.ncu.metrics import METRICS
from kdatune_tuner.ncu.metrics import STALL_FIELDS
from kdatune_tuner.ncu.metrics import from_stored
from kdatune_tuner.ncu.metrics import limiters
from kdatune_tuner.ncu.metrics import stored_form
from kdatune_tuner.ncu.metrics import table
from kdatune_tuner.ncu.report import _combined
from kdatune_tuner.ncu.report import read_report
from kdatune_tuner.ncu.unavailable import Unavailable
from kdatune_tuner.objective import stage_of


@pytest.fixture(params=["t1024", "t8192"])
def recorded(request):
    return request.getfixturevalue(request.param)


def test_every_stage_of_every_config_is_found_by_its_label(recorded) -> None:
    names = {Stage(stage, stage_of(c, stage)).name for c in recorded.configs.values() for stage in STAGES}
    assert set(recorded.stages) == names
    for name, profile in recorded.stages.items():
        assert profile.name == name
        assert profile.launches == 3
        assert len(profile.kernels) == 1
        assert profile.kernels[0].startswith("prepare" if name.startswith("k1/") else "recurrence")


def test_an_h200_report_holds_every_counter_of_the_table(recorded) -> None:
    for profile in recorded.stages.values():
        assert profile.absent == ()
        assert list(profile.counters) == [metric.field for metric in METRICS]


def test_the_eight_warp_k1_reads_as_ncu_shows_it(t8192) -> None:
    c = t8192.profiled("eight-warp", "k1").counters
    assert (c["registers"], c["grid_ctas"], c["cta_threads"]) == (103, 49152, 256)
    assert (c["smem_bytes"], c["smem_dynamic_bytes"]) == (13312, 12288)
    assert (c["theoretical_occupancy_pct"], limiters(c)) == (25.0, ["registers"])
    assert c["executed_inst"] == pytest.approx(526.5e6, rel=1e-3)
    assert c["issue_active_pct"] == pytest.approx(40.9, abs=0.2)
    assert c["barrier_stall_per_issue"] == pytest.approx(0.525, abs=0.01)
    assert c["replay_duration_us"] == pytest.approx(1349, rel=0.01)
    assert c["replay_sm_clock_mhz"] == pytest.approx(1814, rel=0.01)
    assert c["dram_read_bytes"] == pytest.approx(609.6e6, rel=0.01)


def test_the_counters_are_consistent_among_themselves(recorded) -> None:
    for c in (profile.counters for profile in recorded.stages.values()):
        assert sum(c[field] for field in STALL_FIELDS) + c["selected_stall_per_issue"] == pytest.approx(
            c["latency_per_issue"], rel=0.03
        )
        assert 100 * c["active_warps"] / c["latency_per_issue"] == pytest.approx(c["issue_active_pct"], rel=0.05)
        assert c["replay_cycles"] / c["replay_sm_clock_mhz"] == pytest.approx(c["replay_duration_us"], rel=0.05)
        assert c["executed_inst"] == pytest.approx(c["issued_inst"], rel=0.01)
        assert c["achieved_occupancy_pct"] <= c["theoretical_occupancy_pct"] * 1.01


def test_a_counter_that_the_report_lacks_is_absent_and_never_zero(t1024) -> None:
    lacking = dataclasses.replace(BY_FIELD["registers"], field="lacking", counter="smsp__no_such_metric.sum")
    odd_unit = dataclasses.replace(BY_FIELD["dram_read_bytes"], field="odd_unit", scales=(("sector", 32.0),))
    found = read_report(t1024.content, (lacking, odd_unit, BY_FIELD["registers"]))
    assert not isinstance(found, Unavailable)
    for profile in found.values():
        assert profile.absent == ("lacking", "odd_unit")
        assert list(profile.counters) == ["registers"]
        assert list(stored_form(profile.counters)) == ["registers"]


@pytest.mark.parametrize("content", [b"", b"no report", None], ids=["empty", "text", "cut short"])
def test_a_broken_report_is_unavailable(t1024, content) -> None:
    found = read_report(t1024.content[:300_000] if content is None else content)
    assert isinstance(found, Unavailable)
    assert found.code == "bad_report"
    assert "holds no launch" in found.text()


def test_the_stored_form_keeps_unit_and_value(t1024) -> None:
    counters = t1024.profiled("default", "k2").counters
    stored = stored_form(counters)
    assert stored["issue_active_pct"] == {"value": counters["issue_active_pct"], "unit": "%"}
    assert from_stored(stored) == counters
    assert (
        from_stored({"of a later version": {"value": 1.0, "unit": "%"}, "registers": {"value": 1.0, "unit": "x"}}) == {}
    )


def test_the_table_names_each_counter_once_with_unit_meaning_and_source() -> None:
    rows = table()
    assert len({row["field"] for row in rows}) == len({row["source"] for row in rows}) == len(METRICS)
    assert all(row["unit"] and row["meaning"].endswith(".") and row["source"].startswith("ncu ") for row in rows)
    # under the profiler caches are flushed and launches serialised: a reader must see that it is no benchmark time
    assert [m.field for m in METRICS if m.counter.startswith(("gpu__time", "gpc__cycles", "smsp__cycles"))] == [
        "replay_cycles",
        "replay_duration_us",
        "replay_sm_clock_mhz",
    ]


def test_kernels_that_follow_one_another_make_one_stage(t1024) -> None:
    """Two kernels of known counters: sums add up, rates are weighted, attributes are those of the longer one."""
    a = t1024.profiled("default", "k1").counters
    b = t1024.profiled("eight-warp", "k1").counters
    both = _combined([a, b], METRICS)
    for field in ("issued_inst", "replay_cycles", "dram_read_bytes"):
        assert both[field] == a[field] + b[field]
    assert (both["registers"], both["waves"]) == (b["registers"], b["waves"])
    busy = [c["replay_cycles"] * c["sm_active_pct"] for c in (a, b)]
    expected = (a["issue_active_pct"] * busy[0] + b["issue_active_pct"] * busy[1]) / sum(busy)
    assert both["issue_active_pct"] == pytest.approx(expected)
    # what holds for each holds for both together: cycles = instructions x latency / warps / active SMs
    ratio = math.prod(
        (both[field] / b[field]) ** power
        for field, power in (("issued_inst", 1), ("latency_per_issue", 1), ("active_warps", -1), ("sm_active_pct", -1))
    )
    assert ratio == pytest.approx(both["replay_cycles"] / b["replay_cycles"], rel=0.03)
    del a["registers"]
    assert "registers" not in _combined([a, b], METRICS)
