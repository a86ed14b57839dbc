"""Regressions over a stored history: found once, with the right cause, resolved when gone, acknowledged by people."""

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC
from datetime import datetime
from datetime import timedelta

import numpy as np
import pytest
from sqlalchemy import Engine

from kdatune_kernels.errors import StoreError
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.regressions import NO_CAUSE
from kdatune_tuner.regressions import Look
from kdatune_tuner.regressions import look
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import night
from kdatune_tuner.store import queries
from kdatune_tuner.store import regressions
from kdatune_tuner.store import writes
from kdatune_tuner.store.access import Caller
from kdatune_tuner.store.access import page_audit
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.regression_models import RegressionModel
from kdatune_tuner.store.regressions import RegressionState

FIRST = datetime(2026, 10, 1, 2, 30, tzinfo=UTC)
PERSON = Caller("a person")


def night_of(number: int) -> datetime:
    return FIRST + timedelta(days=number)


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture
def put(engine: Engine, world) -> Callable[..., list[int]]:
    """Stores one measurement a night, from night `start` on; and their ids."""

    def add(times_us: Sequence[float], *, start: int = 0, config=None, **changes) -> list[int]:
        with writing(engine) as s:
            return [
                writes.add_measurement(s, world.new(config, median_us=us, measured_at=night_of(start + i), **changes))
                for i, us in enumerate(times_us)
            ]

    return add


@pytest.fixture
def see(engine: Engine, settings: Settings) -> Callable[..., Look]:
    """A look on the morning after a night."""
    return lambda number, **changes: look(
        engine, settings.model_copy(update=changes), now=night_of(number) + timedelta(hours=3)
    )


def quiet(level_us: float, count: int, seed: int, noise_pct: float = 1.0) -> list[float]:
    return list(level_us * (1.0 + noise_pct / 100.0 * np.random.default_rng(seed).normal(size=count)))


def test_a_slower_config_is_found_once(put, see, world, engine) -> None:
    ids = put([*quiet(600.0, 9, 1), *quiet(630.0, 5, 2)])
    with writing(engine) as s:
        world.promote(s, ids[0])
    first = see(13)
    (found,) = first.opened
    assert (found.kernel, found.gpu_name, found.shape, found.config_hash) == (
        "kda",
        "NVIDIA H200",
        world.shape,
        digest(world.config()),
    )
    assert found.before_us == pytest.approx(600.0, rel=0.01)
    assert found.after_us == found.now_us == pytest.approx(630.0, rel=0.01)
    assert found.change_pct == pytest.approx(5.0, abs=1.5)
    assert (found.last_good_at, found.began_at) == (night_of(8), night_of(9))
    assert (found.measurement_before_id, found.measurement_after_id) == (ids[8], ids[9])
    assert (found.build_before_id, found.build_after_id, found.cause) == (world.build_id, world.build_id, NO_CAUSE)
    assert found.confidence_pct >= 99.0
    assert found.is_served
    assert found.state is RegressionState.OPEN
    assert first.unacknowledged == (found,)
    put(quiet(630.0, 2, 3), start=14)
    again = see(15)
    assert (again.opened, again.resolved) == ((), ())
    assert [row.id for row in again.still] == [found.id]
    with reading(engine) as s:
        assert len(regressions.page_regressions(s)) == 1


def test_nothing_is_said_of_few_nights(put, see) -> None:
    put([600.0, 600.0, 600.0, 700.0, 700.0])
    seen = see(5)
    assert (seen.opened, seen.steady_count, seen.short_count) == ((), 0, 1)


def test_many_times_of_two_nights_are_two_nights(put, see) -> None:
    for _ in range(10):
        put([600.0, 700.0])
    assert (see(3).opened, see(3).short_count) == ((), 1)


def test_one_slow_night_is_no_finding(put, see) -> None:
    put([600.0] * 8 + [648.0] + [600.0] * 3)
    for number in range(6, 12):
        assert see(number).opened == ()


def test_estimates_and_failures_are_no_times(put, see) -> None:
    put([600.0] * 8)
    put([660.0] * 4, start=8, estimated=True)
    put([None] * 4, start=8, outcome="timeout")
    assert (see(12).opened, see(12).steady_count) == ((), 1)


def test_the_build_that_changed_is_the_probable_cause(put, see, world, engine) -> None:
    put([600.0] * 7)
    newer = replace(world.build, driver="590.1", triton="3.7.0")
    with writing(engine) as s:
        build_id = writes.put_build(s, newer)
    put([640.0] * 3, start=7, build_id=build_id)
    (found,) = see(9).opened
    assert found.cause == "triton 3.6.0, now 3.7.0; driver 580.1, now 590.1"
    assert (found.build_before_id, found.build_after_id) == (world.build_id, build_id)


