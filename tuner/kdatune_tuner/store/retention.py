"""Thinning of old measurements: what proves something stays for ever, of the rest a sample a week.

Kept are, whatever their age:

- rows that something refers to: a promotion (champion or baseline), a profile, a receipt, a regression;
- of every key and build that is in use the newest row of each config: what a search resumes from;
- of each kernel, card, shape and week the best and the worst time, and some more, spread over the week; for a config that was
  ever served on the key the same by itself, so that its course over the years stays.
"""

from collections import Counter
from collections import defaultdict
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from datetime import UTC
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement
from sqlalchemy import Engine
from sqlalchemy import delete
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy import text
from sqlalchemy.orm import Session

from kdatune_tuner.store.engine import raw
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.models import Base
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import PromotionModel

ROWS_AT_ONCE = 500
"""Rows that one transaction removes: writers wait for it, so it is short."""

REFERRED, RESUMED, EXTREME, SAMPLE = "referred_to", "resumed_from", "best_or_worst", "sample"


class Old(NamedTuple):
    """A measurement that is old enough to be thinned."""

    id: int
    build_id: int
    config_hash: str
    median_us: float | None
    measured_at: datetime


@dataclass
class Plan:
    """What would be removed. kept: how many old measurements stay, by why."""

    old_count: int = 0
    remove: list[int] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)


def plan(engine: Engine, older_than: datetime, per_week: int) -> Plan:
    """What of the measurements made before a moment would be removed. Reads a key at a time.

    Raises:
        StoreError: the database cannot be read.
    """
    found = Plan()
    with reading(engine) as s:
        keys = _keys(s, older_than)
        in_use = _builds_in_use(s, older_than)
    for key in keys:
        with reading(engine) as s:
            rows = _old_rows(s, key, older_than)
            reasons = _reasons(s, key, rows, in_use, per_week)
        found.old_count += len(rows)
        found.kept.update(reasons.values())
        found.remove += [row.id for row in rows if row.id not in reasons]
    return found


def remove(engine: Engine, ids: Sequence[int]) -> Iterator[int]:
    """Remove these measurements, a few in each transaction; gives how many each removed.

    One that something refers to by now stays.

    Raises:
        StoreError: the database refuses, or another writer held it for too long; what was removed until then is removed.
    """
    for start in range(0, len(ids), ROWS_AT_ONCE):
        some = ids[start : start + ROWS_AT_ONCE]
        with writing(engine) as s:
            gone = sorted(set(some) - _referred(s, some))
            if gone:
                s.execute(delete(MeasurementModel).where(MeasurementModel.id.in_(gone)))
        yield len(gone)


def tidy(engine: Engine) -> None:
    """Give the freed space back (SQLite) and tell the planner what the tables hold now (both). Readers are not disturbed.

    Raises:
        StoreError: another writer held the database for too long.
    """
    if engine.dialect.name == "sqlite":
        with raw(engine) as connection:
            connection.execute("VACUUM")
            connection.execute("ANALYZE")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return
    with writing(engine) as s:
        s.execute(text("ANALYZE measurement"))


def size_bytes(engine: Engine) -> int:
    """What the database takes: SQLite's pages, PostgreSQL's measurement table with its indexes."""
    with reading(engine) as s:
        if engine.dialect.name == "sqlite":
            return int(s.scalar(text("PRAGMA page_count")) or 0) * int(s.scalar(text("PRAGMA page_size")) or 0)
        return int(s.scalar(text("SELECT pg_total_relation_size('measurement')")) or 0)


_Key = tuple[str, int, int]  # kernel, gpu id, problem id


def _keys(s: Session, older_than: datetime) -> list[_Key]:
    rows = s.execute(
        select(MeasurementModel.kernel, MeasurementModel.gpu_id, MeasurementModel.problem_id)
        .where(MeasurementModel.measured_at < older_than)
        .distinct()
        .order_by(MeasurementModel.kernel, MeasurementModel.gpu_id, MeasurementModel.problem_id)
    )
    return [(kernel, gpu_id, problem_id) for kernel, gpu_id, problem_id in rows]


