"""From what a page gathered to the answer: HTML from a template, or one of its tables as CSV or JSON."""

import gzip
import logging
from collections.abc import Callable
from collections.abc import Coroutine
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import HTTPException
from fastapi import Request
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment
from jinja2 import FileSystemLoader
from jinja2 import StrictUndefined
from sqlalchemy.exc import SQLAlchemyError

from kdatune_api.caching import MIN_GZIP_BYTES
from kdatune_api.caching import accepts_gzip
from kdatune_api.pages import text
from kdatune_api.pages.assets import CHART_STYLE_IDS
from kdatune_api.pages.assets import asset
from kdatune_api.pages.board import compare_path
from kdatune_api.pages.board import path_of
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.params import unknown_parameter
from kdatune_api.pages.tables import Table
from kdatune_api.pages.tables import to_csv
from kdatune_api.pages.tables import to_json
from kdatune_api.problems import ProblemError
from kdatune_kernels import __version__
from kdatune_kernels.errors import KdatuneError

log = logging.getLogger("kdatune.api")

# sha256 of the empty text: the chart library clears style attributes by setting them to "", which has to be allowed by name
_EMPTY_STYLE = "'unsafe-hashes' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; "
        f"style-src 'self' {_EMPTY_STYLE}; "
        "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# Pages show what is stored now; a browser may keep one only to show it again on the way back.
_CACHING = {"Cache-Control": "private, no-cache", "Vary": "Accept, Accept-Encoding"}
_GZIP_LEVEL = 4

NAVIGATION = (
    ("Overview", "/", "overview"),
    ("Configs", "/configs", "configs"),
    ("Profiles", "/profiles", "profiles"),
    ("Studies", "/studies", "studies"),
    ("Waves", "/waves", "waves"),
    ("Trends", "/trends", "trends"),
    ("Nights", "/nights", "nights"),
    ("Compare", "/compare", "compare"),
)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        auto_reload=False,
    )
    environment.globals |= {
        "asset": asset,
        "chart_style_ids": CHART_STYLE_IDS,
        "path_of": path_of,
        "compare_path": compare_path,
        "navigation": NAVIGATION,
        "version": __version__,
        "NONE": text.NONE,
    }
    for name in (
        "us",
        "speedup",
        "signed_pct",
        "integer",
        "number",
        "ago",
        "moment",
        "breakable",
        "plural",
        "short",
        "trend_of",
    ):
        environment.filters[name] = getattr(text, name)
    return environment


TEMPLATES = _environment()


def compile_templates() -> None:
    """Compile every template now: the first page of a fresh service need not wait for it."""
    for name in TEMPLATES.list_templates():
        TEMPLATES.get_template(name)


class PageRoute(APIRoute):
    """A route whose unexpected errors are pages too. What is expected has its handler (errors.answer_browsers)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_page(request: Request) -> Response:
            try:
                return await handle(request)
            except (ProblemError, RequestValidationError, HTTPException, KdatuneError, SQLAlchemyError):
                raise
            except Exception:
                log.exception("page failed", extra={"fields": {"path": request.scope["path"][:300]}})
                detail = "An unexpected error; its trace is in the service's log."
                return error_page(request, HTTPStatus.INTERNAL_SERVER_ERROR, "Internal Server Error", detail)

        return handle_page


def url_with(request: Request, **changes: str | None) -> str:
    """The address of this page with some parameters changed; None or "" takes one out."""
    given = {name: value for name, value in request.query_params.items() if name not in changes and value != ""}
    query = urlencode(given | {name: value for name, value in changes.items() if value})
    return f"{request.url.path}?{query}" if query else request.url.path


def respond(
    request: Request, template: str, query: ViewQuery, *, here: str, tables: Mapping[str, Table], **context: Any
) -> Response:
    """The page, or the table of it that the query downloads.

    Args:
        here: the entry of the navigation that the page belongs to.
        tables: the tables of the page by name; every one can be downloaded.

    Raises:
        ProblemError: the query downloads a table that the page does not have.
    """
    if query.download is not None:
        return _download(query.download, tables)
    page = TEMPLATES.get_template(template).render(
        request=request,
        here=here,
        tables=tables,
        query=query,
        url_with=lambda **changes: url_with(request, **changes),
        **context,
    )
    return html(request, page)


def html(request: Request, page: str, status: int = HTTPStatus.OK) -> Response:
    """An HTML answer with everything that a page's headers say, compressed where it pays."""
    body = page.encode("utf-8", "replace")
    headers = SECURITY_HEADERS | _CACHING
    if len(body) >= MIN_GZIP_BYTES and accepts_gzip(request.headers.get("accept-encoding")):
        body = gzip.compress(body, _GZIP_LEVEL)
        headers = headers | {"Content-Encoding": "gzip"}
    return Response(body, status, headers, media_type="text/html")


def error_page(
    request: Request, status: int, title: str, detail: str, *, errors: list[dict[str, str]] | None = None
) -> Response:
    """An error as a page: what happened, and the way back."""
    page = TEMPLATES.get_template("error.html").render(
        request=request,
        here="",
        status=int(status),
        title=title,
        detail=detail,
        errors=errors or [],
        request_id=getattr(request.state, "request_id", ""),
    )
    return html(request, page, status)


def _download(wanted: str, tables: Mapping[str, Table]) -> Response:
    name, _, kind = wanted.rpartition(".")
    if name not in tables:
        raise unknown_parameter("download", f"this page has no table {name!r}; it has: {', '.join(tables) or 'none'}")
    body, media_type = (
        (to_csv(tables[name]), "text/csv") if kind == "csv" else (to_json(tables[name]), "application/json")
    )
    headers = {
        "Content-Disposition": f'attachment; filename="kdatune-{name}.{kind}"',
        "Cache-Control": "no-store",
        "Content-Security-Policy": "default-src 'none'",
    }
    return Response(body.encode("utf-8", "replace"), headers=headers, media_type=media_type)
