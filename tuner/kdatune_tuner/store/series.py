"""The series that regressions are looked for in. Every function is called inside `engine.reading`."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement
from sqlalchemy import Select
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy import tuple_
from sqlalchemy.orm import Session

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import digest
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.convert import gpu_of_row
from kdatune_tuner.store.convert import kda_shape_of_row
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.damaged import whole
from kdatune_tuner.store.damaged import whole_tuples
from kdatune_tuner.store.models import SERVING
from kdatune_tuner.store.models import BuildModel
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.models import RunModel
from kdatune_tuner.store.night_models import ReferenceModel

REPLAY = "replay"
"""The backend whose times come from a recording: they and a card's are not one series."""

_CHUNK = 200


class Timed(NamedTuple):
    """One successful measurement of a config on a key."""

    kernel: str
    gpu_id: int
    problem_id: int
    config_hash: str
    backend: str | None
    protocol: str
    build_id: int
    measurement_id: int
    median_us: float
    measured_at: datetime


class Referenced(NamedTuple):
    """One successful time of the reference kernel."""

    gpu_id: int
    backend: str
    shape_key: str
    config_hash: str
    median_us: float
    measured_at: datetime


ConfigKey = tuple[str, int, int, str]
"""Kernel, gpu id, problem id, config hash."""


def timed(s: Session, since: datetime, until: datetime, least: int) -> tuple[list[Timed], set[ConfigKey]]:
    """Measurements between two moments of every config that was measured so often at least, oldest first of each.

    And the keys of those that were measured less often. Estimates are no measurements.
    """
    config = (
        MeasurementModel.kernel,
        MeasurementModel.gpu_id,
        MeasurementModel.problem_id,
        MeasurementModel.config_hash,
    )
    counted = select(*config, func.count()).where(*_measured(since, until)).group_by(*config)
    counts: dict[ConfigKey, int] = {
        (kernel, gpu, problem, one): n for kernel, gpu, problem, one, n in s.execute(counted)
    }
    wanted = [key for key, count in counts.items() if count >= least]
    found: list[Timed] = []
    for start in range(0, len(wanted), _CHUNK):
        query = _timed().where(*_measured(since, until), tuple_(*config).in_(wanted[start : start + _CHUNK]))
        rows = s.execute(query.order_by(MeasurementModel.id))
        found += whole(rows, lambda row: checked(Timed._make(row)), lambda row: ("measurement", row[7]))
    return found, {key for key, count in counts.items() if count < least}


def reference_times(s: Session, since: datetime, until: datetime) -> list[Referenced]:
    """Times of the reference kernel on every card between two moments, oldest first."""
    rows = s.execute(
        select(ReferenceModel.id, *(getattr(ReferenceModel, name) for name in Referenced._fields))
        .where(
            ReferenceModel.outcome == Outcome.OK.value,
            ReferenceModel.measured_at >= since,
            ReferenceModel.measured_at <= until,
        )
        .order_by(ReferenceModel.id)
    )
    return whole_tuples(rows, Referenced._make, "reference_time")


def served_hashes(s: Session) -> dict[tuple[str, int, int], str]:
    """The hash of the config that launchers are given, by (kernel, gpu id, problem id), of every key with a promotion.

    The default's where a rollback serves it. A key whose card or shape cannot be read is left out.
    """
    newest = (
        select(func.max(PromotionModel.generation))
        .where(SERVING)
        .group_by(PromotionModel.kernel, PromotionModel.gpu_id, PromotionModel.problem_id)
    )
    rows = s.execute(
        select(PromotionModel.kernel, PromotionModel.config_hash, GpuModel, ProblemModel)
        .join(GpuModel, PromotionModel.gpu_id == GpuModel.id)
        .join(ProblemModel, PromotionModel.problem_id == ProblemModel.id)
        .where(PromotionModel.generation.in_(newest))
    )
    found: dict[tuple[str, int, int], str] = {}
    for kernel, config_hash, gpu, problem in rows:
        served = config_hash or _default_hash(kernel, gpu, problem)
        if served is not None:
            found[kernel, gpu.id, problem.id] = served
    return found


def configs_of(s: Session, measurement_ids: Sequence[int]) -> dict[int, str]:
    """Config JSON by measurement id."""
    rows = s.execute(
        select(MeasurementModel.id, MeasurementModel.config_json).where(MeasurementModel.id.in_(measurement_ids))
    )
    return {row[0]: row[1] for row in rows}


def _default_hash(kernel: str, gpu: GpuModel, problem: ProblemModel) -> str | None:
    if kernel != "kda":
        return None
    try:
        return digest(default_config(kda_shape_of_row(problem), gpu_of_row(gpu)))
    except KdatuneError:
        return None


def _measured(since: datetime, until: datetime) -> list[ColumnElement[bool]]:
    return [
        MeasurementModel.outcome == Outcome.OK.value,
        MeasurementModel.estimated.is_(False),
        MeasurementModel.measured_at >= since,
        MeasurementModel.measured_at <= until,
    ]


def _timed() -> Select[str, int, int, str, str | None, str, int, int, float | None, datetime]:
    return (
        select(
            MeasurementModel.kernel,
            MeasurementModel.gpu_id,
            MeasurementModel.problem_id,
            MeasurementModel.config_hash,
            RunModel.backend,
            BuildModel.protocol,
            MeasurementModel.build_id,
            MeasurementModel.id,
            MeasurementModel.median_us,
            MeasurementModel.measured_at,
        )
        .join(BuildModel, MeasurementModel.build_id == BuildModel.id)
        .outerjoin(RunModel, MeasurementModel.run_id == RunModel.id)
    )
