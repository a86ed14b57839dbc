"""Tuning a shape: stages, pairs, promotion, resume; on SQLite and PostgreSQL."""

from collections import Counter
from dataclasses import replace
from statistics import median

import pytest
from sqlalchemy import Engine

from kdatune_kernels.space import default_config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.objective import Result
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.promote import Policy
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import MeasurementRow
from kdatune_tuner.store.records import PromotionRow
from kdatune_tuner.store.records import RunState
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuned
from kdatune_tuner.tune import Tuner

REAL, MADE = parse_shape("N=1,H=64,T=8192"), parse_shape("N=1,H=48,T=2048")
"""The first shape of the real sweep, and the shape of the made-up ones, whose default has stages."""


def tune(engine: Engine, backend: ReplayBackend, shape: Shape | None = None, **options) -> Tuned:
    """Tune a shape, by default the first one of the sweep."""
    tuner = Tuner(engine, backend, Options(**{"trials": 1000, "least_gain_pct": 0.0, "policy": Policy(), **options}))
    return tuner.tune(shape or backend.default_shapes()[0])


def champion(engine: Engine):
    with reading(engine) as s:
        return next(iter(queries.champions(s)), None)


def measurements(engine: Engine, **filters) -> list[MeasurementRow]:
    with reading(engine) as s:
        return list(queries.page_measurements(s, limit=1000, **filters))


def promotions(engine: Engine) -> list[PromotionRow]:
    with reading(engine) as s:
        return list(queries.page_promotions(s, limit=1000))


def config_of(backend: ReplayBackend, i1: int, i2: int) -> LaunchConfig:
    checks = backend.recording.checks
    return LaunchConfig(checks["k1", i1].config, checks["k2", i2].config)


def test_a_real_sweep_gives_the_fastest_of_both_stages(engine: Engine, real_sweep: ReplayBackend) -> None:
    tuned = tune(engine, real_sweep)
    best = {}
    for kernel in ("k1", "k2"):
        times = {
            i: median(t.samples_us) for (k, i, s), t in real_sweep.recording.timings.items() if (k, s) == (kernel, REAL)
        }
        best[kernel] = min(times.items(), key=lambda item: item[1])
    assert tuned.best_us == pytest.approx(best["k1"][1] + best["k2"][1])
    assert tuned.best == config_of(real_sweep, best["k1"][0], best["k2"][0])
    served = champion(engine)
    assert served.config == tuned.best == tuned.served
    assert served.measured_us == pytest.approx(tuned.best_us)
    assert (tuned.default_us, tuned.speedup, tuned.estimated) == (None, None, True)
    assert tuned.promotion.decision == "promoted"
    assert "default was not measured; estimated" in tuned.promotion.reason
    rows = Counter(row.kernel for row in measurements(engine))
    assert rows == {"k1": 72, "k2": 436, "kda": 9}
    assert {row.estimated for row in measurements(engine, kernel="kda")} == {True}


def test_the_document_has_the_promised_keys(engine: Engine, make_sweep) -> None:
    sweep = make_sweep([100.0, 90.0], [200.0, 190.0], {(0, 0): 300.0, (1, 1): 281.0, (0, 1): 291.0, (1, 0): 290.0})
    document = tune(engine, sweep).to_json()
    assert document["shape"] == "N=1,H=48,T=2048"
    assert (document["kernel"], document["gpu"], document["backend"]) == ("kda", "NVIDIA H200", "replay")
    assert (document["trials"], document["measured"], document["resumed"]) == (8, 8, 0)
    assert document["outcomes"] == {"ok": 8}
    assert document["best_config"] == document["served_config"]
    assert from_json(LaunchConfig, document["best_config"]) == config_of(sweep, 1, 1)
    assert (document["best_us"], document["default_us"]) == (281.0, 300.0)
    assert document["speedup"] == pytest.approx(300.0 / 281.0)
    assert document["state"] == "done"
    assert document["estimated"] is False
    assert document["seconds"] > 0
    promotion = document["promotion"]
    assert (promotion["decision"], promotion["generation"]) == ("promoted", 1)
    assert promotion["gain_low"] < promotion["gain"] < promotion["gain_high"]
    assert document["stages"]["k1"]["best_us"] == 90.0
    assert document["stages"]["k2"]["sampler"] == "enumerate"


