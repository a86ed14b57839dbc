"""Which of a host's processes asks the service: the one that holds the lock on a file beside the disk copies. Stdlib only.

Eight launchers of one host need one answer, so one asks and the others read the copy that it keeps. The kernel drops the
lock when its holder ends, however it ends; whoever looks next takes it. Where no lock can be had (no directory, a
read-only one, a file system without locks) every process asks for itself, as if it were alone.
"""

import fcntl
import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from kdatune_kernels.environment import Settings


def group_of(settings: Settings) -> str:
    """What processes must have in common for one to ask for all: the service, how often, as whom, for which generation."""
    told = (settings.url, settings.poll_seconds, settings.generation, settings.token)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


class Seat:
    """The right to ask for one GPU model. Used by one thread; never raises, never waits.

    Args:
        directory: of the disk copies; None: there are none, and nobody to agree with.
        name: of the GPU model's copy.
        group: see `group_of`.
    """

    def __init__(self, directory: Path | None, name: str, group: str) -> None:
        self._path = None if directory is None else directory / f".{name}.{group}.lock"
        self._handle: int | None = None
        self._held = False

    def take(self) -> bool:
        """Whether this process is the one that asks, from now on."""
        if self._held or self._path is None:
            return True
        try:
            if self._handle is None:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._held = True
        return True

    def note(self) -> None:
        """The holder has asked: others see by the file's time that it is not stuck."""
        if self._held and self._handle is not None:
            with suppress(OSError):
                os.utime(self._handle)

    def idle_seconds(self) -> float:
        """How long ago the holder asked."""
        with suppress(OSError):
            if self._handle is not None:
                return time.time() - os.stat(self._handle).st_mtime
        return 0.0

    def renounce(self) -> None:
        """Ask for itself only, from now on: the copy that others would read cannot be kept."""
        self.leave()
        self._path = None

    def leave(self) -> None:
        """Let another process have it. In a child after a fork: let go of what is the parent's, which keeps it."""
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
        self._handle, self._held = None, False
