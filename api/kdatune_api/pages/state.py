"""What the pages keep between requests: the board of one generation, and a few finished charts."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from fastapi import Request

_MAX_KEPT = 64


class Kept:
    """The last results of slow work, by what they depend on. Thread-safe; two threads may do the same work at once."""

    def __init__(self, size: int = _MAX_KEPT) -> None:
        self._size = size
        self._found: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The kept result, else that of `make`."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        made = make()
        with self._lock:
            self._found[key] = made
            while len(self._found) > self._size:
                self._found.popitem(last=False)
        return made


@dataclass
class PagesState:
    """Lives as long as the app. board: the last Board that was made (board.read_board)."""

    board: Any = None
    boards: Kept = field(default_factory=lambda: Kept(2))
    charts: Kept = field(default_factory=Kept)


def state_of(request: Request) -> PagesState:
    """The pages' state of the app that answers this request."""
    state: PagesState = request.app.state.pages
    return state
