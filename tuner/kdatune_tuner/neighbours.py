"""What the store knows of shapes near the one that is tuned: a search's first guess, and what the nearest answer costs."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

from sqlalchemy import Engine

from kdatune_kernels import match
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.match import Champion
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_tuner.guess import Sweep
from kdatune_tuner.guess import apart
from kdatune_tuner.guess import guess_from
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import SearchConfig
from kdatune_tuner.objective import WholeConfig
from kdatune_tuner.objective import read_config
from kdatune_tuner.objective import stage_of
from kdatune_tuner.search import Search
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.sweeps import SweepKey
from kdatune_tuner.store.sweeps import sweep_keys
from kdatune_tuner.store.sweeps import sweep_times
from kdatune_tuner.surrogate import Vector

_MOST_SWEEPS = 8
_MOST_CHAMPIONS = 4


def nearest_configs(champions: Iterable[Champion], shape: Shape, gpu: Gpu) -> list[LaunchConfig]:
    """What the champion of the shape and those of the nearest shapes answer, nearest first."""
    left = list(champions)
    configs = []
    for _ in range(_MOST_CHAMPIONS):
        found = match.find(left, shape, gpu)
        if found.champion is None:
            break
        configs.append(found.config)
        left = [champion for champion in left if champion is not found.champion]
    return configs


def stored_guess(
    engine: Engine, kernel: str, space: Sequence[SearchConfig], shape: Shape, gpu: Gpu, gpu_id: int, build_id: int
) -> Vector | None:
    """What the nearest measured shapes of the card suggest of each config; None where that is too little.

    Its own measurements with an earlier build are the nearest of all; those with this build are known, not guessed.
    """

    def distance(key: SweepKey) -> float:
        # the same head sizes and dtype, as match.find wants them: else other kernels run
        if (key.shape.K, key.shape.V, key.shape.dtype) != (shape.K, shape.V, shape.dtype):
            return float("inf")
        return apart(kernel, key.shape, shape, gpu)

    sweeps = []
    with reading(engine) as s:
        keys = [k for k in sweep_keys(s, kernel, gpu_id) if k.shape != shape or k.build_id != build_id]
        near = sorted((distance(key), i) for i, key in enumerate(keys))[:_MOST_SWEEPS]
        for far, i in near:
            if far < float("inf"):
                times_us: dict[SearchConfig, float] = {}
                for data, median_us in sweep_times(s, kernel, gpu_id, keys[i]):
                    try:
                        config = read_config(kernel, data)
                    except KdatuneError:
                        continue  # of an older vocabulary
                    if not isinstance(config, LaunchConfig):
                        times_us[config] = median_us
                sweeps.append(Sweep(far, times_us))
    return guess_from(space, sweeps)


def nearest_regret(
    champions: Iterable[Champion],
    shape: Shape,
    gpu: Gpu,
    stages: Mapping[str, Search],
    served: LaunchConfig,
    pairs: Mapping[WholeConfig, Result],
) -> float | None:
    """What the nearest answer costs for a shape that is measured now: its time over that of what is served (x, >= 1).

    Not over the best time of all: the least of hundreds is less than any config takes when it is measured again. None where
    nothing near is tuned, or where either was not measured here. By the times of the stages, which were searched; where either
    of the two has none, by pairs that were measured end to end.
    """
    found = match.find([c for c in champions if c.shape != shape], shape, gpu)
    if found.champion is None:
        return None
    whole = found.config.k2.whole or served.k2.whole
    answered_us, served_us = (
        _whole_us(pairs, config) if whole else _stages_us(stages, config) for config in (found.config, served)
    )
    return None if answered_us is None or served_us is None else max(1.0, answered_us / served_us)


def _whole_us(pairs: Mapping[WholeConfig, Result], config: LaunchConfig) -> float | None:
    result = pairs.get(config)
    return None if result is None or result.estimated else result.median_us


def _stages_us(stages: Mapping[str, Search], config: LaunchConfig) -> float | None:
    results = [stages[kernel].results.get(stage_of(config, kernel)) for kernel in ("k1", "k2")]
    times_us = [None if result is None else result.median_us for result in results]
    return None if None in times_us else sum(us for us in times_us if us is not None)
