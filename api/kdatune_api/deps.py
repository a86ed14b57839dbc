"""What the routes are given: the service's parts, a database session, a strict query."""

import threading
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from fastapi import Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from kdatune_api.auth import Gate
from kdatune_api.champions import ChampionCache
from kdatune_api.metrics import Metrics
from kdatune_api.problems import INVALID_REQUEST
from kdatune_api.problems import NOT_JSON
from kdatune_api.problems import FieldError
from kdatune_api.problems import ProblemError
from kdatune_tuner.settings import Settings
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing


class Database:
    """The engine, opened when first needed: a service may start before its database does."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    def engine(self) -> Engine:
        """The open engine.

        Raises:
            StoreError: the database is missing, unreachable, or its schema is not the one this code works with.
        """
        with self._lock:
            if self._engine is None:
                self._engine = open_engine(self.url)
            return self._engine

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()
                self._engine = None


@dataclass(frozen=True)
class Service:
    """The parts that live as long as the app does."""

    settings: Settings
    database: Database
    champions: ChampionCache
    metrics: Metrics
    gate: Gate

    def reading(self) -> AbstractContextManager[Session]:
        """A session for one request's reads. Raises StoreError, on entering, when the database cannot be used."""
        return reading(self.database.engine())

    def writing(self) -> AbstractContextManager[Session]:
        """A session for one request's writes, committed at the end. Raises StoreError as `reading` does."""
        return writing(self.database.engine())

    def close(self) -> None:
        """End the background thread, then close the database."""
        self.champions.close()
        self.database.close()


async def service_of(request: Request) -> Service:
    """The Service of the app that answers this request. `async`, since FastAPI sends plain functions to a thread."""
    service: Service = request.app.state.service
    return service


async def strict_query(request: Request) -> None:
    """Refuse a query parameter that is given twice: one of the values would be silently ignored."""
    given = Counter(name for name, _ in request.query_params.multi_items())
    twice = sorted(name for name, count in given.items() if count > 1)
    if twice:
        errors = [FieldError(parameter=name[:100], detail="given more than once") for name in twice]
        raise ProblemError(INVALID_REQUEST, f"{twice[0][:100]}: given more than once", errors)


async def no_query(request: Request) -> None:
    """Refuse any query parameter, for a route that takes none."""
    names = sorted(set(request.query_params))
    if names:
        errors = [FieldError(parameter=name[:100], detail="unknown; this path takes no parameters") for name in names]
        raise ProblemError(INVALID_REQUEST, f"{names[0][:100]}: unknown; this path takes no parameters", errors)


async def json_body(request: Request) -> None:
    """Refuse a body that does not say that it is JSON."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ProblemError(NOT_JSON, f"Content-Type is {content_type[:100]!r}; send application/json")


ServiceDep = Annotated[Service, Depends(service_of)]
