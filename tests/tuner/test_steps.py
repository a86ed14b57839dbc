"""Steps in nightly times: found where they are, with the right date; quiet series, outliers and slow machines give none."""

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC
from datetime import datetime
from datetime import timedelta

import numpy as np
import pytest

from kdatune_tuner.steps import USUAL_NOISE_PCT
from kdatune_tuner.steps import Point
from kdatune_tuner.steps import Rules
from kdatune_tuner.steps import Verdict
from kdatune_tuner.steps import judge
from kdatune_tuner.steps import nights
from kdatune_tuner.steps import usual_noise_pct

FIRST = datetime(2026, 10, 1, 2, 30, tzinfo=UTC)
SEEDS = 100


def points(times_us: Sequence[float]) -> list[Point]:
    """One point a night."""
    return [Point(us, FIRST + timedelta(days=i), 1, i + 1) for i, us in enumerate(times_us)]


def noisy(
    count: int, noise_pct: float, rho: float, seed: Sequence[int], step_at: int | None = None, step_pct: float = 5.0
) -> list[Point]:
    """600 us with noise of that standard deviation and autocorrelation, slower by step_pct from night step_at on."""
    rng = np.random.default_rng(seed)
    off = [rng.normal()]
    for _ in range(count - 1):
        off.append(rho * off[-1] + np.sqrt(1.0 - rho**2) * rng.normal())
    times_us = 600.0 * (1.0 + noise_pct / 100.0 * np.array(off))
    if step_at is not None:
        times_us[step_at:] *= 1.0 + step_pct / 100.0
    return points([float(us) for us in times_us])


def card(count: int, noise_pct: float, rho: float, seed: int) -> list[list[Point]]:
    """Five configs of one card."""
    return [noisy(count, noise_pct, rho, (seed, n)) for n in range(5)]


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("noise_pct", [0.3, 1.0, 2.0, 5.0])
def test_a_quiet_card_gives_no_finding(noise_pct: float, rho: float) -> None:
    """In 99 of 100 seeds at least, 30 nights; the noise of the card is known from five configs."""
    false = 0
    for seed in range(SEEDS):
        configs = card(30, noise_pct, rho, seed)
        false += bool(judge(configs[0], noise_pct=usual_noise_pct(configs)).steps)
    assert false <= 1


@pytest.mark.parametrize("count", [6, 14, 60])
@pytest.mark.parametrize(("noise_pct", "rho"), [(0.3, 0.6), (1.0, 0.0), (1.0, 0.6), (3.0, 0.3)])
def test_a_quiet_config_alone_gives_no_finding(count: int, noise_pct: float, rho: float) -> None:
    false = sum(bool(judge(noisy(count, noise_pct, rho, (7, seed))).steps) for seed in range(SEEDS))
    assert false <= 1


@pytest.mark.parametrize(("count", "step_at"), [(30, 15), (30, 20), (60, 45)])
def test_a_step_of_5_pct_at_1_pct_noise_is_found_with_its_date(count: int, step_at: int) -> None:
    """On the very night in 95 of 100 seeds, on it or the one beside it in 99; the noise moves the best cut by a night."""
    found = []
    for seed in range(SEEDS):
        steps = judge(noisy(count, 1.0, 0.0, (11, seed), step_at)).steps
        assert len(steps) <= 1
        found += [(step.first_slow.measured_at - FIRST).days - step_at for step in steps]
    assert found.count(0) >= 95
    assert sum(abs(off) <= 1 for off in found) >= 99


def test_a_short_history_finds_most_of_them_and_each_night_more() -> None:
    """A fortnight of one config alone, slow since the night: what is missed today is found some nights later."""
    share = {
        slow: sum(bool(judge(noisy(8 + slow, 1.0, 0.0, (13, seed), 8)).steps) for seed in range(SEEDS))
        for slow in (1, 2, 4, 6)
    }
    assert share[1] <= 2  # one slow night, where noise made the night before it look slow as well
    assert 50 <= share[2] <= share[4] <= share[6]
    assert share[6] >= 85


def test_what_is_said_of_a_step() -> None:
    (step,) = judge(points([600.0] * 8 + [640.0, 642.0, 638.0])).steps
    assert (step.before_us, step.after_us, step.now_us) == (600.0, 640.0, 640.0)
    assert step.change_pct == pytest.approx(100 * 40 / 600)
    assert (step.last_good.measurement_id, step.first_slow.measurement_id) == (8, 9)
    assert step.first_slow.measured_at == FIRST + timedelta(days=8)
    assert 99.5 <= step.confidence_pct <= 100.0


@pytest.mark.parametrize("count", range(6))
def test_a_short_series_says_that_it_is_short(count: int) -> None:
    assert judge(points([600.0] * 3 + [900.0] * 2)[:count]) == Verdict(night_count=count, is_short=True)


