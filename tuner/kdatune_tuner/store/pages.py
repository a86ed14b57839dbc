"""Cursor pages over the tables. All take the id of the last row seen and give the rows that follow it.

Rows come oldest first, or newest first on request; after_id None (or 0) starts at the beginning. A filter that cannot
match (an id out of range, a text that no database holds) gives an empty page, not an error.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVarTuple

from sqlalchemy import Row
from sqlalchemy import Select
from sqlalchemy import select
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.orm import Session

from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.values import OtherShape
from kdatune_tuner.store.convert import MAX_ID
from kdatune_tuner.store.convert import is_id
from kdatune_tuner.store.convert import is_text
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import ProfileModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.models import RunModel
from kdatune_tuner.store.records import GpuRow
from kdatune_tuner.store.records import MeasurementRow
from kdatune_tuner.store.records import ProfileRow
from kdatune_tuner.store.records import PromotionRow
from kdatune_tuner.store.records import RunRow
from kdatune_tuner.store.rows import gpu_row
from kdatune_tuner.store.rows import measurement_row
from kdatune_tuner.store.rows import profile_row
from kdatune_tuner.store.rows import promotion_row
from kdatune_tuner.store.rows import run_row

MAX_PAGE_ROWS = 1000

Column = InstrumentedAttribute[Any]
Columns = TypeVarTuple("Columns")


def page_measurements(
    s: Session,
    *,
    gpu_name: str | None = None,
    kernel: str | None = None,
    shape: Shape | OtherShape | None = None,
    outcome: str | None = None,
    run_id: int | None = None,
    after_id: int | None = None,
    limit: int = 100,
    newest_first: bool = False,
) -> list[MeasurementRow]:
    """Measurements that fit all filters given."""
    query = (
        select(MeasurementModel, GpuModel.name, ProblemModel)
        .join(GpuModel, MeasurementModel.gpu_id == GpuModel.id)
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
    )
    filters = _filters(gpu_name, MeasurementModel.kernel, kernel, shape)
    filters |= {MeasurementModel.outcome: outcome, MeasurementModel.run_id: run_id}
    rows = _page(s, query, MeasurementModel.id, filters, after_id, limit, newest_first)
    return [measurement_row(row) for row in rows]


def page_promotions(
    s: Session,
    *,
    gpu_name: str | None = None,
    kernel: str | None = None,
    shape: Shape | OtherShape | None = None,
    decision: str | None = None,
    after_id: int | None = None,
    limit: int = 100,
    newest_first: bool = False,
) -> list[PromotionRow]:
    """Decisions that fit all filters given: the history, ties and rejections included."""
    query = (
        select(PromotionModel, GpuModel, ProblemModel, MeasurementModel.median_us)
        .join(GpuModel, PromotionModel.gpu_id == GpuModel.id)
        .join(ProblemModel, PromotionModel.problem_id == ProblemModel.id)
        .outerjoin(MeasurementModel, PromotionModel.measurement_id == MeasurementModel.id)
    )
    filters = _filters(gpu_name, PromotionModel.kernel, kernel, shape) | {PromotionModel.decision: decision}
    return [promotion_row(row) for row in _page(s, query, PromotionModel.id, filters, after_id, limit, newest_first)]


def page_runs(
    s: Session,
    *,
    gpu_name: str | None = None,
    kernel: str | None = None,
    shape: Shape | OtherShape | None = None,
    state: str | None = None,
    after_id: int | None = None,
    limit: int = 100,
    newest_first: bool = False,
) -> list[RunRow]:
    """Runs that fit all filters given."""
    query = (
        select(RunModel, GpuModel.name, ProblemModel)
        .join(GpuModel, RunModel.gpu_id == GpuModel.id)
        .join(ProblemModel, RunModel.problem_id == ProblemModel.id)
    )
    filters = _filters(gpu_name, RunModel.kernel, kernel, shape) | {RunModel.state: state}
    return [run_row(row) for row in _page(s, query, RunModel.id, filters, after_id, limit, newest_first)]


def page_profiles(
    s: Session,
    *,
    gpu_name: str | None = None,
    kernel: str | None = None,
    shape: Shape | OtherShape | None = None,
    stage: str | None = None,
    measurement_id: int | None = None,
    after_id: int | None = None,
    limit: int = 100,
    newest_first: bool = False,
) -> list[ProfileRow]:
    """Profiles that fit all filters given, the unavailable ones included."""
    query = (
        select(ProfileModel, MeasurementModel, GpuModel.name, ProblemModel)
        .join(MeasurementModel, ProfileModel.measurement_id == MeasurementModel.id)
        .join(GpuModel, MeasurementModel.gpu_id == GpuModel.id)
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
    )
    filters = _filters(gpu_name, MeasurementModel.kernel, kernel, shape)
    filters |= {ProfileModel.stage: stage, ProfileModel.measurement_id: measurement_id}
    return [profile_row(row) for row in _page(s, query, ProfileModel.id, filters, after_id, limit, newest_first)]


def page_gpus(
    s: Session, *, name: str | None = None, after_id: int | None = None, limit: int = 100, newest_first: bool = False
) -> list[GpuRow]:
    """GPU models that fit all filters given."""
    rows = _page(s, select(GpuModel), GpuModel.id, {GpuModel.name: name}, after_id, limit, newest_first)
    return [gpu_row(row[0]) for row in rows]


def _filters(
    gpu_name: str | None, kernel_column: Column, kernel: str | None, shape: Shape | OtherShape | None
) -> dict[Column, Any]:
    return {
        GpuModel.name: gpu_name,
        kernel_column: kernel,
        ProblemModel.shape_hash: None if shape is None else digest(shape),
    }


def _page(
    s: Session,
    query: Select[*Columns],
    id_column: Column,
    filters: Mapping[Column, Any],
    after_id: int | None,
    limit: int,
    newest_first: bool,
) -> Sequence[Row[*Columns]]:
    for column, value in filters.items():
        if isinstance(value, str) and not is_text(value):
            return []
        if isinstance(value, int) and not is_id(value):
            return []
        if value is not None:
            query = query.where(column == value)
    if after_id:
        if newest_first:
            query = query.where(id_column < min(after_id, MAX_ID))
        elif not is_id(after_id):
            return []
        else:
            query = query.where(id_column > after_id)
    order = id_column.desc() if newest_first else id_column
    return s.execute(query.order_by(order).limit(max(1, min(limit, MAX_PAGE_ROWS)))).all()
