"""Nights in the store. Every function is called inside `engine.reading` or `engine.writing`.

A night's report is one JSON object, written anew after every item of its plan, so that a killed night has one too:

    format            1
    night             id of the night
    state             running, done, failed, interrupted
    exit_code         0 clean, 3 regressions found, 1 failed, 130 interrupted; null while it runs or where it was killed
    gpu, backend, host, build (the fields of Build)
    started_at, finished_at (RFC 3339 or null), budget_seconds, spent_seconds
    resumed_nights    ids of earlier nights that were cut short; their findings are in this report as well
    swept_runs        ids of runs that a killed process had left running
    reference         {"machine_ratio": x or null, "reason": text or null (why there is no ratio, or what it rests on),
                       "points": [{"shape", "config" (hash), "outcome", "detail", "median_us", "usual_us", "ratio"}]}
    plan              in the order of work: [{"kind": check | confirm | search | profile, "shape", "why", "value",
                       "estimated_seconds", "state": planned | done | failed | left | skipped, "seconds", "result": text}]
                       left: the budget did not reach it. skipped: it cannot be done here; result says why.
    findings          [{"kind", "regression": true | false, "shape": key or null, "text": one sentence, "figures": {...},
                       "night": id of the night that found it}]
                       kinds: machine_slower, reference_failed, environment_changed, config_slower, config_incorrect,
                       config_failed, rolled_back, demand_served, promoted, step (of the stored history, regressions.py),
                       damaged_rows (rows that were passed over)
    error             text where the night failed, else null

`machine_ratio` is the reference kernel's time over its usual one (x, > 1 is slower tonight).
"""

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy import update
from sqlalchemy.orm import Session

from kdatune_kernels.errors import StoreError
from kdatune_tuner.store import queries
from kdatune_tuner.store.checks import plain
from kdatune_tuner.store.convert import is_id
from kdatune_tuner.store.convert import is_text
from kdatune_tuner.store.damaged import DamagedJson
from kdatune_tuner.store.damaged import check_number
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.damaged import whole
from kdatune_tuner.store.models import BuildModel
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.models import RunModel
from kdatune_tuner.store.night_models import CheckModel
from kdatune_tuner.store.night_models import NightModel
from kdatune_tuner.store.night_models import ReferenceModel
from kdatune_tuner.store.night_models import Verdict
from kdatune_tuner.store.records import CLOCKS_APART
from kdatune_tuner.store.records import PromotionRow
from kdatune_tuner.store.records import RunState
from kdatune_tuner.store.records import utc_now
from kdatune_tuner.store.rows import id_of

TRIGGER = "nightly"
"""The trigger of every run that a night opens."""


@dataclass(frozen=True, kw_only=True)
class NightRow:
    """A stored night. `report` has the form above; it is a DamagedJson where no object is stored."""

    id: int
    gpu_id: int
    gpu_name: str
    build_id: int
    backend: str
    host: str
    state: RunState
    exit_code: int | None
    budget_seconds: float
    machine_ratio: float | None
    report: dict[str, Any]
    started_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class ReferenceRow:
    """The reference kernel measured once."""

    night_id: int
    gpu_id: int
    build_id: int
    backend: str
    shape_key: str
    config_hash: str
    outcome: str
    detail: str | None
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    sample_count: int | None
    sm_clock_mhz: float | None
    throttle_reasons: str | None
    measured_at: datetime


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """A served config measured again in a night."""

    night_id: int
    gpu_id: int
    build_id: int
    problem_id: int
    config_hash: str
    against_hash: str | None
    outcome: str
    measured_us: float | None
    against_us: float | None
    expected_us: float | None
    machine_ratio: float | None
    verdict: Verdict
    checked_at: datetime


_NIGHT_FIELDS = tuple(name for name in NightRow.__dataclass_fields__ if name not in ("gpu_name", "state"))
_REFERENCE_FIELDS = tuple(ReferenceRow.__dataclass_fields__)
_CHECK_FIELDS = tuple(CheckRow.__dataclass_fields__)


def start_night(
    s: Session, *, gpu_id: int, build_id: int, backend: str, host: str, budget_seconds: float, report: dict[str, Any]
) -> int:
    """Open a night and return its id."""
    night = NightModel(
        gpu_id=gpu_id,
        build_id=build_id,
        backend=backend,
        host=str(plain(host)),
        state=RunState.RUNNING.value,
        budget_seconds=budget_seconds,
        report=report,
        started_at=utc_now(),
    )
    s.add(night)
    s.flush()
    return night.id


def save_night(
    s: Session,
    night_id: int,
    *,
    report: dict[str, Any],
    state: RunState,
    machine_ratio: float | None,
    exit_code: int | None = None,
) -> None:
    """Keep how far a night is; a state other than running closes it.

    Raises:
        StoreError: no such night, or it is closed already.
    """
    night = s.get(NightModel, night_id)
    if night is None or night.state != RunState.RUNNING.value:
        raise StoreError(f"night {night_id} does not run: it does not exist or is closed already")
    night.report, night.state, night.machine_ratio = report, state.value, machine_ratio
    if state is not RunState.RUNNING:
        night.exit_code, night.finished_at = exit_code, utc_now()
    s.flush()


