"""Regressions in the store: kept once each, resolved when gone, acknowledged by people, never deleted.

Every function is called inside `engine.reading` or `engine.writing`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from datetime import datetime
from datetime import timedelta
from enum import StrEnum
from math import sqrt
from typing import Any
from typing import NamedTuple

from sqlalchemy import ColumnElement
from sqlalchemy import Select
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.values import OtherShape
from kdatune_tuner.store.access import Caller
from kdatune_tuner.store.access import add_audit
from kdatune_tuner.store.convert import MAX_ID
from kdatune_tuner.store.convert import is_id
from kdatune_tuner.store.convert import is_text
from kdatune_tuner.store.convert import shape_of_row
from kdatune_tuner.store.damaged import check_object
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.damaged import whole
from kdatune_tuner.store.damaged import whole_page
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.records import utc_now
from kdatune_tuner.store.regression_models import RegressionModel
from kdatune_tuner.store.rows import id_of

MAX_NOTE_CHARS = 500
_SAME_STEP = timedelta(days=3)  # what began so near to it is the same step: a night more may move its date


class RegressionState(StrEnum):
    """Where a finding stands. RESOLVED: gone, whether it was acknowledged or not."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    RESOLVED = "resolved"


class SeriesKey(NamedTuple):
    """A config on a key: what one series of times is of."""

    kernel: str
    gpu_id: int
    problem_id: int
    config_hash: str


@dataclass(frozen=True, kw_only=True)
class NewRegression:
    """A step as it is kept. Fields are those of RegressionModel."""

    kernel: str
    gpu_id: int
    problem_id: int
    config_json: str
    config_hash: str
    before_us: float
    after_us: float
    now_us: float
    change_pct: float
    confidence_pct: float
    last_good_at: datetime
    began_at: datetime
    build_before_id: int
    build_after_id: int
    measurement_before_id: int
    measurement_after_id: int
    cause: str
    is_served: bool

    @property
    def key(self) -> SeriesKey:
        return SeriesKey(self.kernel, self.gpu_id, self.problem_id, self.config_hash)


@dataclass(frozen=True, kw_only=True)
class RegressionRow(NewRegression):
    """A stored finding with the names that its ids stand for."""

    id: int
    gpu_name: str
    shape: Shape | OtherShape
    opened_at: datetime
    seen_at: datetime
    resolved_at: datetime | None
    resolution: str | None
    acknowledged_at: datetime | None
    acknowledged_by: str | None
    note: str | None
    state: RegressionState


@dataclass(frozen=True)
class Kept:
    """What became of findings: ids of rows that are new, that hold on, and that ended now."""

    opened: tuple[int, ...]
    still: tuple[int, ...]
    resolved: tuple[int, ...]


@dataclass(frozen=True)
class Standing:
    """How an unresolved finding stands. ended: why it is gone; None where it is not."""

    is_served: bool
    now_us: float | None = None
    ended: str | None = None


_NEW_FIELDS = tuple(f.name for f in fields(NewRegression))
_ROW_FIELDS = tuple(f.name for f in fields(RegressionRow) if f.name not in ("gpu_name", "shape", "state"))
_MOVING = (
    "after_us",
    "now_us",
    "confidence_pct",
    "is_served",
)  # of a finding that holds on; the rest is as it was opened


