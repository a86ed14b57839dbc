"""Champion against challenger: what is promoted, what is a tie, what is never promoted."""

import random
from dataclasses import replace

import pytest

from kdatune_tuner.outcome import Outcome
from kdatune_tuner.promote import Contender
from kdatune_tuner.promote import Policy
from kdatune_tuner.promote import decide
from kdatune_tuner.store.records import Decision as Verdict

POLICY = Policy(min_gain_pct=0.5, confidence_pct=95.0)
CLOCK = [1.00, 1.03, 1.01, 1.05, 1.02, 1.06, 1.04, 1.00, 1.05]
"""A clock that drifts by six per cent: more than any gain here, the same for both sides of a round."""


def alone(name: str, us: float, spread: float = 0.001, **rest) -> Contender:
    return Contender(name, Outcome.OK, tuple(us * (1 + spread * step) for step in (-2, -1, 0, 1, 2)), **rest)


JITTER = [0.4, -1.1, 0.9, 1.6, -0.3, -1.7, 0.1, 1.2, -0.8]


def paired(name: str, us: float, jitter: float = 0.0) -> Contender:
    samples = tuple(us * clock * (1 + jitter * step) for clock, step in zip(CLOCK, JITTER, strict=True))
    return Contender(name, Outcome.OK, samples, rounds=0)


def failed(name: str, outcome: Outcome) -> Contender:
    return Contender(name, outcome)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_only_ok_is_ever_promoted(outcome: Outcome) -> None:
    for champion in (None, alone("champion", 300.0), failed("champion", Outcome.ABORT)):
        decision = decide(failed("challenger", outcome), champion, alone("default", 300.0), POLICY)
        assert decision.decision is Verdict.REJECTED
        assert str(outcome) in decision.reason


def test_an_ok_without_a_time_is_not_promoted() -> None:
    assert decide(Contender("x", Outcome.OK), None, None, POLICY).decision is Verdict.REJECTED


def test_a_gain_beyond_the_noise_is_promoted_with_its_interval() -> None:
    decision = decide(alone("challenger", 300.0), alone("champion", 310.0), None, POLICY)
    assert decision.decision is Verdict.PROMOTED
    assert decision.gain == pytest.approx(310.0 / 300.0)
    # p20 over p80 and p80 over p20 of five samples at steps of 0.1 %
    assert decision.gain_low == pytest.approx(310.0 * 0.9988 / (300.0 * 1.0012))
    assert decision.gain_high == pytest.approx(310.0 * 1.0012 / (300.0 * 0.9988))
    assert decision.reason == "faster: +3.3 % (+3.1 % to +3.6 %) against the champion"


def test_a_gain_inside_the_noise_is_a_tie() -> None:
    decision = decide(alone("challenger", 300.0, 0.02), alone("champion", 310.0, 0.02), None, POLICY)
    assert (decision.decision, decision.reason.split(":")[0]) == (Verdict.TIE, "inside the noise")


def test_a_certain_gain_below_the_least_is_a_tie() -> None:
    decision = decide(paired("challenger", 300.0), paired("champion", 300.9), None, POLICY)
    assert decision.gain == pytest.approx(1.003)
    assert decision.gain_low > 1.0
    assert (decision.decision, decision.reason.split(":")[0]) == (Verdict.TIE, "below the least gain of 0.5 %")
    assert (
        decide(paired("challenger", 300.0), paired("champion", 300.9), None, Policy(0.2)).decision is Verdict.PROMOTED
    )


def test_a_certain_loss_below_the_least_is_a_tie_too() -> None:
    """Of one binary under two labels the interval excludes no gain in one run of twenty, on either side."""
    decision = decide(paired("challenger", 300.9), paired("champion", 300.0), None, POLICY)
    assert decision.gain_high < 1.0
    assert (decision.decision, decision.reason.split(":")[0]) == (Verdict.TIE, "below the least gain of 0.5 %")
    slower = decide(paired("challenger", 302.0), paired("champion", 300.0), None, POLICY)
    assert slower.decision is Verdict.REJECTED


def test_one_binary_under_two_labels_is_a_tie() -> None:
    """Paired runs with the noise that an H200 shows (a few tenths of a per cent), 40 of them."""
    dice = random.Random(1)
    for spread in (0.0005, 0.003):
        for _ in range(20):
            one, other = (
                Contender(name, Outcome.OK, tuple(dice.gauss(600.0, 600.0 * spread) for _ in range(15)), rounds=0)
                for name in ("one label", "another label")
            )
            assert decide(one, other, None, POLICY).decision is Verdict.TIE


def test_slower_than_the_champion_is_rejected() -> None:
    decision = decide(alone("challenger", 310.0), alone("champion", 300.0), alone("default", 400.0), POLICY)
    assert decision.decision is Verdict.REJECTED
    assert decision.gain == pytest.approx(300.0 / 310.0)


