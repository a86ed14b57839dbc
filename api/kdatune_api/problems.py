"""Every error answer is an RFC 9457 problem document (`application/problem+json`): one shape, one place.

A problem whose `type` is "about:blank" says no more than its status. The others are in `PROBLEMS`.
"""

import json
import logging
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi import Request
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic import ConfigDict
from pydantic import Field
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from kdatune_kernels.errors import StoreError

log = logging.getLogger("kdatune.api")

MEDIA_TYPE = "application/problem+json"
ABOUT_BLANK = "about:blank"
RETRY_AFTER_SECONDS = 5
_BAD_REQUEST = 400
_PHRASES = {413: "Content Too Large", 414: "URI Too Long", 422: "Unprocessable Content"}

# A thousand wrong demand items need not be listed one by one, nor a wrong value repeated at full length.
MAX_ERRORS = 20
MAX_DETAIL_CHARS = 300


@dataclass(frozen=True)
class Kind:
    """A problem type: its slug (the end of the type URI), status and title. `meaning` is for the documentation page."""

    slug: str
    status: int
    title: str
    meaning: str

    @property
    def uri(self) -> str:
        return f"urn:kdatune:problem:{self.slug}"


INVALID_REQUEST = Kind(
    "invalid-request",
    422,
    "The request cannot be understood",
    "A parameter or body field is unknown, missing, repeated or out of range; `errors` names each one.",
)
UNKNOWN_GPU = Kind(
    "unknown-gpu",
    404,
    "No GPU model of this name is known",
    "Neither tuned nor in the list of known cards: give its sm_count and compute_capability in the query.",
)
UNKNOWN_KERNEL = Kind(
    "unknown-kernel",
    404,
    "Nothing is known of this kernel here",
    "It is not installed where the service runs, so only the very shapes that are tuned can be served.",
)
UNSUPPORTED = Kind(
    "unsupported",
    422,
    "No launch config runs this",
    "The problem shape or the card is outside what the kernels run; `detail` names the limit.",
)
UNAUTHENTICATED = Kind(
    "unauthenticated",
    401,
    "A valid token is needed",
    "Send `Authorization: Bearer TOKEN`; the token is missing, unknown, revoked or past its end.",
)
FORBIDDEN = Kind(
    "forbidden", 403, "The token may not do this", "The token is valid, but lacks the scope that `detail` names."
)
UNKNOWN_PROMOTION = Kind("unknown-promotion", 404, "No promotion has this id", "See /v1/promotions.")
UNKNOWN_NIGHT = Kind("unknown-night", 404, "No night has this id", "See /nights.")
UNKNOWN_REGRESSION = Kind("unknown-regression", 404, "No regression has this id", "See /v1/regressions.")
CONFLICT = Kind(
    "conflict",
    409,
    "The request does not fit what is stored",
    "Another promotion is served by now, for example; look again, then decide.",
)
BODY_TOO_LARGE = Kind("body-too-large", 413, "The request body is too large", "Send it in smaller batches.")
QUERY_TOO_LONG = Kind("query-too-long", 414, "The path and query are too long", "No valid request is this long.")
HEADERS_TOO_LARGE = Kind(
    "headers-too-large", 431, "The request headers are too large", "No valid request has this many or such long ones."
)
BODY_TOO_SLOW = Kind("body-too-slow", 408, "The request body came too slowly", "Send it again, in one go.")
NOT_JSON = Kind("not-json", 415, "The request body is not JSON", "Send Content-Type: application/json.")
UNAVAILABLE = Kind(
    "database-unavailable",
    503,
    "The database cannot be used",
    "It is missing, unreachable, locked or of another schema; `detail` says what to do. Retry later.",
)
PROBLEMS = (
    INVALID_REQUEST,
    UNAUTHENTICATED,
    FORBIDDEN,
    UNKNOWN_GPU,
    UNKNOWN_KERNEL,
    UNKNOWN_PROMOTION,
    UNKNOWN_NIGHT,
    UNKNOWN_REGRESSION,
    CONFLICT,
    UNSUPPORTED,
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    QUERY_TOO_LONG,
    HEADERS_TOO_LARGE,
    NOT_JSON,
    UNAVAILABLE,
)
# What the router or the middleware says by a status alone.
_KIND_OF: dict[int, Kind] = {kind.status: kind for kind in (BODY_TOO_LARGE, BODY_TOO_SLOW)}


class FieldError(BaseModel):
    """One thing that is wrong with a request. Exactly one of `parameter`, `header` and `pointer` says where."""

    model_config = ConfigDict(extra="forbid")

    detail: str
    parameter: str | None = Field(default=None, description="name of the query or path parameter")
    header: str | None = Field(default=None, description="name of the request header")
    pointer: str | None = Field(default=None, description="JSON pointer (RFC 6901) into the request body")


