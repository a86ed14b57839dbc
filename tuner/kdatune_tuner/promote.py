"""Champion against challenger: one pure decision. What is served changes only where this says "promoted"."""

import random
import statistics
from dataclasses import dataclass

from kdatune_tuner.objective import quantile
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.records import Decision as Verdict

_RESAMPLES = 2000


@dataclass(frozen=True)
class Policy:
    """When a challenger replaces the champion.

    min_gain_pct: a smaller gain is not worth a change of what is served (other numerics, a new compile).
    unpaired_min_gain_pct: the same where the two were not measured in one interleaved run: one pair timed in two runs on an
        H200 differed by up to 1.9 % (2026-11-29), which samples of either run alone do not show.
    confidence_pct: level of the interval that must exclude "no gain".
    """

    min_gain_pct: float = 0.5
    unpaired_min_gain_pct: float = 2.0
    confidence_pct: float = 95.0


@dataclass(frozen=True)
class Contender:
    """One measured config as the decision sees it.

    rounds: contenders of equal rounds (not None) were measured in the same interleaved run: sample i of one and sample
        i of the other belong together.
    estimated: its time is the sum of its parts.
    """

    name: str
    outcome: Outcome
    samples_us: tuple[float, ...] = ()
    estimated: bool = False
    rounds: int | None = None

    @property
    def runs(self) -> bool:
        return self.outcome is Outcome.OK and bool(self.samples_us)


@dataclass(frozen=True)
class Decision:
    """The verdict and its reason. Gains are speed-ups over the baseline (x, > 1 is faster); None: no baseline runs."""

    decision: Verdict
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    reason: str


def decide(challenger: Contender, champion: Contender | None, default: Contender | None, policy: Policy) -> Decision:
    """Whether the challenger is served from now on.

    Only an outcome of ok is ever promoted. The challenger must gain the least gain over what runs now, the champion or
    without one the default, with an interval that excludes no gain; else that stays ("tie"), also where the challenger
    is slower by as much ("rejected").
    """
    if not challenger.runs:
        return Decision(Verdict.REJECTED, None, None, None, f"{challenger.name} ended {challenger.outcome}")
    if champion is None or not champion.runs:
        return _first(challenger, champion, default, policy)
    gain, low, high = _gain(challenger, champion, policy)
    if challenger.estimated and not champion.estimated:
        reason = "an estimated time never replaces a champion measured end to end"
        return Decision(Verdict.REJECTED, gain, low, high, reason)
    least_pct = policy.min_gain_pct if _paired(challenger, champion) else policy.unpaired_min_gain_pct
    return _verdict(gain, low, high, least_pct, "faster", f"the champion{_how(challenger, champion)}")


def _verdict(gain: float, low: float, high: float, least_pct: float, won: str, whom: str) -> Decision:
    shown = f"{_pct(gain)} ({_pct(low)} to {_pct(high)}) against {whom}"
    least = 1.0 + least_pct / 100.0
    if high < 1.0 and gain <= 1.0 / least:
        return Decision(Verdict.REJECTED, gain, low, high, f"slower: {shown}")
    if low <= 1.0 <= high:
        return Decision(Verdict.TIE, gain, low, high, f"inside the noise: {shown}")
    if gain < least:
        return Decision(Verdict.TIE, gain, low, high, f"below the least gain of {least_pct:g} %: {shown}")
    return Decision(Verdict.PROMOTED, gain, low, high, f"{won}: {shown}")


def _first(challenger: Contender, champion: Contender | None, default: Contender | None, policy: Policy) -> Decision:
    why = "the first champion" if champion is None else f"the champion ended {champion.outcome} here"
    if default is None or not default.runs:
        state = "was not measured" if default is None else f"ended {default.outcome}"
        return Decision(Verdict.PROMOTED, None, None, None, f"{why}; the default {state}{_how(challenger)}")
    if default.name == challenger.name:
        return Decision(Verdict.PROMOTED, 1.0, 1.0, 1.0, f"{why}: the default itself is the best{_how(challenger)}")
    gain, low, high = _gain(challenger, default, policy)
    least_pct = policy.min_gain_pct if _paired(challenger, default) else policy.unpaired_min_gain_pct
    return _verdict(gain, low, high, least_pct, why, f"the default{_how(challenger, default)}")


def _paired(a: Contender, b: Contender) -> bool:
    return a.rounds is not None and a.rounds == b.rounds and len(a.samples_us) == len(b.samples_us) >= 3


def _gain(challenger: Contender, baseline: Contender, policy: Policy) -> tuple[float, float, float]:
    """Speed-up of the challenger with its interval: bootstrapped over rounds where paired, else from p20 and p80."""
    ours, theirs = challenger.samples_us, baseline.samples_us
    if _paired(challenger, baseline):
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        # seeded: the same samples give the same decision
        draw = random.Random(0)  # noqa: S311 - resampling, not a secret
        medians = [statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)]
        tail = (100.0 - policy.confidence_pct) / 200.0
        return statistics.median(ratios), quantile(medians, tail), quantile(medians, 1.0 - tail)
    gain = statistics.median(theirs) / statistics.median(ours)
    return gain, quantile(theirs, 0.2) / quantile(ours, 0.8), quantile(theirs, 0.8) / quantile(ours, 0.2)


def _pct(gain: float) -> str:
    return f"{(gain - 1.0) * 100.0:+.1f} %"


def _how(*compared: Contender) -> str:
    return "; estimated as the sum of its parts" if any(one.estimated for one in compared) else ""
