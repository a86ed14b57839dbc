"""Turns to write on SQLite: all who wait look again equally often, and the connection is left as it was."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdatune_tuner.store import turn
from kdatune_tuner.store.turn import begin_immediate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with sqlite3.connect(tmp_path / "k.db") as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    return tmp_path / "k.db"


@pytest.fixture
def two(path: Path) -> Iterator[tuple[sqlite3.Connection, sqlite3.Connection]]:
    """Two connections that open transactions by themselves only when told to."""
    both = [sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False) for _ in range(2)]
    yield both[0], both[1]
    for connection in both:
        connection.close()


def busy_timeout_ms(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA busy_timeout").fetchone()[0]


def test_a_free_database_is_taken_at_once(two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn.time, "sleep", lambda _: pytest.fail("nobody was in the way"))
    one, _ = two
    begin_immediate(one, 30)
    assert one.in_transaction
    assert busy_timeout_ms(one) == 30_000


def test_who_waits_long_looks_again_as_often_as_a_newcomer(two, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = two
    begin_immediate(one, 30)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 500:
            one.execute("COMMIT")

    monkeypatch.setattr(turn.time, "sleep", sleep)
    begin_immediate(other, 30)
    assert other.in_transaction
    assert len(slept) == 500
    assert max(slept) <= 0.02
    early, late = sum(slept[:250]) / 250, sum(slept[250:]) / 250
    assert 0.7 < late / early < 1.4  # it does not get slower; SQLite's own handler goes from 1 ms to 100 ms


def test_the_turn_comes_when_the_other_one_ends(two) -> None:
    one, other = two
    begin_immediate(one, 30)
    one.execute("INSERT INTO t VALUES (1)")
    threading.Timer(0.1, one.execute, ("COMMIT",)).start()
    begin_immediate(other, 30)
    assert other.execute("SELECT x FROM t").fetchall() == [(1,)]


def test_it_gives_up_with_what_sqlite_says(two) -> None:
    one, other = two
    begin_immediate(one, 30)
    with pytest.raises(sqlite3.OperationalError, match="database is locked") as told:
        begin_immediate(other, 0.05)
    assert told.value.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
    assert busy_timeout_ms(other) == 50
    assert not other.in_transaction


def test_another_error_is_not_waited_for(two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn.time, "sleep", lambda _: pytest.fail("waiting does not help"))
    one, _ = two
    begin_immediate(one, 30)
    with pytest.raises(sqlite3.OperationalError, match="within a transaction"):
        begin_immediate(one, 30)
