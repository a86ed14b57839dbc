"""One nightly run at a time on a database. The lock dies with its process, also with one that is killed."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy import Engine
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from kdatune_kernels.errors import StoreError
from kdatune_tuner.store.address import explain
from kdatune_tuner.store.address import sqlite_path
from kdatune_tuner.store.lock import file_lock

BUSY = "another nightly run is at work on this database; this one leaves"
_NIGHT_LOCK = 0x6B646103  # first key of the advisory lock, beside those of engine.py; the second is the schema


@contextmanager
def single_flight(engine: Engine) -> Iterator[Callable[[], None]]:
    """Hold the night's lock; yields a check that it is held still, to be called before each piece of work.

    A file beside a SQLite database, a session's advisory lock on PostgreSQL: there it is gone with the connection.

    Raises:
        StoreError: another nightly run holds it (at once, without waiting); from the check: the connection was lost.
    """
    path = sqlite_path(engine.url)
    if path is not None:
        with file_lock(path.resolve(), 0.0, suffix=".nightly.lock", busy=BUSY):
            yield lambda: None
        return
    with _connected(engine) as connection:
        taken = connection.scalar(text("SELECT pg_try_advisory_lock(:key, hashtext(current_schema()))"), _KEY)
        if not taken:
            raise StoreError(BUSY)
        try:
            yield lambda: _still_held(engine, connection)
        finally:
            if not connection.closed and not connection.invalidated:
                connection.execute(text("SELECT pg_advisory_unlock(:key, hashtext(current_schema()))"), _KEY)


_KEY = {"key": _NIGHT_LOCK}


@contextmanager
def _connected(engine: Engine) -> Iterator[Connection]:
    """A connection of its own, outside any transaction: an idle one must not hold the database's clean-up back."""
    try:
        connection = engine.execution_options(isolation_level="AUTOCOMMIT").connect()
    except DBAPIError as error:
        raise explain(engine.url, error) or error from error
    with connection:
        yield connection


def _still_held(engine: Engine, connection: Connection) -> None:
    try:
        connection.execute(text("SELECT 1"))
    except DBAPIError as error:
        why = explain(engine.url, error) or error
        raise StoreError(f"the connection that held the night's lock was lost ({why}); the night ends here") from error
