"""What the dashboard asks of the store. Read only; every function is called inside `engine.reading`.

Rows that a page takes by the thousand are named tuples of the columns it shows: making ORM objects of 10,000 champions
takes ten times as long as the query. A list that a page shows in part is cut and ordered by the database.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from typing import NamedTuple

from sqlalchemy import ColumnElement
from sqlalchemy import Select
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.convert import is_id
from kdatune_tuner.store.damaged import check_object
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.damaged import whole
from kdatune_tuner.store.damaged import whole_tuples
from kdatune_tuner.store.models import SERVING
from kdatune_tuner.store.models import DemandModel
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.records import MeasurementRow
from kdatune_tuner.store.records import PromotionRow
from kdatune_tuner.store.rows import id_of
from kdatune_tuner.store.rows import measurement_row
from kdatune_tuner.store.rows import promotion_row

MAX_WANTED = 20_000
_CHUNK = 500  # ids of one IN list: PostgreSQL and SQLite plan it well, and SQLite takes no more than 32,766


@dataclass(frozen=True)
class Key:
    """One problem on one card. gpu_ids: every row of `gpu` that is this card (memory sizes are reported differently)."""

    kernel: str
    gpu_ids: tuple[int, ...]
    problem_id: int


class Served(NamedTuple):
    """What is served for one (gpu, problem) of kernel kda: its newest promotion or rollback.

    config_hash, measured_us, build_id and measured_at are None where a rollback serves the default config.
    """

    promotion_id: int
    generation: int
    gpu_id: int
    problem_id: int
    shape_key: str
    n_sequences: int
    n_heads: int
    n_value_heads: int
    n_tokens: int
    dtype: str
    varlen: bool
    config_hash: str | None
    default_us: float | None
    measured_us: float | None
    estimated: bool | None
    build_id: int | None
    measured_at: datetime | None


class Trial(NamedTuple):
    """One measurement of a config, as a search saw it."""

    id: int
    run_id: int | None
    build_id: int
    config_json: str
    config_hash: str
    outcome: str
    detail: str | None
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    requested_num_warps: int | None
    effective_num_warps: int | None
    registers: int | None
    spills: int | None
    smem_bytes: int | None
    occupancy_pct: float | None
    estimated: bool
    measured_at: datetime


class Wanted(NamedTuple):
    """A key that launchers asked for and got no exact answer. `count` would hide the method of a tuple."""

    gpu_name: str
    shape_key: str
    miss_count: int
    first_seen_at: datetime
    last_seen_at: datetime


def served_keys(s: Session, since: int = 0) -> list[Served]:
    """What is served for every key of kernel kda, oldest generation first; since: only what is newer than a generation."""
    rows = s.execute(
        select(
            PromotionModel.id,
            PromotionModel.generation,
            PromotionModel.gpu_id,
            PromotionModel.problem_id,
            ProblemModel.shape_key,
            ProblemModel.n_sequences,
            ProblemModel.n_heads,
            ProblemModel.n_value_heads,
            ProblemModel.n_tokens,
            ProblemModel.dtype,
            ProblemModel.varlen,
            PromotionModel.config_hash,
            PromotionModel.default_us,
            MeasurementModel.median_us,
            MeasurementModel.estimated,
            MeasurementModel.build_id,
            MeasurementModel.measured_at,
        )
        .join(ProblemModel, PromotionModel.problem_id == ProblemModel.id)
        .outerjoin(MeasurementModel, PromotionModel.measurement_id == MeasurementModel.id)
        .where(PromotionModel.generation.in_(served_generations(since)))
        .order_by(PromotionModel.generation)
    )
    return list(whole(rows, lambda row: checked(Served._make(row)), lambda row: ("promotion", row[0])))


def promotions_by_id(s: Session, ids: Sequence[int]) -> dict[int, PromotionRow]:
    """Decisions by their ids."""
    found: dict[int, PromotionRow] = {}
    for some in chunks(ids):
        rows = s.execute(_promotions().where(PromotionModel.id.in_(some)))
        found.update((one.id, one) for one in whole(rows, promotion_row, id_of))
    return found


def measurements_by_id(s: Session, ids: Iterable[int | None]) -> dict[int, MeasurementRow]:
    """Measurements by their ids; None among the ids is passed over."""
    found: dict[int, MeasurementRow] = {}
    for some in chunks([one for one in ids if one is not None]):
        rows = s.execute(_measurements().where(MeasurementModel.id.in_(some)))
        found.update((one.id, one) for one in whole(rows, measurement_row, id_of))
    return found


def wanted_keys(s: Session, gpu_name: str | None = None) -> list[Wanted]:
    """What launchers missed, most wanted first, whether it is served by now or not; at most MAX_WANTED keys."""
    query = select(
        DemandModel.id,
        DemandModel.gpu_name,
        DemandModel.shape_key,
        DemandModel.count,
        DemandModel.first_seen_at,
        DemandModel.last_seen_at,
    ).where(DemandModel.kernel == "kda")
    if gpu_name is not None:
        query = query.where(DemandModel.gpu_name == gpu_name)
    rows = s.execute(query.order_by(DemandModel.count.desc(), DemandModel.id).limit(MAX_WANTED))
    return whole_tuples(rows, Wanted._make, "demand")


def find_problem(s: Session, kernel: str, shape: Shape) -> int | None:
    """The id of (kernel, shape); None when nothing is stored about it."""
    return s.scalar(
        select(ProblemModel.id).where(ProblemModel.kernel == kernel, ProblemModel.shape_hash == digest(shape))
    )


def history(s: Session, key: Key, *, serving_only: bool = False, until: datetime | None = None) -> list[PromotionRow]:
    """Decisions about a key, newest first: all of them, or those that changed what is served."""
    query = _promotions().where(
        PromotionModel.kernel == key.kernel,
        PromotionModel.gpu_id.in_(key.gpu_ids),
        PromotionModel.problem_id == key.problem_id,
    )
    if serving_only:
        query = query.where(SERVING)
    if until is not None:
        query = query.where(PromotionModel.decided_at <= until)
    return list(whole(s.execute(query.order_by(PromotionModel.generation.desc())), promotion_row, id_of))


def newest_measurement(s: Session, key: Key, config_hash: str, until: datetime | None = None) -> MeasurementRow | None:
    """The newest measurement of a config on a key, one that ended ok before any other."""
    query = _measurements().where(*_of(key), MeasurementModel.config_hash == config_hash)
    if until is not None:
        query = query.where(MeasurementModel.measured_at <= until)
    ok_first = (MeasurementModel.outcome == Outcome.OK.value).desc()
    rows = s.execute(query.order_by(ok_first, MeasurementModel.id.desc()).limit(1))
    return next(whole(rows, measurement_row, id_of), None)


def trials(s: Session, key: Key, *, build_id: int | None = None, run_id: int | None = None) -> list[Trial]:
    """What was measured on a key, oldest first."""
    query = select(*(getattr(MeasurementModel, name) for name in Trial._fields)).where(*_of(key))
    if build_id is not None:
        query = query.where(MeasurementModel.build_id == build_id)
    if run_id is not None:
        query = query.where(MeasurementModel.run_id == run_id)
    rows = s.execute(query.order_by(MeasurementModel.id))
    return list(whole(rows, _trial, lambda row: ("measurement", row[0])))


def _trial(row: Any) -> Trial:
    found = checked(Trial._make(row))
    check_object("config_json", found.config_json)
    return found


def newest_trial_id(s: Session, key: Key) -> int:
    """The id of the newest measurement on a key, 0 when there is none: what a kept chart is checked by."""
    return s.scalar(select(func.max(MeasurementModel.id)).where(*_of(key))) or 0


def builds_of(s: Session, key: Key) -> list[tuple[int, int]]:
    """(build id, measurements) of a key, the build that was measured last first."""
    rows = s.execute(
        select(MeasurementModel.build_id, func.count())
        .where(*_of(key))
        .group_by(MeasurementModel.build_id)
        .order_by(func.max(MeasurementModel.id).desc())
    )
    return [(build_id, count) for build_id, count in rows]


def chunks(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    """The ids in lists that one statement takes."""
    wanted = [one for one in ids if is_id(one)]
    return (wanted[start : start + _CHUNK] for start in range(0, len(wanted), _CHUNK))


def _of(key: Key) -> list[ColumnElement[bool]]:
    return [
        MeasurementModel.kernel == key.kernel,
        MeasurementModel.gpu_id.in_(key.gpu_ids),
        MeasurementModel.problem_id == key.problem_id,
    ]


def served_generations(since: int = 0) -> Select[int]:
    """The generation of what is served for each key of kernel kda; since: of keys that changed after a generation."""
    return (
        select(func.max(PromotionModel.generation))
        .where(PromotionModel.kernel == "kda", SERVING, PromotionModel.generation > since)
        .group_by(PromotionModel.gpu_id, PromotionModel.problem_id)
    )


def _promotions() -> Select[PromotionModel, GpuModel, ProblemModel, float | None]:
    return (
        select(PromotionModel, GpuModel, ProblemModel, MeasurementModel.median_us)
        .join(GpuModel, PromotionModel.gpu_id == GpuModel.id)
        .join(ProblemModel, PromotionModel.problem_id == ProblemModel.id)
        .outerjoin(MeasurementModel, PromotionModel.measurement_id == MeasurementModel.id)
    )


def _measurements() -> Select[MeasurementModel, str, ProblemModel]:
    return (
        select(MeasurementModel, GpuModel.name, ProblemModel)
        .join(GpuModel, MeasurementModel.gpu_id == GpuModel.id)
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
    )
