"""The app: `create_app()`, started by its import string "kdatune_api.app:create_app" with factory=True."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from kdatune_api.auth import Gate
from kdatune_api.auth import listening_host
from kdatune_api.champions import CHECK_EVERY_SECONDS
from kdatune_api.champions import ChampionCache
from kdatune_api.deps import Database
from kdatune_api.deps import Service
from kdatune_api.logs import configure_logging
from kdatune_api.metrics import Metrics
from kdatune_api.middleware import Surround
from kdatune_api.openapi import DESCRIPTION
from kdatune_api.openapi import TITLE
from kdatune_api.openapi import openapi_of
from kdatune_api.pages.install import install_pages
from kdatune_api.problems import install_problem_handlers
from kdatune_api.remember import Recall
from kdatune_api.routes import configs
from kdatune_api.routes import demand
from kdatune_api.routes import health
from kdatune_api.routes import listings
from kdatune_api.routes import regressions
from kdatune_api.routes import results
from kdatune_api.routes import rollback
from kdatune_api.routes import snapshots
from kdatune_kernels import __version__
from kdatune_kernels.errors import StoreError
from kdatune_kernels.tunable import registry
from kdatune_tuner.exposure import refuse_strangers
from kdatune_tuner.settings import Settings

log = logging.getLogger("kdatune.api")

MAX_DEMAND_BYTES = 256 << 10


def create_app(settings: Settings | None = None, *, check_every_seconds: float = CHECK_EVERY_SECONDS) -> FastAPI:
    """The service over the database of the settings (the environment's, when none are given).

    The database is opened by the first request that needs it, so the service starts without it and says so in /readyz.

    Args:
        check_every_seconds: how old what is served may be before the database is asked whether it has changed.
    """
    settings = settings or Settings()
    metrics = Metrics()
    database = Database(settings.database_url)
    cache = ChampionCache(database.engine, metrics, check_every_seconds)
    service = Service(settings, database, cache, metrics, Gate(settings, database.engine))
    app = FastAPI(
        title=TITLE,
        version=__version__,
        description=DESCRIPTION,
        lifespan=_lifespan,
        openapi_url=None,  # routes/health.py serves the document, and a page of it that loads nothing from elsewhere
        redirect_slashes=False,
    )
    app.state.service = service
    app.openapi = partial(openapi_of, app)  # type: ignore[method-assign]  # FastAPI's documented way to change it
    install_problem_handlers(app)
    limits = {"/v1/demand": MAX_DEMAND_BYTES}
    app.add_middleware(
        Surround,
        metrics=metrics,
        body_limit=lambda path: min(limits.get(path, settings.max_body_bytes), settings.max_body_bytes),
        admit=service.gate.reader,
        recall=Recall(service, {configs.PATH: configs.answer_at_once}),
    )
    for module in (configs, snapshots, listings, regressions, demand, results, rollback, health):
        app.include_router(module.router)
    install_pages(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    configure_logging()
    service: Service = app.state.service
    try:
        refuse_strangers(service.database.engine, listening_host(service.settings))
        service.champions.warm()
        registry()  # what is installed is loaded, and what is broken said, before somebody asks
        yield
    except StoreError as error:
        log.critical("%s", error)
        raise
    finally:
        service.close()
