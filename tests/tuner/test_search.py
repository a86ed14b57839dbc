"""The search of one stage: it finds the best, measures nothing twice, and stops."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import optuna
import pytest

from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.guess import Sweep
from kdatune_tuner.guess import guess_from
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import StageConfig
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.proposer import Proposer
from kdatune_tuner.search import Budget
from kdatune_tuner.search import Search
from kdatune_tuner.search import run_search
from kdatune_tuner.search import sampler_for
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import schema_state
from kdatune_tuner.store.engine import upgrade

SHAPES = ("N=1,H=96,T=8192", "N=1,H=64,T=8192", "N=6,H=96,T=8192,varlen=true,longest_tokens=3063")


class Counting:
    """Measures through a backend and counts."""

    def __init__(self, backend: ReplayBackend, kernel: str, shape: Shape) -> None:
        self.calls: Counter[StageConfig] = Counter()
        self.order: list[StageConfig] = []
        self._measure: Callable[[StageConfig], Result] = lambda config: backend.measure(kernel, shape, config)

    def __call__(self, config: StageConfig) -> Result:
        self.calls[config] += 1
        self.order.append(config)
        return self._measure(config)


def search(
    backend: ReplayBackend, key: str, trials: int, *, kernel: str = "k2", seed: int = 0, seeds=(), known=None, **rest
) -> tuple[Search, Counting]:
    shape = parse_shape(key)
    space = backend.space(kernel, shape)
    budget = Budget(trials, rest.pop("deadline", None))
    found, measure = Search(kernel, sampler_for(space, budget)), Counting(backend, kernel, shape)
    run_search(found, space=space, seeds=seeds, known=known or {}, measure=measure, budget=budget, seed=seed, **rest)
    return found, measure


def recorded_best(backend: ReplayBackend, key: str, kernel: str = "k2") -> tuple[float, StageConfig]:
    shape = parse_shape(key)
    times = {
        check.config: median(backend.recording.timings[kernel, i, shape].samples_us)
        for (stage, i), check in backend.recording.checks.items()
        if stage == kernel and check.outcome is Outcome.OK
    }
    best = min(times, key=lambda config: times[config])
    return times[best], best


@pytest.mark.parametrize("kernel", ["k1", "k2"])
@pytest.mark.parametrize("key", SHAPES)
def test_enumeration_finds_the_recorded_best(real_sweep: ReplayBackend, key: str, kernel: str) -> None:
    found, measure = search(real_sweep, key, 600, kernel=kernel)
    assert found.sampler == "enumerate"
    assert set(measure.calls) == set(real_sweep.space(kernel, parse_shape(key)))
    assert set(measure.calls.values()) == {1}
    best_us, best = recorded_best(real_sweep, key, kernel)
    assert found.ranked()[0] == (best, found.results[best])
    assert found.best_us() == best_us


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("key", SHAPES)
def test_a_search_comes_within_two_per_cent_in_sixty_trials(real_sweep: ReplayBackend, key: str, seed: int) -> None:
    found, measure = search(real_sweep, key, 60, seed=seed)
    assert found.sampler == "gp"
    assert found.best_us() <= recorded_best(real_sweep, key)[0] * 1.02
    assert len(measure.order) == 60
    assert set(measure.calls.values()) == {1}


def test_equal_seeds_search_alike(real_sweep: ReplayBackend) -> None:
    orders = [search(real_sweep, SHAPES[0], 45, seed=seed)[1].order for seed in (3, 3, 4)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_seeds_come_first_also_from_outside_the_space(real_sweep: ReplayBackend) -> None:
    shape = parse_shape(SHAPES[0])
    inside = real_sweep.space("k2", shape)[7]
    over = next(c.config for c in real_sweep.recording.checks.values() if c.outcome is Outcome.RESOURCE)
    assert over not in real_sweep.space("k2", shape)
    found, measure = search(real_sweep, SHAPES[0], 40, seeds=[over, inside, over])
    assert measure.order[:2] == [over, inside]
    assert found.results[over].outcome is Outcome.RESOURCE
    assert found.outcomes() == {"ok": 39, "resource": 1}


def test_known_trials_count_and_are_not_measured_again(real_sweep: ReplayBackend) -> None:
    first, _ = search(real_sweep, SHAPES[0], 50)
    again, measure = search(real_sweep, SHAPES[0], 50, known=first.results)
    assert (again.resumed, again.measured, measure.order) == (50, 0, [])
    more, measure = search(real_sweep, SHAPES[0], 70, known=first.results)
    assert (more.resumed, more.measured) == (50, 20)
    assert not set(measure.order) & set(first.results)
    rest, measure = search(real_sweep, SHAPES[0], 600, known=first.results)
    assert len(measure.order) == len(real_sweep.space("k2", parse_shape(SHAPES[0]))) - 50
    assert rest.best_us() == recorded_best(real_sweep, SHAPES[0])[0]


def test_a_known_config_that_left_the_space_is_not_ranked(real_sweep: ReplayBackend) -> None:
    gone = K2Config(stages_in=2, num_warps=8)
    space = [c for c in real_sweep.space("k2", parse_shape(SHAPES[0])) if c != gone]
    found = Search("k2", "gp")
    known = {gone: Result(Outcome.OK, (1.0,))}
    run_search(
        found,
        space=space,
        seeds=[],
        known=known,
        measure=Counting(real_sweep, "k2", parse_shape(SHAPES[0])),
        budget=Budget(30),
        seed=0,
    )
    assert gone not in found.results
    assert found.resumed == 0


def test_a_deadline_that_has_passed_leaves_the_first_trial(real_sweep: ReplayBackend) -> None:
    _, measure = search(real_sweep, SHAPES[0], 60, deadline=time.monotonic() - 1.0)
    assert len(measure.order) == 1
    first, _ = search(real_sweep, SHAPES[0], 60)
    _found, measure = search(real_sweep, SHAPES[0], 200, known=first.results, deadline=time.monotonic() - 1.0)
    assert len(measure.order) == 1


def test_a_space_of_failures_ends_typed(real_sweep: ReplayBackend) -> None:
    shape = parse_shape(SHAPES[0])
    found = Search("k2", "gp")
    run_search(
        found,
        space=real_sweep.space("k2", shape),
        seeds=[],
        known={},
        measure=lambda config: Result(Outcome.RESOURCE, detail="too much"),
        budget=Budget(60),
        seed=0,
    )
    assert found.outcomes() == {"resource": 60}
    assert (found.ranked(), found.best_us()) == ([], None)


def test_failures_repel_the_search(real_sweep: ReplayBackend) -> None:
    """Two MMA partitions fail, the best of the space among them; the search learns to stay away."""
    shape = parse_shape(SHAPES[0])
    space = real_sweep.space("k2", shape)

    def measure(config: StageConfig) -> Result:
        if config.consumers == 2:
            return Result(Outcome.ILLEGAL_ACCESS)
        return real_sweep.measure("k2", shape, config)

    tried: Counter[bool] = Counter()
    for seed in range(4):
        found = Search("k2", "gp")
        run_search(found, space=space, seeds=[], known={}, measure=measure, budget=Budget(60), seed=seed)
        tried.update(config.consumers == 2 for config in list(found.results)[20:])
    share = sum(c.consumers == 2 for c in space) / len(space)
    assert tried[True] / tried.total() < share * 0.75


def test_a_search_of_no_least_gain_goes_on_with_what_is_left(real_sweep: ReplayBackend) -> None:
    """All but eight of a small space: long after nothing is expected of any."""
    shape = parse_shape(SHAPES[0])
    space = [c for c in real_sweep.space("k2", shape) if c.consumers == 2][:70]
    found, measure = Search("k2", "gp"), Counting(real_sweep, "k2", shape)
    run_search(found, space=space, seeds=[], known={}, measure=measure, budget=Budget(62), seed=0)
    assert len(measure.order) == 62
    assert set(measure.calls.values()) == {1}


@pytest.mark.parametrize("key", SHAPES)
def test_a_search_ends_where_it_does_not_pay(real_sweep: ReplayBackend, key: str) -> None:
    shape = parse_shape(key)
    space = real_sweep.space("k2", shape)
    for seed in range(3):
        found, measure = Search("k2", "gp"), Counting(real_sweep, "k2", shape)
        budget = Budget(400, least_gain_pct=0.02)
        run_search(found, space=space, seeds=[], known={}, measure=measure, budget=budget, seed=seed)
        assert 20 < len(measure.order) < 150
        assert found.best_us() <= recorded_best(real_sweep, key)[0] * 1.02


def test_a_search_ends_with_its_time_on_the_card(real_sweep: ReplayBackend) -> None:
    shape = parse_shape(SHAPES[0])

    def measure(config: StageConfig) -> Result:
        return replace(real_sweep.measure("k2", shape, config), gpu_seconds=0.5)

    found = Search("k2", "gp")
    space = real_sweep.space("k2", shape)
    run_search(found, space=space, seeds=[], known={}, measure=measure, budget=Budget(100, gpu_seconds=7.4), seed=0)
    assert (found.measured, found.gpu_seconds) == (15, 7.5)


def test_what_other_shapes_suggest_is_tried_first(real_sweep: ReplayBackend) -> None:
    shape, other = parse_shape(SHAPES[1]), parse_shape(SHAPES[0])
    space = real_sweep.space("k2", shape)
    times = {c: real_sweep.measure("k2", other, c).median_us for c in real_sweep.space("k2", other)}
    guess = guess_from(space, [Sweep(0.5, times)])
    found, measure = Search("k2", "gp"), Counting(real_sweep, "k2", shape)
    run_search(found, space=space, seeds=[], known={}, measure=measure, budget=Budget(1), seed=0, guess=guess)
    assert measure.order == [min(times, key=times.__getitem__)]
    assert guess_from(space, [Sweep(0.5, dict(list(times.items())[:9]))]) is None
    assert guess_from(space, []) is None


def test_every_config_has_parameters_of_its_own_in_optuna(real_sweep: ReplayBackend) -> None:
    for kernel in ("k1", "k2"):
        space = real_sweep.space(kernel, parse_shape(SHAPES[0]))
        proposer = Proposer(space, 0)
        assert len({tuple(proposer.params(config).items()) for config in space}) == len(space)
        for config in space[::20]:
            assert proposer.ask(config).params == proposer.params(config)
    params = proposer.params(next(c for c in space if c.variant == "ws" and c.stages_in == 5))
    assert params["ws.stages_in"] == 3  # 2, 3, 4, 5: an ordered index
    assert params["ws.tile"].startswith("block_v=")


def test_the_study_can_be_kept_in_the_database_of_the_tuner(real_sweep: ReplayBackend, database_url: str) -> None:
    upgrade(database_url)
    found, _ = search(real_sweep, SHAPES[0], 25, storage=database_url, study_name="k2 here")
    assert len(found.results) == 25
    storage = optuna.storages.RDBStorage(database_url)
    study = optuna.load_study(storage=storage, study_name="k2 here")
    assert min(t.value for t in study.trials if t.value is not None) == found.best_us()
    storage.remove_session()
    storage.engine.dispose()
    upgrade(database_url)
    engine = open_engine(database_url)
    current, head = schema_state(engine)
    engine.dispose()
    assert current == head


def test_the_study_can_be_kept_in_a_journal(real_sweep: ReplayBackend, tmp_path) -> None:
    journal = tmp_path / "studies.journal"
    search(real_sweep, SHAPES[0], 25, storage=str(journal), study_name="k2 here")
    assert journal.stat().st_size > 0
