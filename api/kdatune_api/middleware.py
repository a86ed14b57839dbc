"""What surrounds every request: its id, its limits, its one log line, its metrics, the answer to what went wrong."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Mapping

from fastapi import HTTPException
from starlette.types import ASGIApp
from starlette.types import Message
from starlette.types import Receive
from starlette.types import Scope
from starlette.types import Send

from kdatune_api import logs
from kdatune_api import problems
from kdatune_api.metrics import Metrics
from kdatune_kernels.errors import StoreError

log = logging.getLogger("kdatune.api")

MAX_TARGET_BYTES = 8192
"""Longest path and query together. The longest valid request is well under 1 KiB."""
MAX_HEADER_BYTES = 16384
"""Names and values of all headers together; the server itself reads at most 64 KiB of them."""
MAX_HEADERS = 100
BODY_SECONDS = 30.0
"""For a body to arrive: one that drips must not hold a connection for ever."""

UNMATCHED = "unmatched"
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_SERVER_ERROR = 500
_CLIENT_CLOSED = 499


class BodyTooLargeError(HTTPException):
    """Raised while a body is read, when it grows past its limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413, f"the body is larger than {limit_bytes} bytes; send it in smaller batches")


class BodyTooSlowError(HTTPException):
    """Raised while a body is read that does not come to its end."""

    def __init__(self) -> None:
        super().__init__(408, f"the body did not arrive within {BODY_SECONDS:g} s; send it again")


class Surround:
    """Pure ASGI middleware (a wrapping task per request, as BaseHTTPMiddleware makes, costs more than the answer).

    Args:
        body_limit: gives the largest body of a path, in bytes.
        admit: raises ProblemError for a request that may not read.
        recall: the answer to a request, and its route, where it was answered before.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        body_limit: Callable[[str], int],
        admit: Callable[[Scope], Awaitable[None]],
        recall: Callable[[Scope], tuple[ASGIApp, str] | None],
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.body_limit = body_limit
        self.admit = admit
        self.recall = recall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        token = logs.request_id.set(request_id)
        method: str = scope["method"]
        # A resource that can be read can be asked for its head: same headers, no body.
        scope = {**scope, "method": "GET" if method == "HEAD" else method}
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        status = _CLIENT_CLOSED

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                dur_ms = (time.perf_counter() - started) * 1e3
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"server-timing", b"app;dur=%.2f" % dur_ms),
                ]
            elif method == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._answer(scope, _bounded(receive, self.body_limit(scope["path"]), headers), send_on)
        except Exception:
            log.exception("request failed", extra={"fields": {"method": method, "path": scope["path"][:300]}})
            if status != _CLIENT_CLOSED:
                raise  # the answer has begun: the server can only cut the connection
            await _problem(send_on, scope, _SERVER_ERROR, "an unexpected error; its trace is in the service's log")
        finally:
            self._account(scope, method, status, time.perf_counter() - started)
            logs.request_id.reset(token)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        target_bytes = len(scope["query_string"]) + len(scope.get("raw_path") or scope["path"].encode())
        if target_bytes > MAX_TARGET_BYTES:
            detail = f"path and query are {target_bytes} bytes; at most {MAX_TARGET_BYTES} are read"
            await _problem(send, scope, problems.QUERY_TOO_LONG, detail)
            return
        headers = scope["headers"]
        header_bytes = sum(len(name) + len(value) for name, value in headers)
        if header_bytes > MAX_HEADER_BYTES or len(headers) > MAX_HEADERS:
            detail = (
                f"{len(headers)} headers of {header_bytes} bytes; at most {MAX_HEADERS} of {MAX_HEADER_BYTES} are read"
            )
            await _problem(send, scope, problems.HEADERS_TOO_LARGE, detail)
            return
        try:
            await self.admit(scope)
        except problems.ProblemError as error:
            await _problem(send, scope, error.kind, error.detail, error.headers)
            return
        except StoreError as error:
            await _problem(send, scope, problems.UNAVAILABLE, str(error))
            return
        recalled = self.recall(scope)
        if recalled is not None:
            response, scope["kdatune_route"] = recalled
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _account(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        route = str(scope.get("kdatune_route") or getattr(scope.get("route"), "path", UNMATCHED))
        self.metrics.observe(method, route, status, seconds)
        if route in _QUIET or not log.isEnabledFor(logging.INFO):
            return
        fields = {"method": method, "path": scope["path"][:300], "status": status, "duration_us": round(seconds * 1e6)}
        log.info("request", extra={"fields": fields})


def _request_id(given: bytes | None) -> str:
    """The caller's id when it is a sane one (it goes into logs and headers), else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return secrets.token_hex(8)


def _bounded(receive: Receive, limit_bytes: int, headers: dict[bytes, bytes]) -> Receive:
    """`receive` that raises BodyTooLargeError when the body is, or says it will be, over the limit, or is too slow."""
    read_bytes = 0
    deadline: float | None = None
    complete = False  # then the next message is the end of the connection, which may be waited for as long as it takes
    declared = headers.get(b"content-length", b"0")

    async def receive_on() -> Message:
        nonlocal read_bytes, deadline, complete
        if declared.isdigit() and int(declared[:20]) > limit_bytes:
            raise BodyTooLargeError(limit_bytes)
        if deadline is None:
            deadline = time.monotonic() + BODY_SECONDS
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic()) if not complete else None):
                message = await receive()
        except TimeoutError:
            raise BodyTooSlowError from None
        complete = complete or not message.get("more_body", False)
        if message["type"] == "http.request":
            read_bytes += len(message.get("body", b""))
            if read_bytes > limit_bytes:
                raise BodyTooLargeError(limit_bytes)
        return message

    return receive_on


async def _problem(
    send: Send, scope: Scope, kind: problems.Kind | int, detail: str, headers: Mapping[str, str] | None = None
) -> None:
    response = problems.make_response(scope["path"], scope["state"]["request_id"], kind, detail, headers=headers)
    await response(scope, _nothing, send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
