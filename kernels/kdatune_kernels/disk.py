"""The launcher's disk copy of a snapshot: one checksummed file a GPU model, replaced atomically. Stdlib only.

A process that starts while the service is down begins with what the last one knew. Nothing here raises: a cache that
cannot be read or written costs one warning and is then left alone.
"""

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from kdatune_kernels.errors import SnapshotError
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.snapshot import seal
from kdatune_kernels.snapshot import unseal
from kdatune_kernels.spec import Json

log = logging.getLogger("kdatune")

MAX_COPY_BYTES = 80 << 20
"""Of a disk copy: the largest document the wire may bring, with room for escapes."""


def file_name(gpu_name: str) -> str:
    """A file name for a GPU name of any kind: no separators, no leading dot, bounded."""
    return (re.sub(r"[^A-Za-z0-9.-]+", "_", gpu_name).strip("._")[:100] or "unnamed") + ".json"


class DiskCopy:
    """The directory of disk copies. `errors` counts what went wrong; the first trouble is logged."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.errors = 0
        self._warned = False
        self._seen: dict[str, tuple[int, int, int]] = {}

    def read(self, gpu_name: str, *, pause: Callable[[], None] | None = None) -> tuple[Snapshot, str | None] | None:
        """The kept snapshot of a GPU model and its ETag; None when there is none that can be trusted.

        Args:
            pause: as for `parse_snapshot`.
        """
        if self.directory is None:
            return None
        path = self.directory / file_name(gpu_name)
        try:
            with path.open("rb") as file:
                self._seen[gpu_name] = _mark(os.fstat(file.fileno()))
                document, etag = unseal(file.read(MAX_COPY_BYTES))
            return parse_snapshot(document, pause=pause), etag
        except FileNotFoundError:
            return None
        except (OSError, SnapshotError) as error:
            self._trouble(f"the snapshot copy {path} cannot be used ({error}); launches go on without it")
            return None

    def read_changed(
        self, gpu_name: str, *, pause: Callable[[], None] | None = None
    ) -> tuple[Snapshot, str | None] | None:
        """The same when the file is another than at the last read; else None."""
        if self.directory is None:
            return None
        try:
            mark = _mark(os.stat(self.directory / file_name(gpu_name)))
        except OSError:
            return None
        return None if mark == self._seen.get(gpu_name) else self.read(gpu_name, pause=pause)

    def write(self, gpu_name: str, document: Json, etag: str | None) -> bool:
        """Keep a document for other processes; whether it is kept. A reader sees the old file or the new one, never a part."""
        if self.directory is None:
            self._trouble("there is no home directory for the snapshot copy; set KDATUNE_CACHE_DIR to keep one")
            return False
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self.directory / file_name(gpu_name), seal(document, etag))
        except OSError as error:
            self._trouble(
                f"no snapshot copy can be kept in {self.directory} ({error}); launches go on without one. "
                "Set KDATUNE_CACHE_DIR to a directory that can be written"
            )
            return False
        return True

    def _trouble(self, message: str) -> None:
        self.errors += 1
        if not self._warned:
            self._warned = True
            log.warning("%s", message)


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
