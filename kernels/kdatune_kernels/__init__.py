"""KDA kernels, their config space, and the launcher. What a serving process installs."""

import importlib
from typing import Any

__version__ = "0.1.0"

_CALLS = {"chunk_kda": "kdatune_kernels.kda", "recurrent_kda": "kdatune_kernels.recurrent"}
"""By name only: the service imports this package too, and has no torch."""


def __getattr__(name: str) -> Any:
    if name not in _CALLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_CALLS[name]), name)