def test_rounds_are_compared_with_each_other_not_across_a_drifting_clock() -> None:
    ours, theirs = paired("challenger", 300.0, 0.001), paired("champion", 306.0, -0.001)
    together = decide(ours, theirs, None, POLICY)
    assert together.decision is Verdict.PROMOTED
    assert together.gain == pytest.approx(1.02, abs=0.004)
    across = decide(replace(ours, rounds=None), replace(theirs, rounds=None), None, POLICY)
    assert across.decision is Verdict.TIE


def test_the_same_samples_give_the_same_decision() -> None:
    ours, theirs = paired("challenger", 300.0, 0.002), paired("champion", 303.0)
    assert decide(ours, theirs, None, POLICY) == decide(ours, theirs, None, POLICY)


def test_a_higher_confidence_widens_the_interval() -> None:
    ours, theirs = paired("challenger", 300.0, 0.002), paired("champion", 303.0)
    narrow = decide(ours, theirs, None, Policy(confidence_pct=50.0))
    wide = decide(ours, theirs, None, Policy(confidence_pct=99.0))
    assert wide.gain_low <= narrow.gain_low < narrow.gain < narrow.gain_high <= wide.gain_high
    assert wide.gain_high - wide.gain_low > narrow.gain_high - narrow.gain_low


def test_an_estimate_never_replaces_what_was_measured_end_to_end() -> None:
    estimate = alone("challenger", 200.0, estimated=True)
    assert decide(estimate, alone("champion", 300.0), None, POLICY).decision is Verdict.REJECTED
    assert decide(estimate, alone("champion", 300.0, estimated=True), None, POLICY).decision is Verdict.PROMOTED
    first = decide(estimate, None, alone("default", 300.0, estimated=True), POLICY)
    assert first.decision is Verdict.PROMOTED
    assert first.reason.endswith("estimated as the sum of its parts")


@pytest.mark.parametrize("served", [True, False])
def test_a_gain_over_an_estimate_says_so(served: bool) -> None:
    def reason(estimated: bool) -> str:
        baseline = alone("baseline", 300.0, estimated=estimated)
        decision = decide(alone("challenger", 270.0), baseline if served else None, baseline, POLICY)
        assert decision.decision is Verdict.PROMOTED
        return decision.reason

    assert reason(True) == f"{reason(False)}; estimated as the sum of its parts"


def test_the_first_champion_must_gain_over_the_default() -> None:
    assert decide(alone("a", 290.0), None, alone("default", 300.0), POLICY).decision is Verdict.PROMOTED
    assert decide(alone("a", 301.0, 0.01), None, alone("default", 300.0, 0.01), POLICY).decision is Verdict.TIE
    slower = decide(alone("a", 310.0), None, alone("default", 300.0), POLICY)
    assert (slower.decision, slower.reason.split(":")[0]) == (Verdict.REJECTED, "slower")


@pytest.mark.parametrize("against", ["champion", "default"])
def test_runs_apart_need_the_larger_gain(against: str) -> None:
    """1.5 % between two runs is what one and the same pair shows; in one interleaved run it is a gain."""

    def verdict(ours: Contender, theirs: Contender) -> Verdict:
        both = (theirs, None) if against == "champion" else (None, theirs)
        return decide(ours, *both, POLICY).decision

    assert verdict(alone("a", 300.0), alone(against, 304.5)) is Verdict.TIE
    assert verdict(alone("a", 300.0), alone(against, 307.0)) is Verdict.PROMOTED
    assert verdict(paired("a", 300.0), paired(against, 304.5)) is Verdict.PROMOTED


def test_the_default_itself_may_be_the_first_champion() -> None:
    decision = decide(alone("default", 300.0), None, alone("default", 300.0), POLICY)
    assert (decision.decision, decision.gain, decision.gain_low, decision.gain_high) == (Verdict.PROMOTED, 1, 1, 1)


def test_without_a_default_that_runs_there_is_no_gain_to_tell() -> None:
    for default, said in ((None, "was not measured"), (failed("default", Outcome.RESOURCE), "ended resource")):
        decision = decide(alone("a", 300.0), None, default, POLICY)
        assert (decision.decision, decision.gain) == (Verdict.PROMOTED, None)
        assert f"the default {said}" in decision.reason


def test_a_champion_that_no_longer_runs_gives_way() -> None:
    dead = failed("champion", Outcome.INCORRECT)
    decision = decide(alone("a", 310.0), dead, alone("default", 320.0), POLICY)
    assert decision.decision is Verdict.PROMOTED
    assert decision.reason.startswith("the champion ended incorrect here")
