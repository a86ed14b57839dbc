"""One bounded HTTP request. Stdlib only, no redirects, no exceptions but ServiceError."""

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
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
"""On the wire."""
MAX_PLAIN_BYTES = 64 << 20
"""Of an answer that came compressed: 10,000 champions are 12 MB, and 0.1 MB on the wire."""


class ServiceError(Exception):
    """The service did not answer, or not within bounds. Never leaves the launcher."""


@dataclass(frozen=True)
class Reply:
    """What came back, decompressed. Any status: a 304 or a 404 is an answer."""

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
        ServiceError: no connection, no answer within TIMEOUT_SECONDS, a body over MAX_BODY_BYTES (MAX_PLAIN_BYTES when
            decompressed), one that cannot be decompressed, or no HTTP.
    """
    sent = {
        "Accept": "application/json",
        "Accept-Encoding": "gzip",
        "User-Agent": f"kdatune/{__version__}",
        **(headers or {}),
    }
    if body is not None:
        sent["Content-Type"] = "application/json"
    if token:
        sent["Authorization"] = f"Bearer {token}"
    asked = urllib.request.Request(url, data=body, headers=sent, method=method)  # noqa: S310 - http(s), checked in client
    try:
        with _opener(url).open(asked, timeout=TIMEOUT_SECONDS) as response:
            body = _plain(_bounded(response), response.headers.get("Content-Encoding"))
            return _reply(response.status, response.headers.get("ETag"), body)
    except urllib.error.HTTPError as error:
        with error:
            return _reply(error.code, error.headers.get("ETag"), b"")
    except (OSError, http.client.HTTPException, ValueError, zlib.error) as error:
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


def _plain(body: bytes, coding: str | None) -> bytes:
    """The body without its compression. At most MAX_PLAIN_BYTES are ever made of it, whatever it holds."""
    if coding is None or coding.lower() == "identity":
        return body
    if coding.lower() not in ("gzip", "x-gzip"):
        raise ServiceError(f"the answer is compressed as {coding[:40]!r}, which was not asked for")
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    plain = inflater.decompress(body, MAX_PLAIN_BYTES)
    if inflater.unconsumed_tail:
        raise ServiceError(f"the answer is larger than {MAX_PLAIN_BYTES} bytes when decompressed")
    if not inflater.eof or inflater.unused_data:
        raise ServiceError("the compressed answer is cut off, or holds more than one")
    return plain
