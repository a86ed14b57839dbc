"""The search of one stage on one shape: seeds first, then what is expected to gain most, all of it where the budget reaches."""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from dataclasses import field

from kdatune_tuner.objective import Result
from kdatune_tuner.objective import SearchConfig
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.proposer import Proposer
from kdatune_tuner.surrogate import Vector

# Trials in a row of which too little was expected, before a search ends: what is expected goes up and down.
_HOPELESS_TRIALS = 5
ENUMERATE = "enumerate"
SUSPICIOUS_LEAD = 1.1
"""A best that is faster than the second by more is measured again."""


@dataclass(frozen=True)
class Budget:
    """How much a search may measure.

    trials: distinct configs of the shape, those that an earlier run measured included.
    deadline: time.monotonic() after which no new trial starts, except the very first; None: no limit.
    gpu_seconds: the same for time on the card.
    least_gain_pct: a search that does not reach for the whole space ends when five trials in a row were expected to take
        less than this off the best time; 0: it goes on.
    """

    trials: int
    deadline: float | None = None
    gpu_seconds: float | None = None
    least_gain_pct: float = 0.0

    def spent(self, gpu_seconds: float) -> bool:
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return late or (self.gpu_seconds is not None and gpu_seconds >= self.gpu_seconds)


@dataclass
class Search:
    """What a search has found so far. `results` holds every distinct config, resumed ones too."""

    kernel: str
    sampler: str
    results: dict[SearchConfig, Result] = field(default_factory=dict)
    measured: int = 0
    resumed: int = 0
    gpu_seconds: float = 0.0
    confirmed: set[SearchConfig] = field(default_factory=set)

    def finished(self, config: SearchConfig, result: Result) -> None:
        """Note a trial that is stored; a second time says nothing new."""
        if config not in self.results:
            self.results[config] = result
            self.measured += 1
            self.gpu_seconds += result.gpu_seconds

    def ranked(self) -> list[tuple[SearchConfig, Result]]:
        """Configs with outcome ok, fastest first."""
        ok = [(c, r) for c, r in self.results.items() if r.outcome is Outcome.OK and r.median_us is not None]
        return sorted(ok, key=lambda pair: pair[1].median_us or 0.0)

    def suspect(self) -> SearchConfig | None:
        """The best, where it leads the second by far and was not measured again yet."""
        ranked = self.ranked()
        if len(ranked) < 2 or ranked[0][0] in self.confirmed:
            return None
        (best, first), (_, second) = ranked[:2]
        return best if (second.median_us or 0.0) > SUSPICIOUS_LEAD * (first.median_us or 0.0) else None

    def best_us(self) -> float | None:
        return min((r.median_us for r in self.results.values() if r.ok and r.median_us is not None), default=None)

    def outcomes(self) -> dict[str, int]:
        return dict(Counter(str(r.outcome) for r in self.results.values()))


def run_search(
    search: Search,
    *,
    space: Sequence[SearchConfig],
    seeds: Sequence[SearchConfig],
    known: Mapping[SearchConfig, Result],
    measure: Callable[[SearchConfig], Result],
    budget: Budget,
    seed: int,
    guess: Vector | None = None,
    confirm: Callable[[SearchConfig], Result] | None = None,
    storage: str | None = None,
    study_name: str | None = None,
) -> None:
    """Fill `search` within the budget. No config is measured twice, and none that is in `known`.

    `seeds` come first and need not be of the space; then what is expected to gain most. `guess` is what other shapes suggest
    of each config of the space.
    A best that leads the second by more than a tenth is measured again by `confirm`, once, and goes by what comes of that: a
    timing that went wrong would end the search too early.
    `measure` stores what it measures, so an interrupt at any moment loses at most the trial it fell into; `search`
    then holds everything that finished.
    """
    members = {*space, *seeds}
    search.results.update({c: r for c, r in known.items() if c in members})
    search.resumed = len(search.results)

    def take(config: SearchConfig) -> Result:
        result = measure(config)
        search.finished(config, result)
        suspect = search.suspect()
        if confirm is not None and suspect is not None:
            search.confirmed.add(suspect)
            search.results[suspect] = confirm(suspect)
        return search.results[config]

    def may_go_on() -> bool:
        return len(search.results) < budget.trials and not (search.measured and budget.spent(search.gpu_seconds))

    for config in dict.fromkeys(seeds):
        if config not in search.results and may_go_on():
            take(config)
    if space and may_go_on():
        with closing(Proposer(space, seed, guess, storage, study_name)) as proposer:
            _propose(search, proposer, take, may_go_on, budget.least_gain_pct / 100.0)
    if search.sampler == ENUMERATE:  # what a proposer of a very large space does not look at
        for config in space:
            if config not in search.results and may_go_on():
                take(config)


def sampler_for(space: Sequence[SearchConfig], budget: Budget) -> str:
    """How a space is walked: "enumerate" when the trials reach for all of it, else "gp": as far as it pays."""
    return ENUMERATE if len(space) <= budget.trials else Proposer.sampler_name


def _propose(
    search: Search,
    proposer: Proposer,
    take: Callable[[SearchConfig], Result],
    may_go_on: Callable[[], bool],
    least_gain: float,
) -> None:
    """Choose, measure and tell until the budget is spent, nothing is left, or it does not pay any more."""
    for known, result in search.results.items():
        if proposer.holds(known):
            proposer.know(known, result)
    hopeless = 0
    while may_go_on() and (chosen := proposer.choose()) is not None:
        config, gain = chosen
        hopeless = hopeless + 1 if gain < least_gain else 0
        # an earlier run that ended here went on for the other four
        ended_before = search.resumed > 0 and search.measured == 0
        if hopeless >= (1 if ended_before else _HOPELESS_TRIALS) and search.sampler != ENUMERATE:
            return
        trial = proposer.ask(config)
        proposer.tell(trial, config, take(config))
        proposer.correct(search.results)
