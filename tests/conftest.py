"""Fixtures of every folder: a database of its own for each test, on SQLite and on PostgreSQL."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL
from sqlalchemy import Engine
from sqlalchemy import make_url

from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import upgrade

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Started in the background of a script: what tests start would be deaf to the Ctrl-C that they are sent.
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEFAULT_POSTGRES_URL = "postgresql+psycopg://postgres@127.0.0.1:5432/test"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a PostgreSQL database whose user may create schemas.

    KDATUNE_TEST_POSTGRES_URL where it is set (and then it must work), else a server on the usual port, else one of our
    own where the server's programs are installed, else the tests are skipped.
    """
    wanted = os.environ.get("KDATUNE_TEST_POSTGRES_URL")
    if wanted:
        _execute(wanted, "SELECT 1")
        yield wanted
        return
    try:
        _execute(DEFAULT_POSTGRES_URL, "SELECT 1")
    except psycopg.OperationalError:
        pass
    else:
        yield DEFAULT_POSTGRES_URL
        return
    initdb = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)
    initdb = initdb or shutil.which("initdb")
    if initdb is None:
        pytest.skip(
            "NO POSTGRESQL: half of the store's tests are not run. Set KDATUNE_TEST_POSTGRES_URL, start a server at "
            f"{DEFAULT_POSTGRES_URL}, or install one (initdb)"
        )
    with tempfile.TemporaryDirectory(prefix="kdatune-postgres-") as folder:
        yield from _own_server(Path(initdb).resolve().parent, folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database (no schema of kdatune yet), gone after the test."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'kdatune.db'}"
        return
    server = request.getfixturevalue("postgres_server")
    schema = f"kdatune_{uuid.uuid4().hex[:12]}"
    _execute(server, f"CREATE SCHEMA {schema}")
    try:
        url: URL = make_url(server)
        yield url.update_query_dict({"options": f"-csearch_path={schema}"}).render_as_string(hide_password=False)
    finally:
        _execute(server, f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """The engine of a migrated, empty database."""
    yield from _migrated(database_url)


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Engine]:
    """As `engine`, of SQLite alone: for what PostgreSQL cannot hold, and for what does not depend on the database."""
    yield from _migrated(f"sqlite:///{tmp_path / 'kdatune.db'}")


def _migrated(url: str) -> Iterator[Engine]:
    upgrade(url)
    engine = open_engine(url)
    yield engine
    engine.dispose()


def _execute(url: str, statement: str) -> None:
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True, connect_timeout=30) as connection:
        connection.execute(statement.encode())


def _own_server(programs: Path, folder: str) -> Iterator[str]:
    user: dict[str, Any] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root; its package makes a user for it
        user = {"user": "postgres", "cwd": "/"}
        shutil.chown(folder, "postgres")
    data = f"{folder}/data"

    def call(program: str, *arguments: str) -> None:
        subprocess.run([programs / program, "-D", data, *arguments], check=True, stdout=subprocess.DEVNULL, **user)

    call("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
    for tries_left in reversed(range(5)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        how = f"-h 127.0.0.1 -p {port} -c unix_socket_directories='' -c fsync=off"
        try:
            call("pg_ctl", "-w", "-t", "200", "-l", f"{data}/log", "-o", how, "start")
            break
        except subprocess.CalledProcessError:  # another process may have taken the port by now
            if not tries_left:
                raise
    try:
        yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "-w", "-m", "immediate", "stop")
