"""One bounded HTTP request. Stdlib only, no redirects, no exceptions but ServiceError."""

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO
from typing import Any

from kdatune_kernels import __version__

TIMEOUT_SECONDS = 2.0
"""For connecting and for each read."""
WHOLE_SECONDS = 10.0
"""For a body, so that a server that drips is given up on."""
MAX_BODY_BYTES = 8 << 20


class ServiceError(Exception):
    """The service did not answer, or not within bounds. Never leaves the launcher."""


@dataclass(frozen=True)
class Reply:
    """What came back. Any status: a 304 or a 404 is an answer."""

    status: int
    etag: str | None
    body: bytes


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        """A redirect is an answer like any other; following it would carry the token to another host."""
        return


def request(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    token: str | None = None,
) -> Reply:
    """Ask once.

    Args:
        url: http or https; the caller has checked it.

    Raises:
        ServiceError: no connection, no answer within TIMEOUT_SECONDS, a body over MAX_BODY_BYTES, or no HTTP.
    """
    sent = {"Accept": "application/json", "User-Agent": f"kdatune/{__version__}", **(headers or {})}
    if body is not None:
        sent["Content-Type"] = "application/json"
    if token:
        sent["Authorization"] = f"Bearer {token}"
    asked = urllib.request.Request(url, data=body, headers=sent, method=method)  # noqa: S310 - http(s), checked in client
    try:
        with _opener(url).open(asked, timeout=TIMEOUT_SECONDS) as response:
            return _reply(response.status, response.headers.get("ETag"), _bounded(response))
    except urllib.error.HTTPError as error:
        with error:
            return _reply(error.code, error.headers.get("ETag"), b"")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ServiceError(f"{type(reason).__name__}: {reason}"[:200]) from error


def _opener(url: str) -> urllib.request.OpenerDirector:
    # A proxy of the environment cannot reach this host's own loopback
    local = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    return urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({} if local else None))


def _reply(status: int, etag: str | None, body: bytes) -> Reply:
    return Reply(status, etag if etag and len(etag) <= 200 else None, body)


def _bounded(response: IO[bytes]) -> bytes:
    end = time.monotonic() + WHOLE_SECONDS
    parts: list[bytes] = []
    size = 0
    while part := response.read1(1 << 16):  # type: ignore[attr-defined]  # http.client.HTTPResponse has it
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ServiceError(f"the answer is larger than {MAX_BODY_BYTES} bytes")
        if time.monotonic() > end:
            raise ServiceError(f"the answer took longer than {WHOLE_SECONDS:g} s")
    return b"".join(parts)
