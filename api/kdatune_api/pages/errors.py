"""Errors as pages, for browsers: what would be a problem document is shown as HTML where a person asked for HTML."""

import json
import re
from collections.abc import Awaitable
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi import Request
from fastapi import Response

from kdatune_api.pages.web import error_page
from kdatune_api.problems import MEDIA_TYPE

_API = re.compile(r"/(v\d+|static|healthz|readyz|version|metrics|openapi\.json)(/|$)")
_CARRIED = ("allow", "retry-after")

Handler = Callable[[Request, Any], Awaitable[Response]]


def answer_browsers(app: FastAPI) -> None:
    """Wrap the app's error handlers: the same status and words, as a page, for those who want one."""
    for kind, handler in list(app.exception_handlers.items()):
        app.exception_handlers[kind] = _wrapped(handler)


def wants_page(request: Request) -> bool:
    """Whether the answer should be HTML: not of the API, and HTML is named in Accept before anything like JSON.

    `*/*` alone, as curl and most clients send, is not a wish for HTML.
    """
    if _API.match(request.scope["path"]):
        return False
    ranges = [part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")]
    named = [one for one in ranges if one == "text/html" or one.endswith("json")]
    return bool(named) and named[0] == "text/html"


def _wrapped(handler: Any) -> Handler:
    async def handle(request: Request, error: Any) -> Response:
        response: Response = await handler(request, error)
        if response.media_type != MEDIA_TYPE or not wants_page(request):
            return response
        problem = json.loads(bytes(response.body))
        page = error_page(
            request,
            problem["status"],
            problem["title"],
            problem["detail"],
            errors=[_told(one) for one in problem.get("errors", [])],
        )
        page.headers.update({name: response.headers[name] for name in _CARRIED if name in response.headers})
        return page

    return handle


def _told(error: dict[str, str]) -> dict[str, str]:
    where = next((error[name] for name in ("parameter", "header", "pointer") if name in error), "")
    return {"where": where, "detail": error["detail"]}
