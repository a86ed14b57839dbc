"""What the dashboard asks of the store, on both databases."""

from dataclasses import replace
from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest

from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import dashboard
from kdatune_tuner.store import dashboard_lists
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewProfile

H20 = KNOWN_GPUS["NVIDIA H20"]
NOW = datetime(2026, 11, 29, 22, 0, tzinfo=UTC)


def key_of(world):
    return dashboard.Key(world.kernel, (world.gpu_id,), world.problem_id)


def test_served_keys_are_the_champions(engine, world, make_world):
    other = make_world(gpu=H20, shape=shape_of(2, 8, 1024))
    with writing(engine) as s:
        for one, median_us in ((world, 700.0), (world, 600.0), (other, 50.0)):
            one.promote(s, writes.add_measurement(s, one.new(median_us=median_us, measured_at=NOW)))
        world.promote(s, writes.add_measurement(s, world.new(median_us=1.0)), decision="tie")
    with reading(engine) as s:
        served = dashboard.served_keys(s)
        champions = queries.champions(s)
        promotions = dashboard.promotions_by_id(s, [row.promotion_id for row in served])
        measured = dashboard.measurements_by_id(
            s, [*(p.measurement_id for p in promotions.values()), None, -1, 1 << 40]
        )
    assert [(r.generation, r.shape_key, r.measured_us, r.default_us) for r in served] == [
        (c.generation, c.shape.key(), c.measured_us, c.default_us) for c in champions
    ]
    with reading(engine) as s:
        assert dashboard.served_keys(s, since=served[0].generation) == served[1:]
        assert dashboard.served_keys(s, since=served[-1].generation) == []
    first = served[0]
    assert (first.measured_at, first.estimated, first.config_hash) == (NOW, False, digest(world.config()))
    assert (first.n_sequences, first.n_heads, first.n_tokens, first.varlen) == (1, 96, 8192, False)
    assert promotions[first.promotion_id].gain == 1.024
    assert [m.median_us for m in measured.values()] == [600.0, 50.0]


def test_a_rollback_to_the_default_is_served_without_a_config(engine, world):
    with writing(engine) as s:
        world.promote(s, writes.add_measurement(s, world.new()))
        writes.rollback(s, 1, "numerics")
    with reading(engine) as s:
        (row,) = dashboard.served_keys(s)
        assert (row.config_hash, row.measured_us, row.build_id, row.measured_at) == (None, None, None, None)
        assert [p.decision for p in dashboard.history(s, key_of(world))] == ["rollback", "promoted"]


def test_history_ends_where_it_is_told_to(engine, world):
    with writing(engine) as s:
        for decision in ("promoted", "tie", "promoted"):
            world.promote(s, writes.add_measurement(s, world.new()), decision=decision)
    with reading(engine) as s:
        every = dashboard.history(s, key_of(world))
        serving = dashboard.history(s, key_of(world), serving_only=True)
        before = dashboard.history(s, key_of(world), until=every[-1].decided_at)
        nobody = dashboard.history(s, replace(key_of(world), gpu_ids=(world.gpu_id + 1,)))
    assert [p.generation for p in every] == [3, 2, 1]
    assert [p.generation for p in serving] == [3, 1]
    assert 3 not in [p.generation for p in before[1:]]
    assert nobody == []


def test_the_newest_measurement_that_ended_ok_goes_first(engine, world):
    config = world.config(stages_in=4)
    with writing(engine) as s:
        for days, median_us in ((3, 700.0), (2, 600.0)):
            writes.add_measurement(s, world.new(config, median_us=median_us, measured_at=NOW - timedelta(days=days)))
        writes.add_measurement(s, world.new(config, outcome=Outcome.TIMEOUT, median_us=None, measured_at=NOW))
    with reading(engine) as s:
        key, config_hash = key_of(world), digest(config)
        newest = dashboard.newest_measurement(s, key, config_hash)
        before = dashboard.newest_measurement(s, key, config_hash, NOW - timedelta(days=2, hours=12))
        assert newest is not None
        assert before is not None
        assert (newest.median_us, before.median_us) == (600.0, 700.0)
        assert dashboard.newest_measurement(s, key, "0" * 16) is None
        assert dashboard.newest_trial_id(s, key) == 3
        assert dashboard.find_problem(s, "kda", world.shape) == world.problem_id
        assert dashboard.find_problem(s, "k2", world.shape) is None


def test_trials_are_of_one_build_or_run(engine, world, make_world):
    newer = make_world(build=replace(world.build, driver="590.1"))
    with writing(engine) as s:
        run = world.run(s)
        writes.add_measurement(s, world.new(run_id=run))
        writes.add_measurement(s, newer.new(median_us=500.0))
    with reading(engine) as s:
        key = key_of(world)
        assert dashboard.builds_of(s, key) == [(newer.build_id, 1), (world.build_id, 1)]
        assert [t.median_us for t in dashboard.trials(s, key)] == [610.2, 500.0]
        assert [t.median_us for t in dashboard.trials(s, key, build_id=newer.build_id)] == [500.0]
        (trial,) = dashboard.trials(s, key, run_id=run)
        assert (trial.config_json, trial.outcome, trial.run_id) == (canonical(world.config()), "ok", run)


