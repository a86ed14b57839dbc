"""What is asked of the store to serve and to tune. Every function is called inside `engine.reading` or `writing`."""

import functools
import json
import logging
from collections.abc import Sequence
from typing import Any
from typing import TypeVarTuple

from sqlalchemy import ColumnElement
from sqlalchemy import Row
from sqlalchemy import Select
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import StoreError
from kdatune_kernels.match import Champion
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import from_json
from kdatune_tuner.store.convert import build_of_row
from kdatune_tuner.store.convert import gpu_of_row
from kdatune_tuner.store.convert import is_id
from kdatune_tuner.store.convert import is_text
from kdatune_tuner.store.convert import kda_shape_of_row
from kdatune_tuner.store.convert import read_shape_key
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.damaged import pass_over
from kdatune_tuner.store.damaged import whole
from kdatune_tuner.store.models import NUMBERED
from kdatune_tuner.store.models import SERVING
from kdatune_tuner.store.models import BuildModel
from kdatune_tuner.store.models import DemandModel
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.pages import page_gpus
from kdatune_tuner.store.pages import page_measurements
from kdatune_tuner.store.pages import page_profiles
from kdatune_tuner.store.pages import page_promotions
from kdatune_tuner.store.pages import page_runs
from kdatune_tuner.store.records import SERVING_DECISIONS
from kdatune_tuner.store.records import DemandRow
from kdatune_tuner.store.records import MeasurementRow
from kdatune_tuner.store.records import PromotionRow
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.rows import id_of
from kdatune_tuner.store.rows import measurement_row
from kdatune_tuner.store.rows import promotion_row

__all__ = [
    "champions",
    "demand",
    "find_build",
    "find_gpu",
    "find_measurement",
    "find_promotion",
    "generation",
    "gpus",
    "measured",
    "page_gpus",
    "page_measurements",
    "page_profiles",
    "page_promotions",
    "page_runs",
    "served",
]

logger = logging.getLogger(__name__)

Columns = TypeVarTuple("Columns")

# Made once: every service asks it twice a second. It walks the unique index from its end: coalesce keeps SQLite from choosing
# the index on decision, through which it would read the whole history (10,000 rows: 2.4 ms against 0.01).
NEWEST_SERVED = (
    select(PromotionModel.generation, PromotionModel.id, PromotionModel.decided_at)
    .where(func.coalesce(PromotionModel.decision, "").in_([d.value for d in SERVING_DECISIONS]), NUMBERED)
    .order_by(PromotionModel.generation.desc())
    .limit(1)
)
"""(generation, id, decided_at) of the promotion or rollback that was decided last."""


def champions(
    s: Session, gpu: Gpu | None = None, kernel: str = "kda", *, problem_ids: Sequence[int] | None = None
) -> list[Champion]:
    """The served best of every problem shape, oldest generation first; gpu None means of every GPU model.

    A card whose memory size was reported differently (a data sheet, a driver) is the same card here; the newest of its
    promotions counts. A row whose config cannot be read is passed over with a warning: it must not stop the others.

    Args:
        problem_ids: only these problems, on every card; a few hundred at most.

    Raises:
        StoreError: a kernel other than "kda": only whole launches are served.
    """
    if kernel != "kda":
        raise StoreError(f"kernel {kernel!r} has no champions; only whole launches (kda) are served")
    rows = s.execute(
        _with_names(select(PromotionModel, GpuModel, ProblemModel, MeasurementModel, BuildModel))
        .join(MeasurementModel, PromotionModel.measurement_id == MeasurementModel.id)
        .join(BuildModel, MeasurementModel.build_id == BuildModel.id)
        .where(PromotionModel.generation.in_(_served_generations(kernel, problem_ids)), *_same_card(gpu))
        .order_by(PromotionModel.generation)
    )
    newest: dict[tuple[Any, ...], Champion] = {}
    for row in rows:
        champion = _champion(row)
        if champion is not None:
            card = champion.gpu
            newest[card.name, card.sm_count, card.mig_profile, champion.shape] = champion
    return sorted(newest.values(), key=lambda champion: champion.generation)


def served(s: Session, kernel: str, gpu_id: int, problem_id: int) -> PromotionRow | None:
    """What is served for the key: its newest promotion or rollback. None, or a row without config: the default.

    Raises StoreError where that row is damaged.
    """
    row = s.execute(
        _with_names(select(PromotionModel, GpuModel, ProblemModel, MeasurementModel.median_us))
        .outerjoin(MeasurementModel, PromotionModel.measurement_id == MeasurementModel.id)
        .where(
            PromotionModel.kernel == kernel,
            PromotionModel.gpu_id == gpu_id,
            PromotionModel.problem_id == problem_id,
            SERVING,
        )
        .order_by(PromotionModel.generation.desc())
        .limit(1)
    ).first()
    return promotion_row(row) if row else None


def find_promotion(s: Session, promotion_id: int) -> PromotionRow | None:
    """One decision about what is served, None when there is none of that id, or it is damaged."""
    if not is_id(promotion_id):
        return None
    rows = s.execute(
        _with_names(select(PromotionModel, GpuModel, ProblemModel, MeasurementModel.median_us))
        .outerjoin(MeasurementModel, PromotionModel.measurement_id == MeasurementModel.id)
        .where(PromotionModel.id == promotion_id)
    )
    return next(whole(rows, promotion_row, id_of), None)


