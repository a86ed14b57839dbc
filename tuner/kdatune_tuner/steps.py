"""Steps in a series of nightly times: where a config became slower, told from noise, outliers and a slower machine.

ruptures says where a series is best cut in two (exact least squares). What is here decides whether a cut counts: the levels
differ by the minimum effect, by several times the nightly noise, and by more than autocorrelated noise explains; one slow
night is no level. docs/decisions/0002-regressions.md says why.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from datetime import UTC
from datetime import date
from datetime import datetime
from datetime import timedelta
from itertools import pairwise

import numpy as np
import numpy.typing as npt

MIN_BEFORE = 4
"""Nights a level must have lasted to be one that something can be slower than."""

MIN_AFTER = 2
"""Nights a slower level must have lasted: one slow night is an outlier until the next one says the same."""

USUAL_NOISE_PCT = 1.0
"""Medians of one config differ by about as much from night to night; no card is taken to be steadier."""

MACHINE_PCT = 2.0
"""A reference that is off by less says nothing about the machine."""

_PRIOR_NIGHTS = 12  # what is known of the card's noise counts as much as so many nights of the series itself
_MIN_SIGMAS = 3.0  # a step of less than so many standard deviations of a night is not told, however long it lasts
_FEW_SERIES, _FEW_NOISY_PCT = 3, 2.2  # of fewer series only noise that is above this is told from the usual
_MIN_RHO = 0.45  # neighbouring nights are taken to be alike to this degree at least: short series show it too little
_NOISY_PCT, _NOISY_RHO = (
    1.8,
    0.6,
)  # and more so on a noisy card: what makes it so (heat, neighbours) stays for some nights
_MAX_CUTS = 3  # that are looked for at once; there may be more within the levels that these leave
_SPIKE_SIGMAS = 4.0
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_UNTRIMMED = 1.22  # of a normal distribution, the greatest tenth taken away
_REFERENCE_REACH = timedelta(hours=18)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One measurement of a config: its median, when, and the ids of its build and of itself."""

    median_us: float
    measured_at: datetime
    build_id: int = 0
    measurement_id: int = 0


@dataclass(frozen=True)
class Rules:
    """What counts as a step. min_nights: of a series with fewer nothing is said."""

    min_pct: float = 3.0
    min_nights: int = 6
    confidence_pct: float = 99.5


@dataclass(frozen=True)
class Step:
    """A config became slower, and is slower still. Times are medians of the nights of a level, on a machine as usual.

    now_us: of the last level. last_good, first_slow: the measurements on both sides of it.
    confidence_pct: that it is not noise, for any place of the series.
    """

    before_us: float
    after_us: float
    now_us: float
    last_good: Point
    first_slow: Point
    confidence_pct: float

    @property
    def change_pct(self) -> float:
        """How much slower (> 0), of the time before."""
        return 100.0 * (self.after_us / self.before_us - 1.0)


@dataclass(frozen=True)
class Verdict:
    """What a series says. machine: steps that the reference shows as well. is_short: too few nights to say anything.

    newest_us: the slower of the last two nights, on a machine as usual; None of a short series.
    """

    steps: tuple[Step, ...] = ()
    machine: tuple[Step, ...] = ()
    night_count: int = 0
    newest_us: float | None = None
    is_short: bool = False


def judge(
    points: Iterable[Point],
    machine: Sequence[Point] = (),
    rules: Rules | None = None,
    noise_pct: float | None = None,
) -> Verdict:
    """The steps up of one series that it has not come back from, oldest first.

    Args:
        points: measurements of one config on one key, in any order.
        machine: of the reference kernel on the same card, in any order. Nights on which it was clearly off its usual time
            are levelled by as much, so that a slower machine is nobody's step.
        noise_pct: standard deviation of a night on this card (`usual_noise_pct`); None: from the series alone.
    """
    rules = rules or Rules()
    course = nights(points)
    if len(course) < rules.min_nights:
        return Verdict(night_count=len(course), is_short=True)
    noise_pct = usual_noise_pct([course]) if noise_pct is None else noise_pct
    raw = _steps(course, rules, noise_pct)
    factors = _machine_factors(course, nights(machine))
    if all(factor == 1.0 for factor in factors):
        return Verdict(raw, (), len(course), _newest_us(course))
    levelled = [replace(p, median_us=p.median_us / f) for p, f in zip(course, factors, strict=True)]
    own = _steps(levelled, rules, noise_pct)
    began = {step.first_slow.measured_at for step in own}
    machine_steps = tuple(step for step in raw if step.first_slow.measured_at not in began)
    return Verdict(own, machine_steps, len(course), _newest_us(levelled))


