"""Opening the database, reading it, writing it, migrating it, the same way on SQLite and PostgreSQL.

Writers go one at a time on both: BEGIN IMMEDIATE on SQLite, a transaction-scoped advisory lock on PostgreSQL. A write
transaction is a few milliseconds and holds no GPU work, so the queue is short; in return a read-then-write never fails
half-way, generations are handed out in commit order, and two writers cannot deadlock.
"""

import functools
import sqlite3
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import nullcontext
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import URL
from sqlalchemy import Connection
from sqlalchemy import Engine
from sqlalchemy import create_engine
from sqlalchemy import event
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from kdatune_kernels.errors import StoreError
from kdatune_migrations import VERSION_TABLE
from kdatune_migrations import alembic_config
from kdatune_migrations import head
from kdatune_migrations import knows
from kdatune_tuner.store.address import BUSY_TIMEOUT_S
from kdatune_tuner.store.address import UPGRADE
from kdatune_tuner.store.address import explain
from kdatune_tuner.store.address import parse_address
from kdatune_tuner.store.address import shown
from kdatune_tuner.store.address import sqlite_path
from kdatune_tuner.store.damaged import read_json
from kdatune_tuner.store.lock import WAIT_S
from kdatune_tuner.store.lock import file_lock
from kdatune_tuner.store.turn import begin_immediate

_MODE = "kdatune_mode"  # execution option: "read" or "write"; none is a plain transaction
_WRITER_LOCK, _MIGRATION_LOCK = 0x6B646101, 0x6B646102  # first key of the advisory locks; the second is the schema


def open_engine(url: str, *, must_exist: bool = True) -> Engine:
    """The engine of the database, ready for `reading` and `writing`. Dispose of it when done.

    Args:
        must_exist: check that the database is there and its schema is the one this code works with.

    Raises:
        StoreError: the URL is none that the store works with, or (must_exist) the file is missing, is not a database,
            the server cannot be reached, or the schema is missing, older or newer; the message says what to run.
    """
    address = parse_address(url)
    path = sqlite_path(address)
    if must_exist and path is not None and not path.exists():
        raise StoreError(f"there is no database at {path.absolute()}; {UPGRADE} or set KDATUNE_DATABASE_URL")
    engine = _new_engine(address)
    if must_exist:
        try:
            _check_schema(engine)
        except StoreError:
            engine.dispose()
            raise
    return engine


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """A session that sees one state of the database and cannot write.

    Raises:
        StoreError: the database cannot be read; the message says what to do.
    """
    with _explained(engine), Session(_bound(engine, "read"), autoflush=False) as session:
        yield session


@contextmanager
def looking(engine: Engine) -> Iterator[Connection]:
    """A connection for one small question that is asked often: on PostgreSQL each statement is by itself, which saves the
    transaction's (0.46 -> 0.2 ms of the asking thread's time).

    Raises:
        StoreError: the database cannot be read; the message says what to do.
    """
    alone = engine.dialect.name == "postgresql"
    asked = engine.execution_options(isolation_level="AUTOCOMMIT") if alone else _bound(engine, "read")
    with _explained(engine), asked.connect() as connection:
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Session]:
    """A session in the one write transaction: committed at the end, rolled back on any exception. Keep it short.

    Raises:
        StoreError: the database refuses the write, or another writer held it for 30 s.
    """
    with _explained(engine), Session(_bound(engine, "write"), expire_on_commit=False) as session, session.begin():
        connection = session.connection()  # on SQLite this is where BEGIN IMMEDIATE waits for its turn
        if connection.dialect.name == "postgresql":
            _lock(connection, _WRITER_LOCK, BUSY_TIMEOUT_S)
        yield session


@contextmanager
def raw(engine: Engine) -> Iterator[Any]:
    """SQLite's own connection, outside any transaction: for statements that take none, such as VACUUM.

    Raises:
        StoreError: the database refuses, or another writer held it for 30 s.
    """
    with _explained(engine):
        pooled = engine.raw_connection()
        connection: Any = pooled.driver_connection
        try:
            connection.execute("PRAGMA query_only = OFF")
            yield connection
        finally:
            pooled.close()


def schema_state(engine: Engine) -> tuple[str | None, str]:
    """The schema's revision in the database (None: no kdatune schema) and the one this code works with.

    Raises:
        StoreError: the database cannot be read.
    """
    with _explained(engine), engine.connect() as connection:
        return _current(connection), _head()


