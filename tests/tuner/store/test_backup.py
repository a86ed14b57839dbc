"""A backup is one state of the database, whatever is written meanwhile; a restore is seen by those who have it open."""

import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy import text

from kdatune_kernels.errors import StoreError
from kdatune_migrations import head
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.backup import backup
from kdatune_tuner.store.backup import inspect
from kdatune_tuner.store.backup import restore
from kdatune_tuner.store.engine import downgrade
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import schema_state
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """SQLite only: the other has its own tools."""
    return f"sqlite:///{tmp_path / 'kdatune.db'}"


def generation(engine: Engine) -> int:
    with reading(engine) as s:
        return queries.generation(s)


def promote(engine: Engine, world, count: int = 1) -> None:
    for _ in range(count):
        with writing(engine) as s:
            world.promote(s, writes.add_measurement(s, world.new()))


def test_a_backup_is_taken_while_others_write(engine, world, database_url, tmp_path) -> None:
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            promote(engine, world)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        copies = []
        for i in range(5):
            before = generation(engine)
            copies.append(backup(database_url, tmp_path / f"{i}.db"))
            assert before <= copies[-1].generation <= generation(engine)
    finally:
        done.set()
        thread.join()
    for copied in copies:
        assert inspect(copied.path) == copied
        assert stat.S_IMODE(copied.path.stat().st_mode) == 0o600
        kept = open_engine(f"sqlite:///{copied.path}")
        with reading(kept) as s:
            # promotion and measurement come in one transaction: neither is there without the other
            assert len(queries.page_measurements(s, limit=1000)) == len(queries.page_promotions(s, limit=1000))
        kept.dispose()
    assert {path.suffix for path in tmp_path.iterdir()} <= {".db", ".db-wal", ".db-shm", ".lock"}


def test_a_restore_is_seen_by_who_has_the_database_open(engine, world, database_url, tmp_path) -> None:
    promote(engine, world, 2)
    backup(database_url, tmp_path / "two.db")
    promote(engine, world, 3)
    with reading(engine) as reader:
        assert queries.generation(reader) == 5
        copied, before = restore(database_url, tmp_path / "two.db")
        assert queries.generation(reader) == 5  # what is being read stays what it was
    assert (copied.generation, generation(engine)) == (2, 2)
    assert before == tmp_path / "kdatune.db.before-restore-1"
    assert inspect(before).generation == 5
    promote(engine, world)
    assert generation(engine) == 3
    with engine.connect() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
    restore(database_url, before)
    assert generation(engine) == 5


def test_an_old_backup_is_brought_to_this_schema(engine, world, database_url, tmp_path) -> None:
    promote(engine, world)
    engine.dispose()
    downgrade(database_url, "0002")
    old = backup(database_url, tmp_path / "old.db")
    assert old.schema == "0002"
    upgrade(database_url)
    restore(database_url, tmp_path / "old.db")
    again = open_engine(database_url)
    assert schema_state(again) == (head(), head())
    assert generation(again) == 1
    again.dispose()


def test_a_database_that_is_gone_is_restored(engine, world, database_url, tmp_path) -> None:
    promote(engine, world)
    backup(database_url, tmp_path / "one.db")
    engine.dispose()
    for end in ("", "-wal", "-shm"):
        (tmp_path / f"kdatune.db{end}").unlink(missing_ok=True)
    assert restore(database_url, tmp_path / "one.db")[1] is None
    again = open_engine(database_url)
    assert generation(again) == 1
    again.dispose()


def test_a_file_that_is_there_is_not_replaced(engine, database_url, tmp_path) -> None:
    (tmp_path / "there").write_text("precious")
    with pytest.raises(StoreError, match="--overwrite"):
        backup(database_url, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "precious"
    assert backup(database_url, tmp_path / "there", overwrite=True).generation == 0


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "torn", "foreign", "newer", "folder"])
def test_what_is_no_backup_is_not_restored(engine, world, database_url, tmp_path, kind) -> None:
    promote(engine, world)
    bad = tmp_path / "bad.db"
    if kind == "empty":
        bad.touch()
    elif kind == "text":
        bad.write_text("SQLite format 3, or so it says" * 100)
    elif kind == "folder":
        bad.mkdir()
    elif kind == "foreign":
        with sqlite3.connect(bad) as other:
            other.execute("CREATE TABLE promotion (generation INTEGER)")
        other.close()
    elif kind != "missing":
        backup(database_url, bad)
        if kind == "torn":
            os.truncate(bad, bad.stat().st_size // 2)
        else:
            with sqlite3.connect(bad) as other:
                other.execute("UPDATE kdatune_alembic_version SET version_num = '9999'")
            other.close()
    with pytest.raises(StoreError, match=r"bad\.db"):
        restore(database_url, bad)
    assert generation(engine) == 1
    assert not list(tmp_path.glob("*before*"))


def test_postgresql_is_told_its_own_tools(tmp_path) -> None:
    for call in (lambda u: backup(u, tmp_path / "x"), lambda u: restore(u, tmp_path / "x")):
        with pytest.raises(StoreError, match="pg_dump"):
            call("postgresql://user@host/database")


def test_nothing_to_back_up(tmp_path) -> None:
    with pytest.raises(StoreError, match="there is no database"):
        backup(f"sqlite:///{tmp_path}/none.db", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written(engine, database_url, tmp_path) -> None:
    with pytest.raises(StoreError, match="the copy failed"):
        backup(database_url, tmp_path / "no" / "folder.db")
