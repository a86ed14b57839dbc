"""POST /v1/demand: misses that launchers counted, in batches. What is missed most is tuned next."""

import logging
from typing import Annotated

from fastapi import APIRouter
from fastapi import Body
from fastapi import Depends
from sqlalchemy.orm import Session

from kdatune_api.auth import guarded
from kdatune_api.auth import security
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import json_body
from kdatune_api.deps import no_query
from kdatune_api.openapi import errors
from kdatune_api.schemas import DemandItem
from kdatune_api.schemas import DemandReport
from kdatune_api.schemas import DemandStored
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.values import OtherShape
from kdatune_tuner.store.access import Scope
from kdatune_tuner.store.intake import demand_room
from kdatune_tuner.store.intake import has_demand
from kdatune_tuner.store.intake import report_quarantine
from kdatune_tuner.store.writes import MAX_DEMAND_COUNT
from kdatune_tuner.store.writes import report_demand

log = logging.getLogger("kdatune.api")

# One report must not fill the log: a launcher sends 100 items at a time.
MAX_NOTED = 20
MAX_REASON_CHARS = 300

router = APIRouter(tags=["demand"], route_class=guarded(Scope.DEMAND))


@router.post(
    "/v1/demand",
    summary="Report misses that launchers counted",
    description="Needs a token unless it comes in on a loopback address (KDATUNE_OPEN_DEMAND).",
    responses=errors(400, 401, 403, 408, 413, 415, 422, 503),
    dependencies=[Depends(no_query), Depends(json_body)],
    openapi_extra={"security": [{}, *security(Scope.DEMAND)["security"]]},
)
def demand(report: Annotated[DemandReport, Body()], service: ServiceDep) -> DemandStored:
    refused = [item for item in report.items if item.quarantined is not None]
    _note(refused)
    service.metrics.quarantined.inc(len(refused))
    counts: dict[tuple[str, str, Shape | OtherShape], int] = {}
    for item in report.items:
        key = (item.gpu, item.kernel, item.shape)
        counts[key] = min(counts.get(key, 0) + item.count, MAX_DEMAND_COUNT)
    with service.writing() as session:
        left_out = _store(session, counts)
        for item in refused:
            assert item.quarantined is not None  # noqa: S101 - the line above has filtered
            why = item.quarantined.reason[:MAX_REASON_CHARS]
            report_quarantine(session, item.gpu, item.kernel, item.shape, item.quarantined.config, why)
    service.metrics.demand.inc(sum(counts.values()))
    return DemandStored(
        item_count=len(report.items),
        key_count=len(counts) - left_out,
        quarantined_count=len(refused),
        left_out_count=left_out,
    )


def _store(session: Session, counts: dict[tuple[str, str, Shape | OtherShape], int]) -> int:
    """Store the misses; how many keys were left out, since the table is full."""
    room, left_out = demand_room(session), 0
    for (gpu, kernel, shape), count in counts.items():
        # keys are looked for one by one only where the table could overflow
        if room < len(counts) and not has_demand(session, gpu, kernel, shape):
            if room == 0:
                left_out += 1
                continue
            room -= 1
        report_demand(session, gpu, kernel, shape, count)
    if left_out:
        log.warning("the demand table is full: %d new keys are left out", left_out)
    return left_out


def _note(refused: list[DemandItem]) -> None:
    """Log configs that launchers could not use: someone has to look at why they were promoted."""
    for item in refused[:MAX_NOTED]:
        assert item.quarantined is not None  # noqa: S101 - the caller has filtered
        fields = {
            "gpu": item.gpu,
            "shape": item.shape.key(),
            "config_hash": digest(item.quarantined.config),
            "reason": item.quarantined.reason[:MAX_REASON_CHARS],
        }
        log.warning("a launcher cannot use a served config", extra={"fields": fields})