def generation(s: Session) -> int:
    """The generation of what is served: that of the newest promotion or rollback, 0 when there is none.

    Ties and rejections have generations too, but they change nothing that is served, so they do not move this one.
    """
    return s.scalar(NEWEST_SERVED) or 0


def gpus(s: Session) -> list[Gpu]:
    """Every stored GPU model, by name. A row that cannot be read is passed over with a warning."""
    rows = s.scalars(select(GpuModel).order_by(GpuModel.name, GpuModel.id))
    return list(whole(rows, gpu_of_row, id_of))


def find_gpu(s: Session, name: str) -> Gpu | None:
    """The stored GPU model of that exact name, the one measured last where several differ; None if unknown."""
    if not is_text(name):
        return None
    last = (
        select(func.max(MeasurementModel.id)).where(MeasurementModel.gpu_id == GpuModel.id).correlate(GpuModel)
    ).scalar_subquery()
    rows = s.scalars(
        select(GpuModel).where(GpuModel.name == name).order_by(func.coalesce(last, 0).desc(), GpuModel.id.desc())
    )
    return next(whole(rows, gpu_of_row, id_of), None)


def measured(s: Session, kernel: str, gpu_id: int, problem_id: int, build_id: int) -> dict[str, MeasurementRow]:
    """What is measured already with this build, newest row of each config, by config hash: what a resumed run skips."""
    rows = s.execute(
        select(MeasurementModel, GpuModel.name, ProblemModel)
        .join(GpuModel, MeasurementModel.gpu_id == GpuModel.id)
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
        .where(
            MeasurementModel.kernel == kernel,
            MeasurementModel.gpu_id == gpu_id,
            MeasurementModel.problem_id == problem_id,
            MeasurementModel.build_id == build_id,
        )
        .order_by(MeasurementModel.id)
    )
    return {row.config_hash: row for row in whole(rows, measurement_row, id_of)}


def find_measurement(s: Session, measurement_id: int) -> MeasurementRow | None:
    """One stored measurement, None when there is none of that id, or it is damaged."""
    if not is_id(measurement_id):
        return None
    rows = s.execute(
        select(MeasurementModel, GpuModel.name, ProblemModel)
        .join(GpuModel, MeasurementModel.gpu_id == GpuModel.id)
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
        .where(MeasurementModel.id == measurement_id)
    )
    return next(whole(rows, measurement_row, id_of), None)


def find_build(s: Session, build_id: int) -> Build | None:
    """One stored build, None when there is none of that id."""
    row = s.get(BuildModel, build_id) if is_id(build_id) else None
    return build_of_row(row) if row else None


def demand(s: Session, gpu_name: str | None = None, limit: int = 100) -> list[DemandRow]:
    """What launchers missed, most wanted first. A key that this code cannot read is passed over with a warning."""
    query = select(DemandModel).order_by(DemandModel.count.desc(), DemandModel.id).limit(limit)
    if gpu_name is not None:
        if not is_text(gpu_name):
            return []
        query = query.where(DemandModel.gpu_name == gpu_name)
    return list(whole(s.scalars(query), _demand_row, id_of))


def _demand_row(row: DemandModel) -> DemandRow:
    values = {name: getattr(row, name) for name in DemandRow.__dataclass_fields__ if name != "shape"}
    return checked(DemandRow(shape=read_shape_key(row.kernel, row.shape_key), **values))


def _with_names(query: Select[*Columns]) -> Select[*Columns]:
    return (
        query.select_from(PromotionModel)
        .join(GpuModel, PromotionModel.gpu_id == GpuModel.id)
        .join(ProblemModel, PromotionModel.problem_id == ProblemModel.id)
    )


def _served_generations(kernel: str, problem_ids: Sequence[int] | None = None) -> Select[int]:
    query = select(func.max(PromotionModel.generation)).where(PromotionModel.kernel == kernel, SERVING)
    if problem_ids is not None:
        query = query.where(PromotionModel.problem_id.in_(problem_ids))
    return query.group_by(PromotionModel.gpu_id, PromotionModel.problem_id)


def _same_card(gpu: Gpu | None) -> Sequence[ColumnElement[bool]]:
    if gpu is None:
        return []
    return [
        GpuModel.name == gpu.name,
        GpuModel.sm_count == gpu.sm_count,
        GpuModel.mig_profile == (gpu.mig_profile or ""),
    ]


@functools.lru_cache(maxsize=4096)
def _launch_config(text: str) -> LaunchConfig:
    # Many champions share few configs: 10,000 of them take 0.85 s to read, 1.4 s without this.
    return from_json(LaunchConfig, json.loads(text))


def _champion(
    row: Row[PromotionModel, GpuModel, ProblemModel, MeasurementModel, BuildModel],
) -> Champion | None:
    promotion, gpu, problem, measurement, build = row
    try:
        champion = Champion(
            gpu=gpu_of_row(gpu),
            shape=kda_shape_of_row(problem),
            config=_launch_config(promotion.config_json or ""),
            generation=promotion.generation,
            measured_us=measurement.median_us,
            default_us=promotion.default_us,
            build=build_of_row(build),
            measured_at=rfc3339(measurement.measured_at),
            kernel=promotion.kernel,
            nearest_regret=promotion.nearest_regret,
            estimated=measurement.estimated,
        )
        return checked(champion)
    except StoreError as error:
        pass_over("promotion", promotion.id, error)
    except (KdatuneError, json.JSONDecodeError) as error:
        logger.warning("promotion %d cannot be served (%s); passed over", promotion.id, error)
    return None
