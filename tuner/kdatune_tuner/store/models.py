"""The tables. Typed SQLAlchemy models, the same for SQLite and PostgreSQL; every constraint has a name."""

from collections.abc import Iterable
from datetime import UTC
from datetime import datetime
from typing import Any
from typing import ClassVar

from sqlalchemy import JSON
from sqlalchemy import BigInteger
from sqlalchemy import CheckConstraint
from sqlalchemy import DateTime
from sqlalchemy import Dialect
from sqlalchemy import Double
from sqlalchemy import ForeignKey
from sqlalchemy import Index
from sqlalchemy import MetaData
from sqlalchemy import Text
from sqlalchemy import TypeDecorator
from sqlalchemy import UniqueConstraint
from sqlalchemy import and_
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.orm import Mapped
from sqlalchemy.orm import mapped_column

from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.records import SERVING_DECISIONS
from kdatune_tuner.store.records import Decision
from kdatune_tuner.store.records import RunState

NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """A timezone-aware timestamp kept in UTC. SQLite has no time zones: there the UTC wall clock is stored."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; store aware timestamps only")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


def one_of(column: str, values: Iterable[str]) -> str:
    """The SQL of a CHECK that the column holds one of the values."""
    return f"{column} IN ({', '.join(repr(str(v)) for v in values)})"


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        float: Double(),
        datetime: UtcDateTime(),
        dict[str, Any]: JSON(none_as_null=True),
        dict[str, int]: JSON(none_as_null=True),
    }


class GpuModel(Base):
    """A GPU model. mig_profile is '' where the card is not split: NULLs would not count as equal in the unique key."""

    __tablename__ = "gpu"
    __table_args__ = (
        UniqueConstraint(
            "name", "compute_capability", "sm_count", "mig_profile", "memory_bytes", name="uq_gpu_identity"
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    compute_capability: Mapped[str]
    sm_count: Mapped[int]
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    l2_bytes: Mapped[int] = mapped_column(BigInteger)
    smem_per_block_bytes: Mapped[int] = mapped_column(BigInteger)
    registers_per_sm: Mapped[int] = mapped_column(BigInteger)
    warps_per_sm: Mapped[int] = mapped_column(BigInteger)
    mig_profile: Mapped[str]
    first_seen_at: Mapped[datetime]


class BuildModel(Base):
    """What measurements were made with; digest is the hash of all its fields."""

    __tablename__ = "build"
    __table_args__ = (UniqueConstraint("digest"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str]
    kernel_hash: Mapped[str]
    space_hash: Mapped[str]
    protocol: Mapped[str]
    triton: Mapped[str]
    ptxas: Mapped[str]
    torch: Mapped[str]
    cuda: Mapped[str]
    driver: Mapped[str]
    first_seen_at: Mapped[datetime]


class ProblemModel(Base):
    """A kernel and a problem shape, exact; the bucket_ columns are what the shape is rounded up to.

    The shape of a kernel other than k1, k2 and kda is shape_json, canonical; then the columns of KDA's shapes are empty.
    """

    __tablename__ = "problem"
    __table_args__ = (
        UniqueConstraint("kernel", "shape_hash"),
        Index("ix_problem_shape_hash", "shape_hash"),
        CheckConstraint("(kernel IN ('k1', 'k2', 'kda')) = (shape_json IS NULL)", name="shape_json"),
        CheckConstraint(
            "shape_json IS NOT NULL OR (n_sequences IS NOT NULL AND n_heads IS NOT NULL AND n_value_heads IS NOT NULL"
            " AND n_tokens IS NOT NULL AND key_dim IS NOT NULL AND value_dim IS NOT NULL AND dtype IS NOT NULL"
            " AND varlen IS NOT NULL AND initial_state IS NOT NULL AND final_state IS NOT NULL"
            " AND state_v_first IS NOT NULL AND state_dtype IS NOT NULL AND bucket_n_sequences IS NOT NULL"
            " AND bucket_n_tokens IS NOT NULL)",
            name="shape_columns",
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    kernel: Mapped[str]
    shape_hash: Mapped[str]
    shape_key: Mapped[str]
    n_sequences: Mapped[int | None] = mapped_column(BigInteger)
    n_heads: Mapped[int | None] = mapped_column(BigInteger)
    n_value_heads: Mapped[int | None] = mapped_column(BigInteger)
    n_tokens: Mapped[int | None] = mapped_column(BigInteger)
    key_dim: Mapped[int | None] = mapped_column(BigInteger)
    value_dim: Mapped[int | None] = mapped_column(BigInteger)
    dtype: Mapped[str | None]
    varlen: Mapped[bool | None]
    longest_tokens: Mapped[int | None] = mapped_column(BigInteger)
    initial_state: Mapped[bool | None]
    final_state: Mapped[bool | None]
    state_v_first: Mapped[bool | None]
    state_dtype: Mapped[str | None]
    bucket_n_sequences: Mapped[int | None] = mapped_column(BigInteger)
    bucket_n_tokens: Mapped[int | None] = mapped_column(BigInteger)
    shape_json: Mapped[str | None]


class RunModel(Base):
    """One search: who asked for it, with what budget, and how it ended."""

    __tablename__ = "run"
    __table_args__ = (CheckConstraint(one_of("state", RunState), name="state"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    trigger: Mapped[str]
    kernel: Mapped[str]
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpu.id"), index=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"), index=True)
    backend: Mapped[str]
    sampler: Mapped[str]
    budget_trials: Mapped[int | None]
    budget_seconds: Mapped[float | None]
    seed: Mapped[int | None] = mapped_column(BigInteger)
    optuna_version: Mapped[str | None]
    state: Mapped[str] = mapped_column(index=True)
    outcome_counts: Mapped[dict[str, int] | None]
    gpu_seconds: Mapped[float | None]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class MeasurementModel(Base):
    """One config measured once: the truth that everything else is derived from. Rows are never updated."""

    __tablename__ = "measurement"
    __table_args__ = (
        CheckConstraint(one_of("outcome", Outcome), name="outcome"),
        CheckConstraint("outcome <> 'ok' OR (median_us IS NOT NULL AND median_us > 0)", name="ok_has_time"),
        Index("ix_measurement_resume", "kernel", "gpu_id", "problem_id", "build_id", "config_hash"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"), index=True)
    kernel: Mapped[str]
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpu.id"), index=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"), index=True)
    build_id: Mapped[int] = mapped_column(ForeignKey("build.id"), index=True)
    config_json: Mapped[str]
    config_hash: Mapped[str]
    outcome: Mapped[str] = mapped_column(index=True)
    detail: Mapped[str | None]
    median_us: Mapped[float | None]
    p20_us: Mapped[float | None]
    p80_us: Mapped[float | None]
    sample_count: Mapped[int | None]
    o_error_ratio: Mapped[float | None]
    state_error_ratio: Mapped[float | None]
    requested_num_warps: Mapped[int | None]
    effective_num_warps: Mapped[int | None]
    registers: Mapped[int | None]
    spills: Mapped[int | None]
    smem_bytes: Mapped[int | None]
    occupancy_pct: Mapped[float | None]
    sm_clock_mhz: Mapped[float | None]
    throttle_reasons: Mapped[str | None]
    regime: Mapped[str | None]
    estimated: Mapped[bool]
    measured_at: Mapped[datetime]


class PromotionModel(Base):
    """One decision about what is served for (kernel, gpu, problem). Rows are only ever added.

    The config is copied here, so that the history says by itself what was served. nearest_regret: see match.Champion.
    """

    __tablename__ = "promotion"
    __table_args__ = (
        UniqueConstraint("generation"),
        CheckConstraint(one_of("decision", Decision), name="decision"),
        CheckConstraint("generation > 0", name="generation"),
        CheckConstraint(
            "(measurement_id IS NULL) = (config_json IS NULL) AND (measurement_id IS NULL) = (config_hash IS NULL)",
            name="config_of_measurement",
        ),
        CheckConstraint("measurement_id IS NOT NULL OR decision = 'rollback'", name="measured"),
        Index("ix_promotion_served", "kernel", "gpu_id", "problem_id", "generation"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    kernel: Mapped[str]
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpu.id"), index=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"), index=True)
    measurement_id: Mapped[int | None] = mapped_column(ForeignKey("measurement.id"), index=True)
    baseline_measurement_id: Mapped[int | None] = mapped_column(ForeignKey("measurement.id"), index=True)
    config_json: Mapped[str | None]
    config_hash: Mapped[str | None]
    default_us: Mapped[float | None]
    gain: Mapped[float | None]
    gain_low: Mapped[float | None]
    gain_high: Mapped[float | None]
    decision: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str]
    generation: Mapped[int]
    decided_at: Mapped[datetime]
    nearest_regret: Mapped[float | None]


class ProfileModel(Base):
    """Hardware counters of one stage of a measured config, or why there are none. Unavailable is never 0.

    report_file: the kept report's name in the reports folder (settings.reports_dir), where one was asked for.
    """

    __tablename__ = "profile"
    __table_args__ = (
        CheckConstraint("stage IN ('k1', 'k2')", name="stage"),
        CheckConstraint("(counters IS NULL) <> (unavailable_reason IS NULL)", name="counters_or_reason"),
        CheckConstraint(
            "unavailable_reason IS NULL OR (issue_active_pct IS NULL AND barrier_stall_per_issue IS NULL)",
            name="unavailable_is_null",
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    measurement_id: Mapped[int] = mapped_column(ForeignKey("measurement.id"), index=True)
    stage: Mapped[str]
    issue_active_pct: Mapped[float | None]
    barrier_stall_per_issue: Mapped[float | None]
    counters: Mapped[dict[str, Any] | None]
    ncu_version: Mapped[str | None]
    driver: Mapped[str | None]
    report_file: Mapped[str | None]
    unavailable_reason: Mapped[str | None]
    profiled_at: Mapped[datetime]


class DemandModel(Base):
    """A miss that launchers reported. Any card may ask, so the card is kept by name, and the shape by its key."""

    __tablename__ = "demand"
    __table_args__ = (
        UniqueConstraint("gpu_name", "kernel", "shape_key"),
        CheckConstraint("count > 0", name="count"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu_name: Mapped[str]
    kernel: Mapped[str]
    shape_key: Mapped[str]
    count: Mapped[int] = mapped_column(BigInteger)
    first_seen_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]


class TokenModel(Base):
    """A bearer token: its public prefix, the sha256 of the whole, and what it may do. The token itself is not kept.

    scopes: names, sorted, one blank between. Rows are never deleted: the audit refers to them.
    """

    __tablename__ = "token"
    __table_args__ = (UniqueConstraint("prefix"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    prefix: Mapped[str]
    token_hash: Mapped[str]
    scopes: Mapped[str]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class AuditModel(Base):
    """Who wrote what, when, by which request. One row a write, in the transaction of the write. Rows are only added."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(primary_key=True)
    happened_at: Mapped[datetime]
    actor: Mapped[str]
    token_id: Mapped[int | None] = mapped_column(ForeignKey("token.id"))
    action: Mapped[str]
    target: Mapped[str]
    detail: Mapped[dict[str, Any] | None]
    request_id: Mapped[str | None]


