"""How well the search and the nearest answers do, replayed on a recorded sweep. Nothing is stored.

A search is measured by its trials until it has seen a time within two per cent of the best of the shape. What a search knows
of other shapes is what the sweep says of them; the results and the champion of the shape itself are hidden from it.
"""

import random
import statistics
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution
from optuna.distributions import CategoricalDistribution
from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from kdatune_kernels import match
from kdatune_kernels.match import Champion
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.guess import Sweep
from kdatune_tuner.guess import apart
from kdatune_tuner.guess import guess_from
from kdatune_tuner.neighbours import nearest_configs
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import SearchConfig
from kdatune_tuner.objective import quantile
from kdatune_tuner.objective import stage_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.proposer import Proposer
from kdatune_tuner.search import Budget
from kdatune_tuner.search import Search
from kdatune_tuner.search import run_search
from kdatune_tuner.surrogate import Vector

KERNELS = ("k1", "k2")
WITHIN = 1.02
MOST_TRIALS = 100
"""A search that has not come near by then counts as one trial more."""
_IDLE_ASKS = 3


@dataclass(frozen=True)
class Case:
    """One stage on one shape: what each config of its space took (None: it does not run there)."""

    kernel: str
    shape: Shape
    times_us: Mapping[SearchConfig, float | None]
    default: SearchConfig

    @property
    def ran(self) -> dict[SearchConfig, float]:
        return {config: us for config, us in self.times_us.items() if us is not None}

    @property
    def best(self) -> SearchConfig:
        return min(self.ran, key=self.ran.__getitem__)

    def over_best(self, config: SearchConfig) -> float | None:
        """Its time over the best time (x); None where it did not run or is not recorded."""
        time_us = self.times_us.get(config)
        return None if time_us is None else time_us / min(self.ran.values())


@dataclass(frozen=True)
class Report:
    """One space over all its shapes and seeds: trials to within two per cent of the best, and what nearest answers cost.

    The regrets are None where the recording holds none of the answers, nor the defaults.
    """

    kernel: str
    shapes: int
    seeds: int
    cold_median: float
    cold_p90: float
    neighbours_median: float
    neighbours_p90: float
    random_median: float
    tpe_median: float
    tpe_p90: float
    regret_geomean: float | None
    regret_worst: float | None

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "kernel"}


def recorded_cases(backend: ReplayBackend) -> dict[str, list[Case]]:
    """Both stages on every shape of a recording, as a tuner sees their spaces."""
    cases: dict[str, list[Case]] = {}
    for kernel in KERNELS:
        for shape in backend.default_shapes():
            times_us: dict[SearchConfig, float | None] = {
                c: backend.measure(kernel, shape, c).median_us for c in backend.space(kernel, shape)
            }
            if any(us is not None for us in times_us.values()):
                default = stage_of(split_default(shape, backend.gpu), kernel)
                cases.setdefault(kernel, []).append(Case(kernel, shape, times_us, default))
    return cases


def evaluate(
    cases: Mapping[str, Sequence[Case]], gpu: Gpu, seeds: int, say: Callable[[str], None] = lambda _: None
) -> list[Report]:
    """A report for each stage. `say` is told what is being done."""
    champions = _champions(cases, gpu)
    return [_evaluate_stage(stage, gpu, champions, seeds, say) for stage in cases.values()]


def _champions(cases: Mapping[str, Sequence[Case]], gpu: Gpu) -> list[Champion]:
    """What would be served had every shape been tuned: the best of each stage; the default's of a stage that is not there."""
    best: dict[Shape, LaunchConfig] = {}
    for kernel, stage in cases.items():
        for case in stage:
            before = best.get(case.shape, split_default(case.shape, gpu))
            k1, k2 = (case.best, before.k2) if kernel == "k1" else (before.k1, case.best)
            best[case.shape] = LaunchConfig(k1, k2, before.precision)  # type: ignore[arg-type]
    return [Champion(gpu, shape, config, i, None, None) for i, (shape, config) in enumerate(best.items(), 1)]


