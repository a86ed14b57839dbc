"""What the dashboard's lists of runs, profiles and timings ask of the store. Read only, as `dashboard`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from typing import NamedTuple

from sqlalchemy import ColumnElement
from sqlalchemy import Row
from sqlalchemy import Select
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.damaged import check_number
from kdatune_tuner.store.damaged import check_object
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.damaged import whole
from kdatune_tuner.store.damaged import whole_tuples
from kdatune_tuner.store.dashboard import chunks
from kdatune_tuner.store.models import SERVING
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import ProfileModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.models import RunModel
from kdatune_tuner.store.records import ProfileRow
from kdatune_tuner.store.records import RunRow
from kdatune_tuner.store.rows import id_of
from kdatune_tuner.store.rows import profile_row
from kdatune_tuner.store.rows import run_row


class Timing(NamedTuple):
    """One successful measurement of a config of a key, for its course over time."""

    id: int
    gpu_id: int
    problem_id: int
    config_hash: str
    build_id: int
    median_us: float
    p20_us: float | None
    p80_us: float | None
    estimated: bool
    measured_at: datetime


class Change(NamedTuple):
    """From when on a config is served for a key; config_hash None: the default."""

    gpu_id: int
    problem_id: int
    config_hash: str | None
    decided_at: datetime


@dataclass(frozen=True)
class RunFilter:
    """Which runs; None: all."""

    gpu_ids: tuple[int, ...] | None = None
    kernel: str | None = None
    state: str | None = None
    trigger: str | None = None
    problem_ids: tuple[int, ...] | None = None


def runs(
    s: Session, wanted: RunFilter, *, order: str = "id", descending: bool = True, offset: int = 0, limit: int = 50
) -> list[RunRow]:
    """Runs in the order asked for."""
    column = {"id": RunModel.id, "gpu_seconds": RunModel.gpu_seconds, "started_at": RunModel.started_at}[order]
    by = column.desc().nulls_last() if descending else column.asc().nulls_last()
    query = _runs().where(*_run_conditions(wanted)).order_by(by, RunModel.id.desc()).offset(offset).limit(limit)
    return list(whole(s.execute(query), run_row, id_of))


def count_runs(s: Session, wanted: RunFilter) -> int:
    """How many runs the filter lets through."""
    return s.scalar(select(func.count()).select_from(RunModel).where(*_run_conditions(wanted))) or 0


def best_of_runs(s: Session, run_ids: Sequence[int]) -> dict[int, tuple[int, float | None]]:
    """Measurements and the best time of each run."""
    found: dict[int, tuple[int, float | None]] = {}
    for some in chunks(run_ids):
        rows = s.execute(
            select(MeasurementModel.run_id, func.count(), func.min(MeasurementModel.median_us))
            .where(MeasurementModel.run_id.in_(some))
            .group_by(MeasurementModel.run_id)
        )
        for run_id, count, best_us in rows:
            if run_id is not None:  # a text, which is no time, comes behind every number
                found[run_id] = (count, best_us if isinstance(best_us, float | int) else None)
    return found


def profile_list(
    s: Session,
    *,
    gpu_ids: tuple[int, ...] | None,
    stage: str | None,
    order: str,
    descending: bool,
    offset: int,
    limit: int,
) -> list[tuple[ProfileRow, float | None]]:
    """Profiles in the order asked for, each with the benchmark time of its measurement."""
    columns: dict[str, Any] = {
        "profiled_at": ProfileModel.id,
        "issue_active_pct": ProfileModel.issue_active_pct,
        "barrier_stall_per_issue": ProfileModel.barrier_stall_per_issue,
    }
    by = columns[order].desc().nulls_last() if descending else columns[order].asc().nulls_last()
    query = _profiles(gpu_ids, stage).order_by(by, ProfileModel.id.desc()).offset(offset).limit(limit)
    return list(whole(s.execute(query), _profile_and_time, id_of))


def _profile_and_time(row: Row[ProfileModel, MeasurementModel, str, ProblemModel]) -> tuple[ProfileRow, float | None]:
    check_number(f"median_us of measurement {row[1].id}", row[1].median_us)
    return profile_row(row), row[1].median_us


def count_profiles(s: Session, *, gpu_ids: tuple[int, ...] | None, stage: str | None) -> int:
    """How many profiles the filter lets through."""
    return s.scalar(select(func.count()).select_from(_profiles(gpu_ids, stage).subquery())) or 0


def timings(s: Session, gpu_ids: Sequence[int], problem_ids: Sequence[int], kernel: str = "kda") -> list[Timing]:
    """Successful measurements of the keys, oldest first."""
    found: list[Timing] = []
    for some in chunks(problem_ids):
        rows = s.execute(
            select(*(getattr(MeasurementModel, name) for name in Timing._fields))
            .where(
                MeasurementModel.kernel == kernel,
                MeasurementModel.gpu_id.in_(gpu_ids),
                MeasurementModel.problem_id.in_(some),
                MeasurementModel.outcome == Outcome.OK.value,
            )
            .order_by(MeasurementModel.id)
        )
        found += whole(rows, lambda row: checked(Timing._make(row)), lambda row: ("measurement", row[0]))
    return found


def changes(s: Session, gpu_ids: Sequence[int], problem_ids: Sequence[int], kernel: str = "kda") -> list[Change]:
    """What was served from when on for the keys, oldest first."""
    found: list[Change] = []
    for some in chunks(problem_ids):
        rows = s.execute(
            select(*(getattr(PromotionModel, name) for name in Change._fields))
            .where(
                PromotionModel.kernel == kernel,
                PromotionModel.gpu_id.in_(gpu_ids),
                PromotionModel.problem_id.in_(some),
                SERVING,
            )
            .order_by(PromotionModel.generation)
        )
        found += [Change._make(row) for row in rows]
    return found


def _runs() -> Select[RunModel, str, ProblemModel]:
    return (
        select(RunModel, GpuModel.name, ProblemModel)
        .join(GpuModel, RunModel.gpu_id == GpuModel.id)
        .join(ProblemModel, RunModel.problem_id == ProblemModel.id)
    )


def _profiles(
    gpu_ids: tuple[int, ...] | None, stage: str | None
) -> Select[ProfileModel, MeasurementModel, str, ProblemModel]:
    query = (
        select(ProfileModel, MeasurementModel, GpuModel.name, ProblemModel)
        .join(MeasurementModel, ProfileModel.measurement_id == MeasurementModel.id)
        .join(GpuModel, MeasurementModel.gpu_id == GpuModel.id)
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
    )
    if gpu_ids is not None:
        query = query.where(MeasurementModel.gpu_id.in_(gpu_ids))
    return query if stage is None else query.where(ProfileModel.stage == stage)


def _run_conditions(wanted: RunFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.gpu_ids is not None:
        conditions.append(RunModel.gpu_id.in_(wanted.gpu_ids))
    if wanted.problem_ids is not None:
        conditions.append(RunModel.problem_id.in_(wanted.problem_ids))
    for column, value in (
        (RunModel.kernel, wanted.kernel),
        (RunModel.state, wanted.state),
        (RunModel.trigger, wanted.trigger),
    ):
        if value is not None:
            conditions.append(column == value)
    return conditions


class Resources(NamedTuple):
    """What a stage's config takes of an SM, and its time alone, on one shape."""

    shape_hash: str
    config_hash: str
    median_us: float | None
    registers: int | None
    smem_bytes: int | None
    effective_num_warps: int | None


