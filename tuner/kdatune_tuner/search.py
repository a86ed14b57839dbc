"""The search of one stage on one shape: seeds first, then everything (small space) or what TPE proposes (large)."""

import random
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
from kdatune_tuner.proposer import STARTUP_TRIALS
from kdatune_tuner.proposer import Proposer

# Proposals in a row that are illegal or already measured, before the rest of the budget is drawn at random from what is
# left. TPE proposes its best again and again once it has converged.
_IDLE_PROPOSALS = 20


@dataclass(frozen=True)
class Budget:
    """How much a search may measure.

    trials: distinct configs of the shape, those that an earlier run measured included.
    deadline: time.monotonic() after which no new trial starts, except the very first; None: no limit.
    """

    trials: int
    deadline: float | None = None

    def spent(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass
class Search:
    """What a search has found so far. `results` holds every distinct config, resumed ones too."""

    kernel: str
    sampler: str
    results: dict[SearchConfig, Result] = field(default_factory=dict)
    measured: int = 0
    resumed: int = 0

    def finished(self, config: SearchConfig, result: Result) -> None:
        """Note a trial that is stored; a second time says nothing new."""
        if config not in self.results:
            self.results[config] = result
            self.measured += 1

    def ranked(self) -> list[tuple[SearchConfig, Result]]:
        """Configs with outcome ok, fastest first."""
        ok = [(c, r) for c, r in self.results.items() if r.outcome is Outcome.OK and r.median_us is not None]
        return sorted(ok, key=lambda pair: pair[1].median_us or 0.0)

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
    storage: str | None = None,
    study_name: str | None = None,
) -> None:
    """Fill `search` within the budget. No config is measured twice, and none that is in `known`.

    `seeds` come first and need not be of the space.
    `measure` stores what it measures, so an interrupt at any moment loses at most the trial it fell into; `search`
    then holds everything that finished.
    """
    members = {*space, *seeds}
    search.results.update({c: r for c, r in known.items() if c in members})
    search.resumed = len(search.results)

    def take(config: SearchConfig) -> Result:
        result = measure(config)
        search.finished(config, result)
        return result

    def may_go_on() -> bool:
        return len(search.results) < budget.trials and not (search.measured and budget.spent())

    for config in dict.fromkeys(seeds):
        if config not in search.results and may_go_on():
            take(config)
    remainder = [c for c in space if c not in search.results]
    random.Random(seed).shuffle(remainder)  # noqa: S311 - a search, not a secret
    if search.sampler != "enumerate" and remainder:
        # TPE's own start-up draws from the product of the parameters, most of which is outside the space
        for config in remainder[: max(0, STARTUP_TRIALS - len(search.results))]:
            if may_go_on():
                take(config)
        with closing(Proposer(space, seed, storage, study_name)) as proposer:
            _propose(search, proposer, take, may_go_on)
    for config in remainder:
        if not may_go_on():
            break
        if config not in search.results:
            take(config)


def sampler_for(space: Sequence[SearchConfig], budget: Budget) -> str:
    """How a space is walked: "enumerate" when the trials reach for all of it, else "tpe"."""
    return "enumerate" if len(space) <= budget.trials else Proposer.sampler_name


def _propose(
    search: Search,
    proposer: Proposer,
    take: Callable[[SearchConfig], Result],
    may_go_on: Callable[[], bool],
) -> None:
    """Ask and tell until the budget is spent or the proposals bring nothing new."""
    for known, result in search.results.items():
        if proposer.holds(known):
            proposer.know(known, result)
    idle = 0
    while may_go_on() and idle < _IDLE_PROPOSALS:
        trial, config = proposer.ask()
        if config is None:
            proposer.tell(trial, None)
            idle += 1
        elif config in search.results:
            proposer.tell(trial, search.results[config])
            idle += 1
        else:
            proposer.tell(trial, take(config))
            idle = 0