def test_pairs_decide_not_the_sum_of_their_parts(engine: Engine, make_sweep) -> None:
    """K1 1 is the faster one alone, K1 0 beside K2 1 is faster together."""
    sweep = make_sweep([100.0, 90.0], [200.0, 190.0], {(0, 0): 300.0, (1, 1): 295.0, (0, 1): 280.0, (1, 0): 290.0})
    tuned = tune(engine, sweep)
    assert tuned.best == config_of(sweep, 0, 1)
    assert champion(engine).measured_us == 280.0


def test_nothing_is_measured_twice(engine: Engine, real_sweep: ReplayBackend) -> None:
    first = tune(engine, real_sweep, trials=40)
    assert (first.measured, first.trials) == (89, 89)  # 40 of each stage, nine pairs
    again = tune(engine, real_sweep, trials=40)
    assert (again.measured, again.trials) == (0, 89)
    assert again.promotion.decision == "kept"
    assert (again.best, again.best_us) == (first.best, first.best_us)
    more = tune(engine, real_sweep, trials=50)
    assert sum(search.measured for search in more.stages.values()) == 20
    rows = measurements(engine)
    assert len({(row.kernel, row.config_hash) for row in rows}) == len(rows)


def test_a_search_that_ended_by_itself_has_nothing_to_do_again(engine: Engine, real_sweep: ReplayBackend) -> None:
    first = tune(engine, real_sweep, trials=300, least_gain_pct=0.02)
    searched = {kernel: (search.sampler, search.measured) for kernel, search in first.stages.items()}
    assert searched["k1"] == ("enumerate", 72)
    assert searched["k2"][0] == "gp"
    assert 20 < searched["k2"][1] < 150
    again = tune(engine, real_sweep, trials=300, least_gain_pct=0.02)
    assert (again.measured, again.trials) == (0, first.trials)
    rows = measurements(engine)
    assert len({(row.kernel, row.config_hash) for row in rows}) == len(rows)


def test_every_trial_is_a_row_of_its_run(engine: Engine, real_sweep: ReplayBackend) -> None:
    tune(engine, real_sweep, trials=30, seed=5)
    with reading(engine) as s:
        runs = queries.page_runs(s)
    assert [(r.kernel, r.sampler, r.budget_trials, r.state) for r in runs] == [
        ("k1", "gp", 30, RunState.DONE),
        ("k2", "gp", 30, RunState.DONE),
        ("kda", "finalists", 9, RunState.DONE),
    ]
    assert {(r.trigger, r.backend, r.seed, r.optuna_version.split(".")[0]) for r in runs} == {
        ("tune", "replay", 5, "5")
    }
    assert [r.outcome_counts for r in runs] == [{"ok": 30}, {"ok": 30}, {"ok": 9}]
    row = measurements(engine, kernel="k2")[0]
    check = real_sweep.recording.checks["k2", real_sweep.recording.index[real_sweep.space("k2", REAL)[0]]]
    assert (row.run_id, row.regime) == (runs[1].id, real_sweep.regime)
    assert row.sample_count == 5
    assert row.p20_us <= row.median_us <= row.p80_us
    assert check.outcome is Outcome.OK


def test_one_stage_alone_promotes_nothing(engine: Engine, real_sweep: ReplayBackend) -> None:
    tuned = tune(engine, real_sweep, kernel="k1")
    assert tuned.promotion is None
    assert tuned.best_us == min(
        median(t.samples_us) for (k, _, s), t in real_sweep.recording.timings.items() if (k, s) == ("k1", REAL)
    )
    assert {row.kernel for row in measurements(engine)} == {"k1"}
    assert promotions(engine) == []


