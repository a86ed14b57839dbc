"""Cursor pages over the tables. All take the id of the last row seen and give the rows that follow it.

Rows come oldest first, or newest first on request; after_id None (or 0) starts at the beginning. A filter that cannot
match (an id out of range, a text that no database holds) gives an empty page, not an error. A damaged row is passed over.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar
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
from kdatune_tuner.store.damaged import whole_page
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
from kdatune_tuner.store.rows import id_of
from kdatune_tuner.store.rows import measurement_row
from kdatune_tuner.store.rows import profile_row
from kdatune_tuner.store.rows import promotion_row
from kdatune_tuner.store.rows import run_row

MAX_PAGE_ROWS = 1000

Column = InstrumentedAttribute[Any]
Columns = TypeVarTuple("Columns")
Out = TypeVar("Out")


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
    return _page(s, query, MeasurementModel.id, measurement_row, filters, after_id, limit, newest_first)


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
    return _page(s, query, PromotionModel.id, promotion_row, filters, after_id, limit, newest_first)


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
    return _page(s, query, RunModel.id, run_row, filters, after_id, limit, newest_first)


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
    return _page(s, query, ProfileModel.id, profile_row, filters, after_id, limit, newest_first)


def page_gpus(
    s: Session, *, name: str | None = None, after_id: int | None = None, limit: int = 100, newest_first: bool = False
) -> list[GpuRow]:
    """GPU models that fit all filters given."""
    query = select(GpuModel)
    return _page(
        s, query, GpuModel.id, lambda row: gpu_row(row[0]), {GpuModel.name: name}, after_id, limit, newest_first
    )


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
    convert: Callable[[Row[*Columns]], Out],
    filters: Mapping[Column, Any],
    after_id: int | None,
    limit: int,
    newest_first: bool,
) -> list[Out]:
    for column, value in filters.items():
        if isinstance(value, str) and not is_text(value):
            return []
        if isinstance(value, int) and not is_id(value):
            return []
        if value is not None:
            query = query.where(column == value)
    if after_id and not newest_first and not is_id(after_id):
        return []
    query = query.order_by(id_column.desc() if newest_first else id_column)

    def fetch(after: int | None, count: int) -> Sequence[Row[*Columns]]:
        if after and newest_first:
            return s.execute(query.where(id_column < min(after, MAX_ID)).limit(count)).all()
        return s.execute((query.where(id_column > after) if after else query).limit(count)).all()

    return whole_page(fetch, convert, id_of, after_id, max(1, min(limit, MAX_PAGE_ROWS)))