def configs_of_promotions(s: Session, ids: Sequence[int]) -> dict[str, str]:
    """Config JSON by config hash, of those promotions."""
    found: dict[str, str] = {}
    for some in chunks(ids):
        rows = s.execute(
            select(PromotionModel.id, PromotionModel.config_hash, PromotionModel.config_json).where(
                PromotionModel.id.in_(some), PromotionModel.config_hash.is_not(None)
            )
        )
        found.update(whole(rows, _hash_and_config, lambda row: ("promotion", row[0])))
    return found


def _hash_and_config(row: Row[int, str | None, str | None]) -> tuple[str, str]:
    check_object("config_json", row[2] or "")
    return row[1] or "", row[2] or ""


def stage_resources(
    s: Session, kernel: str, gpu_ids: Sequence[int], shape_hashes: Sequence[str], config_hashes: Sequence[str]
) -> list[Resources]:
    """Successful measurements of a stage's configs on those shapes, oldest first. Few shapes and configs at a time."""
    rows = s.execute(
        select(
            MeasurementModel.id,
            ProblemModel.shape_hash,
            MeasurementModel.config_hash,
            MeasurementModel.median_us,
            MeasurementModel.registers,
            MeasurementModel.smem_bytes,
            MeasurementModel.effective_num_warps,
        )
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
        .where(
            MeasurementModel.kernel == kernel,
            MeasurementModel.gpu_id.in_(gpu_ids),
            ProblemModel.kernel == kernel,
            ProblemModel.shape_hash.in_(shape_hashes),
            MeasurementModel.config_hash.in_(config_hashes),
            MeasurementModel.outcome == Outcome.OK.value,
        )
        .order_by(MeasurementModel.id)
    )
    return whole_tuples(rows, Resources._make, "measurement")


def newest_measurement_id(s: Session) -> int:
    """The id of the newest measurement of all, 0 when there is none."""
    return s.scalar(select(func.max(MeasurementModel.id))) or 0
