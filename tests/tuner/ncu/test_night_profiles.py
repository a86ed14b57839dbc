"""Counters in a night: which are due, taking them, and a machine that gives none."""

from datetime import UTC
from datetime import datetime

import pytest
from sqlalchemy import Engine

from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner import night_profiles
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.ncu import profiling
from kdatune_tuner.ncu.profiling import How
from kdatune_tuner.night_plan import Facts
from kdatune_tuner.night_plan import Planner
from kdatune_tuner.nightly import Night
from kdatune_tuner.nightly import NightOptions
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import Result
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.promote import Decision
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.tune import Options


def planner(backend: Backend) -> Planner:
    return Planner(backend, Facts(datetime(2026, 12, 1, tzinfo=UTC), [], [], [], {}, {}, (), None, 200, 30.0))


def test_a_served_config_gets_its_counters_once(
    engine: Engine, make_sweep, make_ncu, answer, t8192, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the default at the time of the report
    monkeypatch.setattr(profiling, "default_config", lambda *_: t8192.configs["default"])
    backend = make_sweep([100.0] * 13, [200.0] * 13)
    ledger = Ledger(engine, backend, t8192.shape)
    with ledger.run("kda", trigger="tune", sampler="tpe", trials=1, seconds=None, seed=0) as run:
        known = ledger.add(run, "kda", t8192.configs["default"], Result(Outcome.OK, samples_us=(620.0,) * 5))
    ledger.decide(Decision("promoted", None, None, None, "first"), known.measurement_id, None, None)
    (skipped,) = night_profiles.due(engine, backend, How(), planner(backend))
    assert (str(skipped.state), skipped.result) == ("skipped", "the replay backend has no card to profile")

    backend.name = "gpu"
    make_ncu(report=t8192.content, answer=answer)
    (item,) = night_profiles.due(engine, backend, How(), planner(backend))
    assert (item.kind, item.shape) == ("profile", t8192.shape)
    night_profiles.take(engine, backend, item, How(), [item])
    assert item.result == "counters stored"
    with reading(engine) as s:
        profiles = queries.page_profiles(s)
    assert {row.stage for row in profiles if row.counters is not None} == {"k1", "k2"}
    assert night_profiles.due(engine, backend, How(), planner(backend)) == []


@pytest.mark.usefixtures("no_permission")
def test_a_machine_that_gives_no_counters_is_asked_once(engine: Engine) -> None:
    backend = ReplayBackend.open()
    shapes = [shape_of(1, 96, 8192), shape_of(1, 64, 8192)]
    backend.name = "gpu"
    with writing(engine) as s:
        for shape in shapes:
            writes.report_demand(s, backend.gpu.name, "kda", shape, 5)
    report = Night(engine, backend, NightOptions(600.0, Options(trials=1), how=How())).run()
    profiles = [item for item in report.plan if item.kind == "profile"]
    assert [str(item.state) for item in profiles] == ["done", "skipped"]
    assert str(profiles[0].result).startswith("no_permission: ERR_NVGPUCTRPERM")
    assert profiles[1].result == profiles[0].result
    assert report.exit_code == 0
    assert {finding.kind for finding in report.findings} == {"demand_served"}
    with reading(engine) as s:
        rows = queries.page_profiles(s)
    assert len({digest(row.config_json) for row in rows}) == 1
    assert all("no_permission" in str(row.unavailable_reason) for row in rows)
