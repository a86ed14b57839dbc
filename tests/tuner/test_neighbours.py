"""What the store knows of near shapes: first guesses, what nearest answers cost, and what is stale goes first."""

from dataclasses import replace

import pytest
from sqlalchemy import Engine

from kdatune_kernels import match
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import shape_of
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.cli_tune import stale_first
from kdatune_tuner.guess import apart
from kdatune_tuner.neighbours import nearest_configs
from kdatune_tuner.neighbours import nearest_regret
from kdatune_tuner.neighbours import stored_guess
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.sweeps import sweep_keys
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuner

H96, H64 = shape_of(1, 96, 8192), shape_of(1, 64, 8192)
OLDER = Build("kernels", "space", "1", "3.6.0", "12.9", "2.13", "13.0", "580.1")


def tune(engine: Engine, backend: ReplayBackend, shape=H96, **options):
    return Tuner(engine, backend, Options(**{"trials": 600, **options})).tune(shape)


def test_a_search_starts_from_what_other_shapes_measured(engine: Engine, shipped: ReplayBackend) -> None:
    near = shape_of(1, 96, 1024)
    tune(engine, shipped, H96, kernel="k2", trials=496)
    alone = tune(engine, shipped, near, kernel="k2", trials=60)
    times = {c: r.median_us for c, r in alone.stages["k2"].results.items()}
    best = min(shipped.measure("k2", near, c).median_us for c in shipped.space("k2", near))
    assert alone.stages["k2"].sampler == "gp"
    assert min(times.values()) == best
    assert len(times) < 60  # it ended by itself
    # the best of the neighbour that is not the default's is among the first
    first = [c for c, _ in zip(times, range(5), strict=False)]
    assert min(times[c] for c in first) <= best * 1.02


def test_a_guess_needs_measurements_of_the_same_head_sizes(engine: Engine, real_sweep: ReplayBackend) -> None:
    tune(engine, real_sweep, H96, kernel="k2")
    space = real_sweep.space("k2", H64)
    with writing(engine) as s:
        ids = {"gpu_id": writes.put_gpu(s, real_sweep.gpu), "build_id": writes.put_build(s, real_sweep.build)}
    guess = stored_guess(engine, "k2", space, H64, real_sweep.gpu, **ids)
    times = {c: real_sweep.measure("k2", H96, c).median_us for c in real_sweep.space("k2", H96)}
    assert space[int(guess.argmin())] == min(times, key=times.__getitem__)
    assert guess.min() == 0.0
    other = replace(H64, K=64)
    assert stored_guess(engine, "k2", space, other, real_sweep.gpu, **ids) is None
    assert stored_guess(engine, "k1", real_sweep.space("k1", H64), H64, real_sweep.gpu, **ids) is None


def test_what_an_earlier_build_measured_on_the_same_shape_is_a_guess_and_today_s_is_not(
    engine: Engine, real_sweep: ReplayBackend
) -> None:
    tune(engine, real_sweep, H96, kernel="k2")
    space = real_sweep.space("k2", H96)
    with writing(engine) as s:
        gpu_id, build_id = writes.put_gpu(s, real_sweep.gpu), writes.put_build(s, real_sweep.build)
        newer = writes.put_build(s, OLDER)
    with reading(engine) as s:
        assert [key.shape for key in sweep_keys(s, "k2", gpu_id)] == [H96]
    assert stored_guess(engine, "k2", space, H96, real_sweep.gpu, gpu_id, build_id) is None
    assert stored_guess(engine, "k2", space, H96, real_sweep.gpu, gpu_id, newer) is not None


def test_a_shape_of_other_waves_is_further_away() -> None:
    gpu = ReplayBackend.open().gpu
    assert apart("k2", H64, H96, gpu) == match.distance(H64, H96) + 1.0
    assert apart("k1", H64, H96, gpu) == match.distance(H64, H96)
    assert apart("k2", shape_of(1, 96, 8192), shape_of(1, 80, 8192), gpu) < 1.0


def test_a_promotion_says_what_the_nearest_answer_would_have_cost(engine: Engine, shipped: ReplayBackend) -> None:
    far, near = shape_of(1, 64, 1024), shape_of(1, 16, 1024)  # of the same waves, and two kernels both
    tune(engine, shipped, far)
    first = champion_of(engine, shipped, far)
    assert first.nearest_regret is None  # nothing was tuned
    tuned = tune(engine, shipped, near)
    second = champion_of(engine, shipped, near)
    assert match.find([first], near, shipped.gpu).config == second.config
    assert second.nearest_regret == 1.0
    # the same with a neighbour that answers with another K2
    slow = next(c for c, r in reversed(tuned.stages["k2"].ranked()) if c.variant == "ws")
    other = replace(first, config=replace(first.config, k2=slow))
    answer = match.find([other], near, shipped.gpu).config
    assert answer.k2 == slow
    times = {c: r.median_us for stage in tuned.stages.values() for c, r in stage.results.items()}
    regret = nearest_regret([other, second], near, shipped.gpu, tuned.stages, second.config, tuned.pairs)
    cost, own = (times[config.k1] + times[config.k2] for config in (answer, second.config))
    assert regret == pytest.approx(cost / own)
    assert regret > 1.1
    assert nearest_regret([second], near, shipped.gpu, tuned.stages, second.config, tuned.pairs) is None
    unmeasured = replace(first.config, k2=K2Config(block_v=32, stages_in=1, num_warps=8, transposed=False))
    tuned.stages["k2"].results.pop(unmeasured.k2)
    other = replace(first, config=unmeasured)
    assert nearest_regret([other], near, shipped.gpu, tuned.stages, second.config, tuned.pairs) is None


def champion_of(engine: Engine, backend: ReplayBackend, shape):
    with reading(engine) as s:
        return next(c for c in queries.champions(s, backend.gpu) if c.shape == shape)


def test_nearest_configs_begin_with_the_shape_s_own(engine: Engine, shipped: ReplayBackend) -> None:
    for shape in (shape_of(1, 96, 8192), shape_of(1, 96, 1024)):
        tune(engine, shipped, shape)
    with reading(engine) as s:
        champions = queries.champions(s, shipped.gpu)
    by_shape = {c.shape: c.config for c in champions}
    found = nearest_configs(champions, shape_of(1, 96, 1024), shipped.gpu)
    assert found[0] == by_shape[shape_of(1, 96, 1024)]
    assert len(found) == 2


def test_what_is_stale_is_tuned_first(engine: Engine, real_sweep: ReplayBackend) -> None:
    first, second, third = real_sweep.default_shapes()
    assert stale_first(engine, real_sweep) == [first, second, third]
    before = ReplayBackend(replace(real_sweep.recording, build=OLDER))
    tune(engine, before, third, trials=20)
    tune(engine, real_sweep, second, trials=20)
    assert stale_first(engine, real_sweep) == [third, first, second]
    tune(engine, real_sweep, third, trials=20)
    assert stale_first(engine, real_sweep) == [first, second, third]


@pytest.fixture
def shipped() -> ReplayBackend:
    return ReplayBackend.open()
