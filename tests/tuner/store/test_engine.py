"""Opening, reading, writing; and what is said when it cannot be done."""

import re
import socket
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy import make_url
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from kdatune_kernels.errors import StoreError
from kdatune_migrations import VERSION_TABLE
from kdatune_migrations import head
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.address import parse_address
from kdatune_tuner.store.address import shown
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import schema_state
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing


def test_an_upgraded_database_is_at_head(engine: Engine) -> None:
    assert schema_state(engine) == (head(), head())


def test_a_database_without_schema_says_what_to_run(database_url: str) -> None:
    bare = open_engine(database_url, must_exist=False)
    assert schema_state(bare) == (None, head())
    bare.dispose()
    with pytest.raises(StoreError, match=r"holds no kdatune schema; run `kdatune db upgrade`"):
        open_engine(database_url)


def test_an_older_schema_says_what_to_run(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(database_url)
    monkeypatch.setattr("kdatune_tuner.store.engine._head", lambda: "9999")
    with pytest.raises(
        StoreError, match=rf"has schema {head()}, this kdatune works with 9999; run `kdatune db upgrade`"
    ):
        open_engine(database_url)


def test_a_newer_schema_is_neither_opened_nor_migrated(database_url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(StoreError, match=r"has schema 9999, which this kdatune .* does not know; update kdatune"):
        open_engine(database_url)
    with pytest.raises(StoreError, match="update kdatune"):
        upgrade(database_url)


def test_a_missing_file_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with pytest.raises(StoreError, match=re.escape(f"no database at {path}; run `kdatune db upgrade`")):
        open_engine(f"sqlite:///{path}")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"cannot write .*none/k\.db\.lock: No such file.*check that its folder exists"
    ):
        upgrade(f"sqlite:///{tmp_path / 'none' / 'k.db'}")


def test_a_folder_is_not_a_database(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        open_engine(f"sqlite:///{tmp_path}")


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("these are notes, more than a hundred bytes of them, so that a header could be read: " + "x" * 100)
    before = path.read_bytes()
    for use in (open_engine, upgrade):
        with pytest.raises(StoreError, match="is not a SQLite database"):
            use(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_an_unreachable_server_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"postgresql://kdatune:secret@127.0.0.1:{free.getsockname()[1]}/kdatune"
        with pytest.raises(StoreError, match=r"cannot be used: .*refused.*check that the server runs") as caught:
            open_engine(url)
    assert "secret" not in str(caught.value)


def test_a_missing_postgres_database_is_named(postgres_server: str) -> None:
    url = make_url(postgres_server).set(database="no_such_database").render_as_string(hide_password=False)
    with pytest.raises(StoreError, match='database "no_such_database" does not exist'):
        open_engine(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("kdatune.db", "is not a database URL"),
        ("", "is not a database URL"),
        ("sqlite://", "needs a plain file path"),
        ("sqlite:///:memory:", "needs a plain file path"),
        ("sqlite:///file:k.db?mode=ro&uri=true", "needs a plain file path"),
        ("mysql://root:secret@localhost/k", r"mysql://root:\*\*\*@localhost/k: the store works with sqlite:/// and"),
        ("postgresql+asyncpg://localhost/k", "the store works with sqlite:/// and"),
    ],
)
def test_a_url_that_cannot_be_used_says_why(url: str, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        open_engine(url)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_common_postgres_scheme_gets_the_driver_in_use(scheme: str) -> None:
    address = parse_address(f"{scheme}://user:secret@db.example/kdatune")
    assert address.drivername == "postgresql+psycopg"
    assert shown(address) == "postgresql+psycopg://user:***@db.example/kdatune"


def test_sqlite_is_set_up_for_many_processes(tmp_path: Path) -> None:
    upgrade(f"sqlite:///{tmp_path / 'k.db'}")
    engine = open_engine(f"sqlite:///{tmp_path / 'k.db'}")
    with reading(engine) as s:
        pragmas = {name: s.scalar(text(f"PRAGMA {name}")) for name in ("journal_mode", "foreign_keys", "busy_timeout")}
    engine.dispose()
    assert pragmas == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 30000}


def test_sqlite_writers_take_the_lock_first_and_readers_never(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    upgrade(f"sqlite:///{path}")
    engine = open_engine(f"sqlite:///{path}")
    other = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        with reading(engine) as s:
            assert queries.generation(s) == 0
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        with writing(engine), pytest.raises(sqlite3.OperationalError, match="database is locked"):
            other.execute("BEGIN IMMEDIATE")
        other.execute("BEGIN IMMEDIATE")
    finally:
        other.close()
        engine.dispose()


def test_a_busy_database_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "k.db"
    upgrade(f"sqlite:///{path}")
    monkeypatch.setattr("kdatune_tuner.store.engine.BUSY_TIMEOUT_S", 0.05)
    engine = open_engine(f"sqlite:///{path}")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(StoreError, match=r"is busy: another writer held it .*database is locked"), writing(engine):
            pass
    finally:
        other.close()
        engine.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_postgres_writers_go_one_at_a_time(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_engine(database_url, must_exist=False)
    second = open_engine(database_url, must_exist=False)
    try:
        with writing(first), monkeypatch.context() as patch:
            patch.setattr("kdatune_tuner.store.engine.BUSY_TIMEOUT_S", 1)
            with pytest.raises(StoreError, match="is busy: another writer held it"), writing(second):
                pass
        with writing(second) as s:
            assert s.scalar(text("SELECT 1")) == 1
    finally:
        first.dispose()
        second.dispose()


def test_reading_cannot_write(engine: Engine) -> None:
    with pytest.raises((StoreError, DBAPIError), match=r"(?i)read-?only"), reading(engine) as s:
        s.execute(text("DELETE FROM demand"))
    with writing(engine) as s:  # the same pooled connection writes again
        s.execute(text("DELETE FROM demand"))


def test_reading_sees_one_state(engine: Engine, world) -> None:
    with reading(engine) as before:
        assert queries.gpus(before) == [world.gpu]
        with writing(engine) as s:
            writes.report_demand(s, "NVIDIA H20", "kda", world.shape, 1)
        assert queries.demand(before) == []
    with reading(engine) as after:
        assert len(queries.demand(after)) == 1


def test_an_exception_rolls_everything_back(engine: Engine, world) -> None:
    with pytest.raises(StoreError, match="does not exist"), writing(engine) as s:
        world.promote(s, writes.add_measurement(s, world.new()) + 1)
    with reading(engine) as s:
        assert queries.page_measurements(s) == []


def test_a_dangling_reference_is_refused(engine: Engine, world) -> None:
    with pytest.raises(StoreError, match=r"(?i)refused the write: .*foreign key"), writing(engine) as s:
        writes.add_measurement(s, world.new(build_id=4711))


def test_a_table_that_is_gone_says_what_to_run(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE demand"))
    with pytest.raises(StoreError, match=r"lacks a table of kdatune .*run `kdatune db upgrade`"), reading(engine) as s:
        queries.demand(s)


def test_a_mistake_in_a_statement_is_not_dressed_up(engine: Engine) -> None:
    with pytest.raises(DBAPIError, match=r"(?i)syntax error") as caught, reading(engine) as s:
        s.execute(text("SELEKT 1"))
    assert not isinstance(caught.value, StoreError)
