"""What is served of kernels that this code does not know. What reads is called inside `engine.reading`."""

import json
import logging
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import fields
from dataclasses import replace

from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import StoreError
from kdatune_kernels.others import OtherChampion
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OUR_KERNELS
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_tuner.store.convert import build_of_row
from kdatune_tuner.store.convert import gpu_of_row
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.damaged import pass_over
from kdatune_tuner.store.models import SERVING
from kdatune_tuner.store.models import BuildModel
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.records import rfc3339

logger = logging.getLogger(__name__)


def other_champions(
    s: Session, gpu: Gpu | None = None, kernel: str | None = None, *, problem_ids: Sequence[int] | None = None
) -> list[OtherChampion]:
    """The served best of every shape of every other kernel, oldest generation first.

    A row that cannot be read is passed over with a warning, and of a card that was stored with several memory sizes the
    newest promotion counts: as for `queries.champions`.

    Args:
        gpu: only this card. kernel: only this kernel.
        problem_ids: only these problems, on every card; a few hundred at most.
    """
    newest = select(func.max(PromotionModel.generation)).where(SERVING)
    if problem_ids is not None:
        newest = newest.where(PromotionModel.problem_id.in_(problem_ids))
    newest = newest.group_by(PromotionModel.gpu_id, PromotionModel.problem_id)
    query = (
        select(PromotionModel, GpuModel, ProblemModel, MeasurementModel, BuildModel)
        .join(GpuModel, PromotionModel.gpu_id == GpuModel.id)
        .join(ProblemModel, PromotionModel.problem_id == ProblemModel.id)
        .join(MeasurementModel, PromotionModel.measurement_id == MeasurementModel.id)
        .join(BuildModel, MeasurementModel.build_id == BuildModel.id)
    )
    if kernel is None:
        newest = newest.where(PromotionModel.kernel.not_in(OUR_KERNELS))
    else:
        newest = newest.where(PromotionModel.kernel == kernel)
    if gpu is not None:
        query = query.where(
            GpuModel.name == gpu.name,
            GpuModel.sm_count == gpu.sm_count,
            GpuModel.mig_profile == (gpu.mig_profile or ""),
        )
    found: dict[tuple[object, ...], OtherChampion] = {}
    rows = s.execute(query.where(PromotionModel.generation.in_(newest)).order_by(PromotionModel.generation))
    for promotion, card_row, problem, measurement, build in rows:
        try:
            card = gpu_of_row(card_row)
            champion = OtherChampion(
                kernel=promotion.kernel,
                gpu=card,
                shape=OtherShape(json.loads(problem.shape_json or "")),
                config=OtherConfig(json.loads(promotion.config_json or "")),
                generation=promotion.generation,
                measured_us=measurement.median_us,
                default_us=promotion.default_us,
                build=build_of_row(build),
                measured_at=rfc3339(measurement.measured_at),
            )
            checked(champion)
        except StoreError as error:
            pass_over("promotion", promotion.id, error)
            continue
        except (KdatuneError, json.JSONDecodeError) as error:
            logger.warning("promotion %d cannot be served (%s); passed over", promotion.id, error)
            continue
        found[champion.kernel, card.name, card.sm_count, card.mig_profile, champion.shape] = champion
    return sorted(found.values(), key=lambda champion: champion.generation)


def marked_others(champions: Iterable[OtherChampion]) -> list[OtherChampion]:
    """The champions with `stale_reason` set on those that were measured with something else than what is in use.

    As `staleness.marked`: what is in use on a card is told by its newest champion of the kernel, and what of the kernel's own
    code is in use by this installation, where it is installed here.
    """
    champions = list(champions)
    newest: dict[tuple[str, Gpu], Build] = {}
    for one in sorted(champions, key=lambda c: (c.measured_at or "", c.generation)):
        if one.build is not None:
            newest[one.kernel, one.gpu] = one.build
    hashes = {name: _hashes(name) for name in {one.kernel for one in champions}}
    return [
        replace(one, stale_reason=reason)
        if (reason := _stale(one, newest.get((one.kernel, one.gpu)), hashes[one.kernel]))
        else one
        for one in champions
    ]


def _hashes(kernel: str) -> tuple[str, str] | None:
    """Kernel and space hash of what is installed here; None where nothing is, or its code cannot be read."""
    installed = registry().get(kernel)
    try:
        return None if installed is None else (installed.kernel_hash(), installed.space_hash())
    except KdatuneError as error:
        logger.warning("%s; whether its champions are stale is not known", error)
        return None


def _stale(champion: OtherChampion, newest: Build | None, hashes: tuple[str, str] | None) -> str | None:
    build = champion.build
    if build is None:
        return "what it was measured with is not known"
    if newest is not None and build != newest:
        changed = [f.name for f in fields(Build) if getattr(build, f.name) != getattr(newest, f.name)]
        return f"measured with {'; '.join(f'{n} {getattr(build, n)}, now {getattr(newest, n)}' for n in changed)}"[:500]
    if hashes is not None and build.kernel_hash != hashes[0]:
        return f"measured with kernel sources {build.kernel_hash}, those installed here are {hashes[0]}"
    if hashes is not None and build.space_hash != hashes[1]:
        return "the config space has changed since it was tuned"
    return None
