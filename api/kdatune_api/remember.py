"""Routes that answer a request they have answered before, for as long as the generation is the same, without reading it.

Most of what is asked is asked again.
"""

from collections.abc import Callable
from collections.abc import Coroutine
from typing import Any

from fastapi import Request
from fastapi import Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import Scope

from kdatune_api.caching import respond
from kdatune_api.champions import Answer
from kdatune_api.champions import ChampionIndex
from kdatune_api.deps import Service


class RememberingRoute(APIRoute):
    """Looks at the index's answers first; the endpoint adds to them by `answer_with`.

    Requests come here only where `Recall` has no answer: the first of a generation, and those that look at the database.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer_anew = super().get_route_handler()

        async def answer(request: Request) -> Response:
            service: Service = request.app.state.service
            index = await service.champions.current()
            known = index.recall(key_of(request.scope))
            return _send(request.scope, service, known) if known else await answer_anew(request)

        return answer


class Recall:
    """Answers a request before it is routed, when it was answered before and the database was looked at lately."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def __call__(self, scope: Scope) -> tuple[Response, str] | None:
        """The answer and its route; None when the request must go the whole way."""
        if scope["method"] != "GET":
            return None
        index = self.service.champions.fresh
        known = None if index is None else index.recall(key_of(scope))
        return None if known is None else (_send(scope, self.service, known), known.route)


def answer_with(request: Request, service: Service, index: ChampionIndex, answer: Answer) -> Response:
    """Send the answer, and give it to whoever asks the very same until the index is another."""
    index.remember(key_of(request.scope), answer)
    return _send(request.scope, service, answer)


def key_of(scope: Scope) -> bytes:
    """What makes two requests the same: path and query, byte for byte."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query


def _send(scope: Scope, service: Service, answer: Answer) -> Response:
    if answer.match is not None:
        service.metrics.answers.labels(answer.match).inc()
    return respond(Headers(scope=scope), answer.document, max_age_s=service.settings.snapshot_max_age_s)