def usual_noise_pct(courses: Iterable[Sequence[Point]]) -> float:
    """The standard deviation of a night on a card, from the series of its configs: their median, USUAL_NOISE_PCT at least.

    From one night to the next, so that a step, even one of all configs at once, does not count as noise.
    """
    found = [
        # neighbouring nights are alike, so their difference says a little too little
        1.25 * _sigma_of_differences(_despiked(_scaled(course)))
        for course in courses
        if len(course) >= MIN_BEFORE + MIN_AFTER
    ]
    noise_pct = float(np.median(found)) if found else 0.0
    is_told = len(found) >= _FEW_SERIES or noise_pct > _FEW_NOISY_PCT
    return max(USUAL_NOISE_PCT, noise_pct) if is_told else USUAL_NOISE_PCT


def nights(points: Iterable[Point]) -> list[Point]:
    """One point for each UTC day, oldest first: its last measurement, with the median of all of them."""
    of_day: dict[date, list[Point]] = {}
    for point in points:
        of_day.setdefault(point.measured_at.astimezone(UTC).date(), []).append(point)
    found = []
    for day in sorted(of_day):
        mine = sorted(of_day[day], key=lambda p: p.measured_at)
        found.append(replace(mine[-1], median_us=float(np.median([point.median_us for point in mine]))))
    return found


def _newest_us(course: Sequence[Point]) -> float:
    return max(point.median_us for point in course[-MIN_AFTER:])


def _steps(course: Sequence[Point], rules: Rules, noise_pct: float) -> tuple[Step, ...]:
    values = np.array([point.median_us for point in course])
    scaled = _despiked(_scaled(course))
    cuts = _cuts(scaled, 0, len(scaled), rules, noise_pct)
    edges = [0, *cuts, len(scaled)]
    levels = np.split(scaled, cuts)
    found = []
    for i, cut in enumerate(cuts):
        before = levels[i]
        floor = _level(before) * (1.0 + rules.min_pct / 100.0)
        stands = all(_level(level) >= floor for level in levels[i + 1 :])
        if not stands or len(before) < MIN_BEFORE:
            continue
        found.append(
            Step(
                before_us=float(np.median(values[edges[i] : cut])),
                after_us=float(np.median(values[cut : edges[i + 2]])),
                now_us=float(np.median(values[edges[-2] :])),
                last_good=course[cut - 1],
                first_slow=course[cut],
                confidence_pct=100.0 * _confidence(levels, i, noise_pct),
            )
        )
    return tuple(found)


def _scaled(course: Sequence[Point]) -> Floats:
    """The times in per cent of the usual one."""
    values = np.array([point.median_us for point in course], dtype=np.float64)
    scaled: Floats = 100.0 * values / np.median(values)
    return scaled


def _despiked(scaled: Floats) -> Floats:
    """The series with single nights that stick out of both neighbours taken back to them."""
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(np.diff(scaled)))) / float(np.sqrt(2.0))  # no spike widens it
    limit_pct = _SPIKE_SIGMAS * max(sigma, USUAL_NOISE_PCT)
    middle = np.median(np.stack([scaled[:-2], scaled[1:-1], scaled[2:]]), axis=0)
    out = scaled.copy()
    out[1:-1] = np.where(np.abs(scaled[1:-1] - middle) > limit_pct, middle, scaled[1:-1])
    return out


