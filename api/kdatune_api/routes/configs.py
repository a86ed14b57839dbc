"""GET /v1/configs/resolve: the best known launch config for one card and one problem shape."""

import json
from collections.abc import Callable
from collections.abc import Coroutine
from typing import Annotated
from typing import Any

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from kdatune_api.caching import document
from kdatune_api.caching import respond
from kdatune_api.cards import Card
from kdatune_api.cards import find_card
from kdatune_api.champions import Answer
from kdatune_api.deps import Service
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.openapi import CACHED
from kdatune_api.openapi import errors
from kdatune_api.problems import UNSUPPORTED
from kdatune_api.problems import ProblemError
from kdatune_api.schemas import Resolved
from kdatune_api.schemas import ResolveQuery
from kdatune_kernels.match import Match
from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json


class RememberingRoute(APIRoute):
    """Answers a query string that this generation has answered before without reading it again.

    Measured inside the process, that takes 36 us in place of 420, and most of what is asked is asked again.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer_anew = super().get_route_handler()

        async def answer(request: Request) -> Response:
            service: Service = request.app.state.service
            index = await service.champions.current()
            known = index.answers.get(request.scope["query_string"])
            return _send(request, service, known) if known else await answer_anew(request)

        return answer


router = APIRouter(tags=["configs"], route_class=RememberingRoute)


@router.get(
    "/v1/configs/resolve",
    summary="The launch config to use for a card and a problem shape, and why",
    response_model=Resolved,
    responses={**CACHED, **errors(404, 422, 503)},
    dependencies=[Depends(strict_query)],
)
async def resolve(request: Request, query: Annotated[ResolveQuery, Query()], service: ServiceDep) -> Response:
    index = await service.champions.current()
    card = await find_card(service, index, query.gpu, query)
    shape = query.shape()
    view = index.view(card.gpu)
    found = await run_in_threadpool(view.find, shape) if view.is_slow(shape) else view.find(shape)
    if found.champion is None:
        refused = config_ok(found.config, shape, card.gpu)
        if refused:
            raise ProblemError(UNSUPPORTED, f"no launch config runs {shape.key()} on {card.gpu.name}: {refused}")
    body = json.dumps(_answer(found, card, shape, index.generation), separators=(",", ":")).encode()
    answer = Answer(document(index.generation, body), found.match)
    index.remember(request.scope["query_string"], answer)
    return _send(request, service, answer)


def _send(request: Request, service: Service, answer: Answer) -> Response:
    service.metrics.answers.labels(answer.match).inc()
    return respond(request, answer.document, max_age_s=service.settings.snapshot_max_age_s)


def _answer(found: Match, card: Card, shape: Shape, generation: int) -> Json:
    champion = found.champion
    return {
        "config": to_json(found.config),
        "match": found.match,
        "gpu_level": found.gpu_level,
        "reason": found.reason,
        "expected_regret": found.expected_regret,
        "generation": generation,
        "measured_us": champion.measured_us if champion else None,
        "default_us": champion.default_us if champion else None,
        "provenance": champion
        and {
            "kernel": champion.kernel,
            "gpu": to_json(champion.gpu),
            "shape": to_json(champion.shape),
            "shape_key": champion.shape.key(),
            "generation": champion.generation,
            "measured_at": champion.measured_at,
            "build": champion.build and to_json(champion.build),
        },
        "stale": found.stale_reason is not None,
        "stale_reason": found.stale_reason,
        "requested": {
            "gpu": to_json(card.gpu),
            "gpu_source": card.source,
            "shape": to_json(shape),
            "shape_key": shape.key(),
        },
    }