def keep(s: Session, found: Sequence[NewRegression], stands: Callable[[RegressionRow], Standing]) -> Kept:
    """Store what was found in one look: a step that is stored already is not opened twice.

    Args:
        stands: how an unresolved finding stands whose step was not found again, or whose config is served no longer.
    """
    now = utc_now()
    standing = {row.id: row for row in s.scalars(_models().where(RegressionModel.resolved_at.is_(None)))}
    opened: list[int] = []
    seen: set[int] = set()
    for one in found:
        row = next((row for row in standing.values() if row.id not in seen and _is_same_step(row, one)), None)
        if row is None and not one.is_served and _was_resolved(s, one):
            continue  # nobody is given it any more, which is what closed it
        if row is not None and row.is_served and not one.is_served:
            continue  # its standing says so
        if row is None:
            row = RegressionModel(**{name: getattr(one, name) for name in _NEW_FIELDS}, opened_at=now, seen_at=now)
            s.add(row)
            s.flush()
            opened.append(row.id)
        else:
            for name in _MOVING:
                setattr(row, name, getattr(one, name))
            row.seen_at = now
        seen.add(row.id)
    resolved = []
    rows = {row.id: row for row in _rows(s, RegressionModel.id.in_(sorted(set(standing) - seen)))}
    for row_id, model in standing.items():
        if row_id not in rows:
            continue
        standing_now = stands(rows[row_id])
        model.is_served, model.now_us = standing_now.is_served, standing_now.now_us or model.now_us
        if standing_now.ended is not None:
            model.resolved_at, model.resolution = now, standing_now.ended
            resolved.append(row_id)
    s.flush()
    return Kept(tuple(opened), tuple(sorted(set(standing) - set(resolved))), tuple(resolved))


def acknowledge(s: Session, regression_id: int, by: Caller, note: str | None) -> tuple[RegressionRow, bool]:
    """Say that a person knows of a finding: it is open no longer, and a night does not fail by it. With an audit row.

    Returns the finding and whether this changed it: one that was acknowledged keeps its first word, who, when and why.

    Raises:
        StoreError: no such finding, one that is damaged, or a note or name that is empty, too long or that no database can
            hold.
    """
    said = None if note is None else note.strip()
    if said is not None and not (0 < len(said) <= MAX_NOTE_CHARS and is_text(said)):
        raise StoreError(f"a note must be 1 to {MAX_NOTE_CHARS} characters that a database can hold")
    row = s.get(RegressionModel, regression_id) if is_id(regression_id) else None
    if row is None:
        raise StoreError(f"regression {regression_id} does not exist; see `kdatune regressions --all`")
    changed = row.acknowledged_at is None
    if changed:
        row.acknowledged_at, row.acknowledged_by, row.note = utc_now(), by.name, said
        s.flush()
        add_audit(s, by, "regression.acknowledge", f"regression {regression_id}", {"note": said})
    found = find_regression(s, regression_id)
    if found is None:
        raise StoreError(f"regression {regression_id} is damaged, see the log; it is not acknowledged")
    return found, changed


def find_regression(s: Session, regression_id: int) -> RegressionRow | None:
    """One stored finding, None when there is none of that id."""
    found = _rows(s, RegressionModel.id == regression_id) if is_id(regression_id) else []
    return found[0] if found else None


def regressions_of(s: Session, ids: Sequence[int]) -> list[RegressionRow]:
    """The findings of these ids, oldest first."""
    return _rows(s, RegressionModel.id.in_(ids)) if ids else []


def page_regressions(
    s: Session,
    *,
    gpu_name: str | None = None,
    kernel: str | None = None,
    shape: Shape | OtherShape | None = None,
    state: str | None = None,
    served: bool | None = None,
    after_id: int | None = None,
    limit: int = 100,
    newest_first: bool = False,
) -> list[RegressionRow]:
    """Findings that fit all filters given; state: a RegressionState."""
    conditions: list[ColumnElement[bool]] = []
    if any(isinstance(value, str) and not is_text(value) for value in (gpu_name, kernel)):
        return []
    for column, value in (
        (GpuModel.name, gpu_name),
        (RegressionModel.kernel, kernel),
        (ProblemModel.shape_hash, None if shape is None else digest(shape)),
        (RegressionModel.is_served, served),
    ):
        if value is not None:
            conditions.append(column == value)
    if state is not None:
        conditions += _in_state(RegressionState(state))
    if after_id and not newest_first and not is_id(after_id):
        return []
    query = _query(*conditions, newest_first=newest_first)

    def fetch(after: int | None, count: int) -> Sequence[Any]:
        if not after:
            return s.execute(query.limit(count)).all()
        beyond = RegressionModel.id < min(after, MAX_ID) if newest_first else RegressionModel.id > after
        return s.execute(query.where(beyond).limit(count)).all()

    return whole_page(fetch, _row, id_of, after_id, max(1, min(limit, 1000)))