def upgrade(url: str) -> None:
    """Bring the database to the newest schema, making it where there is none. Many processes may do so at once.

    Raises:
        StoreError: the database cannot be reached or written, is no database, or its schema is newer than this code.
    """
    _migrate(url, lambda config: command.upgrade(config, "head"))


def downgrade(url: str, revision: str = "base") -> None:
    """Take the schema back to an older revision; "base" drops every table of kdatune with its rows.

    Raises:
        StoreError: as for `upgrade`.
    """
    _migrate(url, lambda config: command.downgrade(config, revision))


@functools.cache
def _head() -> str:
    return head()


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def _check_schema(engine: Engine) -> None:
    where = shown(engine.url)
    with _explained(engine), engine.connect() as connection:
        _refuse_newer(connection, where)
        current = _current(connection)
    if current is None:
        raise StoreError(f"{where} holds no kdatune schema; {UPGRADE}")
    if current != _head():
        raise StoreError(f"{where} has schema {current}, this kdatune works with {_head()}; {UPGRADE}")


def _refuse_newer(connection: Connection, where: str) -> None:
    current = _current(connection)
    if current not in (None, _head()) and not knows(str(current)):
        raise StoreError(f"{where} has schema {current}, which this kdatune ({_head()}) does not know; update kdatune")


def _new_engine(address: URL) -> Engine:
    if address.drivername == "sqlite":
        engine = create_engine(address, connect_args={"timeout": BUSY_TIMEOUT_S}, json_deserializer=read_json)
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
        return engine
    args = {"application_name": "kdatune", "connect_timeout": 10}
    return create_engine(
        address, pool_pre_ping=True, connect_args={k: v for k, v in args.items() if k not in address.query}
    )


def _sqlite_connect(dbapi_connection: Any, _record: Any) -> None:
    # The driver must not open transactions by itself: it would skip BEGIN before SELECT and DDL. _sqlite_begin does it.
    # Source: SQLAlchemy 2.1, SQLite dialect, "Enabling Non-Legacy SQLite Transactional Modes".
    dbapi_connection.isolation_level = None
    dbapi_connection.execute("PRAGMA foreign_keys = ON")


def _sqlite_begin(connection: Connection) -> None:
    mode = connection.get_execution_options().get(_MODE)
    connection.exec_driver_sql(f"PRAGMA query_only = {'ON' if mode == 'read' else 'OFF'}")
    if mode == "write":
        begin_immediate(_driver(connection), BUSY_TIMEOUT_S)
    else:
        connection.exec_driver_sql("BEGIN")


def _driver(connection: Connection) -> Any:
    return connection.connection.dbapi_connection


def _bound(engine: Engine, mode: str) -> Engine:
    if engine.dialect.name == "postgresql" and mode == "read":
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return engine.execution_options(**{_MODE: mode})


def _lock(connection: Connection, key: int, wait_s: int) -> None:
    """Take an advisory lock until the transaction ends; a client that hangs while it holds it is cut off."""
    connection.execute(text(f"SET LOCAL lock_timeout = '{wait_s}s'"))
    connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = '{wait_s}s'"))
    connection.execute(text("SELECT pg_advisory_xact_lock(:key, hashtext(current_schema()))"), {"key": key})


@contextmanager
def _explained(engine: Engine) -> Iterator[None]:
    try:
        yield
    except (DBAPIError, sqlite3.Error) as error:
        explained = explain(engine.url, error)
        if explained is None:
            raise
        raise explained from error


def _migrate(url: str, run: Callable[[Config], None]) -> None:
    address = parse_address(url)
    path = sqlite_path(address)
    engine = _new_engine(address)
    try:
        with (
            _explained(engine),
            file_lock(path) if path is not None else nullcontext(),
            engine.execution_options(**{_MODE: "write"}).connect() as connection,
        ):
            if path is not None:
                _prepare_sqlite(connection)
            with connection.begin():
                if path is None:
                    _lock(connection, _MIGRATION_LOCK, WAIT_S)
                _refuse_newer(connection, shown(address))
                config = alembic_config()
                config.attributes["connection"] = connection
                run(config)
    finally:
        engine.dispose()


def _prepare_sqlite(connection: Connection) -> None:
    """What cannot be done inside a transaction: WAL, once and for all, and no cascades while tables are rebuilt."""
    driver = _driver(connection)
    driver.execute("PRAGMA foreign_keys = OFF")
    driver.execute("PRAGMA journal_mode = WAL")
