"""GET /v1/snapshots/{gpu}: every champion that may be served to one card, in one document. What a launcher polls."""

from typing import Annotated

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Path
from fastapi import Query
from fastapi import Request
from fastapi import Response
from fastapi.concurrency import run_in_threadpool

from kdatune_api.cards import find_card
from kdatune_api.champions import Answer
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.openapi import CACHED
from kdatune_api.openapi import errors
from kdatune_api.remember import RememberingRoute
from kdatune_api.remember import answer_with
from kdatune_api.schemas import GpuFacts
from kdatune_api.schemas import GpuName
from kdatune_api.schemas import SnapshotDocument

PATH = "/v1/snapshots/{gpu:path}"
router = APIRouter(tags=["snapshots"], route_class=RememberingRoute)


@router.get(
    PATH,
    summary="Every champion of one GPU model and of cards of the same silicon, as the snapshot document",
    response_model=SnapshotDocument,
    responses={**CACHED, **errors(404, 422, 503)},
    dependencies=[Depends(strict_query)],
)
async def snapshot(
    request: Request,
    gpu: Annotated[GpuName, Path(description="GPU model, as the driver names it; percent-encoded")],
    facts: Annotated[GpuFacts, Query()],
    service: ServiceDep,
) -> Response:
    index = await service.champions.current()
    card = await find_card(service, index, gpu, facts)
    view = index.view(card.gpu)
    if not view.is_rendered:  # 10,000 champions take half a second to write down: others are answered meanwhile
        await run_in_threadpool(view.render)
    return answer_with(request, service, index, Answer(view.snapshot, None, PATH))
