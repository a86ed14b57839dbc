"""GET /v1/configs/resolve: the best known launch config for one card and one problem shape."""

import json
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response
from pydantic import ValidationError

from kdatune_api.caching import document
from kdatune_api.cards import Card
from kdatune_api.cards import find_card
from kdatune_api.cards import known_card
from kdatune_api.champions import Answer
from kdatune_api.champions import ChampionIndex
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.openapi import CACHED
from kdatune_api.openapi import errors
from kdatune_api.other_kernels import find_other
from kdatune_api.problems import UNSUPPORTED
from kdatune_api.problems import ProblemError
from kdatune_api.remember import RememberingRoute
from kdatune_api.remember import answer_with
from kdatune_api.schemas import Resolved
from kdatune_api.schemas import ResolveQuery
from kdatune_kernels.match import Champion
from kdatune_kernels.match import Match
from kdatune_kernels.others import OtherMatch
from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json
from kdatune_kernels.values import OtherShape

PATH = "/v1/configs/resolve"
_COMPACT = json.JSONEncoder(separators=(",", ":"))
router = APIRouter(tags=["configs"], route_class=RememberingRoute)


def plain_query(query_string: bytes) -> ResolveQuery | None:
    """The query string as a ResolveQuery; None when there is anything wrong with it. Reads it as FastAPI does."""
    pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    values = dict(pairs)
    if len(values) != len(pairs):
        return None
    try:
        return ResolveQuery.model_validate(values)
    except ValidationError:
        return None


def answer_at_once(query_string: bytes, index: ChampionIndex) -> Answer | None:
    """The answer to a query that has nothing wrong with it about a card that is in memory.

    Of every other query the route says what is wrong, or looks into the database. What FastAPI does before a route is
    reached takes longer than the answer.
    """
    query = plain_query(query_string)
    card = None if query is None else known_card(index, query.gpu, query)
    if query is None or card is None:
        return None
    try:
        return _answer(index, card, query)
    except ProblemError:
        return None


@router.get(
    PATH,
    summary="The launch config to use for a card and a problem shape, and why",
    response_model=Resolved,
    responses={**CACHED, **errors(404, 422, 503)},
    dependencies=[Depends(strict_query)],
)
async def resolve(request: Request, query: Annotated[ResolveQuery, Query()], service: ServiceDep) -> Response:
    index = await service.champions.current()
    card = await find_card(service, index, query.gpu, query)
    return answer_with(request, service, index, _answer(index, card, query))


def _answer(index: ChampionIndex, card: Card, query: ResolveQuery) -> Answer:
    """Raises ProblemError when no config runs the shape on the card."""
    shape = query.shape
    if isinstance(shape, OtherShape):
        answered = find_other(index, card.gpu, query.kernel, shape)
        body = _COMPACT.encode(_body(answered, card, shape, index.generation)).encode()
        return Answer(document(index.generation, body), answered.match, PATH)
    found = index.view(card.gpu).find(shape)
    if found.champion is None:
        refused = config_ok(found.config, shape, card.gpu)
        if refused:
            raise ProblemError(UNSUPPORTED, f"no launch config runs {shape.key()} on {card.gpu.name}: {refused}")
    body = _COMPACT.encode(_body(found, card, shape, index.generation)).encode()
    return Answer(document(index.generation, body), found.match, PATH)


def _body(found: Match | OtherMatch, card: Card, shape: Shape | OtherShape, generation: int) -> Json:
    champion = found.champion
    return {
        "config": to_json(found.config),
        "match": found.match,
        "gpu_level": found.gpu_level,
        "reason": found.reason,
        "expected_regret": found.expected_regret,
        "generation": generation,
        "measured_us": champion.measured_us if champion else None,
        # another kernel has no parts: it is always measured whole
        "estimated": isinstance(champion, Champion) and champion.estimated,
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
