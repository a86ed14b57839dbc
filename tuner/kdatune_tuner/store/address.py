"""Database URLs: which are accepted, and what an error of the database means to the one who reads it."""

from pathlib import Path

from psycopg.errors import InsufficientPrivilege
from psycopg.errors import LockNotAvailable
from psycopg.errors import QueryCanceled
from psycopg.errors import UndefinedTable
from sqlalchemy import URL
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.exc import DataError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import IntegrityError
from sqlalchemy.exc import OperationalError

from kdatune_kernels.errors import StoreError

BUSY_TIMEOUT_S = 30
"""How long a writer waits for another one before it gives up."""

UPGRADE = "run `kdatune db upgrade`"


def parse_address(url: str) -> URL:
    """The database URL, with the driver that the store uses.

    Raises:
        StoreError: not a URL, an in-memory or URI-style SQLite database, or another database or driver.
    """
    try:
        address = make_url(url)
    except ArgumentError as error:
        raise StoreError(
            f"KDATUNE_DATABASE_URL={url!r} is not a database URL; write e.g. sqlite:///kdatune.db or "
            "postgresql://user@host/database"
        ) from error
    if address.drivername in ("postgres", "postgresql"):
        address = address.set(drivername="postgresql+psycopg")
    if address.drivername == "sqlite+pysqlite":
        address = address.set(drivername="sqlite")
    if address.drivername not in ("sqlite", "postgresql+psycopg"):
        raise StoreError(f"{shown(address)}: the store works with sqlite:/// and postgresql:// (psycopg) only")
    if address.drivername == "sqlite" and (
        address.database in (None, "", ":memory:") or str(address.database).startswith("file:") or address.query
    ):
        raise StoreError(f"{shown(address)}: the store needs a plain file path, e.g. sqlite:///kdatune.db")
    return address


def shown(address: URL) -> str:
    """The URL for people: without its password."""
    return address.render_as_string(hide_password=True)


def sqlite_path(address: URL) -> Path | None:
    """The file of a SQLite database, None for PostgreSQL."""
    return Path(str(address.database)) if address.drivername == "sqlite" else None


def explain(address: URL, error: DBAPIError) -> StoreError | None:
    """The database's error as one that says what to do, or None when the error is a mistake of the calling code."""
    where = shown(address)
    what = str(error.orig).strip().replace("\n", " ")
    if isinstance(error, IntegrityError):
        return StoreError(f"{where} refused the write: {what}")
    if isinstance(error, DataError):
        return StoreError(f"{where} cannot hold a value: {what}")
    if isinstance(error.orig, UndefinedTable) or "no such table" in what:
        return StoreError(f"{where} lacks a table of kdatune ({what}); {UPGRADE}")
    if isinstance(error.orig, InsufficientPrivilege):
        return StoreError(f"{where}: {what}; grant the user CREATE and USAGE on the schema, or use another schema")
    if isinstance(error.orig, LockNotAvailable | QueryCanceled) or "database is locked" in what:
        return StoreError(
            f"{where} is busy: another writer held it for more than {BUSY_TIMEOUT_S} s ({what}); try again"
        )
    if "file is not a database" in what or "malformed" in what:
        return StoreError(f"{where} is not a SQLite database ({what}); name another file or restore a backup")
    if "readonly database" in what:
        return StoreError(f"{where} cannot be written ({what}); check the rights of the file and of its folder")
    if "unable to open database file" in what:
        return StoreError(
            f"{where} cannot be opened ({what}); check that its folder exists and that you may write there"
        )
    if isinstance(error, OperationalError) and address.drivername != "sqlite":
        return StoreError(
            f"{where} cannot be used: {what}; check that the server runs and KDATUNE_DATABASE_URL is right"
        )
    if isinstance(error, OperationalError):
        return StoreError(f"{where}: {what}")
    return None