def count_regressions(s: Session, state: RegressionState, *, served: bool | None = None) -> int:
    """How many findings are in that state."""
    conditions = _in_state(state)
    if served is not None:
        conditions.append(RegressionModel.is_served == served)
    return s.scalar(select(func.count()).select_from(RegressionModel).where(*conditions)) or 0


def _in_state(state: RegressionState) -> list[ColumnElement[bool]]:
    if state is RegressionState.RESOLVED:
        return [RegressionModel.resolved_at.is_not(None)]
    acknowledged = RegressionModel.acknowledged_at
    is_open = acknowledged.is_(None) if state is RegressionState.OPEN else acknowledged.is_not(None)
    return [RegressionModel.resolved_at.is_(None), is_open]


def _state_of(row: RegressionModel) -> RegressionState:
    if row.resolved_at is not None:
        return RegressionState.RESOLVED
    return RegressionState.OPEN if row.acknowledged_at is None else RegressionState.ACKNOWLEDGED


def _is_same_step(row: RegressionModel, new: NewRegression) -> bool:
    """Whether a stored finding is of this step: of the same config on the same key, and from the same level.

    A second step goes up from where the first one ended, which is nearer to its after_us than to its before_us.
    """
    same_key = (row.kernel, row.gpu_id, row.problem_id, row.config_hash) == new.key
    if not same_key:
        return False
    levels: tuple[object, object] = (row.before_us, row.after_us)
    if any(isinstance(level, str) for level in levels):
        return True  # damaged: no second finding is opened beside it
    return new.before_us < sqrt(row.before_us * row.after_us)


def _was_resolved(s: Session, new: NewRegression) -> bool:
    """Whether a finding of this very step was closed before."""
    rows = s.scalars(
        _models().where(
            RegressionModel.kernel == new.kernel,
            RegressionModel.gpu_id == new.gpu_id,
            RegressionModel.problem_id == new.problem_id,
            RegressionModel.config_hash == new.config_hash,
            RegressionModel.resolved_at.is_not(None),
        )
    )
    return any(_is_same_step(row, new) and abs(row.began_at - new.began_at) <= _SAME_STEP for row in rows)


def _models() -> Select[RegressionModel]:
    return select(RegressionModel).order_by(RegressionModel.id)


def _rows(s: Session, *conditions: ColumnElement[bool]) -> list[RegressionRow]:
    return list(whole(s.execute(_query(*conditions)), _row, id_of))


def _query(*conditions: ColumnElement[bool], newest_first: bool = False) -> Any:
    return (
        select(RegressionModel, GpuModel.name, ProblemModel)
        .join(GpuModel, RegressionModel.gpu_id == GpuModel.id)
        .join(ProblemModel, RegressionModel.problem_id == ProblemModel.id)
        .where(*conditions)
        .order_by(RegressionModel.id.desc() if newest_first else RegressionModel.id)
    )


def _row(row: Any) -> RegressionRow:
    model, gpu_name, problem = row
    check_object(f"config_json of regression {model.id}", model.config_json)
    values = {name: getattr(model, name) for name in _ROW_FIELDS}
    return checked(RegressionRow(gpu_name=gpu_name, shape=shape_of_row(problem), state=_state_of(model), **values))


def as_json(row: RegressionRow) -> Mapping[str, Any]:
    """One finding as JSON data for the command line: times in RFC 3339, the shape by its key."""
    values = {name: getattr(row, name) for name in _ROW_FIELDS}
    shown = {name: rfc3339(value) if isinstance(value, datetime) else value for name, value in values.items()}
    return {**shown, "gpu": row.gpu_name, "shape": row.shape.key(), "state": str(row.state)}
