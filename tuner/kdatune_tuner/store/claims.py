"""Claims: which worker tunes which key, so that workers on several cards and hosts share one work and no key twice.

A key is a problem shape on a GPU model with a build; its plan is what it is tuned with. One worker at a time holds a key,
whatever the plan, and says by a heartbeat that it lives. When the lease ends without one, the next worker takes the key
over and goes on from the trials that are stored. All moments are of the database's clock, so hosts need not agree.

A round is one go through a plan. It begins with the first command; a command with the same plan that starts while keys
of it are held joins the round, and what is done in the round is not taken again.

`take` and the rest are called inside `engine.writing`, `standing` and `round_of` also inside `engine.reading`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from enum import StrEnum

from sqlalchemy import CheckConstraint
from sqlalchemy import ForeignKey
from sqlalchemy import UniqueConstraint
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy import text
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import Mapped
from sqlalchemy.orm import Session
from sqlalchemy.orm import mapped_column

from kdatune_kernels.errors import StoreError
from kdatune_tuner.store.models import Base
from kdatune_tuner.store.models import one_of

MAX_ATTEMPTS = 3
"""Workers that may die of a key in one round. After that it is failed: it must not take all the others down."""


class ClaimState(StrEnum):
    """Where a key stands in its round."""

    OPEN = "open"
    HELD = "held"
    DONE = "done"
    FAILED = "failed"


class ClaimModel(Base):
    """A key of a plan and who tunes it. attempts: how often it was taken in this round without an end in order."""

    __tablename__ = "claim"
    __table_args__ = (
        UniqueConstraint("gpu_id", "problem_id", "build_id", "plan", name="uq_claim_key"),
        CheckConstraint(one_of("state", ClaimState), name="state"),
        CheckConstraint("state <> 'held' OR (owner IS NOT NULL AND lease_ends_at IS NOT NULL)", name="held"),
        CheckConstraint("attempts >= 0", name="attempts"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpu.id"))
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"))
    build_id: Mapped[int] = mapped_column(ForeignKey("build.id"))
    plan: Mapped[str]
    state: Mapped[str]
    owner: Mapped[str | None]
    attempts: Mapped[int]
    detail: Mapped[str | None]
    round_started_at: Mapped[datetime]
    taken_at: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime | None]
    lease_ends_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))


class ClaimLostError(StoreError):
    """The lease ended and another worker has the key: nothing more may be written for it."""


@dataclass(frozen=True)
class Keys:
    """The keys of a plan for one GPU model and build; `problem_ids` are those of kernel "kda", in the order of the work."""

    gpu_id: int
    build_id: int
    problem_ids: tuple[int, ...]
    plan: str


@dataclass(frozen=True)
class Claim:
    """A key that a worker holds."""

    id: int
    problem_id: int
    owner: str
    attempts: int


@dataclass(frozen=True)
class Standing:
    """Where a key stands now. `free`: a worker of the round may take it."""

    problem_id: int
    state: ClaimState
    owner: str | None
    detail: str | None
    free: bool


def database_now(s: Session) -> datetime:
    """The moment by the database's clock (SQLite: this host's), not that of the transaction's start."""
    if s.get_bind().dialect.name == "postgresql":
        now: datetime = s.scalars(select(func.clock_timestamp())).one()
        return now.astimezone(UTC)
    told = s.scalars(text("SELECT strftime('%Y-%m-%dT%H:%M:%f', 'now')")).one()
    return datetime.fromisoformat(told).replace(tzinfo=UTC)


def round_of(s: Session, keys: Keys, started_at: datetime) -> datetime:
    """When the round began that a command of `started_at` belongs to: its own start, or that of the work it joins."""
    now = database_now(s)
    live = [row.round_started_at for row in _rows(s, keys) if _lives(row, now)]
    return min([started_at, *live])


def take(s: Session, keys: Keys, owner: str, lease_seconds: float, since: datetime) -> Claim | None:
    """Hold the first key that is free in the round that began at `since`. None: all are held, done or failed.

    A key that MAX_ATTEMPTS workers died of is marked failed on the way.
    """
    _offer(s, keys, since)
    now = database_now(s)
    elsewhere = _held_by_other_plans(s, keys, now)
    rows = {row.problem_id: row for row in _rows(s, keys, lock=True)}
    for problem_id in keys.problem_ids:
        row = rows.get(problem_id)  # one that is missing is locked by somebody else: passed over
        if row is None or problem_id in elsewhere or not _free(row, now, since):
            continue
        if _before(row, since) or row.state in (ClaimState.DONE, ClaimState.FAILED):
            row.attempts, row.detail, row.round_started_at = 0, None, since
        if row.attempts >= MAX_ATTEMPTS:
            row.detail = row.detail or f"{MAX_ATTEMPTS} workers ended while they tuned it, the last was {row.owner}"
            row.state, row.finished_at, row.lease_ends_at = ClaimState.FAILED.value, now, None
            continue
        row.state, row.owner, row.attempts = ClaimState.HELD.value, owner, row.attempts + 1
        row.taken_at = row.heartbeat_at = now
        row.lease_ends_at = now + timedelta(seconds=lease_seconds)
        row.finished_at = row.run_id = None
        s.flush()
        return Claim(row.id, problem_id, owner, row.attempts)
    return None


def beat(s: Session, claim: Claim, lease_seconds: float) -> None:
    """Say that the holder lives: the lease runs on. Raises ClaimLostError when another one has the key."""
    row = _held(s, claim)
    row.heartbeat_at = database_now(s)
    row.lease_ends_at = row.heartbeat_at + timedelta(seconds=lease_seconds)


