"""What has no stages: measured, replayed, tuned, served near by and taken out of use whole, never by its parts."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from sqlalchemy import Engine

from kdatune_kernels import match
from kdatune_kernels.client import Settings
from kdatune_kernels.match import Champion
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.space import FUSED
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import WHOLES
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner import exchange_fla
from kdatune_tuner import exchange_t4
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.evaluate import evaluate
from kdatune_tuner.evaluate import recorded_cases
from kdatune_tuner.exchange import Told
from kdatune_tuner.exchange import Traded
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.neighbours import nearest_regret
from kdatune_tuner.objective import Result
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.recording import SweepWriter
from kdatune_tuner.recording import load_recording
from kdatune_tuner.recording import meta_row
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import utc_now
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuned
from kdatune_tuner.tune import Tuner

H200 = KNOWN_GPUS["NVIDIA H200"]
FULL, FEW, LONG = shape_of(1, 128, 8192), shape_of(1, 48, 2048), shape_of(1, 48, 8192)
"""Shapes whose default is the fused kernel, two stages, and pairs."""
SPLIT = split_default(FULL, H200)
PLAIN = K1Config()
BUILD = Build("kernels", "space", "1", "3.6.0", "12.9", "2.13", "13.0", "580.1")


@pytest.fixture
def sweep(tmp_path: Path):
    """A small recording: the default of two stages, the K1 that goes with what has none, plain K2s, and pairs."""

    def make(
        whole_us: float | None,
        shape: Shape = FULL,
        *,
        whole: LaunchConfig = FUSED,
        split_us: float | None = 300.0,
        check: str = "ok",
        build_of: ReplayBackend | None = None,
        name: str = "sweep.gz",
    ) -> ReplayBackend:
        split = split_default(shape, H200)
        writer = SweepWriter(tmp_path / name)
        build = BUILD if build_of is None else replace(build_of.build, driver="590.0")
        writer.add(meta_row(H200, build, recorded_at="2026-11-29T00:00:00Z", command="made", regime="none", spaces={}))
        stages = {"k1": {split.k1: 100.0, PLAIN: 150.0}, "k2": {split.k2: 200.0, K2Config(): 260.0}}
        for kernel, configs in stages.items():
            for i, (config, us) in enumerate(configs.items()):
                row = {"t": "check", "kernel": kernel, "i": i, "config": to_json(config), "outcome": "ok"}
                writer.add(row)
                writer.add({"t": "time", "kernel": kernel, "i": i, "shape": shape.key(), "samples_us": around(us)})
        if split_us is not None:
            writer.add({"t": "pair", "i1": 0, "i2": 0, "shape": shape.key(), "samples_us": around(split_us)})
        if whole_us is not None:
            checked = {"t": "check", "kernel": "k2", "i": 2, "config": to_json(whole.k2), "outcome": check}
            writer.add(checked | {"spills": 16, "registers": 255})
            if check == "ok":
                writer.add({"t": "pair", "i1": 1, "i2": 2, "shape": shape.key(), "samples_us": around(whole_us)})
        writer.finish()
        return ReplayBackend(load_recording(tmp_path / name))

    return make


def around(us: float) -> list[float]:
    return [us * (1.0 + 0.001 * step) for step in (-2, -1, 0, 1, 2)]


def tune(engine: Engine, backend: ReplayBackend, shape: Shape = FULL, **options) -> Tuned:
    return Tuner(engine, backend, Options(**{"least_gain_pct": 0.0, **options})).tune(shape)


def champions(engine: Engine) -> list[Champion]:
    with reading(engine) as s:
        return queries.champions(s)


BOTH = pytest.mark.parametrize(("whole", "shape"), [(FUSED, FULL), (PAIRS, LONG)])


def test_the_shapes_are_what_their_names_say() -> None:
    assert default_config(FULL, H200) == FUSED != SPLIT
    assert default_config(FEW, H200) == split_default(FEW, H200)
    assert default_config(LONG, H200) == PAIRS != split_default(LONG, H200)
    assert all(config_ok(whole, shape, H200) is None for whole in WHOLES for shape in (FULL, FEW, LONG))


@BOTH
def test_a_recording_answers_for_it_whole_and_never_by_a_sum(sweep, whole: LaunchConfig, shape: Shape) -> None:
    backend = sweep(250.0, shape, whole=whole)
    split = split_default(shape, H200)
    assert [c.variant for c in backend.space("k2", shape)] == [split.k2.variant, "triton"]
    result = backend.measure_pair(shape, whole)
    assert (result.median_us, result.estimated, result.spills) == (250.0, False, 16)
    run = backend.measure_pair(shape, whole, split)
    assert (median(run.samples_us), median(run.against_us), run.estimated) == (250.0, 300.0, False)
    # beside a pair that was not recorded together nothing is put in for parts that it has not
    other = LaunchConfig(split.k1, K2Config())
    for ours, theirs, times_us in ((whole, other, (250.0, 360.0)), (other, whole, (360.0, 250.0))):
        run = backend.measure_pair(shape, ours, theirs)
        assert (median(run.samples_us), median(run.against_us), run.estimated) == (*times_us, True)


@BOTH
def test_a_recording_without_it_says_so(sweep, engine: Engine, whole: LaunchConfig, shape: Shape) -> None:
    backend = sweep(None, shape)
    result = backend.measure_pair(shape, whole)
    assert (result.outcome, result.samples_us, result.estimated) == (Outcome.LAUNCH_ERROR, (), False)
    assert result.detail == f"{whole.k2.variant} is not recorded on {shape.key()} in sweep.gz"
    assert not backend.measurable("kda", shape, whole)
    tuned = tune(engine, backend, shape)
    assert whole not in tuned.pairs
    assert (tuned.served, tuned.default_us) == (split_default(shape, H200), None)
    assert "the default was not measured" in tuned.promotion.reason


def test_a_recording_of_the_fused_kernel_alone_is_replayed_where_pairs_are_the_default(sweep, engine: Engine) -> None:
    tuned = tune(engine, sweep(250.0, LONG), LONG)
    assert next(iter(tuned.pairs)) == FUSED == tuned.served
    assert PAIRS not in tuned.pairs
    assert tuned.default_us is None


@pytest.mark.parametrize("check", ["incorrect", "resource"])
def test_one_that_failed_its_check_is_told_and_not_served(sweep, engine: Engine, check: str) -> None:
    tuned = tune(engine, sweep(250.0, check=check))
    assert tuned.pairs[FUSED].outcome == check
    assert tuned.served == SPLIT


@pytest.mark.parametrize(
    ("whole", "shape", "whole_us"),
    [
        (FUSED, FULL, 250.0),
        (FUSED, FULL, 330.0),
        (FUSED, FEW, 250.0),
        (PAIRS, LONG, 250.0),
        (PAIRS, LONG, 330.0),
        (PAIRS, FEW, 250.0),
    ],
)
def test_it_is_tried_as_a_pair_on_every_shape(
    sweep, engine: Engine, whole: LaunchConfig, shape: Shape, whole_us: float
) -> None:
    backend = sweep(whole_us, shape, whole=whole)
    tuned = tune(engine, backend, shape)
    split = split_default(shape, H200)
    assert list(tuned.pairs)[: 2 if shape == FEW else 1] == ([split, whole] if shape == FEW else [whole])
    assert tuned.served == (whole if whole_us < 300.0 else split)
    assert tuned.default_us == (300.0 if shape == FEW else whole_us)
    assert whole.k2 not in tuned.stages["k2"].results
    assert next(iter(tuned.stages["k1"].results)) == split.k1  # the stages begin with the default of two kernels
    assert next(iter(tuned.stages["k2"].results)) == split.k2
    served = champions(engine)[0]
    assert (served.config, served.measured_us) == (tuned.served, min(whole_us, 300.0))
    assert tune(engine, backend, shape).measured == 0


def test_one_stage_alone_is_compared_with_the_default_of_two_kernels(sweep, engine: Engine) -> None:
    tuned = tune(engine, sweep(250.0), kernel="k2")
    assert (tuned.best, tuned.default_us) == (SPLIT.k2, 200.0)


def test_a_sum_of_parts_does_not_replace_it(sweep, engine: Engine) -> None:
    """The fused default was measured end to end; the pair of two kernels was not, and its parts add up to less."""
    tuned = tune(engine, sweep(320.0, split_us=None))
    assert tuned.pairs[SPLIT].estimated
    assert tuned.served == FUSED
    assert tuned.promotion.reason == "the first champion: the default itself is the best"


def test_a_rolled_back_one_does_not_come_back_and_history_keeps_it(sweep, engine: Engine) -> None:
    tune(engine, sweep(250.0))
    with writing(engine) as s:
        writes.rollback(s, queries.page_promotions(s)[-1].id, "numerics differ")
    assert champions(engine) == []
    assert tune(engine, sweep(250.0)).promotion.decision == "kept"
    assert champions(engine) == []
    with reading(engine) as s:
        stored = [(p.decision.value, p.config_hash) for p in queries.page_promotions(s)]
    assert stored == [("promoted", digest(FUSED)), ("rollback", None)]


def test_a_fused_champion_seeds_no_stage(sweep, engine: Engine) -> None:
    tune(engine, sweep(250.0))
    newer = sweep(250.0, build_of=sweep(250.0), name="newer.gz")
    tuner = Tuner(engine, newer, Options())
    assert tuner._seeds(Ledger(engine, newer, FULL), FULL) == [SPLIT]
    tuned = tune(engine, newer, trials=1)
    assert [list(tuned.stages[k].results) for k in ("k1", "k2")] == [[SPLIT.k1], [SPLIT.k2]]
    assert tuned.promotion.reason == "the champion is confirmed with today's build"


def champion(shape: Shape, config: LaunchConfig) -> Champion:
    return Champion(H200, shape, config, 1, 100.0, 110.0)


@pytest.mark.parametrize(
    ("tuned", "config", "asked", "answer"),
    [
        (FULL, FUSED, shape_of(1, 128, 4096), FUSED),
        *(
            (FEW, whole, shape_of(1, 48, 1024), whole) for whole in WHOLES
        ),  # won where the default has stages: whole, too
        *((FEW, whole, shape_of(1, 47, 2048), None) for whole in WHOLES),
        (LONG, PAIRS, shape_of(1, 40, 4096), PAIRS),
        (LONG, PAIRS, FEW, None),  # too short for pairs to win
        (FEW, split_default(FEW, H200), LONG, None),  # it has not met pairs
        (FULL, FUSED, FEW, None),  # one kernel instead of two is slower there
        (FULL, FUSED, shape_of(1, 128, 4096, V=256), None),  # not legal, nor near
        (FEW, split_default(FEW, H200), FULL, None),
    ],
)
def test_a_neighbour_answers_whole_or_not_at_all(
    tuned: Shape, config: LaunchConfig, asked: Shape, answer: LaunchConfig | None
) -> None:
    found = match.find([champion(tuned, config)], asked, H200)
    assert found.config == (answer or default_config(asked, H200))
    assert (found.champion is None) == (answer is None)


def test_two_kernels_that_beat_it_are_carried_over_by_their_own_default() -> None:
    asked = shape_of(1, 128, 1024)
    theirs = split_default(asked, H200)
    assert SPLIT.k1 != theirs.k1  # TMA pays for many tiles only
    deep = replace(SPLIT, k2=replace(SPLIT.k2, stages_in=4))
    found = match.find([champion(FULL, deep)], asked, H200)
    assert (found.match, found.config) == ("nearest", replace(deep, k1=theirs.k1))
    kept = match.find([champion(FULL, SPLIT)], asked, H200)
    assert kept.config == theirs


def test_no_answer_mixes_the_parts() -> None:
    shapes = [shape_of(n, h, t) for n in (1, 2, 8) for h in (8, 64, 96, 128) for t in (1024, 8192)]
    plain = LaunchConfig(PLAIN, SPLIT.k2)
    for tuned in shapes:
        for config in (*WHOLES, split_default(tuned, H200), plain):
            for asked in shapes:
                found = match.find([champion(tuned, config)], asked, H200).config
                assert config_ok(found, asked, H200) is None
                assert not found.k2.whole or found in WHOLES


def test_the_nearest_answer_is_compared_whole(sweep, engine: Engine) -> None:
    tuned = tune(engine, sweep(250.0))
    near = champion(shape_of(1, 128, 4096), FUSED)
    assert nearest_regret([near], FULL, H200, tuned.stages, SPLIT, tuned.pairs) == 1.0
    two = champion(shape_of(1, 128, 4096), replace(SPLIT, k2=K2Config()))
    assert nearest_regret([two], FULL, H200, tuned.stages, SPLIT, tuned.pairs) == pytest.approx(360.0 / 300.0)
    assert nearest_regret([two], FULL, H200, tuned.stages, FUSED, tuned.pairs) is None  # only estimated as a pair
    slower = tuned.pairs | {FUSED: Result(Outcome.OK, (330.0,))}
    assert nearest_regret([near], FULL, H200, tuned.stages, SPLIT, slower) == pytest.approx(1.1)


def test_an_evaluation_passes_it_over(sweep) -> None:
    cases = recorded_cases(sweep(250.0))
    assert [case.default for stage in cases.values() for case in stage] == [SPLIT.k1, SPLIT.k2]
    assert all(FUSED.k2 not in case.times_us for case in cases["k2"])
    reports = evaluate(cases, H200, seeds=1)
    assert [report.regret_worst for report in reports] == [1.0, 1.0]


@BOTH
def test_in_quarantine_the_default_of_two_stages_runs_then_plain_triton(
    tmp_path: Path, whole: LaunchConfig, shape: Shape
) -> None:
    launcher = Resolver(Settings(url=None, cache_dir=tmp_path), tmp_path / "no-bundle.json")
    split = split_default(shape, H200)
    try:
        assert launcher.quarantine(whole, shape, H200, "no shared memory") == split
        answer = launcher.resolve(shape, H200)
        assert (answer.config, answer.layer) == (split, "default")
        plain = default_config(shape, None)
        assert launcher.quarantine(split, shape, H200, "it fails, too") == plain
        assert launcher.quarantine(plain, shape, H200, "as well") is None
    finally:
        launcher.close()


def test_it_is_exchanged_without_loss(sweep, engine: Engine) -> None:
    backend = sweep(250.0)
    tune(engine, backend)
    served = champions(engine)[0]
    document = exchange_fla.dump([served])
    (back,) = exchange_fla.load(document, Told(None, None, None))
    assert (back.config, back.shape, back.values["median_us"]) == (FUSED, FULL, 250.0)
    row = Traded("kda", H200, FULL, backend.build, FUSED, Outcome.OK, {"median_us": 250.0, "measured_at": utc_now()})
    (again,), never_run = exchange_t4.load(exchange_t4.dump([row], "kda", H200), Told(None, None, None))
    assert (again.config, again.values["median_us"], never_run) == (FUSED, 250.0, 0)


def test_what_was_measured_is_known_again(sweep, engine: Engine) -> None:
    backend = sweep(250.0)
    tune(engine, backend)
    known = Ledger(engine, backend, FULL).known("kda")[FUSED]
    assert (known.result.median_us, known.result.spills, known.result.registers) == (250.0, 16, 255)
