"""The grown model equals the textbook one, and expects most where it should."""

import math
import random

import numpy as np
import pytest

from kdatune_kernels.space import k2_configs
from kdatune_kernels.values import OtherConfig
from kdatune_tuner import surrogate
from kdatune_tuner.surrogate import Surrogate
from kdatune_tuner.surrogate import features

CONFIGS = list(k2_configs())


def test_features_count_the_fields_in_which_two_differ() -> None:
    space = [OtherConfig({"warps": w, "fast": f}) for w in (1, 2, 8) for f in (False, True)]
    points = features(space)

    def apart(a: int, b: int) -> float:
        return float(np.abs(points[a] - points[b]).sum())

    assert apart(0, 1) == 1.0  # another flag
    assert apart(0, 2) == 0.5  # one of two steps in warps
    assert apart(0, 5) == 2.0
    assert features(space[:1]).shape == (1, 0)


@pytest.mark.parametrize("failed", [False, True])
def test_the_model_is_a_gaussian_process(failed: bool) -> None:
    """Against K^-1 by numpy, with the most likely mean and spread of each length."""
    draw = random.Random(7)
    told = draw.sample(range(len(CONFIGS)), 25)
    times = {i: math.exp(draw.gauss(5.0, 0.3)) for i in told}
    out = told[3] if failed else None
    model = Surrogate(CONFIGS)
    for i in told:
        model.tell(CONFIGS[i], None if i == out else times[i])
    gains = model.gains()
    y = np.array([math.log(max(t for j, t in times.items() if j != out) if i == out else times[i]) for i in told])
    best = min(y)
    points = features(CONFIGS)
    expected = {}
    for length in surrogate._LENGTHS:
        K = np.exp(-np.abs(points[:, None, :] - points[None, :, :]).sum(axis=2) / length)
        seen = K[np.ix_(told, told)] + surrogate._NOISE * np.eye(len(told))
        ones = np.ones(len(told))
        inverse = np.linalg.inv(seen)
        mean = (ones @ inverse @ y) / (ones @ inverse @ ones)
        weight, spread = surrogate._SPREAD_WEIGHT, surrogate._SPREAD
        variance = (weight * spread**2 + (y - mean) @ inverse @ (y - mean)) / (weight + len(told))
        likelihood = -0.5 * (len(told) + weight) * math.log(variance) - 0.5 * np.linalg.slogdet(seen)[1]
        cross = K[:, told]
        mu = mean + cross @ inverse @ (y - mean)
        sd = np.sqrt(variance * (1.0 + surrogate._NOISE - np.einsum("ij,jk,ik->i", cross, inverse, cross)))
        z = (best - mu) / sd
        below = np.array([0.5 * (1.0 + math.erf(x / math.sqrt(2.0))) for x in z])
        expected[likelihood] = sd * (z * below + np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi))
    want = expected[max(expected)]
    rest = [i for i in range(len(CONFIGS)) if i not in told]
    assert gains[rest] == pytest.approx(want[rest], rel=1e-6, abs=1e-12)
    assert (gains[told] == -1.0).all()
    assert model.left == len(CONFIGS) - 25


def test_what_is_like_the_best_is_expected_to_gain_more_than_what_is_like_the_worst() -> None:
    space = [OtherConfig({"warps": w, "stages": s}) for w in range(1, 9) for s in range(1, 9)]
    model = Surrogate(space)
    for config in space[::7]:
        model.tell(config, 100.0 + 10.0 * config["warps"])
    gains = dict(zip(space, model.gains(), strict=True))
    few = [g for c, g in gains.items() if c["warps"] == 1 and g >= 0.0]
    many = [g for c, g in gains.items() if c["warps"] == 8 and g >= 0.0]
    assert max(many) < max(few)


def test_a_guess_decides_before_anything_is_known_and_while_nothing_runs() -> None:
    guess = np.linspace(0.3, 0.0, len(CONFIGS))
    model = Surrogate(CONFIGS, guess)
    assert int(model.gains().argmax()) == len(CONFIGS) - 1
    model.tell(CONFIGS[-1], None)
    assert int(model.gains().argmax()) == len(CONFIGS) - 2
    model.tell(CONFIGS[-2], 100.0)
    model.tell(CONFIGS[-2], 50.0)  # told before: says nothing
    assert model.left == len(CONFIGS) - 2
    assert int(model.gains().argmax()) not in (len(CONFIGS) - 1, len(CONFIGS) - 2)
