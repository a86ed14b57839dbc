"""What the pages load, all of it from this package and the chart library's wheel. Nothing comes from elsewhere.

An asset's address holds a digest of its content, so it may be kept for ever; without the digest it must be asked for anew.
"""

import functools
import gzip
import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter
from fastapi import HTTPException
from fastapi import Request
from fastapi import Response

from kdatune_api.caching import accepts_gzip
from kdatune_api.caching import matches

router = APIRouter()

_FOLDER = Path(__file__).parent.parent / "static"
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FOR_EVER = "public, max-age=31536000, immutable"
_OWN = ("kdatune.css", "kdatune.js", "htmx.min.js", "icon.svg")
CHART_LIBRARY = "plotly.min.js"
CHART_STYLE_IDS = ("9f215cf04c5486422605d13261cb87401f4e7763b6296af81e98efbc0130da53",)
"""Ids of style sheets that the chart library adds to a page unless they are there. Our policy forbids it to, so the page
carries the ids itself; kdatune.css holds the rules that are needed. A test tells when a new release has others."""


@dataclass(frozen=True)
class Asset:
    """A file that pages load."""

    name: str
    body: bytes
    gzipped: bytes

    @cached_property
    def digest(self) -> str:
        """What the address holds. The chart library is large and known by its version."""
        if self.name == CHART_LIBRARY:
            return chart_library_version()
        return hashlib.sha256(self.body).hexdigest()[:16]

    @property
    def media_type(self) -> str:
        return _TYPES[self.name.rpartition(".")[2]]


def asset(name: str) -> str:
    """The address of an asset, digest included."""
    digest = chart_library_version() if name == CHART_LIBRARY else _load(name).digest
    return f"/static/{name}?v={digest}"


@functools.cache
def chart_library_version() -> str:
    """The version of the installed chart library."""
    return version("plotly")


@router.get("/static/{name}")
def static(request: Request, name: str, v: str = "") -> Response:
    if name not in (*_OWN, CHART_LIBRARY):
        raise HTTPException(404)
    found = _load(name)
    etag = f'"{found.digest}"'
    headers = {
        "ETag": etag,
        "Cache-Control": _FOR_EVER if v == found.digest else "no-cache",
        "Vary": "Accept-Encoding",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Content-Security-Policy": "default-src 'none'",
    }
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    if accepts_gzip(request.headers.get("accept-encoding")):
        return Response(found.gzipped, headers=headers | {"Content-Encoding": "gzip"}, media_type=found.media_type)
    return Response(found.body, headers=headers, media_type=found.media_type)


@functools.cache
def _load(name: str) -> Asset:
    body = _chart_library() if name == CHART_LIBRARY else (_FOLDER / name).read_bytes()
    return Asset(name, body, gzip.compress(body, 6, mtime=0))


def _chart_library() -> bytes:
    import plotly.offline  # half a second: the first page with charts pays for it, and no other

    source: str = plotly.offline.get_plotlyjs()
    return source.encode()