def sweep(s: Session, silent_since: datetime) -> tuple[list[int], list[int]]:
    """Type as interrupted what killed processes left running: ids of the nights, ids of the runs.

    The caller holds the night's lock, so no other night and no run of one is alive. A run of another command counts as
    dead when it has measured nothing since that moment, or its times are ahead of the clock: a clock that was wrong then
    would keep it running until they come. Its gpu_seconds are not known.
    """
    nights = list(
        s.scalars(select(NightModel).where(NightModel.state == RunState.RUNNING.value).order_by(NightModel.id))
    )
    for night in nights:
        night.state, night.finished_at = RunState.INTERRUPTED.value, utc_now()
        if not isinstance(_report(night), DamagedJson):  # what is left of a damaged one stays for whoever looks at it
            night.report = {**night.report, "state": RunState.INTERRUPTED.value}
    newest = (
        select(MeasurementModel.run_id, func.max(MeasurementModel.measured_at).label("last_at"))
        .group_by(MeasurementModel.run_id)
        .subquery()
    )
    rows = s.execute(
        select(RunModel.id, RunModel.trigger, RunModel.started_at, newest.c.last_at)
        .outerjoin(newest, newest.c.run_id == RunModel.id)
        .where(RunModel.state == RunState.RUNNING.value)
        .order_by(RunModel.id)
    )
    alive_until = utc_now() + CLOCKS_APART
    dead = [
        (run_id, last or started)
        for run_id, trigger, started, last in rows
        if trigger == TRIGGER or not silent_since <= (last or started) <= alive_until
    ]
    for run_id, ended_at in dead:
        outcomes = Counter(s.scalars(select(MeasurementModel.outcome).where(MeasurementModel.run_id == run_id)))
        s.execute(
            update(RunModel)
            .where(RunModel.id == run_id)
            .values(state=RunState.INTERRUPTED.value, outcome_counts=dict(outcomes), finished_at=ended_at)
        )
    s.flush()
    return [night.id for night in nights], [run_id for run_id, _ in dead]


def find_night(s: Session, night_id: int) -> NightRow | None:
    """One stored night, None when there is none of that id, or it is damaged."""
    rows: Iterable[Any] = s.execute(_nights().where(NightModel.id == night_id)) if is_id(night_id) else []
    return next(whole(rows, _night_row, id_of), None)


def page_nights(
    s: Session,
    *,
    gpu_name: str | None = None,
    after_id: int | None = None,
    limit: int = 100,
    newest_first: bool = True,
) -> list[NightRow]:
    """Stored nights, a page at a time."""
    query = _nights()
    if gpu_name is not None:
        if not is_text(gpu_name):
            return []
        query = query.where(GpuModel.name == gpu_name)
    if after_id and is_id(after_id):
        query = query.where(NightModel.id < after_id if newest_first else NightModel.id > after_id)
    order = NightModel.id.desc() if newest_first else NightModel.id
    return list(whole(s.execute(query.order_by(order).limit(max(1, min(limit, 1000)))), _night_row, id_of))


def nights_of(s: Session, gpu_id: int, backend: str, limit: int = 60) -> list[NightRow]:
    """The newest nights of a card, newest first."""
    query = _nights().where(NightModel.gpu_id == gpu_id, NightModel.backend == backend)
    return list(whole(s.execute(query.order_by(NightModel.id.desc()).limit(limit)), _night_row, id_of))


def add_reference(s: Session, new: ReferenceRow) -> None:
    """Keep a time of the reference kernel."""
    s.add(ReferenceModel(**{name: plain(getattr(new, name)) for name in _REFERENCE_FIELDS}))
    s.flush()


def reference_history(s: Session, gpu_id: int, backend: str, build_id: int | None = None) -> list[ReferenceRow]:
    """Times of the reference kernel on a card, oldest first; of one build or of all."""
    query = select(ReferenceModel).where(ReferenceModel.gpu_id == gpu_id, ReferenceModel.backend == backend)
    if build_id is not None:
        query = query.where(ReferenceModel.build_id == build_id)
    return list(whole(s.scalars(query.order_by(ReferenceModel.id)), _reference_row, id_of))


def _reference_row(row: ReferenceModel) -> ReferenceRow:
    return checked(ReferenceRow(**{name: getattr(row, name) for name in _REFERENCE_FIELDS}))


def add_check(s: Session, new: CheckRow) -> None:
    """Keep what a check of a served config said."""
    values = {name: plain(getattr(new, name)) for name in _CHECK_FIELDS}
    s.add(CheckModel(**values | {"verdict": new.verdict.value}))
    s.flush()


def check_history(s: Session, gpu_id: int, build_id: int, problem_id: int, config_hash: str) -> list[CheckRow]:
    """Checks of one config on a card with a build, oldest first."""
    query = select(CheckModel).where(
        CheckModel.gpu_id == gpu_id,
        CheckModel.build_id == build_id,
        CheckModel.problem_id == problem_id,
        CheckModel.config_hash == config_hash,
    )
    return list(whole(s.scalars(query.order_by(CheckModel.id)), _check_row, id_of))


