"""What other shapes' measurements suggest about a shape that is not measured yet."""

import math
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdatune_kernels import match
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Shape
from kdatune_tuner.objective import SearchConfig
from kdatune_tuner.objective import stage_of
from kdatune_tuner.surrogate import Vector
from kdatune_tuner.surrogate import features

# Fewer configs of the space than this say too little about it.
_LEAST_KNOWN = 10
# How far away shapes of other waves or segments are, in steps of match.distance, beside what they are anyway.
_OTHER_DEFAULT = 1.0


@dataclass(frozen=True)
class Sweep:
    """Times of one stage on another shape (or of an earlier build on the same one), and how far away that is."""

    apart: float
    times_us: Mapping[SearchConfig, float]


def apart(kernel: str, have: Shape, want: Shape, gpu: Gpu) -> float:
    """How far away the measurements of a stage are. More where the stage's default says that another config is called for."""
    same = stage_of(split_default(have, gpu), kernel) == stage_of(split_default(want, gpu), kernel)
    return match.distance(have, want) + (0.0 if same else _OTHER_DEFAULT)


def guess_from(space: Sequence[SearchConfig], sweeps: Sequence[Sweep]) -> Vector | None:
    """Log of the expected time over the best, for each of the space: the mean over the sweeps, near ones counting most.

    A config that none of them holds is taken for what is most like it. None: they hold too little of the space.
    """
    total = np.zeros(len(space))
    weights = np.zeros(len(space))
    for sweep in sweeps:
        best_us = min(sweep.times_us.values(), default=math.inf)
        weight = math.exp(-sweep.apart)
        for i, config in enumerate(space):
            time_us = sweep.times_us.get(config)
            if time_us is not None:
                total[i] += weight * math.log(time_us / best_us)
                weights[i] += weight
    known = weights > 0.0
    if known.sum() < _LEAST_KNOWN:
        return None
    guess = np.divide(total, weights, out=np.zeros_like(total), where=known)
    points = features(space)
    for i in np.flatnonzero(~known):
        likeness = np.exp(-np.abs(points[known] - points[i]).sum(axis=1))
        guess[i] = (likeness @ guess[known]) / likeness.sum()
    return guess