def test_the_default_is_promoted_when_nothing_beats_it(engine: Engine, make_sweep) -> None:
    sweep = make_sweep([100.0, 120.0], [200.0, 220.0], {(0, 0): 300.0, (0, 1): 320.0, (1, 0): 320.0, (1, 1): 340.0})
    tuned = tune(engine, sweep)
    assert champion(engine).config == default_config(MADE, sweep.gpu) == tuned.served
    assert tuned.promotion.reason == "the first champion: the default itself is the best"
    assert (champion(engine).measured_us, champion(engine).default_us) == (300.0, 300.0)


@pytest.mark.parametrize(("gain_pct", "decision"), [(2.0, "promoted"), (0.3, "tie"), (0.0, "kept")])
def test_a_challenger_must_beat_the_champion(engine: Engine, make_sweep, gain_pct: float, decision: str) -> None:
    first = make_sweep([100.0], [200.0], {(0, 0): 300.0})
    tune(engine, first)
    us = 300.0 / (1 + gain_pct / 100.0) if gain_pct else 330.0
    second = make_sweep([100.0, 99.0], [200.0], {(0, 0): 300.0, (1, 0): us}, spread=0.0001, name="second.gz")
    tuned = tune(engine, second)
    assert tuned.promotion.decision == decision
    wins = decision == "promoted"
    assert champion(engine).config == config_of(second, int(wins), 0) == tuned.served
    stored = [p.decision.value for p in promotions(engine)]
    assert stored == ["promoted"] + ([] if decision == "kept" else [decision])
    again = tune(engine, second)
    assert (again.measured, again.promotion.decision) == (0, "kept")
    assert [p.decision.value for p in promotions(engine)] == stored


def test_a_wrong_or_failing_config_is_never_promoted(engine: Engine, make_sweep) -> None:
    wrong = {("k1", 1): "incorrect", ("k1", 2): "nondeterministic", ("k2", 1): "illegal_access"}
    sweep = make_sweep([100.0, 50.0, 60.0, 80.0], [200.0, 10.0], outcomes=wrong)
    tuned = tune(engine, sweep)
    assert tuned.best == config_of(sweep, 3, 0) == champion(engine).config
    assert tuned.outcomes() == {"illegal_access": 1, "incorrect": 1, "nondeterministic": 1, "ok": 5}


def test_a_shape_on_which_nothing_runs_ends_without_a_champion(engine: Engine, make_sweep) -> None:
    sweep = make_sweep([100.0], [200.0, 300.0], outcomes={("k2", 0): "incorrect", ("k2", 1): "compile_error"})
    tuned = tune(engine, sweep)
    assert (tuned.best, tuned.state, champion(engine)) == (None, "done", None)
    assert tuned.promotion.decision == "kept"


def test_a_second_run_tells_what_the_first_told(engine: Engine, make_sweep) -> None:
    """The champion stays the best that is known; a faster time that was inside the noise does not become a result."""
    sweep = make_sweep([100.0, 98.0], [200.0], {(0, 0): 300.0, (1, 0): 298.0})
    first, second = tune(engine, sweep), tune(engine, sweep)
    assert (second.promotion.decision, second.measured) == ("kept", 0)
    assert second.promotion.reason == "no new pair was measured since the last decision"
    assert (first.best, first.best_us, first.default_us) == (second.best, second.best_us, second.default_us)
    assert second.best == champion(engine).config


def test_what_is_compared_as_two_sums_says_so(engine: Engine, make_sweep) -> None:
    """The default's pair was not recorded: it meets the best by the sums of their parts, 300 and 280 us."""
    tuned = tune(engine, make_sweep([100.0, 80.0], [200.0], {(1, 0): 290.0}))
    assert (tuned.default_us, tuned.best_us, tuned.estimated) == (300.0, 290.0, False)
    assert tuned.promotion.gain == pytest.approx(300.0 / 280.0)
    assert tuned.promotion.reason.endswith("against the default; estimated as the sum of its parts")
    assert (champion(engine).measured_us, champion(engine).estimated) == (290.0, False)