def _evaluate_stage(
    stage: Sequence[Case], gpu: Gpu, champions: Sequence[Champion], seeds: int, say: Callable[[str], None]
) -> Report:
    cold: list[int] = []
    near: list[int] = []
    shuffled: list[int] = []
    tpe: list[int] = []
    regrets: list[float] = []
    for case in stage:
        say(f"{case.kernel}, {case.shape.key()}")
        others = [other for other in stage if other is not case]
        hidden = [champion for champion in champions if champion.shape != case.shape]
        answer = match.find(hidden, case.shape, gpu).config
        answered = None if answer.k2.whole else case.over_best(stage_of(answer, case.kernel))
        if answered is None:  # the recording lacks it, or it has no stages
            answered = case.over_best(case.default)
        if answered is not None:
            regrets.append(answered)
        winners = [stage_of(c, case.kernel) for c in nearest_configs(hidden, case.shape, gpu) if not c.k2.whole]
        sweeps = [Sweep(apart(case.kernel, other.shape, case.shape, gpu), other.ran) for other in others]
        guess = guess_from(list(case.times_us), sweeps)
        for seed in range(seeds):
            cold.append(_ours(case, seed, [case.default], None))
            near.append(_ours(case, seed, [case.default, *winners], guess))
            shuffled.append(_at_random(case, seed))
            tpe.append(_plain_tpe(case, seed))
    return Report(
        stage[0].kernel,
        len(stage),
        seeds,
        statistics.median(cold),
        quantile(cold, 0.9),
        statistics.median(near),
        quantile(near, 0.9),
        statistics.median(shuffled),
        statistics.median(tpe),
        quantile(tpe, 0.9),
        statistics.geometric_mean(regrets) if regrets else None,
        max(regrets, default=None),
    )


class _NearError(Exception):
    """The search has seen a time within two per cent of the best."""


def _ours(case: Case, seed: int, first: Sequence[SearchConfig], guess: Vector | None) -> int:
    goal_us = WITHIN * min(case.ran.values())
    trials = 0

    def measure(config: SearchConfig) -> Result:
        nonlocal trials
        trials += 1
        time_us = case.times_us[config]
        if time_us is not None and time_us <= goal_us:
            raise _NearError
        return Result(Outcome.RESOURCE) if time_us is None else Result(Outcome.OK, (time_us,))

    seeds = [config for config in first if config in case.times_us]
    try:
        run_search(
            Search(case.kernel, Proposer.sampler_name),
            space=list(case.times_us),
            seeds=seeds,
            known={},
            measure=measure,
            budget=Budget(MOST_TRIALS),
            seed=seed,
            guess=guess,
        )
    except _NearError:
        return trials
    return MOST_TRIALS + 1


def _at_random(case: Case, seed: int) -> int:
    goal_us = WITHIN * min(case.ran.values())
    order = list(case.times_us)
    random.Random(seed).shuffle(order)  # noqa: S311 - a search, not a secret
    trials = next(n for n, config in enumerate(order, 1) if (case.times_us[config] or goal_us * 2) <= goal_us)
    return min(trials, MOST_TRIALS + 1)


def _plain_tpe(case: Case, seed: int) -> int:
    """Optuna's default TPESampler over the parameters that our studies have.

    Only configs that are measured for the first time count. After three proposals in a row that are none, or known, one is
    drawn at random from what is left: alone it proposes its best for ever.
    """
    goal_us = WITHIN * min(case.ran.values())
    proposer = Proposer(list(case.times_us), seed)
    configs = {tuple(proposer.params(config).items()): config for config in case.times_us}
    left = list(case.times_us)
    random.Random(seed).shuffle(left)  # noqa: S311 - a search, not a secret
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    seen: set[SearchConfig] = set()
    idle = 0
    while len(seen) < min(MOST_TRIALS, len(left)):
        if idle == _IDLE_ASKS:
            config: SearchConfig | None = next(c for c in left if c not in seen)
            study.enqueue_trial(proposer.params(config))  # type: ignore[arg-type]
        trial = study.ask()
        config = configs.get(tuple(_suggested(trial, proposer).items()))
        time_us = None if config is None else case.times_us[config]
        if time_us is None:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, time_us)
        if config is None or config in seen:
            idle += 1
            continue
        idle = 0
        seen.add(config)
        if time_us is not None and time_us <= goal_us:
            return len(seen)
    return MOST_TRIALS + 1


def _suggested(trial: optuna.Trial, proposer: Proposer) -> dict[str, object]:
    """Parameters by the study's own sampler: the variant, then those that it has."""
    params: dict[str, object] = {"variant": trial.suggest_categorical("variant", proposer.variants)}
    for name, distribution in proposer.distributions(str(params["variant"])).items():
        params[name] = _suggest(trial, name, distribution)
    return params


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> object:
    match distribution:
        case IntDistribution(low=low, high=high):
            return trial.suggest_int(name, low, high)
        case CategoricalDistribution(choices=choices):
            return trial.suggest_categorical(name, choices)
    raise AssertionError(f"{name} is of another kind: {distribution}")