def _check_row(row: CheckModel) -> CheckRow:
    values = {name: getattr(row, name) for name in _CHECK_FIELDS} | {"verdict": Verdict(row.verdict)}
    return checked(CheckRow(**values))


def last_checks(s: Session, gpu_id: int, build_id: int) -> dict[tuple[str, str], datetime]:
    """When configs were checked last on a card with a build, by (shape key, config hash)."""
    rows = s.execute(
        select(ProblemModel.shape_key, CheckModel.config_hash, CheckModel.checked_at)
        .join(ProblemModel, CheckModel.problem_id == ProblemModel.id)
        .where(CheckModel.gpu_id == gpu_id, CheckModel.build_id == build_id)
        .order_by(CheckModel.id)
    )
    return {(shape_key, config_hash): checked_at for shape_key, config_hash, checked_at in rows}


def promotion_of(s: Session, generation: int) -> PromotionRow:
    """The decision of a generation. Raises StoreError when there is none."""
    promotion_id = s.scalar(select(PromotionModel.id).where(PromotionModel.generation == generation))
    found = None if promotion_id is None else queries.find_promotion(s, promotion_id)
    if found is None:
        raise StoreError(f"there is no decision of generation {generation}")
    return found


def measured_counts(s: Session, gpu_id: int, build_id: int) -> dict[tuple[str, str], int]:
    """How many distinct configs are measured with a build, by (kernel, shape key)."""
    rows = s.execute(
        select(MeasurementModel.kernel, ProblemModel.shape_key, func.count(MeasurementModel.config_hash.distinct()))
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
        .where(MeasurementModel.gpu_id == gpu_id, MeasurementModel.build_id == build_id)
        .group_by(MeasurementModel.kernel, ProblemModel.shape_key)
    )
    return {(kernel, shape_key): count for kernel, shape_key, count in rows}


def ended_searches(
    s: Session, gpu_id: int, build_id: int, backend: str, trials: int, shares: Mapping[str, float]
) -> set[tuple[str, str]]:
    """(kernel, shape key) that a search of at least so many trials has gone through since the build came into use.

    A search that ended by itself counts, also where it saw no need for all its trials; one that its time cut short does not.

    Args:
        shares: kernels, and the part of a shape's time within which a search of each has surely ended by itself.
    """
    rows = s.execute(
        select(RunModel, ProblemModel.shape_key)
        .join(ProblemModel, RunModel.problem_id == ProblemModel.id)
        .join(BuildModel, BuildModel.id == build_id)
        .where(
            RunModel.gpu_id == gpu_id,
            RunModel.backend == backend,
            RunModel.kernel.in_(list(shares)),
            RunModel.state == RunState.DONE.value,
            RunModel.budget_trials >= trials,
            RunModel.started_at >= BuildModel.first_seen_at,
        )
    )

    def ended(row: Any) -> tuple[str, str] | None:
        run, shape_key = row
        for name in ("budget_trials", "budget_seconds"):
            check_number(name, getattr(run, name))
        limit_seconds = math.inf if run.budget_seconds is None else shares[run.kernel] * run.budget_seconds
        in_time = run.finished_at is not None and (run.finished_at - run.started_at).total_seconds() < limit_seconds
        return (run.kernel, shape_key) if in_time else None

    return {key for key in whole(rows, ended, id_of) if key is not None}


def seconds_per_trial(s: Session, gpu_id: int, backend: str) -> float | None:
    """What a measurement took on a card, from the newest runs; None where no run tells."""
    newest = (
        select(RunModel.id, RunModel.gpu_seconds, RunModel.outcome_counts)
        .where(RunModel.gpu_id == gpu_id, RunModel.backend == backend, RunModel.gpu_seconds > 0)
        .order_by(RunModel.id.desc())
        .limit(100)
    )
    spent = list(whole(s.execute(newest), _seconds_and_trials, lambda row: ("run", row[0])))
    trials = sum(count for _, count in spent)
    return sum(seconds for seconds, _ in spent) / trials if trials else None


def _seconds_and_trials(row: Any) -> tuple[float, int]:
    _, gpu_seconds, outcomes = row
    check_number("gpu_seconds", gpu_seconds)
    counts = list(outcomes.values()) if isinstance(outcomes, dict) else []
    if not all(type(count) is int and count >= 0 for count in counts):
        raise StoreError(f"outcome_counts holds no counts: {str(outcomes)[:60]}")
    return gpu_seconds or 0.0, sum(counts)


def _nights() -> Any:
    return select(NightModel, GpuModel.name).join(GpuModel, NightModel.gpu_id == GpuModel.id)


def _night_row(row: Any) -> NightRow:
    night, gpu_name = row
    values = {name: getattr(night, name) for name in _NIGHT_FIELDS} | {"report": _report(night)}
    return checked(NightRow(gpu_name=gpu_name, state=RunState(night.state), **values))


def _report(night: NightModel) -> dict[str, Any]:
    report: Any = night.report
    return report if isinstance(report, dict) else DamagedJson()
