"""What the installed kernels and the timing protocol are, as a build names them. Stdlib only: a service asks it too."""

import functools
import hashlib
from pathlib import Path

PROTOCOL = "1"
"""Version of the timing protocol in bench.py; a change makes every stored time stale."""

KERNEL_SOURCES = (
    "numerics.py",
    "prepare.py",
    "prepare_sm90.py",
    "recurrence.py",
    "recurrence_sm90.py",
    "segments.py",
    "segments_sm90.py",
)
"""The files that decide what is launched."""


@functools.cache
def kernel_hash() -> str:
    """Identity of the kernel sources: sha256 over KERNEL_SOURCES, 16 hex digits."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for name in KERNEL_SOURCES:
        digest.update(name.encode() + b"\0" + (here / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]
