"""What is asked of the store about profiles. Every function is called inside `engine.reading` or `writing`."""

import json
from dataclasses import dataclass

from sqlalchemy import Row
from sqlalchemy import Select
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.match import Champion
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.convert import gpu_of_row
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.damaged import whole
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import ProfileModel
from kdatune_tuner.store.records import NewProfile
from kdatune_tuner.store.records import ProfileRow
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.rows import id_of
from kdatune_tuner.store.rows import profile_row


@dataclass(frozen=True)
class StoredProfile:
    """A profile with the benchmark time of the measurement it belongs to."""

    row: ProfileRow
    measured_us: float | None

    @property
    def config(self) -> Json:
        """The profiled launch config (or that of one kernel), as JSON data."""
        data: Json = json.loads(self.row.config_json)
        return data


def put_profile(s: Session, new: NewProfile) -> int:
    """Store a profile and return its id; one that is unavailable for the reason the newest one gives is not repeated.

    Raises:
        StoreError: as `writes.add_profile`.
    """
    if new.unavailable_reason is not None:
        last = s.scalars(
            select(ProfileModel)
            .where(ProfileModel.measurement_id == new.measurement_id, ProfileModel.stage == new.stage)
            .order_by(ProfileModel.id.desc())
            .limit(1)
        ).first()
        if last is not None and last.unavailable_reason == new.unavailable_reason:
            return last.id
    return writes.add_profile(s, new)


def find_profile(s: Session, profile_id: int) -> StoredProfile | None:
    """One stored profile, None when there is none of that id, or it is damaged."""
    rows = s.execute(_with_names().where(ProfileModel.id == profile_id))
    return next(whole(rows, _stored, id_of), None)


def newest_profiles(s: Session, gpu: Gpu, shape: Shape) -> list[StoredProfile]:
    """The newest profile of every measured config and stage of a shape on a card, the unavailable ones included."""
    newest = select(func.max(ProfileModel.id)).group_by(ProfileModel.measurement_id, ProfileModel.stage)
    rows = s.execute(
        _with_names()
        .where(
            ProfileModel.id.in_(newest),
            MeasurementModel.kernel == "kda",
            ProblemModel.shape_hash == digest(shape),
            GpuModel.name == gpu.name,
            GpuModel.sm_count == gpu.sm_count,
            GpuModel.mig_profile == (gpu.mig_profile or ""),
        )
        .order_by(ProfileModel.id.desc())
    )
    found: dict[tuple[str, str], StoredProfile] = {}
    for one in whole(rows, _stored, id_of):
        found.setdefault((one.row.config_json, one.row.stage), one)
    return list(found.values())


def champions_without_counters(s: Session, gpu: Gpu) -> list[Champion]:
    """Champions of a card, oldest generation first, that have no counters of what they launch since they were measured.

    What a nightly run profiles. Where counters are unavailable for a reason of the machine, one attempt tells for all.
    """
    return [champion for champion in queries.champions(s, gpu) if not _has_counters(s, gpu, champion)]


def _has_counters(s: Session, gpu: Gpu, champion: Champion) -> bool:
    config = canonical(champion.config)
    fresh = {
        one.row.stage
        for one in newest_profiles(s, gpu, champion.shape)
        if one.row.config_json == config
        and one.row.counters is not None
        and (champion.measured_at is None or rfc3339(one.row.profiled_at) >= champion.measured_at)
    }
    return fresh >= ({"k2"} if champion.config.k2.whole else {"k1", "k2"})


def profiled_gpus(s: Session, shape: Shape) -> list[Gpu]:
    """The cards that have a profile of a shape, by name."""
    rows = s.scalars(
        select(GpuModel)
        .where(
            GpuModel.id.in_(
                select(MeasurementModel.gpu_id)
                .join(ProfileModel, ProfileModel.measurement_id == MeasurementModel.id)
                .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
                .where(MeasurementModel.kernel == "kda", ProblemModel.shape_hash == digest(shape))
            )
        )
        .order_by(GpuModel.name, GpuModel.id)
    )
    return list(whole(rows, gpu_of_row, id_of))


def _stored(row: Row[ProfileModel, MeasurementModel, str, ProblemModel]) -> StoredProfile:
    return checked(StoredProfile(profile_row(row), row[1].median_us))


def _with_names() -> Select[ProfileModel, MeasurementModel, str, ProblemModel]:
    return (
        select(ProfileModel, MeasurementModel, GpuModel.name, ProblemModel)
        .join(MeasurementModel, ProfileModel.measurement_id == MeasurementModel.id)
        .join(GpuModel, MeasurementModel.gpu_id == GpuModel.id)
        .join(ProblemModel, MeasurementModel.problem_id == ProblemModel.id)
    )