def test_what_was_estimated_and_is_measured_now_is_no_estimate(engine: Engine, make_sweep) -> None:
    tune(engine, make_sweep([100.0], [200.0]))
    assert champion(engine).estimated
    tuned = tune(engine, make_sweep([100.0, 80.0], [200.0], {(0, 0): 310.0, (1, 0): 290.0}, name="second.gz"))
    assert tuned.promotion.reason.endswith("against the champion")
    assert (champion(engine).measured_us, champion(engine).estimated) == (290.0, False)


def test_an_estimate_does_not_displace_a_pair_that_was_measured(engine: Engine, make_sweep) -> None:
    first = make_sweep([100.0], [200.0], {(0, 0): 310.0})
    tune(engine, first)
    # of the second sweep the faster pair was never run together
    tuned = tune(engine, make_sweep([100.0, 80.0], [200.0], {(0, 0): 310.0}, name="second.gz"))
    assert (tuned.best_us, tuned.estimated) == (310.0, False)
    assert (tuned.promotion.decision, len(promotions(engine))) == ("kept", 1)
    assert champion(engine).config == config_of(first, 0, 0)
    assert champion(engine).measured_us == 310.0
    # a slower one that was run together is promoted past it
    third = make_sweep([100.0, 80.0, 90.0], [200.0], {(0, 0): 310.0, (2, 0): 300.0}, name="third.gz")
    assert tune(engine, third).promotion.decision == "promoted"
    assert champion(engine).config == config_of(third, 2, 0)


def test_a_rolled_back_config_does_not_come_back_by_itself(engine: Engine, make_sweep) -> None:
    pairs = {(0, 0): 300.0, (1, 0): 280.0, (2, 0): 285.0}
    sweep = make_sweep([100.0, 80.0, 85.0], [200.0], pairs)
    tune(engine, sweep)
    assert champion(engine).config == config_of(sweep, 1, 0)
    with writing(engine) as s:
        writes.rollback(s, promotions(engine)[-1].id, "numerics differ")
    assert champion(engine) is None
    assert tune(engine, sweep).promotion.decision == "kept"
    assert champion(engine) is None
    # new evidence: a fourth K1. The best that nobody took back is promoted, not the one that was.
    more = make_sweep([100.0, 80.0, 85.0, 88.0], [200.0], pairs | {(3, 0): 288.0}, name="more.gz")
    tune(engine, more, finalists=4)
    assert champion(engine).config == config_of(sweep, 2, 0)


def test_another_build_measures_again_and_confirms_the_champion(engine: Engine, make_sweep) -> None:
    pairs = {(0, 0): 300.0, (1, 0): 280.0}
    first = make_sweep([100.0, 80.0], [200.0], pairs)
    tune(engine, first)
    newer = replace(first.build, driver="590.0")
    second = make_sweep([100.0, 80.0], [200.0], pairs, build=newer, name="second.gz")
    tuned = tune(engine, second)
    assert tuned.measured == 5
    assert tuned.promotion.reason == "the champion is confirmed with today's build"
    assert (champion(engine).build, champion(engine).config) == (newer, config_of(first, 1, 0))
    assert tune(engine, second).promotion.decision == "kept"


def test_a_champion_that_fails_with_another_build_gives_way(engine: Engine, make_sweep) -> None:
    first = make_sweep([100.0, 80.0], [200.0], {(0, 0): 300.0, (1, 0): 280.0})
    tune(engine, first)
    second = make_sweep([100.0, 80.0], [200.0], {(0, 0): 300.0}, build=replace(first.build, driver="590.0"),
                        outcomes={("k1", 1): "incorrect"}, name="second.gz")  # fmt: skip
    tuned = tune(engine, second)
    assert champion(engine).config == config_of(second, 0, 0)
    assert "the champion ended incorrect here" in tuned.promotion.reason


def test_a_champion_that_is_not_recorded_stays(engine: Engine, make_sweep) -> None:
    first = make_sweep([100.0, 80.0], [200.0], {(1, 0): 280.0})
    tune(engine, first)
    second = make_sweep([100.0], [200.0, 150.0], {(0, 0): 300.0, (0, 1): 250.0}, name="second.gz")
    tuned = tune(engine, second)
    assert tuned.promotion.decision == "kept"
    assert "the champion is not recorded here" in tuned.promotion.reason
    assert champion(engine).config == config_of(first, 1, 0)


