"""What goes into the store and what comes out of it: frozen dataclasses, free of SQLAlchemy."""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from dataclasses import field
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from enum import StrEnum
from typing import Any

from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Shape
from kdatune_kernels.values import OtherShape
from kdatune_tuner.outcome import Outcome

_CLOCK: ContextVar[Callable[[], datetime] | None] = ContextVar("kdatune_clock", default=None)

CLOCKS_APART = timedelta(minutes=10)
"""So far ahead of this machine's clock may be what another one dated."""


def utc_now() -> datetime:
    """Now, in UTC, timezone aware: by the clock of `at_clock` inside its block, else by the machine's."""
    now = _CLOCK.get()
    return datetime.now(UTC) if now is None else now()


@contextmanager
def at_clock(now: Callable[[], datetime] | None) -> Iterator[None]:
    """Inside the block every row is stamped by this clock; None is the machine's own."""
    token = _CLOCK.set(now)
    try:
        yield
    finally:
        _CLOCK.reset(token)


def rfc3339(moment: datetime) -> str:
    """The edge form of a timestamp: RFC 3339, UTC, whole seconds, e.g. 2026-11-29T22:31:00Z."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Decision(StrEnum):
    """What came of a challenger. Only `PROMOTED` and `ROLLBACK` change what is served."""

    PROMOTED = "promoted"
    TIE = "tie"
    REJECTED = "rejected"
    ROLLBACK = "rollback"


SERVING_DECISIONS = (Decision.PROMOTED, Decision.ROLLBACK)


class RunState(StrEnum):
    """Where a run stands. A run whose process died stays `RUNNING`; its age tells."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class NewMeasurement:
    """One measurement as it is written.

    config_json is `canonical(config)` and config_hash is `digest(config)`. Times are of one launch. Error ratios are
    dimensionless; registers and spills are a thread's. `estimated` says that a pair's time is the sum of its parts.
    """

    run_id: int | None
    kernel: str
    gpu_id: int
    problem_id: int
    build_id: int
    config_json: str
    config_hash: str
    outcome: Outcome
    detail: str | None = None
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    sample_count: int | None = None
    o_error_ratio: float | None = None
    state_error_ratio: float | None = None
    requested_num_warps: int | None = None
    effective_num_warps: int | None = None
    registers: int | None = None
    spills: int | None = None
    smem_bytes: int | None = None
    occupancy_pct: float | None = None
    sm_clock_mhz: float | None = None
    throttle_reasons: str | None = None
    regime: str | None = None
    estimated: bool = False
    measured_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class MeasurementRow(NewMeasurement):
    """A stored measurement with the names that its ids stand for."""

    id: int
    gpu_name: str
    shape: Shape | OtherShape


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A stored run. outcome_counts maps an outcome to how many measurements ended so; None while it runs."""

    id: int
    trigger: str
    kernel: str
    gpu_id: int
    gpu_name: str
    problem_id: int
    shape: Shape | OtherShape
    backend: str
    sampler: str
    budget_trials: int | None
    budget_seconds: float | None
    seed: int | None
    optuna_version: str | None
    state: RunState
    outcome_counts: dict[str, int] | None
    gpu_seconds: float | None
    started_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class PromotionRow:
    """One decision about what is served. Gains are speed-ups over the baseline (x, > 1 is faster).

    A rollback to before the first promotion has no measurement and no config: the default config is served again.
    """

    id: int
    kernel: str
    gpu_id: int
    gpu_name: str
    problem_id: int
    shape: Shape | OtherShape
    measurement_id: int | None
    baseline_measurement_id: int | None
    config_json: str | None
    config_hash: str | None
    measured_us: float | None
    default_us: float | None
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    decision: Decision
    reason: str
    generation: int
    decided_at: datetime


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """A stored GPU model and when it was first seen."""

    id: int
    gpu: Gpu
    first_seen_at: datetime


@dataclass(frozen=True, kw_only=True)
class NewProfile:
    """Counters of one stage of one measured config, or the reason why there are none. Unavailable is never 0.

    counters maps a metric name to {"value": number, "unit": text}. report_file is the kept report's name in the reports
    folder, where one was asked for.
    """

    measurement_id: int
    stage: str
    counters: dict[str, dict[str, Any]] | None = None
    issue_active_pct: float | None = None
    barrier_stall_per_issue: float | None = None
    ncu_version: str | None = None
    driver: str | None = None
    report_file: str | None = None
    unavailable_reason: str | None = None
    profiled_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class ProfileRow(NewProfile):
    """A stored profile with what it is a profile of."""

    id: int
    kernel: str
    gpu_name: str
    shape: Shape | OtherShape
    config_json: str


@dataclass(frozen=True, kw_only=True)
class DemandRow:
    """A miss that launchers reported: how often, and when first and last."""

    id: int
    gpu_name: str
    kernel: str
    shape: Shape | OtherShape
    count: int
    first_seen_at: datetime
    last_seen_at: datetime


@dataclass(frozen=True, kw_only=True)
class QuarantineRow:
    """A served config that launchers could not use: how often they said so, and why the last one did."""

    id: int
    gpu_name: str
    kernel: str
    shape: Shape | OtherShape
    config_hash: str
    config_json: str
    reason: str
    count: int
    first_seen_at: datetime
    last_seen_at: datetime


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A bearer token as it is listed. The token itself is kept nowhere."""

    id: int
    name: str
    prefix: str
    scopes: frozenset[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    def is_active(self, at: datetime) -> bool:
        """Whether it may be used at that moment: not revoked, not past its end."""
        return self.revoked_at is None and (self.expires_at is None or at < self.expires_at)


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One write: who, what, when, by which request."""

    id: int
    happened_at: datetime
    actor: str
    token_id: int | None
    action: str
    target: str
    detail: dict[str, Any] | None
    request_id: str | None


MEASUREMENT_FIELDS = tuple(f.name for f in dataclasses.fields(NewMeasurement))
PROFILE_FIELDS = tuple(f.name for f in dataclasses.fields(NewProfile))
