"""The one write path. Every function is called inside `engine.writing`, which makes writers go one at a time."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import CursorResult
from sqlalchemy import Insert
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy import update
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import Session

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import to_json
from kdatune_kernels.values import OtherShape
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.checks import KERNELS
from kdatune_tuner.store.checks import check_kernel
from kdatune_tuner.store.checks import check_measurement
from kdatune_tuner.store.checks import check_profile
from kdatune_tuner.store.checks import check_shape
from kdatune_tuner.store.checks import check_texts
from kdatune_tuner.store.checks import plain
from kdatune_tuner.store.convert import gpu_columns
from kdatune_tuner.store.convert import is_id
from kdatune_tuner.store.convert import shape_columns
from kdatune_tuner.store.models import NUMBERED
from kdatune_tuner.store.models import SERVING
from kdatune_tuner.store.models import Base
from kdatune_tuner.store.models import BuildModel
from kdatune_tuner.store.models import DemandModel
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import ProfileModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.models import RunModel
from kdatune_tuner.store.records import MEASUREMENT_FIELDS
from kdatune_tuner.store.records import PROFILE_FIELDS
from kdatune_tuner.store.records import SERVING_DECISIONS
from kdatune_tuner.store.records import Decision
from kdatune_tuner.store.records import NewMeasurement
from kdatune_tuner.store.records import NewProfile
from kdatune_tuner.store.records import RunState
from kdatune_tuner.store.records import utc_now

__all__ = [
    "KERNELS",
    "MAX_DEMAND_COUNT",
    "add_measurement",
    "add_profile",
    "finish_run",
    "promote",
    "put_build",
    "put_gpu",
    "put_problem",
    "report_demand",
    "rollback",
    "start_run",
]

MAX_DEMAND_COUNT = 1_000_000
"""Misses one report may claim for one key: more is a fault of the one who reports."""


def put_gpu(s: Session, gpu: Gpu) -> int:
    """The id of the GPU model, added when it is new. Limits that a driver reports anew replace the stored ones.

    Raises:
        StoreError: a text that no database can hold.
    """
    columns = gpu_columns(gpu)
    check_texts("gpu", columns)
    identity = ("name", "compute_capability", "sm_count", "mig_profile", "memory_bytes")
    key = {name: columns[name] for name in identity}
    gpu_id = _put(s, GpuModel, key, columns | {"first_seen_at": utc_now()})
    facts = {name: value for name, value in columns.items() if name not in identity and value}
    s.execute(update(GpuModel).where(GpuModel.id == gpu_id).values(**facts))
    return gpu_id


def put_build(s: Session, build: Build) -> int:
    """The id of the build, added when it is new. Raises StoreError for a text that no database can hold."""
    columns = to_json(build)
    check_texts("build", columns)
    return _put(s, BuildModel, {"digest": digest(build)}, columns | {"first_seen_at": utc_now()})


def put_problem(s: Session, kernel: str, shape: Shape | OtherShape) -> int:
    """The id of (kernel, shape), added when it is new. Raises StoreError for an unknown kernel or a shape of another."""
    check_shape(kernel, shape)
    return _put(s, ProblemModel, {"kernel": kernel, "shape_hash": digest(shape)}, shape_columns(shape))


def start_run(
    s: Session,
    *,
    trigger: str,
    kernel: str,
    gpu_id: int,
    problem_id: int,
    backend: str,
    sampler: str,
    budget_trials: int | None = None,
    budget_seconds: float | None = None,
    seed: int | None = None,
    optuna_version: str | None = None,
) -> int:
    """Open a run and return its id. Raises StoreError for an unknown kernel."""
    check_kernel(kernel)
    run = RunModel(
        trigger=plain(trigger),
        kernel=kernel,
        gpu_id=gpu_id,
        problem_id=problem_id,
        backend=plain(backend),
        sampler=plain(sampler),
        budget_trials=budget_trials,
        budget_seconds=budget_seconds,
        seed=seed,
        optuna_version=optuna_version,
        state=RunState.RUNNING.value,
        started_at=utc_now(),
    )
    s.add(run)
    s.flush()
    return run.id


def finish_run(s: Session, run_id: int, *, outcome_counts: Mapping[str, int], gpu_seconds: float, state: str) -> None:
    """Close a run.

    Args:
        outcome_counts: how many measurements ended how; keys are `Outcome` values.
        gpu_seconds: time the card was used.
        state: a `RunState` other than running.

    Raises:
        StoreError: no such run, one that is closed already, an unknown state or outcome.
    """
    ends = [end.value for end in RunState if end is not RunState.RUNNING]
    if state not in ends:
        raise StoreError(f"run {run_id}: state {state!r} is not an end; use one of {', '.join(ends)}")
    unknown = sorted(set(map(str, outcome_counts)) - {outcome.value for outcome in Outcome})
    if unknown:
        raise StoreError(f"run {run_id}: unknown outcome(s) {', '.join(unknown)}")
    result = s.execute(
        update(RunModel)
        .where(RunModel.id == run_id, RunModel.state == RunState.RUNNING.value)
        .values(
            outcome_counts={str(k): v for k, v in outcome_counts.items()},
            gpu_seconds=gpu_seconds,
            state=str(state),
            finished_at=utc_now(),
        )
    )
    if _rows(result) != 1:
        raise StoreError(f"run {run_id} is not running: it does not exist or is closed already")


def add_measurement(s: Session, new: NewMeasurement) -> int:
    """Store one measurement and return its id. An error ratio that is not finite is stored as None: the outcome tells.

    Raises:
        StoreError: the config is not in canonical form or its hash is of another config, an outcome ok without a time,
            a time that is not a positive finite number, a count out of range, or a reference to a row that is not there.
    """
    check_measurement(new)
    row = MeasurementModel(**{name: plain(getattr(new, name)) for name in MEASUREMENT_FIELDS})
    s.add(row)
    s.flush()
    return row.id


def promote(
    s: Session,
    *,
    kernel: str,
    gpu_id: int,
    problem_id: int,
    measurement_id: int,
    baseline_measurement_id: int | None,
    default_us: float | None,
    gain: float | None,
    gain_low: float | None,
    gain_high: float | None,
    decision: str,
    reason: str,
    nearest_regret: float | None = None,
) -> int:
    """Record a decision about a challenger and return its generation; "promoted" and "rollback" serve it from now on.

    Args:
        gain: speed-up over the baseline (x, > 1 is faster), with its interval gain_low..gain_high.
        decision: a `Decision`.
        nearest_regret: what the nearest answer would have cost for the shape (time over the best, x, >= 1).

    Raises:
        StoreError: unknown decision; the measurement is not there or of another kernel, card or shape; or its outcome
            is not ok while the decision would serve it.
    """
    if decision not in {d.value for d in Decision}:
        raise StoreError(f"unknown decision {decision!r}; use one of {', '.join(Decision)}")
    measurement = s.get(MeasurementModel, measurement_id) if is_id(measurement_id) else None
    if measurement is None:
        raise StoreError(f"measurement {measurement_id} does not exist")
    if (measurement.kernel, measurement.gpu_id, measurement.problem_id) != (kernel, gpu_id, problem_id):
        raise StoreError(f"measurement {measurement_id} is of another kernel, GPU model or problem shape")
    if decision in SERVING_DECISIONS and measurement.outcome != Outcome.OK:
        raise StoreError(f"measurement {measurement_id} ended {measurement.outcome}; only an ok one can be served")
    return _add_promotion(
        s,
        kernel=kernel,
        gpu_id=gpu_id,
        problem_id=problem_id,
        measurement_id=measurement_id,
        baseline_measurement_id=baseline_measurement_id,
        config_json=measurement.config_json,
        config_hash=measurement.config_hash,
        default_us=plain(default_us),
        gain=plain(gain),
        gain_low=plain(gain_low),
        gain_high=plain(gain_high),
        decision=str(decision),
        reason=plain(reason),
        nearest_regret=plain(nearest_regret),
    )


def rollback(s: Session, promotion_id: int, reason: str) -> int:
    """Undo the promotion that is served now: what was served before it is served again. Returns the new generation.

    Before the first promotion the default config was served; then the new row has no config.

    Raises:
        StoreError: no such promotion, or another one is served for its key by now.
    """
    undone = s.get(PromotionModel, promotion_id) if is_id(promotion_id) else None
    if undone is None:
        raise StoreError(f"promotion {promotion_id} does not exist")
    served = list(
        s.scalars(
            select(PromotionModel)
            .where(
                PromotionModel.kernel == undone.kernel,
                PromotionModel.gpu_id == undone.gpu_id,
                PromotionModel.problem_id == undone.problem_id,
                SERVING,
            )
            .order_by(PromotionModel.generation.desc())
            .limit(2)
        )
    )
    if not served or served[0].id != promotion_id:
        now = f"promotion {served[0].id} is" if served else "nothing is"
        raise StoreError(f"promotion {promotion_id} is not what is served: {now} served for its key by now")
    before = served[1] if len(served) > 1 else None
    return _add_promotion(
        s,
        kernel=undone.kernel,
        gpu_id=undone.gpu_id,
        problem_id=undone.problem_id,
        measurement_id=before.measurement_id if before else None,
        baseline_measurement_id=undone.measurement_id,
        config_json=before.config_json if before else None,
        config_hash=before.config_hash if before else None,
        default_us=before.default_us if before else undone.default_us,
        decision=Decision.ROLLBACK.value,
        reason=plain(reason),
    )


def add_profile(s: Session, new: NewProfile) -> int:
    """Store the counters of one stage, or why there are none, and return the id.

    Raises:
        StoreError: both or neither of counters and unavailable_reason, an unknown stage, a counter without value and
            unit, or a measurement that is not there.
    """
    check_profile(new)
    row = ProfileModel(**{name: plain(getattr(new, name)) for name in PROFILE_FIELDS})
    s.add(row)
    s.flush()
    return row.id


def report_demand(s: Session, gpu_name: str, kernel: str, shape: Shape | OtherShape, count: int) -> None:
    """Add misses that launchers counted for a key.

    Raises:
        StoreError: an unknown kernel, a name that no database can hold, or a count outside 1..1,000,000.
    """
    check_shape(kernel, shape)
    check_texts("demand", {"gpu_name": gpu_name})
    if not 1 <= count <= MAX_DEMAND_COUNT:
        raise StoreError(f"demand count {count} is outside 1..{MAX_DEMAND_COUNT}")
    now = utc_now()
    statement = _insert(s, DemandModel).values(
        gpu_name=gpu_name,
        kernel=kernel,
        shape_key=shape.key(),
        count=count,
        first_seen_at=now,
        last_seen_at=now,
    )
    s.execute(
        statement.on_conflict_do_update(
            index_elements=["gpu_name", "kernel", "shape_key"],
            set_={"count": DemandModel.count + statement.excluded.count, "last_seen_at": now},
        )
    )


def _add_promotion(s: Session, **columns: Any) -> int:
    # Writers go one at a time, so nobody takes this generation in between; the unique constraint would tell.
    last = s.scalar(select(func.max(PromotionModel.generation)).where(NUMBERED)) or 0
    s.add(PromotionModel(generation=last + 1, decided_at=utc_now(), **columns))
    s.flush()
    return last + 1


def _insert(s: Session, model: type[Base]) -> Any:
    dialect = s.get_bind().dialect.name
    return postgresql.insert(model) if dialect == "postgresql" else sqlite.insert(model)


def _put(s: Session, model: Any, key: Mapping[str, Any], columns: Mapping[str, Any]) -> int:
    """Get or create by a unique key. Looks first: an insert that conflicts would use up an id on PostgreSQL."""
    find = select(model.id).filter_by(**key)
    found = s.scalar(find)
    if found is None:
        insert: Insert = _insert(s, model).values(**{**columns, **key}).on_conflict_do_nothing(index_elements=list(key))
        s.execute(insert)
        found = s.scalar(find)
    if found is None:
        raise StoreError(f"{model.__tablename__} {dict(key)} was removed while it was added")
    return int(found)


def _rows(result: Any) -> int:
    return result.rowcount if isinstance(result, CursorResult) else 0
