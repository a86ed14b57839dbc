"""Measurements that go into another tuner's file, or come from one: stored once each, by a run that says where from.

They are evidence beside what was measured here. None of them is promoted: what is served is decided by a paired run.
"""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import from_json
from kdatune_tuner.exchange import CONFIG_TYPES
from kdatune_tuner.exchange import Traded
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import writes
from kdatune_tuner.store.checks import plain
from kdatune_tuner.store.convert import build_of_row
from kdatune_tuner.store.convert import kda_shape_of_row
from kdatune_tuner.store.models import BuildModel
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.queries import find_gpu
from kdatune_tuner.store.records import MEASUREMENT_FIELDS
from kdatune_tuner.store.records import NewMeasurement
from kdatune_tuner.store.records import RunState

log = logging.getLogger(__name__)

TRIGGER = "import"
_IDS = ("run_id", "kernel", "gpu_id", "problem_id", "build_id", "config_json", "config_hash", "outcome")


def put_imported(s: Session, found: Sequence[Traded], source: str) -> tuple[int, int]:
    """Store what is not stored yet: how many are new, how many are known. Both or nothing, inside one transaction.

    A measurement is known when one of the same card, shape, build and config has the same values, wherever it is from;
    one whose file does not say when it was measured is compared without its time of day.

    Args:
        source: what is written into the run as its backend, e.g. "t4".

    Raises:
        StoreError: a card of that name is stored with other facts, or a value that no database keeps.
    """
    runs: dict[tuple[str, int, int], int] = {}
    outcomes: dict[int, Counter[str]] = {}
    known = 0
    gpu_ids = {gpu: writes.put_gpu(s, _gpu(s, gpu)) for gpu in {one.gpu for one in found}}
    build_ids = {build: writes.put_build(s, build) for build in {one.build for one in found}}
    problems = {(one.kernel, one.shape) for one in found}
    problem_ids = {problem: writes.put_problem(s, *problem) for problem in problems}
    for one in found:
        gpu_id, build_id, problem_id = gpu_ids[one.gpu], build_ids[one.build], problem_ids[one.kernel, one.shape]
        values = {name: value for name, value in one.values.items() if value is not None}
        columns: dict[str, Any] = values | {
            "kernel": one.kernel,
            "gpu_id": gpu_id,
            "problem_id": problem_id,
            "build_id": build_id,
            "config_json": canonical(one.config),
            "config_hash": digest(one.config),
            "outcome": one.outcome,
        }
        new = NewMeasurement(run_id=None, **columns)
        if _is_known(s, new, timed="measured_at" in values):
            known += 1
            continue
        key = (one.kernel, gpu_id, problem_id)
        if key not in runs:
            runs[key] = writes.start_run(
                s,
                trigger=TRIGGER,
                kernel=one.kernel,
                gpu_id=gpu_id,
                problem_id=problem_id,
                backend=source,
                sampler="none",
            )
        writes.add_measurement(s, replace(new, run_id=runs[key]))
        outcomes.setdefault(runs[key], Counter())[one.outcome.value] += 1
    for run_id, counts in outcomes.items():
        writes.finish_run(s, run_id, outcome_counts=counts, gpu_seconds=0.0, state=RunState.DONE.value)
    return len(found) - known, known


def traded(s: Session, gpu: Gpu, kernel: str, shapes: Sequence[Shape] = ()) -> list[Traded]:
    """What was measured of a kernel on a card and these shapes (none: all), oldest first.

    A row whose config or shape this code cannot read is passed over with a warning.
    """
    query = (
        select(MeasurementModel, ProblemModel, BuildModel)
        .join(GpuModel, MeasurementModel.gpu_id == GpuModel.id)
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
        .join(BuildModel, MeasurementModel.build_id == BuildModel.id)
        .where(MeasurementModel.kernel == kernel, GpuModel.name == gpu.name, GpuModel.sm_count == gpu.sm_count)
        .order_by(MeasurementModel.id)
    )
    if shapes:
        query = query.where(ProblemModel.shape_hash.in_([digest(shape) for shape in shapes]))
    found = []
    for row, problem, build in s.execute(query):
        try:
            found.append(
                Traded(
                    kernel=kernel,
                    gpu=gpu,
                    shape=kda_shape_of_row(problem),
                    build=build_of_row(build),
                    config=from_json(CONFIG_TYPES[kernel], json.loads(row.config_json)),
                    outcome=Outcome(row.outcome),
                    values={name: getattr(row, name) for name in MEASUREMENT_FIELDS if name not in _IDS},
                )
            )
        except KdatuneError as error:
            log.warning("measurement %d cannot be read (%s); passed over", row.id, error)
    return found


def _gpu(s: Session, gpu: Gpu) -> Gpu:
    """The card as it is stored: a file must not change what is known of it."""
    stored = find_gpu(s, gpu.name)
    if stored is None:
        return gpu
    if (stored.compute_capability, stored.sm_count) != (gpu.compute_capability, gpu.sm_count):
        raise StoreError(
            f"{gpu.name} is stored with {stored.sm_count} SMs of {stored.compute_capability}; "
            f"the file says {gpu.sm_count} of {gpu.compute_capability}"
        )
    return stored


def _is_known(s: Session, new: NewMeasurement, *, timed: bool) -> bool:
    query = select(MeasurementModel).where(
        *(getattr(MeasurementModel, name) == getattr(new, name) for name in _IDS if name != "run_id")
    )
    names = [name for name in MEASUREMENT_FIELDS if name not in _IDS and (timed or name != "measured_at")]
    wanted = {name: plain(getattr(new, name)) for name in names}  # as it would be stored
    return any(all(getattr(row, name) == value for name, value in wanted.items()) for row in s.scalars(query))
