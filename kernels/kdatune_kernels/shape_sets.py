"""The named shapes that comparisons are made on, and the peers they are made with. Stdlib only."""

from collections.abc import Iterator
from collections.abc import Sequence

from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import parse_shape

SKEWED_LENGTHS = (1300, 547, 2048, 963, 271, 3063)
"""The packed batch of the published comparisons: 8,192 tokens in six sequences."""

_SKEWED = f"N=6,T=8192,varlen=true,longest_tokens={max(SKEWED_LENGTHS)}"
SHAPE_SETS: dict[str, tuple[str, ...]] = {
    "headline": (
        *(f"N=1,H={h},T={t}" for h in (64, 96) for t in (1024, 2048, 4096, 8192)),
        *(text for h in (64, 96) for text in (f"{_SKEWED},H={h}", f"N=8,H={h},T=8192")),
    ),
    "small": tuple(f"N=1,H={h},T=8192" for h in (8, 16, 32)),
    "batch": ("N=8,H=96,T=8192", "N=64,H=96,T=65536", "N=32,H=64,T=8192"),
    "long": ("N=1,H=8,T=32768", "N=1,H=4,T=32768", "N=1,H=32,T=32768"),
}
OURS = ("ours", "default", "fast")
"""What is ours in a comparison: the resolved config, the default, the resolved one in precision "fast"."""
PEER_NAMES = ("flash_kda", "fla")
"""Peers by the module that is imported."""


def shapes_of(set_name: str | None, keys: Sequence[str]) -> Iterator[Shape]:
    """The shapes of a named set and of shape keys.

    Raises:
        UsageError: no such set; the message lists them. ShapeError: a key that cannot be read.
    """
    if set_name is not None and set_name not in SHAPE_SETS:
        raise UsageError(f"unknown shape set {set_name[:60]!r}; there are {', '.join(SHAPE_SETS)}")
    yield from (parse_shape(key) for key in (*(SHAPE_SETS[set_name] if set_name else ()), *keys))


def peers_of(text: str) -> list[str]:
    """Peers of a comma-separated list; an empty one is none. Raises UsageError for an unknown one."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in PEER_NAMES:
            raise UsageError(f"unknown peer {name[:60]!r}; there are {', '.join(PEER_NAMES)}")
    return names
