"""What was measured of a stage on other shapes of a card: what a search takes its first guess from."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.convert import kda_shape_of_row
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel


@dataclass(frozen=True)
class SweepKey:
    """Measurements of one shape with one build."""

    problem_id: int
    build_id: int
    shape: Shape


def sweep_keys(s: Session, kernel: str, gpu_id: int) -> list[SweepKey]:
    """Every shape that a stage was measured on with a card, each with the newest build only."""
    newest = (
        select(MeasurementModel.problem_id, MeasurementModel.build_id, func.max(MeasurementModel.id).label("last"))
        .where(MeasurementModel.kernel == kernel, MeasurementModel.gpu_id == gpu_id)
        .group_by(MeasurementModel.problem_id, MeasurementModel.build_id)
        .subquery()
    )
    rows = s.execute(
        select(ProblemModel, newest.c.build_id)
        .join(newest, newest.c.problem_id == ProblemModel.id)
        .order_by(newest.c.last)
    )
    found: dict[int, SweepKey] = {}
    for problem, build_id in rows:
        try:
            found[problem.id] = SweepKey(problem.id, build_id, kda_shape_of_row(problem))
        except KdatuneError:
            continue  # damaged: it suggests nothing
    return list(found.values())


def sweep_times(s: Session, kernel: str, gpu_id: int, key: SweepKey) -> Iterator[tuple[Json, float]]:
    """The configs that ran, with their times in us; of a config measured again the newest comes last."""
    rows = s.execute(
        select(MeasurementModel.config_json, MeasurementModel.median_us)
        .where(
            MeasurementModel.kernel == kernel,
            MeasurementModel.gpu_id == gpu_id,
            MeasurementModel.problem_id == key.problem_id,
            MeasurementModel.build_id == key.build_id,
            MeasurementModel.outcome == Outcome.OK,
            MeasurementModel.median_us > 0,
        )
        .order_by(MeasurementModel.id)
    )
    for text, median_us in rows:
        try:
            config = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(median_us, float):  # else somebody overwrote it
            yield config, median_us