def test_the_default_then_the_champion_then_neighbours_come_first(engine: Engine, make_sweep) -> None:
    near = parse_shape("N=1,H=48,T=1024")
    tune(engine, make_sweep([100.0, 99.0, 50.0], [200.0], shape=near), near)
    tune(engine, make_sweep([100.0, 80.0, 101.0, 102.0], [200.0], name="own.gz"))
    newest = max(row.id for row in measurements(engine))
    sweep = make_sweep(
        [100.0, 80.0, 101.0, 102.0], [200.0], build=replace(make_sweep([1.0], [1.0]).build, driver="x"), name="new.gz"
    )
    tune(engine, sweep, trials=3)
    order = [row.config_json for row in measurements(engine, kernel="k1") if row.id > newest]
    assert order == [canonical(sweep.recording.checks["k1", i].config) for i in (0, 1, 2)]


class Interrupting(ReplayBackend):
    """Ctrl-C at the n-th measurement of a kernel."""

    def __init__(self, sweep: ReplayBackend, kernel: str, at: int) -> None:
        super().__init__(sweep.recording)
        self.kernel, self.left = kernel, at

    def _count(self, kernel: str) -> None:
        if kernel == self.kernel:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

    def measure(self, kernel: str, shape: Shape, config) -> Result:
        self._count(kernel)
        return super().measure(kernel, shape, config)

    def measure_pair(self, shape: Shape, config: LaunchConfig, against: LaunchConfig | None = None) -> Result:
        self._count("duel" if against else "kda")
        return super().measure_pair(shape, config, against)


@pytest.mark.parametrize(("kernel", "at", "stored"), [("k1", 17, 17), ("k2", 30, 102), ("kda", 4, 156)])
def test_an_interrupt_keeps_what_is_finished(engine: Engine, real_sweep: ReplayBackend, kernel, at, stored) -> None:
    tuner = Tuner(engine, Interrupting(real_sweep, kernel, at), Options(trials=80, least_gain_pct=0.0))
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(REAL)
    assert len(measurements(engine)) == stored
    assert tuner.last.state == "interrupted"
    with reading(engine) as s:
        assert queries.page_runs(s)[-1].state is RunState.INTERRUPTED
    again = tune(engine, real_sweep, trials=80)
    assert again.trials - again.measured == stored
    assert Counter(row.kernel for row in measurements(engine)) == {"k1": 72, "k2": 80, "kda": 9}


def test_an_interrupt_before_the_decision_leaves_it_to_the_next_run(engine: Engine, make_sweep) -> None:
    sweep = make_sweep([100.0, 80.0], [200.0], {(0, 0): 300.0, (1, 0): 280.0})
    with pytest.raises(KeyboardInterrupt):
        tune(engine, Interrupting(sweep, "duel", 0))
    assert champion(engine) is None
    tuned = tune(engine, sweep)
    assert (tuned.measured, tuned.promotion.decision) == (0, "promoted")
    assert champion(engine).config == config_of(sweep, 1, 0)


def test_a_time_budget_still_measures_the_default_and_decides(engine: Engine, real_sweep: ReplayBackend) -> None:
    tuned = Tuner(engine, real_sweep, Options(trials=200)).tune(REAL, 1e-6)
    assert {kernel: len(search.results) for kernel, search in tuned.stages.items()} == {"k1": 1, "k2": 1}
    assert tuned.state == "done"


def test_a_mistake_of_ours_is_not_data(engine: Engine, real_sweep: ReplayBackend, monkeypatch) -> None:
    def broken(*_: object) -> Result:
        raise ZeroDivisionError

    monkeypatch.setattr(real_sweep, "measure", broken)
    with pytest.raises(ZeroDivisionError):
        tune(engine, real_sweep)
    with reading(engine) as s:
        assert queries.page_runs(s)[-1].state is RunState.FAILED