class ReceiptModel(Base):
    """A posted result that was taken in: the digest of what was posted, so that posting it again adds nothing."""

    __tablename__ = "receipt"
    __table_args__ = (UniqueConstraint("digest"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str]
    measurement_id: Mapped[int] = mapped_column(ForeignKey("measurement.id"), index=True)
    token_id: Mapped[int] = mapped_column(ForeignKey("token.id"))
    received_at: Mapped[datetime]


class QuarantineModel(Base):
    """A served config that launchers could not use. Any launcher may say so, so the card is kept by name."""

    __tablename__ = "quarantine"
    __table_args__ = (
        UniqueConstraint("gpu_name", "kernel", "shape_key", "config_hash"),
        CheckConstraint("count > 0", name="count"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu_name: Mapped[str]
    kernel: Mapped[str]
    shape_key: Mapped[str]
    config_hash: Mapped[str]
    config_json: Mapped[str]
    reason: Mapped[str]
    count: Mapped[int] = mapped_column(BigInteger)
    first_seen_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]


# A generation that was overwritten with text is no generation: SQLite holds any text for greater than every number.
NUMBERED = PromotionModel.generation <= (1 << 31) - 1
SERVING = and_(PromotionModel.decision.in_([decision.value for decision in SERVING_DECISIONS]), NUMBERED)
"""Of a promotion: it changed what is served."""

# The tables of other modules: whoever imports this one has all of them.
from kdatune_tuner.store import claims  # noqa: E402, F401
from kdatune_tuner.store import night_models  # noqa: E402, F401
from kdatune_tuner.store import regression_models  # noqa: E402, F401