def test_times_of_another_protocol_are_another_series(put, see, world, engine) -> None:
    put([600.0] * 7)
    with writing(engine) as s:
        build_id = writes.put_build(s, replace(world.build, protocol="2"))
    put([640.0] * 7, start=7, build_id=build_id)
    seen = see(14)
    assert (seen.opened, seen.steady_count) == ((), 1)


def test_a_slower_machine_is_nobodys_regression(put, see, world, engine) -> None:
    put([600.0] * 7 + [648.0] * 4)
    other = world.config(stages_in=4)
    put([500.0] * 7 + [583.2] * 4, config=other)  # slower by 8 % with the machine, and by 8 % of its own
    with writing(engine) as s:
        opened = night.start_night(
            s, gpu_id=world.gpu_id, build_id=world.build_id, backend="gpu", host="h", budget_seconds=1.0, report={}
        )
        for number in range(11):
            us = 300.0 * (1.08 if number >= 7 else 1.0)
            night.add_reference(
                s,
                night.ReferenceRow(
                    night_id=opened,
                    gpu_id=world.gpu_id,
                    build_id=world.build_id,
                    backend="gpu",
                    shape_key="N=1,H=64,T=8192",
                    config_hash="r" * 16,
                    outcome="ok",
                    detail=None,
                    median_us=us,
                    p20_us=us,
                    p80_us=us,
                    sample_count=9,
                    sm_clock_mhz=None,
                    throttle_reasons=None,
                    measured_at=night_of(number) - timedelta(minutes=20),
                ),
            )
    seen = see(10)
    (found,) = seen.opened
    assert found.config_hash == digest(other)
    assert (found.before_us, found.after_us) == (500.0, pytest.approx(540.0))  # its own part, the machine's taken out
    (machine,) = seen.machine
    assert machine.key.config_hash == digest(world.config())
    assert machine.step.change_pct == pytest.approx(8.0)


def test_it_is_resolved_when_it_is_gone_and_opened_anew_when_it_comes_back(put, see) -> None:
    put([600.0] * 7 + [640.0] * 3)
    (found,) = see(9).opened
    put([601.0], start=10)
    assert see(10).resolved == ()  # one good night
    put([601.0] * 4, start=11)
    (gone,) = see(14).resolved
    assert (gone.id, gone.state) == (found.id, RegressionState.RESOLVED)
    assert gone.resolution == "it is as fast as before again: 601.0 us at 2026-10-15T02:30:00Z"
    assert see(14).still == ()
    put([640.0] * 6, start=15)
    (again,) = see(20).opened
    assert again.id != found.id
    assert again.began_at == night_of(15)


def test_a_second_step_is_a_second_finding(put, see) -> None:
    put([600.0] * 7 + [640.0] * 7)
    (first,) = see(13).opened
    put([690.0] * 5, start=14)
    seen = see(18)
    assert [row.id for row in seen.still] == [first.id]
    (second,) = seen.opened
    assert (second.before_us, second.after_us, second.began_at) == (640.0, 690.0, night_of(14))
    assert seen.still[0].now_us == 690.0


def test_a_step_that_the_window_has_left_behind_is_not_gone(put, see) -> None:
    put([600.0] * 7 + [640.0] * 20)
    (found,) = see(12).opened
    seen = see(26, regression_days=15.0)  # the fast nights are out of sight, yet it is as slow as it was
    assert [row.id for row in seen.still] == [found.id]
    assert (seen.opened, seen.resolved) == ((), ())


def test_what_is_no_longer_served_is_resolved_and_not_opened_again(put, see, world, engine) -> None:
    ids = put([600.0] * 7 + [640.0] * 4)
    with writing(engine) as s:
        world.promote(s, ids[0])
    (found,) = see(10).opened
    other = put([610.0] * 3, start=8, config=world.config(stages_in=4))
    with writing(engine) as s:
        world.promote(s, other[0])
    seen = see(11)
    assert [(row.id, row.resolution, row.is_served) for row in seen.resolved] == [
        (found.id, "it is no longer served", False)
    ]
    put([640.0] * 2, start=11)
    assert see(13).opened == ()
    with writing(engine) as s:  # served again, and as slow as before
        world.promote(s, ids[-1])
    (again,) = see(13).opened
    assert again.is_served


def test_what_nobody_measures_any_more_is_resolved(put, see) -> None:
    put([600.0] * 7 + [640.0] * 4)
    see(10)
    (gone,) = see(100).resolved
    assert gone.resolution == "it was not measured for 60 days"


def test_a_default_that_is_served_counts_as_served(put, see, world, engine) -> None:
    default = default_config(world.shape, world.gpu)
    put([600.0] * 7 + [640.0] * 4, config=default)
    ids = put([590.0], config=world.config(stages_in=4))
    with writing(engine) as s:
        world.promote(s, ids[0])
        writes.rollback(s, queries.page_promotions(s)[0].id, "back")
    (found,) = see(10).opened
    assert (found.config_hash, found.is_served) == (digest(default), True)