def _cuts(scaled: Floats, start: int, end: int, rules: Rules, noise_pct: float) -> list[int]:
    """The first index of every new level between start and end: the fewest cuts that all count, then those within them."""
    import ruptures  # takes two seconds to load, and every command would wait for it

    part = scaled[start:end]
    algorithm = ruptures.KernelCPD(kernel="linear", min_size=MIN_AFTER)
    for count in range(1, min(_MAX_CUTS, len(part) // MIN_AFTER - 1) + 1):
        inner = [int(cut) for cut in algorithm.fit(part.reshape(-1, 1)).predict(n_bkps=count)[:-1]]
        if len(part) >= MIN_BEFORE + MIN_AFTER and _all_count(part, inner, rules, noise_pct):
            edges = [start, *(start + cut for cut in inner), end]
            return sorted(
                {*edges[1:-1], *(c for a, b in pairwise(edges) for c in _cuts(scaled, a, b, rules, noise_pct))}
            )
    return []


def _all_count(part: Floats, cuts: Sequence[int], rules: Rules, noise_pct: float) -> bool:
    levels = np.split(part, cuts)
    for index, (before, after) in enumerate(pairwise(levels)):
        low, high = sorted((_level(before), _level(after)))
        if 100.0 * (high / low - 1.0) < rules.min_pct:
            return False
        if 100.0 * _confidence(levels, index, noise_pct) < rules.confidence_pct:
            return False
    return True


def _level(values: Floats) -> float:
    """The median; of two values the lower one, so that a night that is an outlier does not lift its neighbour."""
    return float(np.min(values)) if len(values) == MIN_AFTER else float(np.median(values))


def _confidence(levels: Sequence[Floats], index: int, noise_pct: float) -> float:
    """How sure it is that a level differs from the next (0 to 1), given that any place of the series might have shown it.

    A t test: sigma from the spread within all levels and what is known of the card, the variance of a mean that of a
    first-order autoregression, the number of places by Bonferroni. 0 where the two are within _MIN_SIGMAS.
    """
    from scipy import special

    before, after = levels[index], levels[index + 1]
    length = sum(len(level) for level in levels)
    freedom = length - len(levels)
    own = sum(float(np.sum((level - level.mean()) ** 2)) for level in levels) / max(1, freedom)
    known = (_PRIOR_NIGHTS * noise_pct**2 + freedom * own) / (_PRIOR_NIGHTS + freedom)
    sigma = float(np.sqrt(max(own, known)))
    if abs(_level(after) - _level(before)) < _MIN_SIGMAS * sigma:
        return 0.0
    rho = max(_autocorrelation(levels), _NOISY_RHO if noise_pct > _NOISY_PCT else _MIN_RHO)
    error = sigma * float(np.sqrt(_mean_variance(len(before), rho) + _mean_variance(len(after), rho)))
    t = abs(float(after.mean() - before.mean())) / error
    return max(0.0, 1.0 - 2.0 * (length - 1) * float(special.stdtr(freedom + _PRIOR_NIGHTS, -t)))


def _sigma_of_differences(values: Floats) -> float:
    """The standard deviation from one value to the next, without the greatest tenth of them: a step does not widen it."""
    off = np.sort(np.abs(np.diff(values)))
    kept = off[: len(off) - max(1, len(off) // 10)]
    return _UNTRIMMED * float(np.sqrt(np.mean(kept**2) / 2.0)) if len(kept) else 0.0


def _autocorrelation(levels: Sequence[Floats]) -> float:
    """Of neighbours within a level, with the bias of short series (Kendall) taken out; 0 to 0.9."""
    product = square = 0.0
    for level in levels:
        off = level - level.mean()
        product += float(np.sum(off[1:] * off[:-1]))
        square += float(np.sum(off**2))
    length = sum(len(level) for level in levels)
    return float(np.clip((length * product / square + 1.0) / (length - 3), 0.0, 0.9)) if square > 0.0 else 0.0


def _mean_variance(length: int, rho: float) -> float:
    """Variance of the mean of as many autocorrelated values, in units of theirs."""
    lags = np.arange(1, length)
    return float((1.0 + 2.0 * np.sum((1.0 - lags / length) * rho**lags)) / length)


def _machine_factors(course: Sequence[Point], machine: Sequence[Point]) -> list[float]:
    """How slow the machine was each night, over its usual time; 1 where the reference does not say that it was off."""
    if len(machine) < MIN_BEFORE:
        return [1.0] * len(course)
    times = np.array([point.median_us for point in machine])
    usual = float(np.median(times))
    off_pct = max(MACHINE_PCT, 3.0 * _sigma_of_differences(100.0 * times / usual))
    factors = []
    for point in course:
        near = min(machine, key=lambda one: abs(one.measured_at - point.measured_at))
        ratio = near.median_us / usual
        is_near = abs(near.measured_at - point.measured_at) <= _REFERENCE_REACH
        factors.append(ratio if is_near and 100.0 * abs(ratio - 1.0) >= off_pct else 1.0)
    return factors
