"""Regressions: configs that became slower and are so still, looked for in the stored history and kept in the store.

`look` is what a night calls at its end and what `kdatune regressions` runs: it reads the times of every config that was
measured on enough nights, lets `steps` find the steps, and keeps what was found.
"""

from collections import defaultdict
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from datetime import timedelta
from statistics import median

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from kdatune_kernels.spec import Build
from kdatune_tuner import steps
from kdatune_tuner.settings import Settings
from kdatune_tuner.steps import Point
from kdatune_tuner.steps import Rules
from kdatune_tuner.steps import Step
from kdatune_tuner.steps import Verdict
from kdatune_tuner.store import series
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.queries import find_build
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.records import utc_now
from kdatune_tuner.store.regressions import NewRegression
from kdatune_tuner.store.regressions import RegressionRow
from kdatune_tuner.store.regressions import SeriesKey
from kdatune_tuner.store.regressions import Standing
from kdatune_tuner.store.regressions import keep
from kdatune_tuner.store.regressions import regressions_of
from kdatune_tuner.store.series import REPLAY
from kdatune_tuner.store.series import ConfigKey
from kdatune_tuner.store.series import Referenced
from kdatune_tuner.store.series import Timed
from kdatune_tuner.store.staleness import changes

NO_CAUSE = "nothing that is recorded changed"


@dataclass(frozen=True)
class MachineStep:
    """A step that the reference kernel of the card shows as well: the machine's, or that of what all kernels share."""

    key: SeriesKey
    step: Step
    cause: str


@dataclass(frozen=True)
class Look:
    """What a look at the history found.

    opened: findings that were not there before. still: those that were and hold on, acknowledged ones too. resolved: those
    that ended now. machine: steps that the reference kernel shows as well. steady_count: configs with enough nights and
    without a step. short_count: configs with too few nights to say anything.
    """

    opened: tuple[RegressionRow, ...]
    still: tuple[RegressionRow, ...]
    resolved: tuple[RegressionRow, ...]
    machine: tuple[MachineStep, ...]
    steady_count: int
    short_count: int

    @property
    def unacknowledged(self) -> tuple[RegressionRow, ...]:
        """Open findings of served configs that nobody has acknowledged: where there is one, a night exits with 3."""
        return tuple(row for row in (*self.opened, *self.still) if row.is_served and row.acknowledged_at is None)


@dataclass(frozen=True)
class _Judged:
    """What the history says, before anything is kept. rare: configs that were measured too seldom to be judged at all."""

    verdicts: Mapping[SeriesKey, Verdict]
    newest: Mapping[SeriesKey, datetime]
    rare: Collection[ConfigKey]


def look(engine: Engine, settings: Settings, *, now: datetime | None = None) -> Look:
    """Look for regressions in the stored history and keep them: opened once, resolved when gone, never deleted.

    Reads the measurements and the reference kernel's times. One short write transaction; reading and reckoning happen
    outside it. Safe to run again at any time: a second look at the same history opens and resolves
    nothing.

    Args:
        now: the moment of the look; measurements made later are not looked at. None: this moment.

    Raises:
        StoreError: the database cannot be read or written.
    """
    now = now or utc_now()
    judged = _judge(engine, settings, now)
    with writing(engine) as s:
        served = series.served_hashes(s)
        found = list(_findings(s, judged, served))
        kept = keep(s, found, lambda row: _standing(row, judged, served, settings))
        # without the damaged ones, which the log names
        rows = {row.id: row for row in regressions_of(s, (*kept.opened, *kept.still, *kept.resolved))}
        machine = tuple(
            MachineStep(key, step, _cause(s, step))
            for key, verdict in judged.verdicts.items()
            for step in verdict.machine
        )
    said = [verdict for verdict in judged.verdicts.values() if not verdict.is_short]
    return Look(
        opened=tuple(rows[row_id] for row_id in kept.opened if row_id in rows),
        still=tuple(rows[row_id] for row_id in kept.still if row_id in rows),
        resolved=tuple(rows[row_id] for row_id in kept.resolved if row_id in rows),
        machine=machine,
        steady_count=sum(1 for verdict in said if not verdict.steps and not verdict.machine),
        short_count=len(judged.rare) + len(judged.verdicts) - len(said),
    )