def test_the_minimum_effect_is_a_setting() -> None:
    course = points([600.0] * 10 + [624.0] * 10)
    assert len(judge(course, rules=Rules(min_pct=3.0)).steps) == 1
    assert judge(course, rules=Rules(min_pct=5.0)).steps == ()


@pytest.mark.parametrize("tail", [[660.0], [600.0, 660.0, 600.0], [660.0, 600.0], [900.0, 600.0, 600.0, 600.0]])
def test_one_slow_night_is_no_step(tail: list[float]) -> None:
    assert judge(points([600.0] * 8 + tail)).steps == ()


def test_a_faster_config_is_no_finding() -> None:
    assert judge(points([600.0] * 8 + [560.0] * 8)).steps == ()


def test_a_step_that_went_away_is_no_finding() -> None:
    assert judge(points([600.0] * 8 + [640.0] * 5 + [600.0] * 5)).steps == ()


def test_half_of_a_step_that_went_away_leaves_a_step() -> None:
    (step,) = judge(points([600.0] * 8 + [660.0] * 6 + [630.0] * 6)).steps
    assert (step.before_us, step.after_us, step.now_us) == (600.0, 660.0, 630.0)


def test_two_steps_are_two() -> None:
    first, second = judge(points([600.0] * 7 + [640.0] * 7 + [690.0] * 5)).steps
    assert [(first.before_us, first.after_us), (second.before_us, second.after_us)] == [(600.0, 640.0), (640.0, 690.0)]


def test_times_that_repeat_to_the_digit_are_not_taken_to_be_without_noise() -> None:
    assert judge(points([600.0] * 10 + [612.0] * 10)).steps == ()  # 2 %, below the minimum effect
    assert usual_noise_pct([points([600.0] * 10)] * 5) == USUAL_NOISE_PCT


def test_the_noise_of_a_card_is_that_of_its_configs_whatever_steps_they_have() -> None:
    steady = [noisy(30, 3.0, 0.0, (17, n)) for n in range(9)]
    stepped = [noisy(30, 3.0, 0.0, (17, n), 15, 20.0) for n in range(9)]
    assert usual_noise_pct(steady) == pytest.approx(3.75, abs=0.6)  # a quarter on top, for what neighbours hide
    assert usual_noise_pct(stepped) == pytest.approx(usual_noise_pct(steady), rel=0.3)


def test_a_night_is_a_utc_day_and_its_time_the_median() -> None:
    day = FIRST.replace(hour=1)
    course = nights(
        [Point(us, day + timedelta(hours=h), h, h) for h, us in ((2, 610.0), (1, 600.0), (22, 590.0), (23, 700.0))]
    )
    assert [(p.median_us, p.measurement_id, p.build_id) for p in course] == [(600.0, 22, 22), (700.0, 23, 23)]


def test_a_slower_machine_is_nobodys_step() -> None:
    slow = [600.0] * 8 + [648.0] * 6
    reference = points([1.0] * 8 + [1.08] * 6)
    verdict = judge(points(slow), reference)
    assert verdict.steps == ()
    (step,) = verdict.machine
    assert (step.before_us, step.after_us) == (600.0, 648.0)
    assert verdict.newest_us == pytest.approx(600.0)


def test_what_a_config_got_slower_on_top_of_its_machine_is_its_own() -> None:
    (step,) = judge(points([600.0] * 8 + [680.4] * 6), points([1.0] * 8 + [1.08] * 6)).steps  # 8 % and 5 %
    assert (step.before_us, step.after_us) == (600.0, pytest.approx(630.0))


def test_a_night_of_a_slow_machine_hides_no_step_and_makes_none() -> None:
    reference = points([1.0] * 6 + [1.08] + [1.0] * 7)
    assert judge(points([600.0] * 6 + [648.0] + [600.0] * 7), reference).steps == ()
    (step,) = judge(points([600.0] * 6 + [648.0] + [600.0] * 2 + [630.0] * 5), reference).steps
    assert step.first_slow.measured_at == FIRST + timedelta(days=9)


def test_a_reference_within_its_noise_says_nothing() -> None:
    """It is not divided by: that would add its noise to every series."""
    course = points([600.0] * 8 + [630.0] * 6)
    quiet = points([1.0, 1.01, 0.99, 1.012, 0.985, 1.0, 1.01, 0.99, 1.015, 1.01, 1.0, 1.012, 1.0, 0.99])
    assert judge(course, quiet) == judge(course)


def test_a_reference_of_other_nights_says_nothing() -> None:
    reference = [Point(1.08, FIRST - timedelta(days=30 + n)) for n in range(8)]
    assert judge(points([600.0] * 8 + [648.0] * 6), reference).machine == ()


def test_commands_do_not_wait_for_what_only_a_look_needs() -> None:
    told = "import sys, kdatune_tuner.cli; print(sorted({'ruptures', 'scipy.stats'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"
