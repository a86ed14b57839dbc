"""Old measurements are thinned; what proves something stays, and a search resumes as before."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from threading import Thread

import pytest
from sqlalchemy import Engine
from sqlalchemy import func
from sqlalchemy import select

from kdatune_kernels.spec import shape_of
from kdatune_tuner.regressions import look
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import queries
from kdatune_tuner.store import retention
from kdatune_tuner.store import writes
from kdatune_tuner.store.access import Caller
from kdatune_tuner.store.access import create_token
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.intake import receive
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.records import NewProfile

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
CUT = NOW - timedelta(days=90)
MONDAY = datetime(2026, 3, 2, 2, 30, tzinfo=UTC)  # of an old week


@pytest.fixture
def put(engine: Engine, world) -> Callable[..., int]:
    """Stores one measurement of that config number at a moment; gives its id."""

    def add(us: float | None, at: datetime, number: int = 0, **changes) -> int:
        with writing(engine) as s:
            config = world.config(stages_in=2 + number % 4, consumers=1 + number // 4)
            values = {"median_us": us, "measured_at": at, "outcome": "ok" if us is not None else "timeout"}
            return writes.add_measurement(s, world.new(config, **values | changes))

    return add


@pytest.fixture
def newer_build(engine: Engine, world) -> int:
    """A build that came later, so that rows of the first one are resumed from no more."""
    with writing(engine) as s:
        return writes.put_build(s, replace(world.build, driver="590.1"))


def ids(engine: Engine) -> list[int]:
    with reading(engine) as s:
        return list(s.scalars(select(MeasurementModel.id).order_by(MeasurementModel.id)))


def thin(engine: Engine, per_week: int = 2) -> int:
    return sum(retention.remove(engine, retention.plan(engine, CUT, per_week).remove))


def test_a_week_keeps_its_best_its_worst_and_a_sample(engine, put, newer_build) -> None:
    old = [
        put(us, MONDAY + timedelta(hours=i), i % 8) for i, us in enumerate([610.0, 605.0, 600.0, 640.0, 620.0, 615.0])
    ]
    next_week = put(650.0, MONDAY + timedelta(days=7))
    put(590.0, NOW, build_id=newer_build)
    plan = retention.plan(engine, CUT, 2)
    assert plan.old_count == 7
    assert plan.kept == {"best_or_worst": 3, "sample": 2}
    assert plan.remove == [old[1], old[5]]  # of 610, 605, 620, 615 the first and the third stay
    assert ids(engine) == [*old, next_week, next_week + 1], "a plan removes nothing"
    assert thin(engine) == 2
    assert ids(engine) == [old[0], *old[2:5], next_week, next_week + 1]
    assert thin(engine) == 0, "once more changes nothing"


def test_young_ones_all_stay(engine, put, newer_build) -> None:
    for i in range(30):
        put(600.0 + i, CUT + timedelta(seconds=1 + i))
    put(590.0, NOW, build_id=newer_build)
    assert retention.plan(engine, CUT, 0) == retention.Plan()


def test_failures_are_thinned_as_others(engine, put, newer_build) -> None:
    for i in range(6):
        put(None, MONDAY + timedelta(hours=i))
    put(590.0, NOW, build_id=newer_build)
    assert thin(engine, 1) == 5


def test_evidence_of_champions_survives(engine, put, world, newer_build) -> None:
    rows = [put(600.0 + i, MONDAY + timedelta(minutes=i), i % 8) for i in range(40)]
    challenger, baseline, profiled, posted = rows[11], rows[12], rows[13], rows[20]
    with writing(engine) as s:
        world.promote(s, challenger, baseline_measurement_id=baseline)
        world.promote(s, rows[14], decision="rejected")
        writes.add_profile(s, NewProfile(measurement_id=profiled, stage="k1", unavailable_reason="no permission"))
        token, _ = create_token(s, "t", ["results:write"], Caller("a test"))
        extra, _ = receive(s, world.new(median_us=700.0, measured_at=MONDAY), "d" * 16, token.id)
    put(590.0, NOW, build_id=newer_build)
    with reading(engine) as s:
        before = queries.champions(s)
    assert thin(engine, 0) > 20
    left = set(ids(engine))
    assert {challenger, baseline, rows[14], profiled, extra} <= left
    assert posted not in left, "what nothing refers to went"
    with reading(engine) as s:
        assert queries.champions(s) == before
        row = queries.find_measurement(s, challenger)
        assert row is not None
        assert row.median_us == 611.0
        (champion,) = before
        assert champion.measured_us == 611.0


def test_what_a_regression_refers_to_survives(engine, put, newer_build) -> None:
    rows = [put(600.0 if i < 8 else 640.0, MONDAY + timedelta(days=i)) for i in range(12)]
    look(engine, Settings(), now=MONDAY + timedelta(days=12))
    put(590.0, NOW, 5, build_id=newer_build)
    thin(engine, 0)
    assert {rows[7], rows[8]} <= set(ids(engine))


def test_the_course_of_a_config_that_was_served_stays(engine, put, world, newer_build) -> None:
    nights = [put(600.0 + i, MONDAY + timedelta(days=i)) for i in range(7)]
    for i in range(60):
        put(500.0 + i, MONDAY + timedelta(hours=i), 1 + i % 7)
    with writing(engine) as s:
        world.promote(s, nights[3])
    put(590.0, NOW, build_id=newer_build)
    thin(engine, 5)
    assert set(nights) <= set(ids(engine)), "one a night: the best, the worst and five more"


def test_a_search_resumes_as_before(engine, put, world, newer_build) -> None:
    """What is measured with the build in use stays known, config by config; of an old build less is known, nothing wrongly."""
    for i in range(40):
        put(600.0 + i, MONDAY + timedelta(hours=i), i % 8)  # twice or more of each, long ago
        put(None if i % 8 == 3 else 550.0 + i, MONDAY + timedelta(hours=i), i % 8, build_id=newer_build)
    key = ("kda", world.gpu_id, world.problem_id)
    with reading(engine) as s:
        before = queries.measured(s, *key, newer_build)
        old = queries.measured(s, *key, world.build_id)
    assert len(before) == 8
    assert thin(engine, 0) > 50
    with reading(engine) as s:
        assert queries.measured(s, *key, newer_build) == before
        left = queries.measured(s, *key, world.build_id)
    assert 0 < len(left) < len(old)
    for config_hash, row in left.items():  # what is left of the old build is what was measured with it
        assert row.config_hash == config_hash
        assert row.median_us is not None
        assert 600.0 <= row.median_us < 640.0


def test_a_build_that_is_in_use_anywhere_is_resumed_from(engine, put, world, newer_build, make_world) -> None:
    for i in range(16):
        put(600.0 + i, MONDAY + timedelta(hours=i), i % 8)
    put(590.0, MONDAY + timedelta(days=1), 1, build_id=newer_build)  # the newest of this key
    other = make_world(shape=shape_of(1, 64, 8192))
    put(400.0, NOW, problem_id=other.problem_id)  # another machine measures with the first build today
    with reading(engine) as s:
        before = queries.measured(s, "kda", world.gpu_id, world.problem_id, world.build_id)
    assert thin(engine, 0) > 0
    with reading(engine) as s:
        assert queries.measured(s, "kda", world.gpu_id, world.problem_id, world.build_id) == before


def test_what_is_referred_to_since_the_plan_stays(engine, put, world, newer_build) -> None:
    rows = [put(600.0 + i, MONDAY + timedelta(minutes=i), i % 8) for i in range(20)]
    put(590.0, NOW, build_id=newer_build)
    plan = retention.plan(engine, CUT, 0)
    assert rows[5] in plan.remove
    with writing(engine) as s:
        world.promote(s, rows[5])
    assert sum(retention.remove(engine, plan.remove)) == len(plan.remove) - 1
    assert rows[5] in ids(engine)


def test_writers_and_readers_go_on_meanwhile(engine, put, world, newer_build, monkeypatch) -> None:
    """Each transaction removes a few rows; another writer comes in between, and a reader sees whole states."""
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 10)
    with writing(engine) as s:
        for i in range(300):
            writes.add_measurement(s, world.new(median_us=600.0 + i, measured_at=MONDAY + timedelta(minutes=i)))
    put(590.0, NOW, build_id=newer_build)
    plan = retention.plan(engine, CUT, 0)
    assert len(plan.remove) == 298
    counts = []

    def serve() -> None:
        for i in range(20):
            put(580.0 + i, NOW, build_id=newer_build)
            with reading(engine) as s:
                counts.append(s.scalar(select(func.count()).select_from(MeasurementModel)))

    server = Thread(target=serve)
    server.start()
    steps = list(retention.remove(engine, plan.remove))
    server.join()
    retention.tidy(engine)
    assert steps == [10] * 29 + [8]
    assert len(counts) == 20
    with reading(engine) as s:
        assert s.scalar(select(func.count()).select_from(MeasurementModel)) == 2 + 1 + 20


def test_sqlite_gets_its_space_back(engine, put, world, newer_build) -> None:
    with writing(engine) as s:
        for i in range(3000):
            writes.add_measurement(
                s, world.new(median_us=600.0 + i, measured_at=MONDAY + timedelta(minutes=i), detail="x" * 500)
            )
    put(590.0, NOW, build_id=newer_build)
    before = retention.size_bytes(engine)
    thin(engine, 0)
    retention.tidy(engine)
    after = retention.size_bytes(engine)
    if engine.dialect.name == "sqlite":
        assert after < before / 4
    assert after > 0