def check_held(s: Session, claim: Claim) -> None:
    """Raise ClaimLostError when the key is not ours any more: inside a write, so that a late worker writes nothing."""
    _held(s, claim)


def finish(s: Session, claim: Claim, run_id: int | None) -> None:
    """The key is done; run_id is the run that decided it. Raises ClaimLostError when another one has the key."""
    row = _held(s, claim)
    row.state, row.finished_at, row.run_id = ClaimState.DONE.value, database_now(s), run_id
    row.lease_ends_at = row.detail = None


def fail(s: Session, claim: Claim, detail: str) -> None:
    """The key cannot be tuned, whoever tries. Raises ClaimLostError when another one has the key."""
    row = _held(s, claim)
    row.state, row.finished_at, row.detail = ClaimState.FAILED.value, database_now(s), detail
    row.lease_ends_at = None


def release(s: Session, owner: str, *, detail: str | None = None) -> list[int]:
    """Free what a worker holds, and return the problem ids.

    Args:
        detail: how the worker died; None: it stopped in order, which does not count as an attempt.
    """
    rows = list(s.scalars(select(ClaimModel).where(ClaimModel.owner == owner, ClaimModel.state == ClaimState.HELD)))
    for row in rows:
        row.state, row.lease_ends_at, row.detail = ClaimState.OPEN.value, None, detail
        if detail is None:
            row.attempts = max(0, row.attempts - 1)
    return [row.problem_id for row in rows]


def standing(s: Session, keys: Keys, since: datetime) -> list[Standing]:
    """Every key of the plan in the round that began at `since`, in the order of the work; one not offered yet is open."""
    now = database_now(s)
    elsewhere = _held_by_other_plans(s, keys, now)
    rows = {row.problem_id: row for row in _rows(s, keys)}
    found = []
    for problem_id in keys.problem_ids:
        row = rows.get(problem_id)
        free = problem_id not in elsewhere and (row is None or _free(row, now, since))
        if row is None or (free and row.state in (ClaimState.DONE, ClaimState.FAILED)):
            found.append(Standing(problem_id, ClaimState.OPEN, None, None, free))  # what was done was another round's
        elif problem_id in elsewhere and row.state != ClaimState.HELD and _free(row, now, since):
            found.append(Standing(problem_id, ClaimState.HELD, elsewhere[problem_id], None, False))
        else:
            found.append(Standing(problem_id, ClaimState(row.state), row.owner, row.detail, free))
    return found


def _offer(s: Session, keys: Keys, since: datetime) -> None:
    """The rows exist, whoever comes first."""
    there = {row.problem_id for row in _rows(s, keys)}
    insert = postgresql.insert if s.get_bind().dialect.name == "postgresql" else sqlite.insert
    for problem_id in dict.fromkeys(keys.problem_ids):
        if problem_id not in there:
            s.execute(
                insert(ClaimModel)
                .values(
                    gpu_id=keys.gpu_id,
                    problem_id=problem_id,
                    build_id=keys.build_id,
                    plan=keys.plan,
                    state=ClaimState.OPEN.value,
                    attempts=0,
                    round_started_at=since,
                )
                .on_conflict_do_nothing(index_elements=["gpu_id", "problem_id", "build_id", "plan"])
            )


def _rows(s: Session, keys: Keys, *, lock: bool = False) -> Sequence[ClaimModel]:
    statement = select(ClaimModel).where(
        ClaimModel.gpu_id == keys.gpu_id,
        ClaimModel.build_id == keys.build_id,
        ClaimModel.plan == keys.plan,
        ClaimModel.problem_id.in_(keys.problem_ids),
    )
    # SKIP LOCKED: never wait for a row that another session has; SQLite has no row locks, its BEGIN IMMEDIATE does it
    return s.scalars(statement.with_for_update(skip_locked=True) if lock else statement).all()


def _held_by_other_plans(s: Session, keys: Keys, now: datetime) -> dict[int, str | None]:
    rows = s.scalars(
        select(ClaimModel).where(
            ClaimModel.gpu_id == keys.gpu_id,
            ClaimModel.build_id == keys.build_id,
            ClaimModel.plan != keys.plan,
            ClaimModel.state == ClaimState.HELD,
            ClaimModel.problem_id.in_(keys.problem_ids),
        )
    )
    return {row.problem_id: row.owner for row in rows if _lives(row, now)}


def _lives(row: ClaimModel, now: datetime) -> bool:
    return row.state == ClaimState.HELD and row.lease_ends_at is not None and row.lease_ends_at > now


def _free(row: ClaimModel, now: datetime, since: datetime) -> bool:
    if row.state == ClaimState.OPEN:
        return True
    if row.state == ClaimState.HELD:
        return not _lives(row, now)
    return row.finished_at is None or row.finished_at < since


def _before(row: ClaimModel, since: datetime) -> bool:
    """Whether the row is of an earlier round. Commands that start together may each begin one: what was taken since is ours."""
    return row.round_started_at < since and (row.taken_at is None or row.taken_at < since)


def _held(s: Session, claim: Claim) -> ClaimModel:
    statement = select(ClaimModel).where(
        ClaimModel.id == claim.id, ClaimModel.owner == claim.owner, ClaimModel.state == ClaimState.HELD
    )
    row = s.scalars(statement.with_for_update()).one_or_none()
    if row is None:
        raise ClaimLostError(f"another worker has taken over what {claim.owner} held: its lease had ended")
    return row