def test_keys_are_apart(put, see, make_world, world) -> None:
    put([600.0] * 7 + [640.0] * 4)
    other = make_world(shape=shape_of(1, 64, 8192))
    put([400.0] * 11, problem_id=other.problem_id)
    seen = see(10)
    assert ([row.problem_id for row in seen.opened], seen.steady_count) == ([world.problem_id], 1)


def test_acknowledged_once_with_an_audit_row(put, see, engine) -> None:
    put([600.0] * 7 + [640.0] * 4)
    (found,) = see(10).opened
    with writing(engine) as s:
        row, changed = regressions.acknowledge(s, found.id, PERSON, "  the new driver; reported upstream ")
    assert (row.state, row.acknowledged_by, row.note, changed) == (
        RegressionState.ACKNOWLEDGED,
        "a person",
        "the new driver; reported upstream",
        True,
    )
    with writing(engine) as s:
        again, changed = regressions.acknowledge(s, found.id, Caller("another"), "something else")
        audit = [one for one in page_audit(s) if one.action == "regression.acknowledge"]
    assert (again, changed) == (row, False)
    assert [(one.actor, one.target, one.detail) for one in audit] == [
        ("a person", f"regression {found.id}", {"note": "the new driver; reported upstream"})
    ]
    put([640.0] * 3, start=11)
    seen = see(13)
    assert (seen.opened, seen.unacknowledged, [one.note for one in seen.still]) == ((), (), [row.note])
    put([600.0] * 5, start=14)
    (gone,) = see(18).resolved
    assert (gone.note, gone.state) == (row.note, RegressionState.RESOLVED)


@pytest.mark.parametrize("note", ["", "   ", "x" * 501, "a\0b", "\ud800"])
def test_a_note_that_cannot_be_kept(put, see, engine, note) -> None:
    put([600.0] * 7 + [640.0] * 4)
    (found,) = see(10).opened
    with pytest.raises(StoreError, match="a note must be 1 to 500 characters"), writing(engine) as s:
        regressions.acknowledge(s, found.id, PERSON, note)


@pytest.mark.parametrize("config", ["{", "[]", "[" * 100_000])
def test_a_damaged_finding_stops_no_look_and_cannot_be_acknowledged(put, see, engine, caplog, config) -> None:
    put([600.0] * 7 + [640.0] * 4)
    (found,) = see(10).opened
    with writing(engine) as s:
        row = s.get(RegressionModel, found.id)
        row.config_json = config
    seen = see(10)
    assert (seen.opened, seen.still, seen.resolved) == ((), (), ())
    assert f"regression {found.id} is damaged" in caplog.text
    with pytest.raises(StoreError, match=f"regression {found.id} is damaged"), writing(engine) as s:
        regressions.acknowledge(s, found.id, PERSON, "x")
    with reading(engine) as s:
        row = s.get(RegressionModel, found.id)
        assert (row.acknowledged_at, [one.action for one in page_audit(s)]) == (None, [])


@pytest.mark.parametrize("wanted", [7, -1, 1 << 40])
def test_a_finding_that_is_not_there(engine, wanted) -> None:
    with pytest.raises(StoreError, match=f"regression {wanted} does not exist"), writing(engine) as s:
        regressions.acknowledge(s, wanted, PERSON, "x")
    with reading(engine) as s:
        assert regressions.find_regression(s, wanted) is None


def test_pages_and_filters(put, see, engine, world, make_world) -> None:
    put([600.0] * 7 + [640.0] * 4)
    other = make_world(shape=shape_of(1, 64, 8192))
    put([400.0] * 7 + [440.0] * 4, problem_id=other.problem_id)
    put([500.0] * 7 + [550.0] * 4, config=world.config(stages_in=4))
    rows = see(10).opened
    with writing(engine) as s:
        regressions.acknowledge(s, rows[0].id, PERSON, None)
    ids = [row.id for row in rows]
    with reading(engine) as s:
        page = regressions.page_regressions

        def got(**filters):
            return [row.id for row in page(s, **filters)]

        assert got() == ids
        assert got(newest_first=True) == ids[::-1]
        assert got(limit=2) == ids[:2]
        assert got(after_id=ids[0]) == ids[1:]
        assert got(after_id=ids[2], newest_first=True) == [ids[1], ids[0]]
        assert got(state="acknowledged") == ids[:1]
        assert got(state="open") == ids[1:]
        assert got(state="resolved") == []
        assert got(shape=other.shape) == [row.id for row in rows if row.shape == other.shape]
        assert got(gpu_name="NVIDIA H200") == ids
        assert got(gpu_name="NVIDIA H20") == got(gpu_name="a\0") == got(kernel="k1") == []
        assert got(served=True) == []
        assert got(served=False) == ids
        assert regressions.count_regressions(s, RegressionState.OPEN) == 2
        assert regressions.count_regressions(s, RegressionState.OPEN, served=True) == 0
