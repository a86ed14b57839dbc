"""Routes that answer a request they have answered before, for as long as the generation is the same, without reading it.

Most of what is asked is asked again.
"""

from collections.abc import Callable
from collections.abc import Coroutine
from collections.abc import Mapping
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

    Requests come here only where `Recall` has no answer.
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
    """Answers a request before it is routed, when the database was looked at lately: from memory, or at once.

    Args:
        at_once: by path, what makes an answer of a query string; None where only the route can answer.
    """

    def __init__(
        self, service: Service, at_once: Mapping[str, Callable[[bytes, ChampionIndex], Answer | None]]
    ) -> None:
        self.service = service
        self.at_once = at_once

    def __call__(self, scope: Scope) -> tuple[Response, str] | None:
        """The answer and its route; None when the request must go the whole way."""
        index = self.service.champions.fresh
        if index is None or scope["method"] != "GET":
            return None
        key = key_of(scope)
        answer = index.recall(key)
        if answer is None:
            make = self.at_once.get(scope["path"])
            answer = None if make is None else make(scope["query_string"], index)
            if answer is None:
                return None
            index.remember(key, answer)
        return _send(scope, self.service, answer), answer.route


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
