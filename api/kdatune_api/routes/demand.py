"""POST /v1/demand: misses that launchers counted, in batches. What is missed most is tuned next."""

import logging
from typing import Annotated

from fastapi import APIRouter
from fastapi import Body
from fastapi import Depends

from kdatune_api.deps import ServiceDep
from kdatune_api.deps import json_body
from kdatune_api.deps import no_query
from kdatune_api.openapi import errors
from kdatune_api.schemas import DemandItem
from kdatune_api.schemas import DemandReport
from kdatune_api.schemas import DemandStored
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_tuner.store.writes import MAX_DEMAND_COUNT
from kdatune_tuner.store.writes import report_demand

log = logging.getLogger("kdatune.api")

# One report must not fill the log: a launcher sends 100 items at a time.
MAX_NOTED = 20
MAX_REASON_CHARS = 300

router = APIRouter(tags=["demand"])


@router.post(
    "/v1/demand",
    summary="Report misses that launchers counted",
    responses=errors(400, 413, 415, 422, 503),
    dependencies=[Depends(no_query), Depends(json_body)],
)
def demand(report: Annotated[DemandReport, Body()], service: ServiceDep) -> DemandStored:
    refused = [item for item in report.items if item.quarantined is not None]
    _note(refused)
    service.metrics.quarantined.inc(len(refused))
    counts: dict[tuple[str, str, Shape], int] = {}
    for item in report.items:
        key = (item.gpu, item.kernel, item.shape)
        counts[key] = min(counts.get(key, 0) + item.count, MAX_DEMAND_COUNT)
    with service.writing() as session:
        for (gpu, kernel, shape), count in counts.items():
            report_demand(session, gpu, kernel, shape, count)
    service.metrics.demand.inc(sum(counts.values()))
    return DemandStored(item_count=len(report.items), key_count=len(counts), quarantined_count=len(refused))


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