class Problem(BaseModel):
    """An RFC 9457 problem document."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field(description="stable URI of the problem type; about:blank when the status says it all")
    title: str
    status: int = Field(ge=400, le=599, description="the HTTP status")
    detail: str = Field(description="what happened, with which value, and what to do")
    instance: str = Field(description="path of the request")
    request_id: str = Field(description="the X-Request-ID of the request; name it when asking for help")
    errors: list[FieldError] | None = None
    errors_left_out_count: int | None = Field(default=None, description="errors beyond those listed")


class ProblemError(Exception):
    """Ends a request with a problem document.

    Args:
        kind: the problem type.
        detail: what happened, with which value, and what to do.
        errors: each wrong field, for invalid-request.
        headers: what the answer carries beside the usual.
    """

    def __init__(
        self,
        kind: Kind,
        detail: str,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})


def invalid_parameter(name: str, detail: str) -> ProblemError:
    """The problem of one query or path parameter."""
    return ProblemError(INVALID_REQUEST, f"{name}: {detail}", [FieldError(parameter=name, detail=detail)])


def make_response(
    path: str,
    request_id: str,
    kind: Kind | int,
    detail: str,
    *,
    errors: Sequence[FieldError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer for a problem type, or for a bare status (an about:blank problem)."""
    status = kind if isinstance(kind, int) else kind.status
    document: dict[str, Any] = {
        "type": ABOUT_BLANK if isinstance(kind, int) else kind.uri,
        "title": status_phrase(status) if isinstance(kind, int) else kind.title,
        "status": status,
        "detail": detail,
        "instance": path[:MAX_DETAIL_CHARS],
        "request_id": request_id,
    }
    if errors:
        document["errors"] = [error.model_dump(exclude_none=True) for error in errors[:MAX_ERRORS]]
    if len(errors) > MAX_ERRORS:
        document["errors_left_out_count"] = len(errors) - MAX_ERRORS
    extra = dict(headers or {}) | {"Cache-Control": "no-store"}
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        extra.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
    # json.dumps escapes to ASCII: text of unknown origin, lone surrogates included, always encodes
    return Response(json.dumps(document).encode(), status_code=status, media_type=MEDIA_TYPE, headers=extra)


def problem_response(
    request: Request,
    kind: Kind | int,
    detail: str,
    *,
    errors: Sequence[FieldError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`make_response` for a request."""
    request_id = getattr(request.state, "request_id", "")
    return make_response(request.scope["path"], request_id, kind, detail, errors=errors, headers=headers)


def status_phrase(status: int) -> str:
    """The registered phrase of a status code (RFC 9110; Python has renamed some between 3.11 and 3.13)."""
    if status in _PHRASES:
        return _PHRASES[status]
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def field_errors(errors: Sequence[Any]) -> list[FieldError]:
    """Pydantic's error list as ours. Values that were sent are not repeated: they can be long, or secrets."""
    return [_field_error(error) for error in errors]


def _field_error(error: Mapping[str, Any]) -> FieldError:
    where, *path = error.get("loc", ()) or ("body",)
    detail = str(error.get("msg", "invalid")).removeprefix("Value error, ")[:MAX_DETAIL_CHARS]
    if error.get("type") == "extra_forbidden":
        detail = "unknown; see /docs for what may be given"
    elif error.get("type") == "json_invalid":
        detail, path = f"not JSON at character {path[0] if path else 0}: {error.get('ctx', {}).get('error', '')}", []
    name = ".".join(str(part) for part in path)[:MAX_DETAIL_CHARS]
    detail = detail.removeprefix(f"{name} ")
    if where in ("query", "path"):
        return FieldError(parameter=name or None, detail=detail)
    if where == "header":
        return FieldError(header=name, detail=detail)
    return FieldError(pointer="".join(f"/{_escape(str(part))}" for part in path)[:MAX_DETAIL_CHARS], detail=detail)


def _escape(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


def _describe(errors: Sequence[FieldError]) -> str:
    first = errors[0]
    where = first.parameter or first.header or first.pointer
    text = f"{where}: {first.detail}" if where else first.detail
    return text if len(errors) == 1 else f"{text} (and {len(errors) - 1} more, see errors)"


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - the handler is registered for this class only
    errors = field_errors(error.errors())
    return problem_response(request, INVALID_REQUEST, _describe(errors), errors=errors)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)  # noqa: S101 - the handler is registered for this class only
    return problem_response(request, error.kind, error.detail, errors=error.errors, headers=error.headers)


async def _on_http(request: Request, error: Exception) -> Response:
    """What the router itself refuses: no such path, wrong method, a body that cannot be read."""
    assert isinstance(error, HTTPException)  # noqa: S101 - the handler is registered for this class only
    details = {
        404: f"there is nothing at {request.scope['path'][:MAX_DETAIL_CHARS]}; see /docs",
        405: f"{request.method} is not for this path; see the Allow header",
    }
    if error.status_code == _BAD_REQUEST and error.__cause__ is not None:  # of reading the body
        deep = isinstance(error.__cause__, RecursionError)
        detail = "the body is nested too deeply" if deep else "the body is not JSON in UTF-8"
        return problem_response(request, error.status_code, detail, headers=error.headers)
    plain = error.detail == status_phrase(error.status_code)
    detail = details.get(error.status_code, error.detail) if plain else error.detail
    kind = _KIND_OF.get(error.status_code, error.status_code)
    return problem_response(request, kind, str(detail), headers=error.headers)


async def _on_store(request: Request, error: Exception) -> Response:
    log.info("database unavailable: %s", error)
    return problem_response(request, UNAVAILABLE, str(error))


async def _on_busy(request: Request, error: Exception) -> Response:
    log.warning("no database connection is free: %s", error)
    return problem_response(request, UNAVAILABLE, "every database connection is in use; try again")


def install_problem_handlers(app: FastAPI) -> None:
    """Make every error answer of the app a problem document. Unexpected exceptions are the middleware's."""
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(StoreError, _on_store)
    app.add_exception_handler(PoolTimeoutError, _on_busy)
