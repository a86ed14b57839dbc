"""Taking a turn to write on SQLite, so that whoever waits longest does not wait for ever.

SQLite's own busy handler sleeps the longer the longer it has waited (1 ms to 100 ms), so newcomers win against those who
wait: of 64 processes with 50 writes each, five were refused after 30 s. Here everyone who waits looks again equally often.
PostgreSQL needs nothing of the kind: its advisory lock has a queue.
"""

import random
import sqlite3
import time

_LOOK_AGAIN_SECONDS = (0.002, 0.02)


def begin_immediate(connection: sqlite3.Connection, wait_seconds: float) -> None:
    """BEGIN IMMEDIATE, when its turn comes.

    Raises:
        sqlite3.OperationalError: SQLITE_BUSY when others wrote for all of wait_seconds; any other at once.
    """
    deadline = time.monotonic() + wait_seconds
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # the low byte; the rest says why
                if not busy or time.monotonic() >= deadline:
                    raise
            time.sleep(random.uniform(*_LOOK_AGAIN_SECONDS))  # noqa: S311 - no secret
    finally:
        connection.execute(f"PRAGMA busy_timeout = {int(wait_seconds * 1000)}")
