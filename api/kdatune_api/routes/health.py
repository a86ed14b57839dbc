"""Whether the service lives, is ready, which version it is, what it counts, and its documentation."""

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Request
from fastapi import Response
from fastapi.concurrency import run_in_threadpool

from kdatune_api.deps import Service
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import no_query
from kdatune_api.metrics import CONTENT_TYPE
from kdatune_api.openapi import docs_page
from kdatune_api.openapi import errors
from kdatune_api.schemas import Health
from kdatune_api.schemas import Ready
from kdatune_api.schemas import Version
from kdatune_kernels import __version__
from kdatune_kernels.errors import StoreError
from kdatune_kernels.snapshot import SCHEMA
from kdatune_kernels.spec import Json
from kdatune_migrations import head
from kdatune_tuner.store.engine import schema_state
from kdatune_tuner.store.queries import generation

router = APIRouter(tags=["service"])

# The page is one file with its own styles, and needs nothing else.
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
_UNCACHED = {"Cache-Control": "no-store"}


@router.get(
    "/healthz",
    summary="The process answers; the database is not asked",
    responses=errors(422),
    dependencies=[Depends(no_query)],
)
async def healthz(response: Response) -> Health:
    response.headers.update(_UNCACHED)
    return Health(status="ok")


@router.get(
    "/readyz",
    summary="The database can be read and its schema is the one this service works with",
    responses=errors(422, 503),
    dependencies=[Depends(no_query)],
)
async def readyz(service: ServiceDep, response: Response) -> Ready:
    response.headers.update(_UNCACHED)
    return await run_in_threadpool(_ready, service)


@router.get(
    "/version",
    summary="Versions of the service, its API, its snapshot document and its database schema",
    responses=errors(422),
    dependencies=[Depends(no_query)],
)
async def version() -> Version:
    return Version(version=__version__, api="v1", snapshot_schema=SCHEMA, schema_revision=head())


@router.get("/metrics", include_in_schema=False)
async def metrics(service: ServiceDep) -> Response:
    return Response(service.metrics.render(), headers={**_UNCACHED, "Content-Type": CONTENT_TYPE})


@router.get("/openapi.json", include_in_schema=False)
async def openapi_json(request: Request) -> Json:
    document: Json = request.app.openapi()
    return document


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    state = request.app.state
    if getattr(state, "docs", None) is None:
        state.docs = docs_page(request.app.openapi())
    return Response(state.docs, media_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})


def _ready(service: Service) -> Ready:
    engine = service.database.engine()
    current, wanted = schema_state(engine)
    if current != wanted:
        raise StoreError(
            f"the database has schema {current}, this service works with {wanted}; run `kdatune db upgrade`"
        )
    with service.reading() as session:
        return Ready(status="ok", schema_revision=wanted, generation=generation(session))
