"""Backup and restore of a SQLite database while it is served and written. PostgreSQL has its own: pg_dump, pg_restore."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kdatune_kernels.errors import StoreError
from kdatune_migrations import VERSION_TABLE
from kdatune_migrations import head
from kdatune_migrations import knows
from kdatune_tuner.store.address import BUSY_TIMEOUT_S
from kdatune_tuner.store.address import explain
from kdatune_tuner.store.address import parse_address
from kdatune_tuner.store.address import sqlite_path
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.lock import file_lock


@dataclass(frozen=True)
class Copied:
    """What a copy holds."""

    path: Path
    schema: str
    generation: int
    size_bytes: int


def backup(url: str, to: Path, *, overwrite: bool = False) -> Copied:
    """Write the database as it is at this moment to a file. Readers and writers go on meanwhile.

    Raises:
        StoreError: not SQLite, no such database, the file is there already, cannot be written, or the copy is damaged.
    """
    source = _file(url, "backup")
    if not source.exists():
        raise StoreError(f"there is no database at {source.absolute()}")
    if to.exists() and not overwrite:
        raise StoreError(f"{to} is there already; name a new file, or say --overwrite")
    part = to.with_name(to.name + ".part")
    with _told(url), _removed(part):
        part.touch(mode=0o600)  # it holds the hashes of tokens
        _copy(source, part)
        with closing(sqlite3.connect(part)) as connection:
            connection.execute(
                "PRAGMA journal_mode = DELETE"
            )  # one file, which can be read where nothing can be written
        copied = inspect(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, to)
    return Copied(to, copied.schema, copied.generation, copied.size_bytes)


def restore(url: str, source: Path) -> tuple[Copied, Path | None]:
    """Put a backup in the database's place, in one transaction, and bring it to this schema. A service may go on.

    Returns:
        What was restored, and the file that holds what was there before (None: nothing was).

    Raises:
        StoreError: not SQLite, the backup cannot be read, is damaged or of a newer kdatune, or a writer keeps the
            database busy for 30 s.
    """
    target = _file(url, "restore")
    with _told(url):
        copied = inspect(source)
        before = None
        with file_lock(target):
            if target.exists() and target.stat().st_size:
                before = _unused(target)
                _copy(target, before)
            _copy(source, target)
    upgrade(url)
    return copied, before


def inspect(path: Path) -> Copied:
    """What a backup holds. Raises StoreError: not there, no kdatune database, damaged, or of a newer kdatune."""
    if not path.is_file():
        raise StoreError(f"there is no file {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            (sound,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            versions = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall()  # noqa: S608 - ours
            (generation,) = connection.execute("SELECT coalesce(max(generation), 0) FROM promotion").fetchone()
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} is not a kdatune database: {error}") from error
    if sound != "ok":
        raise StoreError(f"{path} is damaged: {sound}")
    schema = str(versions[0][0]) if versions else ""
    if not knows(schema):
        raise StoreError(f"{path} has schema {schema or 'none'}, which this kdatune ({head()}) does not know")
    return Copied(path, schema, int(generation), path.stat().st_size)


def _file(url: str, what: str) -> Path:
    path = sqlite_path(parse_address(url))
    if path is None:
        raise StoreError(f"`kdatune {what}` is for SQLite; for PostgreSQL use pg_dump and pg_restore")
    return path


def _copy(source: Path, to: Path) -> None:
    """All pages in one step: one state of the source, whatever is written meanwhile, and one transaction of the target."""
    with (
        closing(sqlite3.connect(source, timeout=BUSY_TIMEOUT_S)) as have,
        closing(sqlite3.connect(to, timeout=BUSY_TIMEOUT_S)) as get,
    ):
        have.backup(get)


def _unused(target: Path) -> Path:
    number = 1
    while (path := target.with_name(f"{target.name}.before-restore-{number}")).exists():
        number += 1
    return path


@contextlib.contextmanager
def _removed(part: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ("", "-wal", "-shm", "-journal"):
            part.with_name(part.name + end).unlink(missing_ok=True)


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise explain(parse_address(url), error) or StoreError(f"the copy failed: {error}") from error
    except OSError as error:
        raise StoreError(f"the copy failed: {error}") from error
