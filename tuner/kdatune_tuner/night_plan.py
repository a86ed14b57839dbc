"""What a night does, and in which order: the most value per GPU-second first.

Value is in points. They say what goes first when the night is too short for all, no more:

    check     10     a served config measured again; 100 where launchers refused it since it was measured
    confirm   10     the same for a stale one, which serves today's build from then on
    search    10 * log2(1 + misses) of a shape that launchers missed; half where a neighbour answers, a quarter where one
              of the same bucket does. 30 where the champion is stale, 60 where it got slower or failed tonight, 20 where an
              earlier search was cut short.
    profile    1     counters of a served config that has none since it was measured

Seconds are what earlier runs on the card took a trial, times the trials that are left.
"""

import math
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from datetime import timedelta

from kdatune_kernels import match
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.match import Champion
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_tuner.night_report import Item
from kdatune_tuner.night_report import ItemState
from kdatune_tuner.objective import Backend
from kdatune_tuner.store.records import DemandRow
from kdatune_tuner.store.records import QuarantineRow
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.staleness import is_old
from kdatune_tuner.store.staleness import marked

CHECK, CONFIRM, SEARCH, PROFILE = "check", "confirm", "search", "profile"
CHECK_AGAIN_AFTER = timedelta(hours=12)
"""A served config that was checked later than this before now is not checked again: that is the same night."""

_CHECK_POINTS, _REFUSED_POINTS, _PROFILE_POINTS = 10.0, 100.0, 1.0
_STALE_POINTS, _WORSE_POINTS, _REST_POINTS, _DEMAND_POINTS = 30.0, 60.0, 20.0, 10.0
_NEAR = {"exact": 0.0, "bucket": 0.25, "nearest": 0.5, "default": 1.0}
_CHECK_TRIALS, _PAIR_TRIALS, _PROFILE_TRIALS = 5, 12, 20  # what each takes, in trials
# Of a shape's time: a stage whose search took less has surely ended by itself. tune.py gives K1 as much, and K2 no less.
ENDED_WITHIN = {"k1": 0.35, "k2": 0.5}
_SECONDS_PER_TRIAL = {"gpu": 1.5, "replay": 0.002}  # until the card's own runs tell


@dataclass(frozen=True)
class Facts:
    """What a plan is made from.

    champions, demand, refused: of the card. checked_at: when a config was checked last with the build in use, by (shape
    key, config hash); one far in the future is of a clock that was wrong. measured: distinct configs measured with the
    build in use, by (kernel, shape key). ended: (kernel, shape key) whose search with it has come to its end, also where
    that was before all trials were used.
    """

    now: datetime
    champions: Sequence[Champion]
    demand: Sequence[DemandRow]
    refused: Sequence[QuarantineRow]
    checked_at: Mapping[tuple[str, str], datetime]
    measured: Mapping[tuple[str, str], int]
    ended: Collection[tuple[str, str]]
    seconds_per_trial: float | None
    trials: int
    max_age_days: float


