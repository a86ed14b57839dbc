"""Database URLs: which are accepted, and what an error of the database means to the one who reads it."""

import sqlite3
from pathlib import Path

import psycopg
from psycopg import errors
from sqlalchemy import URL
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.exc import DBAPIError

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


def explain(address: URL, error: DBAPIError | sqlite3.Error) -> StoreError | None:
    """The database's error as one that says what to do, or None when the error is a mistake of the calling code."""
    cause: BaseException | None = error.orig if isinstance(error, DBAPIError) else error
    what = str(cause).strip().replace("\n", " ")
    says = _sqlite_says(cause, what) if isinstance(cause, sqlite3.Error) else _postgres_says(cause, what)
    return StoreError(f"{shown(address)} {says}") if says else None


def _sqlite_says(cause: sqlite3.Error, what: str) -> str | None:
    # Extended codes keep the primary code in the low byte. Source: SQLite, "Result and Error Codes".
    code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    match code:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return f"is busy: another writer held it for more than {BUSY_TIMEOUT_S} s ({what}); try again"
        case sqlite3.SQLITE_CONSTRAINT:
            return f"refused the write: {what}"
        case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
            return f"is not a SQLite database ({what}); name another file or restore a backup"
        case sqlite3.SQLITE_READONLY:
            return f"cannot be written ({what}); check the rights of the file and of its folder"
        case sqlite3.SQLITE_CANTOPEN:
            return f"cannot be opened ({what}); check that its folder exists and that you may write there"
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:
            return f"cannot be read or written ({what}); check the disk"
    return f"lacks a table of kdatune ({what}); {UPGRADE}" if "no such table" in what else None


def _postgres_says(cause: BaseException | None, what: str) -> str | None:
    match cause:
        case errors.LockNotAvailable():
            return f"is busy: another writer held it for more than {BUSY_TIMEOUT_S} s ({what}); try again"
        case errors.UndefinedTable():
            return f"lacks a table of kdatune ({what}); {UPGRADE}"
        case errors.InsufficientPrivilege():
            return f"refuses: {what}; grant the user CREATE and USAGE on the schema, or use another schema"
        case psycopg.IntegrityError():
            return f"refused the write: {what}"
        case psycopg.DataError():
            return f"cannot hold a value: {what}"
        case psycopg.OperationalError():
            return f"cannot be used: {what}; check that the server runs and that KDATUNE_DATABASE_URL is right"
    return None
