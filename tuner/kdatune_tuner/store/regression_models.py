"""The table of regressions that were found in the stored history."""

from datetime import datetime

from sqlalchemy import CheckConstraint
from sqlalchemy import ForeignKey
from sqlalchemy import Index
from sqlalchemy.orm import Mapped
from sqlalchemy.orm import mapped_column

from kdatune_tuner.store.models import Base


class RegressionModel(Base):
    """A config that became slower on one key. Opened when first seen, resolved when gone, never deleted.

    before_us, after_us, now_us: medians of the nights before the step, of those after it, and of the newest ones, each
    divided by how much slower than usual the reference kernel was in that night.
    measurement_before_id and measurement_after_id: on both sides of the step; retention keeps them.
    build_before_id and build_after_id: what these were made with. cause: in words what differs between the two.
    is_served: whether launchers were given this config when it was last looked at.
    """

    __tablename__ = "regression"
    __table_args__ = (
        CheckConstraint("before_us > 0 AND after_us > before_us", name="slower"),
        CheckConstraint("(resolved_at IS NULL) = (resolution IS NULL)", name="resolution"),
        CheckConstraint("(acknowledged_at IS NULL) = (acknowledged_by IS NULL)", name="acknowledged"),
        Index("ix_regression_key", "kernel", "gpu_id", "problem_id", "config_hash"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    kernel: Mapped[str]
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpu.id"))
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"))
    config_json: Mapped[str]
    config_hash: Mapped[str]
    before_us: Mapped[float]
    after_us: Mapped[float]
    now_us: Mapped[float]
    change_pct: Mapped[float]
    confidence_pct: Mapped[float]
    last_good_at: Mapped[datetime]
    began_at: Mapped[datetime]
    build_before_id: Mapped[int] = mapped_column(ForeignKey("build.id"))
    build_after_id: Mapped[int] = mapped_column(ForeignKey("build.id"))
    measurement_before_id: Mapped[int] = mapped_column(ForeignKey("measurement.id"), index=True)
    measurement_after_id: Mapped[int] = mapped_column(ForeignKey("measurement.id"), index=True)
    cause: Mapped[str]
    is_served: Mapped[bool]
    opened_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    resolved_at: Mapped[datetime | None]
    resolution: Mapped[str | None]
    acknowledged_at: Mapped[datetime | None]
    acknowledged_by: Mapped[str | None]
    note: Mapped[str | None]