def test_runs_are_listed_with_what_they_found(engine, world, make_world):
    other = make_world(gpu=H20)
    with writing(engine) as s:
        first, second = world.run(s), other.run(s, trigger="nightly", kernel="k2")
        for median_us in (700.0, 600.0):
            writes.add_measurement(s, world.new(run_id=first, median_us=median_us))
        writes.finish_run(s, first, outcome_counts={"ok": 2}, gpu_seconds=9.5, state="done")
    with reading(engine) as s:
        lists = dashboard_lists
        every = lists.RunFilter()
        assert [r.id for r in lists.runs(s, every)] == [second, first]
        assert [r.id for r in lists.runs(s, every, order="gpu_seconds")] == [first, second], "unknown goes last"
        assert [r.id for r in lists.runs(s, every, order="gpu_seconds", descending=False)] == [first, second]
        assert [r.id for r in lists.runs(s, every, offset=1, limit=1)] == [first]
        assert lists.count_runs(s, every) == 2
        for wanted in (
            lists.RunFilter(gpu_ids=(other.gpu_id,)),
            lists.RunFilter(kernel="k2"),
            lists.RunFilter(state="running"),
            lists.RunFilter(trigger="nightly"),
        ):
            assert [r.id for r in lists.runs(s, wanted)] == [second]
            assert lists.count_runs(s, wanted) == 1
        assert lists.best_of_runs(s, [first, second]) == {first: (2, 600.0)}


def test_profiles_are_listed_in_order_and_unavailable_ones_last(engine, world):
    with writing(engine) as s:
        measurement_id = writes.add_measurement(s, world.new(median_us=612.5))
        for active in (40.0, 60.0):
            counters = {"issue_active_pct": {"value": active, "unit": "%"}}
            writes.add_profile(
                s,
                NewProfile(measurement_id=measurement_id, stage="k1", counters=counters, issue_active_pct=active),
            )
        writes.add_profile(s, NewProfile(measurement_id=measurement_id, stage="k2", unavailable_reason="no ncu"))
    with reading(engine) as s:

        def listed(order, descending, stage=None, gpu_ids=None):
            rows = dashboard_lists.profile_list(
                s, gpu_ids=gpu_ids, stage=stage, order=order, descending=descending, offset=0, limit=9
            )
            assert {us for _, us in rows} <= {612.5}
            return [row.issue_active_pct for row, _ in rows]

        assert listed("issue_active_pct", True) == [60.0, 40.0, None]
        assert listed("issue_active_pct", False) == [40.0, 60.0, None]
        assert listed("profiled_at", True) == [None, 60.0, 40.0]
        assert listed("profiled_at", True, stage="k2") == [None]
        assert listed("profiled_at", True, gpu_ids=(world.gpu_id + 1,)) == []
        assert dashboard_lists.count_profiles(s, gpu_ids=None, stage="k1") == 2


def test_timings_and_changes_are_of_the_keys_asked_for(engine, world, make_world):
    other = make_world(shape=shape_of(2, 8, 1024))
    config = world.config(stages_in=4)
    with writing(engine) as s:
        mine = writes.add_measurement(s, world.new(config, measured_at=NOW - timedelta(days=40)))
        writes.add_measurement(s, world.new(config, median_us=500.0, measured_at=NOW))
        writes.add_measurement(s, world.new(median_us=400.0, measured_at=NOW))
        writes.add_measurement(s, world.new(outcome=Outcome.TIMEOUT, median_us=None))
        writes.add_measurement(s, other.new())
        world.promote(s, mine)
        world.promote(s, mine, decision="rejected")
    with reading(engine) as s:
        lists = dashboard_lists
        found = lists.timings(s, (world.gpu_id,), (world.problem_id,))
        assert [t.median_us for t in found] == [610.2, 500.0, 400.0]
        (change,) = lists.changes(s, (world.gpu_id,), (world.problem_id, other.problem_id))
        assert (change.problem_id, change.config_hash) == (world.problem_id, digest(config))
        assert lists.configs_of_promotions(s, [1, 2]) == {digest(config): canonical(config)}
        assert lists.newest_measurement_id(s) == 5


def test_more_ids_than_a_statement_takes(engine, world):
    with writing(engine) as s:
        ids = [writes.add_measurement(s, world.new()) for _ in range(3)]
    with reading(engine) as s:
        found = dashboard.measurements_by_id(s, [*range(1, 2000), *ids])
        assert sorted(found) == ids


def test_what_a_stage_takes_of_an_sm(engine, make_world):
    world = make_world(kernel="k2")
    k2 = world.config().k2
    with writing(engine) as s:
        for registers in (160, 168):
            writes.add_measurement(
                s, world.new(k2, registers=registers, smem_bytes=94128, effective_num_warps=12, median_us=300.0)
            )
    with reading(engine) as s:
        found = dashboard_lists.stage_resources(s, "k2", (world.gpu_id,), (digest(world.shape),), (digest(k2),))
        assert [r.registers for r in found] == [160, 168]
        assert found[-1].config_hash == digest(k2)
        assert dashboard_lists.stage_resources(s, "k2", (world.gpu_id,), ("0" * 16,), (digest(k2),)) == []


@pytest.mark.parametrize("gpu_name", [None, "NVIDIA H20", "nobody"])
def test_what_launchers_want_comes_most_wanted_first(engine, gpu_name):
    with writing(engine) as s:
        writes.report_demand(s, "NVIDIA H20", "kda", shape_of(1, 8, 1024), 3)
        writes.report_demand(s, "NVIDIA H200", "kda", shape_of(1, 8, 1024), 30)
        writes.report_demand(s, "NVIDIA H20", "k1", shape_of(1, 8, 1024), 300)
    expected = {None: [("NVIDIA H200", 30), ("NVIDIA H20", 3)], "NVIDIA H20": [("NVIDIA H20", 3)], "nobody": []}
    with reading(engine) as s:
        found = dashboard.wanted_keys(s, gpu_name)
    assert [(w.gpu_name, w.miss_count) for w in found] == expected[gpu_name]
