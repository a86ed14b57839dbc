"""Who may do what: bearer tokens (RFC 6750) with scopes, looked up in the database, and where a request came in.

Reads are open unless KDATUNE_OPEN_READS is false. A write needs a token with its scope; a launcher's report of misses
does so too, unless it came in on a loopback address. A refusal is answered before the body is read, logged, and stores
nothing.
"""

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable
from collections.abc import Coroutine
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi import Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from sqlalchemy import Engine
from starlette.datastructures import Headers
from starlette.types import Scope as AsgiScope

from kdatune_api import logs
from kdatune_api.openapi import SECURITY_SCHEME
from kdatune_api.problems import FORBIDDEN
from kdatune_api.problems import UNAUTHENTICATED
from kdatune_api.problems import ProblemError
from kdatune_tuner.exposure import is_loopback
from kdatune_tuner.settings import Settings
from kdatune_tuner.store.access import Caller
from kdatune_tuner.store.access import Scope
from kdatune_tuner.store.access import find_token
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.records import TokenRow

log = logging.getLogger("kdatune.api")

# A token that may read is looked up again after this long: a revoked one reads on for as long. Writes always look.
REMEMBER_SECONDS = 5.0
MAX_REMEMBERED = 1000
_ALWAYS_OPEN = frozenset({"/healthz", "/readyz", "/version"})
_MAX_TOKEN_CHARS = 200
_IN_PROCESS = "testserver"  # Starlette's test client, which has no network


class Gate:
    """Lets callers through, or not. Thread-safe; asks the database for every write.

    Args:
        engine: opens the database, or raises StoreError.
    """

    def __init__(self, settings: Settings, engine: Callable[[], Engine]) -> None:
        self.open_reads = settings.open_reads
        self.open_demand = settings.open_demand
        self._engine = engine
        self._known: dict[bytes, float] = {}

    async def writer(self, scope: AsgiScope, wanted: Scope) -> Caller:
        """The caller, who may write what `wanted` says.

        Raises:
            ProblemError: unauthenticated without a token that may be used, forbidden without the scope.
            StoreError: the database cannot be read.
        """
        request_id = scope["state"]["request_id"]
        given = _token_of(scope)
        if given is None and wanted is Scope.DEMAND and self.open_demand and is_local(scope):
            return Caller("a launcher on this machine", None, request_id)
        row = await self._row(scope, given)
        if wanted not in row.scopes:
            _note(scope, f"token {row.prefix} lacks scope {wanted}")
            header = f'Bearer realm="kdatune", error="insufficient_scope", scope="{wanted}"'
            detail = (
                f"token {row.prefix} may not do this: it lacks the scope {wanted}; `kdatune token create` gives one"
            )
            raise ProblemError(FORBIDDEN, detail, headers={"WWW-Authenticate": header})
        return Caller(f"{row.name} ({row.prefix})", row.id, request_id)

    async def reader(self, scope: AsgiScope) -> None:
        """Let a request through that reads. Raises ProblemError unauthenticated, StoreError."""
        if self.open_reads or scope["method"] not in ("GET", "HEAD") or scope["path"] in _ALWAYS_OPEN:
            return
        given = _token_of(scope)
        key = hashlib.sha256((given or "").encode("utf-8", "replace")).digest()
        if time.monotonic() < self._known.get(key, 0.0):
            return
        await self._row(scope, given)
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[key] = time.monotonic() + REMEMBER_SECONDS

    async def _row(self, scope: AsgiScope, given: str | None) -> TokenRow:
        row = await run_in_threadpool(self._find, given) if given else None
        if row is None:
            _note(scope, "a token that is not valid" if given is not None else "no token")
            error = ', error="invalid_token"' if given is not None else ""
            detail = (
                "the token is unknown, revoked or past its end; `kdatune token create` gives one"
                if given is not None
                else "this needs a token: send Authorization: Bearer TOKEN; `kdatune token create` gives one"
            )
            header = f'Bearer realm="kdatune"{error}'
            raise ProblemError(UNAUTHENTICATED, detail, headers={"WWW-Authenticate": header})
        return row

    def _find(self, given: str) -> TokenRow | None:
        with reading(self._engine()) as session:
            return find_token(session, given)


def guarded(wanted: Scope) -> type[APIRoute]:
    """A route class whose requests need the scope. The route finds the caller in `request.state.caller`."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer_known = super().get_route_handler()

            async def answer(request: Request) -> Response:
                gate: Gate = request.app.state.service.gate
                request.state.caller = await gate.writer(request.scope, wanted)
                return await answer_known(request)

            return answer

    return GuardedRoute


def security(wanted: Scope) -> dict[str, Any]:
    """The OpenAPI extra of an operation behind `guarded`."""
    return {"security": [{SECURITY_SCHEME: [wanted.value]}]}


def caller_of(request: Request) -> Caller:
    """Who is behind a request of a guarded route."""
    caller: Caller = request.state.caller
    return caller


def is_local(scope: AsgiScope) -> bool:
    """Whether the request came in on a loopback address or a Unix socket, and not through a proxy that says so."""
    headers = Headers(scope=scope)
    if "forwarded" in headers or "x-forwarded-for" in headers:
        return False
    server = scope.get("server")
    return server is None or server[0] == _IN_PROCESS or str(server[0]).startswith("/") or is_loopback(str(server[0]))


def listening_host(settings: Settings, argv: Sequence[str] | None = None) -> str:
    """The address the service will listen on, as far as it can be told before it does.

    `kdatune serve` says it in KDATUNE_HOST. Started by uvicorn itself, it is in uvicorn's arguments or environment.
    """
    argv = sys.argv if argv is None else argv
    program = argv[0].replace("\\", "/") if argv else ""
    if "uvicorn" in program or "gunicorn" in program:
        for i, argument in enumerate(argv[1:], 1):
            name, _, value = argument.partition("=")
            if name in ("--host", "--bind", "-b"):
                given = value or (argv[i + 1] if i + 1 < len(argv) else "")
                return given if name == "--host" else given.rpartition(":")[0] or given
        if "UVICORN_HOST" in os.environ:
            return os.environ["UVICORN_HOST"]
    return settings.host


def _token_of(scope: AsgiScope) -> str | None:
    """The bearer token as it was sent; None without an Authorization header, "" for one that is no bearer token."""
    lines = Headers(scope=scope).getlist("authorization")
    if not lines:
        return None
    scheme, _, token = lines[0].partition(" ")
    token = token.strip()
    return token if len(lines) == 1 and scheme.lower() == "bearer" and len(token) <= _MAX_TOKEN_CHARS else ""


def _note(scope: AsgiScope, what: str) -> None:
    client = scope.get("client")
    fields = {"method": scope["method"], "path": scope["path"][:300], "client": client[0] if client else None}
    token = logs.request_id.set(scope["state"]["request_id"])
    try:
        log.warning("refused: %s", what, extra={"fields": fields})
    finally:
        logs.request_id.reset(token)