class Planner:
    """Makes a plan of facts for one backend. Measures nothing and writes nothing."""

    def __init__(self, backend: Backend, facts: Facts) -> None:
        self._backend = backend
        self._facts = facts
        self._sizes: dict[tuple[str, Shape], int] = {}
        self._trial_seconds = facts.seconds_per_trial or _SECONDS_PER_TRIAL.get(backend.name, 1.0)

    def stale(self) -> dict[Shape, str]:
        """Why served configs must be measured again, by shape: another build, or their age."""
        found = {}
        for champion in marked(self._facts.champions, in_use=self._backend.build):
            if champion.stale_reason is not None:
                found[champion.shape] = champion.stale_reason
            elif is_old(champion, self._facts.now, self._facts.max_age_days):
                found[champion.shape] = f"measured {champion.measured_at}, over {self._facts.max_age_days:g} days ago"
        return found

    def plan(self) -> list[Item]:
        """Everything that is due, most value per second first; what cannot be done is at the end, with the reason."""
        items = [*self._checks(), *self._searches()]
        return ordered(items)

    def search(self, shape: Shape, why: str, value: float = _WORSE_POINTS, count: int = 0) -> Item:
        """A search of a shape, as long as what is not measured yet takes."""
        left = self.unmeasured(shape)
        seconds = self._trial_seconds * (left + _PAIR_TRIALS)
        return Item(SEARCH, shape, why, value, seconds, count)

    def profile(self, shape: Shape) -> Item:
        """Counters of a served config."""
        why = "no counters since it was measured"
        return Item(PROFILE, shape, why, _PROFILE_POINTS, self._trial_seconds * _PROFILE_TRIALS)

    def unmeasured(self, shape: Shape) -> int:
        """Trials that a search of the shape still has to do with the build in use. Raises KdatuneError as `space`."""
        left = 0
        for kernel in ("k1", "k2"):
            key = (kernel, shape.key())
            measured = self._facts.measured.get(key, 0)
            if measured and key in self._facts.ended:
                continue
            if measured < self._facts.trials:  # else its space, which takes milliseconds to list, does not matter
                left += max(0, min(self._facts.trials, self._size(kernel, shape)) - measured)
        return left

    def _size(self, kernel: str, shape: Shape) -> int:
        if (kernel, shape) not in self._sizes:
            self._sizes[kernel, shape] = len(self._backend.space(kernel, shape))
        return self._sizes[kernel, shape]

    def _checks(self) -> list[Item]:
        stale = self.stale()
        seconds = self._trial_seconds * _CHECK_TRIALS
        items = []
        for champion in self._facts.champions:
            refusal = self._refusal(champion)
            if champion.shape in stale:
                item = Item(CONFIRM, champion.shape, stale[champion.shape], _CHECK_POINTS, 2 * seconds)
            else:
                item = Item(CHECK, champion.shape, "what is served is checked every night", _CHECK_POINTS, seconds)
            checked_at = self._checked_at(champion)
            if not self._can(champion):
                item.state, item.result = ItemState.SKIPPED, "the served config cannot be measured here"
            elif refusal is not None:
                item.why, item.value = f"launchers refused it {refusal.count} times: {refusal.reason}", _REFUSED_POINTS
            elif (
                checked_at is not None and abs(self._facts.now - checked_at) < CHECK_AGAIN_AFTER and item.kind == CHECK
            ):
                item.state, item.result = ItemState.SKIPPED, f"checked at {rfc3339(checked_at)} already"
            items.append(item)
        return items

    def _searches(self) -> list[Item]:
        stale = self.stale()
        champions = {champion.shape: champion for champion in self._facts.champions}
        items = []
        for shape in champions:
            if shape in stale:
                item = self._search(shape, f"stale: {stale[shape]}", _STALE_POINTS)
            else:
                item = self._search(shape, "not searched to its end with this build", _REST_POINTS)
            if item.state is ItemState.SKIPPED or self.unmeasured(shape):
                items.append(item)
        for row in self._facts.demand:
            if row.kernel != "kda" or not isinstance(row.shape, Shape) or row.shape in champions:
                continue
            found = match.find(self._facts.champions, row.shape, self._backend.gpu).match
            value = _DEMAND_POINTS * math.log2(1 + row.count) * _NEAR[found]
            why = f"launchers missed it {row.count} times (answered: {found})"
            items.append(self._search(row.shape, why, value, row.count))
        return items

    def _search(self, shape: Shape, why: str, value: float, count: int = 0) -> Item:
        refused = "it has no tokens: there is nothing to measure" if shape.T == 0 else None
        if refused is None:
            try:
                return self.search(shape, why, value, count)
            except KdatuneError as error:
                refused = str(error)
        return Item(SEARCH, shape, why, value, 0.0, count, ItemState.SKIPPED, result=refused)

    def _can(self, champion: Champion) -> bool:
        return self._backend.measurable("kda", champion.shape, champion.config)

    def _refusal(self, champion: Champion) -> QuarantineRow | None:
        """What launchers said of a champion after it was measured and checked last."""
        checked_at = self._checked_at(champion)
        seen = max(champion.measured_at or "", "" if checked_at is None else rfc3339(checked_at))
        for row in self._facts.refused:
            mine = row.kernel == "kda" and row.shape == champion.shape and row.config_hash == digest(champion.config)
            if mine and rfc3339(row.last_seen_at) > seen:
                return row
        return None

    def _checked_at(self, champion: Champion) -> datetime | None:
        """When it was checked last with the build in use."""
        return self._facts.checked_at.get((champion.shape.key(), digest(champion.config)))


def ordered(items: Sequence[Item]) -> list[Item]:
    """Most value per second first, what is not to be done last; equal ones in the order given."""
    return sorted(
        items,
        key=lambda item: (item.state is not ItemState.PLANNED, -item.value / max(item.estimated_seconds, 1e-3)),
    )
