"""What a search expects of configs that it has not measured: a Gaussian process over the whole config space.

A config space has some hundred members and a trial takes milliseconds, so the model answers for every member and costs less
than a trial: observing one is a pass over the space for each length scale, there is nothing to fit again.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdatune_kernels.values import OtherConfig
from kdatune_tuner.objective import SearchConfig

Vector = NDArray[np.float64]

# How far a config tells about others, in fields that differ. The one under which the times are most likely counts.
_LENGTHS = (1.0, 2.0, 4.0)
# Variance of a repeated measurement, of that between configs.
_NOISE = 1e-4
# How far log-times lie apart before two are known, and how many observations that guess is worth.
_SPREAD, _SPREAD_WEIGHT = 0.2, 2.0
# A guess from other shapes leaves less open.
_SPREAD_GUESSED = 0.05


class Surrogate:
    """Expected times of all configs of a space, from some of them and from what other shapes suggest.

    Args:
        space: the configs, at least one.
        guess: log of the expected time over the best, for each of the space; None: nothing is known of other shapes.
    """

    def __init__(self, space: Sequence[SearchConfig], guess: Vector | None = None) -> None:
        self._places = {config: i for i, config in enumerate(space)}
        points = features(space)
        self._guess = np.zeros(len(space)) if guess is None else guess
        self._spread = _SPREAD if guess is None else _SPREAD_GUESSED
        self._models = [_Model(points, length) for length in _LENGTHS]
        self._seen: NDArray[np.bool_] = np.zeros(len(space), dtype=bool)
        self._best = math.inf
        self._worst = -math.inf

    @property
    def left(self) -> int:
        """Configs that are not told yet."""
        return int((~self._seen).sum())

    def tell(self, config: SearchConfig, median_us: float | None) -> None:
        """What a config took; None: it does not run. A config that is not of the space, or told before, says nothing."""
        i = self._places.get(config, -1)
        if i < 0 or self._seen[i]:
            return
        self._seen[i] = True
        log_us = None if median_us is None else math.log(median_us)
        if log_us is not None:
            self._best, self._worst = min(self._best, log_us), max(self._worst, log_us)
        for model in self._models:
            model.tell(i, None if log_us is None else log_us - self._guess[i])

    def gains(self) -> Vector:
        """For each config the expected gain of measuring it: how much of the best time it may take off. -1: was told."""
        if self._best == math.inf:  # nothing runs yet: what the other shapes suggest
            gains = self._guess.max() - self._guess
        else:
            # what does not run is as bad as the worst that does
            model = max((m.fit(self._worst, self._spread) for m in self._models), key=lambda m: m.likelihood)
            gains = _expected_gains(self._guess + model.mean, model.deviation, self._best)
        told: Vector = np.where(self._seen, -1.0, np.maximum(gains, 0.0))
        return told


class _Fit:
    """One length scale's view of all configs: mean and deviation of the log-time beside the guess, and its likelihood."""

    def __init__(self, mean: Vector, deviation: Vector, likelihood: float) -> None:
        self.mean = mean
        self.deviation = deviation
        self.likelihood = likelihood


class _Model:
    """A Gaussian process of one length scale, by a Cholesky factor that grows by a row an observation.

    `rows` is L^-1 K of the observed with all configs: its squares say how much of each config's variance is explained, and
    all that is observed enters by vectors L^-1 y, so that neither mean nor spread need be known when a row is made.
    """

    def __init__(self, features: Vector, length: float) -> None:
        self._features = features
        self._length = length
        self._rows = np.empty((0, len(features)))
        self._count = 0
        self._explained = np.zeros(len(features))
        # L^-1 of: the times (0 where it failed), ones, and ones where it failed
        self._whitened = np.empty((0, 3))
        self._log_diagonal = 0.0

    def tell(self, i: int, value: float | None) -> None:
        """Observe config i: its log-time less the guess, or None where it failed."""
        n = self._count
        if n == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty((max(32, n), len(self._features)))])
            self._whitened = np.concatenate([self._whitened, np.empty((max(32, n), 3))])
        before = self._rows[:n]
        column = np.exp(-np.abs(self._features - self._features[i]).sum(axis=1) / self._length)
        own = before[:, i].copy()
        diagonal = math.sqrt(max(1.0 + _NOISE - float(own @ own), _NOISE))
        row = (column - own @ before) / diagonal
        told = np.array([value or 0.0, 1.0, float(value is None)])
        self._rows[n] = row
        self._whitened[n] = (told - own @ self._whitened[:n]) / diagonal
        self._explained += row * row
        self._log_diagonal += math.log(diagonal)
        self._count = n + 1

    def fit(self, failed: float, spread: float) -> _Fit:
        """The model with its most likely mean and spread, where a failure counts as the log-time `failed`."""
        n = self._count
        times, ones, failures = self._whitened[:n].T
        times = times + failures * failed
        level = (ones @ times) / (ones @ ones)
        residual = times - level * ones
        variance = (_SPREAD_WEIGHT * spread * spread + residual @ residual) / (_SPREAD_WEIGHT + n)
        left = np.sqrt(np.maximum(1.0 + _NOISE - self._explained, _NOISE) * variance)
        likelihood = -0.5 * (n + _SPREAD_WEIGHT) * math.log(variance) - self._log_diagonal
        return _Fit(level + residual @ self._rows[:n], left, likelihood)


def _expected_gains(mean: Vector, deviation: Vector, best: float) -> Vector:
    """Expected improvement on the best log-time, a share of the time."""
    z = (best - mean) / deviation
    below = 0.5 * (1.0 + np.array([math.erf(x) for x in z / math.sqrt(2.0)]))
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    gains: Vector = deviation * (z * below + density)
    return gains


def features(space: Sequence[SearchConfig]) -> Vector:
    """Each config as a point; the sum of absolute differences of two counts the fields in which they differ.

    A whole number counts by its rank among the values of the space, from 0 to 1; any other value as the same or not.
    """
    columns: list[list[float]] = []
    for name in field_names(space):
        values = [field_value(config, name) for config in space]
        distinct = list(dict.fromkeys(values))
        if len(distinct) < 2:
            continue
        if all(type(value) is int for value in distinct):
            ranks = {value: rank / (len(distinct) - 1) for rank, value in enumerate(sorted(distinct))}
            columns.append([ranks[value] for value in values])
        else:
            columns.extend([0.5 if value == one else 0.0 for value in values] for one in distinct)
    return np.array(columns, dtype=np.float64).reshape(len(columns), len(space)).T


def field_names(space: Sequence[SearchConfig]) -> list[str]:
    """The names of the fields, in a fixed order. Configs of another kernel need not all have the same."""
    first = space[0]
    if isinstance(first, OtherConfig):
        return sorted({name for config in space if isinstance(config, OtherConfig) for name in config})
    return list(first.__dataclass_fields__)


def field_value(config: SearchConfig, name: str) -> Any:
    """A field of a config; None where a config of another kernel lacks it."""
    return config.get(name) if isinstance(config, OtherConfig) else getattr(config, name)