def _judge(engine: Engine, settings: Settings, now: datetime) -> _Judged:
    since = now - timedelta(days=settings.regression_days)
    rules = Rules(settings.regression_min_pct, settings.regression_min_nights, settings.regression_confidence_pct)
    with reading(engine) as s:
        rows, rare = series.timed(s, since, now, rules.min_nights)
        references = series.reference_times(s, since, now)
    machines = _machines(references)
    courses = _courses(rows)
    of_card: dict[tuple[int, bool], list[list[Point]]] = defaultdict(list)
    for (key, is_replay), points in courses.items():
        of_card[key.gpu_id, is_replay].append(steps.nights(points))
    noise_pct = {card: steps.usual_noise_pct(of_one) for card, of_one in of_card.items()}
    verdicts: dict[SeriesKey, Verdict] = {}
    newest: dict[SeriesKey, datetime] = {}
    for (key, is_replay), points in courses.items():
        card = (key.gpu_id, is_replay)
        last = max(point.measured_at for point in points)
        if key not in newest or newest[key] < last:  # of a card's times and a recording's, those that go on
            newest[key] = last
            verdicts[key] = steps.judge(points, machines.get(card, ()), rules, noise_pct[card])
    return _Judged(verdicts, newest, rare)


def _courses(rows: Iterable[Timed]) -> dict[tuple[SeriesKey, bool], list[Point]]:
    """The series of every config, of the bench protocol that it was measured by last: times of two are not comparable."""
    found: dict[tuple[SeriesKey, bool], list[tuple[str, Point]]] = defaultdict(list)
    for row in rows:
        key = SeriesKey(row.kernel, row.gpu_id, row.problem_id, row.config_hash)
        point = Point(row.median_us, row.measured_at, row.build_id, row.measurement_id)
        found[key, row.backend == REPLAY].append((row.protocol, point))
    return {key: [point for protocol, point in some if protocol == some[-1][0]] for key, some in found.items()}


def _machines(references: Iterable[Referenced]) -> dict[tuple[int, bool], list[Point]]:
    """How slow each card was, over its usual time, at every moment that the reference kernel was timed."""
    times: dict[tuple[int, bool, str, str], list[Referenced]] = defaultdict(list)
    for row in references:
        times[row.gpu_id, row.backend == REPLAY, row.shape_key, row.config_hash].append(row)
    found: dict[tuple[int, bool], list[Point]] = defaultdict(list)
    for (gpu_id, is_replay, _, _), of_one in times.items():
        usual_us = median(row.median_us for row in of_one)
        found[gpu_id, is_replay] += [Point(row.median_us / usual_us, row.measured_at) for row in of_one]
    return found


def _findings(s: Session, judged: _Judged, served: Mapping[tuple[str, int, int], str]) -> Iterable[NewRegression]:
    told = [(key, step) for key, verdict in judged.verdicts.items() for step in verdict.steps]
    configs = series.configs_of(s, [step.first_slow.measurement_id for _, step in told])
    for key, step in told:
        config_json = configs.get(step.first_slow.measurement_id)
        if config_json is None:
            continue  # thinned away since it was read
        yield NewRegression(
            **key._asdict(),
            config_json=config_json,
            before_us=step.before_us,
            after_us=step.after_us,
            now_us=step.now_us,
            change_pct=step.change_pct,
            confidence_pct=step.confidence_pct,
            last_good_at=step.last_good.measured_at,
            began_at=step.first_slow.measured_at,
            build_before_id=step.last_good.build_id,
            build_after_id=step.first_slow.build_id,
            measurement_before_id=step.last_good.measurement_id,
            measurement_after_id=step.first_slow.measurement_id,
            cause=_cause(s, step),
            is_served=served.get(key[:3]) == key.config_hash,
        )


def _standing(
    row: RegressionRow, judged: _Judged, served: Mapping[tuple[str, int, int], str], settings: Settings
) -> Standing:
    """How a finding stands whose step was not found in this look, or whose config is served no longer."""
    is_served = served.get(row.key[:3]) == row.config_hash
    verdict = judged.verdicts.get(row.key)
    newest_us = None if verdict is None else verdict.newest_us
    if row.is_served and not is_served:
        return Standing(is_served, newest_us, "it is no longer served")
    if verdict is None and row.key not in judged.rare:
        return Standing(is_served, None, f"it was not measured for {settings.regression_days:g} days")
    limit_us = row.before_us * (1.0 + settings.regression_min_pct / 200.0)  # half way to what counts as slower
    if newest_us is not None and newest_us < limit_us:
        since = rfc3339(judged.newest[row.key])
        return Standing(is_served, newest_us, f"it is as fast as before again: {newest_us:,.1f} us at {since}")
    return Standing(is_served, newest_us)


def _cause(s: Session, step: Step) -> str:
    """What differs between the builds on both sides of a step: the probable cause."""
    before, after = (find_build(s, point.build_id) for point in (step.last_good, step.first_slow))
    return probable_cause(before, after)


def probable_cause(before: Build | None, after: Build | None) -> str:
    """In words what changed between two builds, or that nothing did."""
    if before is None or after is None or before == after:
        return NO_CAUSE
    return changes(before, after)
