"""A lock file, so that only one process at a time makes or migrates a SQLite database."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kdatune_kernels.errors import StoreError

WAIT_S = 60
"""How long a process waits for another one that migrates."""


@contextmanager
def file_lock(
    database: Path,
    wait_s: float = WAIT_S,
    *,
    suffix: str = ".lock",
    busy: str = "another process migrates the database",
) -> Iterator[None]:
    """Hold the lock file beside the database file.

    The file stays when the lock is gone: deleting it would let two processes each hold "the" lock. A process that dies
    gives its lock up.

    Args:
        wait_s: how long to wait for a process that holds it; 0: not at all.
        busy: what such a process does, for the message.

    Raises:
        StoreError: the lock file cannot be written, or another process holds it for longer than wait_s.
    """
    lock = database.with_name(database.name + suffix)
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(
            f"cannot write {lock}: {error.strerror}; check that its folder exists and that you may write there"
        ) from error
    try:
        _take(handle, lock, wait_s, busy)
        yield
    finally:
        os.close(handle)


def _take(handle: int, lock: Path, wait_s: float, busy: str) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                waited = f" for over {wait_s:g} s" if wait_s else ""
                raise StoreError(f"{busy}: it holds {lock}{waited}") from error
            time.sleep(0.02)