def _builds_in_use(s: Session, since: datetime) -> set[int]:
    """Builds that anything was measured with since then."""
    return set(s.scalars(select(MeasurementModel.build_id).where(MeasurementModel.measured_at >= since).distinct()))


def _old_rows(s: Session, key: _Key, older_than: datetime) -> list[Old]:
    rows = s.execute(
        select(*(getattr(MeasurementModel, name) for name in Old._fields))
        .where(*_of(key), MeasurementModel.measured_at < older_than)
        .order_by(MeasurementModel.id)
    )
    return [Old._make(row) for row in rows]


def _reasons(s: Session, key: _Key, rows: Sequence[Old], in_use: Collection[int], per_week: int) -> dict[int, str]:
    """Why old measurements of one key stay, by id; those that are not in it go."""
    reasons: dict[int, str] = {}
    ids = [row.id for row in rows]
    for start in range(0, len(ids), ROWS_AT_ONCE):
        reasons.update(dict.fromkeys(_referred(s, ids[start : start + ROWS_AT_ONCE]), REFERRED))
    for row_id in _resumed(s, key, in_use):
        reasons.setdefault(row_id, RESUMED)
    old = set(ids)
    reasons = {row_id: why for row_id, why in reasons.items() if row_id in old}
    served = _served_hashes(s, key)
    weeks: dict[tuple[int, int, str], list[Old]] = defaultdict(list)
    for row in rows:
        year, week, _ = row.measured_at.astimezone(UTC).isocalendar()
        weeks[year, week, row.config_hash if row.config_hash in served else ""].append(row)
    for of_week in weeks.values():
        timed = [row for row in of_week if row.median_us is not None]
        for extreme in (min(timed, key=_time), max(timed, key=_time)) if timed else ():
            reasons.setdefault(extreme.id, EXTREME)
        rest = [row.id for row in of_week if row.id not in reasons]
        reasons.update(dict.fromkeys(_spread(rest, per_week), SAMPLE))
    return reasons


def _time(row: Old) -> tuple[float, int]:
    return row.median_us or 0.0, row.id


def _spread(ids: Sequence[int], count: int) -> Iterable[int]:
    """So many of the ids, evenly spread."""
    if len(ids) <= count:
        return ids
    return [ids[i * len(ids) // count] for i in range(count)]


def _resumed(s: Session, key: _Key, in_use: Collection[int]) -> list[int]:
    """The newest row of every config, for the builds that are in use and the one that the key was measured with last."""
    last = s.scalar(select(MeasurementModel.build_id).where(*_of(key)).order_by(MeasurementModel.id.desc()).limit(1))
    builds = sorted({*in_use, *([] if last is None else [last])})
    newest = (
        select(func.max(MeasurementModel.id))
        .where(*_of(key), MeasurementModel.build_id.in_(builds))
        .group_by(MeasurementModel.build_id, MeasurementModel.config_hash)
    )
    return [row_id for row_id in s.scalars(newest) if row_id is not None]


def _served_hashes(s: Session, key: _Key) -> set[str]:
    """The configs that were ever put forward to be served on the key."""
    hashes = s.scalars(
        select(PromotionModel.config_hash)
        .where(
            PromotionModel.kernel == key[0],
            PromotionModel.gpu_id == key[1],
            PromotionModel.problem_id == key[2],
            PromotionModel.config_hash.is_not(None),
        )
        .distinct()
    )
    return {one for one in hashes if one is not None}


def _referred(s: Session, ids: Sequence[int]) -> set[int]:
    """Those of the measurements that a row of another table refers to, whichever table that is."""
    found: set[int] = set()
    for table in Base.metadata.sorted_tables:
        for column in table.columns:
            if any(key.column.table.name == MeasurementModel.__tablename__ for key in column.foreign_keys):
                found.update(s.scalars(select(column).where(column.in_(ids)).distinct()))
    return found


def _of(key: _Key) -> tuple[ColumnElement[bool], ...]:
    return (
        MeasurementModel.kernel == key[0],
        MeasurementModel.gpu_id == key[1],
        MeasurementModel.problem_id == key[2],
    )
