"""The tables of the night shift: nights with their reports, the reference kernel's times, checks of what is served."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import CheckConstraint
from sqlalchemy import ForeignKey
from sqlalchemy import Index
from sqlalchemy.orm import Mapped
from sqlalchemy.orm import mapped_column

from kdatune_tuner.store.models import Base
from kdatune_tuner.store.models import one_of
from kdatune_tuner.store.records import RunState


class Verdict(StrEnum):
    """What a check of a served config says. UNJUDGED: there was nothing to compare with."""

    OK = "ok"
    SLOWER = "slower"
    FAILED = "failed"
    UNJUDGED = "unjudged"


class NightModel(Base):
    """One nightly run: how it ended, how the machine was, and its report (see store/night.py for the report's form).

    machine_ratio: the reference kernel's time over its usual one (x, > 1 is slower); None where it was not measured.
    exit_code: what the process ended with; None while it runs, or where it was killed.
    """

    __tablename__ = "night"
    __table_args__ = (CheckConstraint(one_of("state", RunState), name="state"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpu.id"), index=True)
    build_id: Mapped[int] = mapped_column(ForeignKey("build.id"))
    backend: Mapped[str]
    host: Mapped[str]
    state: Mapped[str]
    exit_code: Mapped[int | None]
    budget_seconds: Mapped[float]
    machine_ratio: Mapped[float | None]
    report: Mapped[dict[str, Any]]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class ReferenceModel(Base):
    """The reference kernel measured once, with all its figures here: thinning `measurement` does not touch them."""

    __tablename__ = "reference_time"
    __table_args__ = (
        CheckConstraint("outcome <> 'ok' OR (median_us IS NOT NULL AND median_us > 0)", name="ok_has_time"),
        Index("ix_reference_time_history", "gpu_id", "build_id", "backend"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    night_id: Mapped[int] = mapped_column(ForeignKey("night.id"), index=True)
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpu.id"))
    build_id: Mapped[int] = mapped_column(ForeignKey("build.id"))
    backend: Mapped[str]
    shape_key: Mapped[str]
    config_hash: Mapped[str]
    outcome: Mapped[str]
    detail: Mapped[str | None]
    median_us: Mapped[float | None]
    p20_us: Mapped[float | None]
    p80_us: Mapped[float | None]
    sample_count: Mapped[int | None]
    sm_clock_mhz: Mapped[float | None]
    throttle_reasons: Mapped[str | None]
    measured_at: Mapped[datetime]


class CheckModel(Base):
    """A served config measured again in a night. measured_us / machine_ratio is its time on a usual machine.

    against_us: the config it was paired with, measured in the same run. expected_us: what it took before, on a usual
    machine.
    """

    __tablename__ = "champion_check"
    __table_args__ = (
        CheckConstraint(one_of("verdict", Verdict), name="verdict"),
        Index("ix_champion_check_history", "gpu_id", "problem_id", "build_id", "config_hash"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    night_id: Mapped[int] = mapped_column(ForeignKey("night.id"), index=True)
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpu.id"))
    build_id: Mapped[int] = mapped_column(ForeignKey("build.id"))
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"))
    config_hash: Mapped[str]
    against_hash: Mapped[str | None]
    outcome: Mapped[str]
    measured_us: Mapped[float | None]
    against_us: Mapped[float | None]
    expected_us: Mapped[float | None]
    machine_ratio: Mapped[float | None]
    verdict: Mapped[str]
    checked_at: Mapped[datetime]
