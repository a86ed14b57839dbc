"""From the rows of a query to the frozen records that leave the store.

Every function raises StoreError for a row that is damaged: JSON in it that is none, or a number.
"""

from typing import Any

from sqlalchemy import Row

from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.convert import gpu_of_row
from kdatune_tuner.store.convert import shape_of_row
from kdatune_tuner.store.damaged import check_json
from kdatune_tuner.store.damaged import check_object
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import ProfileModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.models import RunModel
from kdatune_tuner.store.records import MEASUREMENT_FIELDS
from kdatune_tuner.store.records import PROFILE_FIELDS
from kdatune_tuner.store.records import Decision
from kdatune_tuner.store.records import GpuRow
from kdatune_tuner.store.records import MeasurementRow
from kdatune_tuner.store.records import ProfileRow
from kdatune_tuner.store.records import PromotionRow
from kdatune_tuner.store.records import RunRow
from kdatune_tuner.store.records import RunState

_OWN = {"shape", "gpu_name", "measured_us", "id", "decision", "state", "outcome"}
_PROMOTION_FIELDS = tuple(name for name in PromotionRow.__dataclass_fields__ if name not in _OWN)
_RUN_FIELDS = tuple(name for name in RunRow.__dataclass_fields__ if name not in _OWN)


def measurement_row(row: Row[MeasurementModel, str, ProblemModel]) -> MeasurementRow:
    """(MeasurementModel, gpu name, ProblemModel) as a record."""
    measurement, gpu_name, problem = row
    check_object(f"config_json of measurement {measurement.id}", measurement.config_json)
    values = {name: getattr(measurement, name) for name in MEASUREMENT_FIELDS}
    values["outcome"] = Outcome(measurement.outcome)
    return checked(MeasurementRow(id=measurement.id, gpu_name=gpu_name, shape=shape_of_row(problem), **values))


def promotion_row(row: Row[PromotionModel, GpuModel, ProblemModel, float | None]) -> PromotionRow:
    """(PromotionModel, GpuModel, ProblemModel, median_us) as a record."""
    promotion, gpu, problem, median_us = row
    check_object(f"config_json of promotion {promotion.id}", promotion.config_json)
    found = PromotionRow(
        id=promotion.id,
        gpu_name=gpu.name,
        shape=shape_of_row(problem),
        measured_us=median_us,
        decision=Decision(promotion.decision),
        **{name: getattr(promotion, name) for name in _PROMOTION_FIELDS},
    )
    return checked(found)


def run_row(row: Row[RunModel, str, ProblemModel]) -> RunRow:
    """(RunModel, gpu name, ProblemModel) as a record."""
    run, gpu_name, problem = row
    check_json(f"outcome_counts of run {run.id}", run.outcome_counts)
    found = RunRow(
        id=run.id,
        gpu_name=gpu_name,
        shape=shape_of_row(problem),
        state=RunState(run.state),
        **{name: getattr(run, name) for name in _RUN_FIELDS},
    )
    return checked(found)


def profile_row(row: Row[ProfileModel, MeasurementModel, str, ProblemModel]) -> ProfileRow:
    """(ProfileModel, MeasurementModel, gpu name, ProblemModel) as a record."""
    profile, measurement, gpu_name, problem = row
    check_object(f"config_json of measurement {measurement.id}", measurement.config_json)
    check_json(f"counters of profile {profile.id}", profile.counters)
    found = ProfileRow(
        id=profile.id,
        kernel=measurement.kernel,
        gpu_name=gpu_name,
        shape=shape_of_row(problem),
        config_json=measurement.config_json,
        **{name: getattr(profile, name) for name in PROFILE_FIELDS},
    )
    return checked(found)


def gpu_row(row: GpuModel) -> GpuRow:
    """A row of `gpu` as a record."""
    return GpuRow(id=row.id, gpu=gpu_of_row(row), first_seen_at=row.first_seen_at)


def id_of(row: Any) -> tuple[str, int]:
    """The table and id of a row that a query gave, of its first column where it has several: for `damaged.whole`."""
    model = row[0] if isinstance(row, Row) else row
    return model.__tablename__, model.id
