"""What a person sees while a search runs: a bar on stderr, only where stderr is a terminal."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn
from rich.progress import MofNCompleteColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn

from kdatune_tuner.objective import AnyShape


def show_us(time_us: float | None) -> str:
    """A time for people, "-" where there is none."""
    return "-" if time_us is None else f"{time_us:,.1f} us"


class Bar:
    """A progress bar on stderr while it is entered: a description, a count, a note, and the time gone by."""

    def __init__(self, *, enabled: bool) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not enabled,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class Watch(Bar):
    """A progress bar: the shape, the stage, trials done, and the best time so far."""

    def __init__(self, *, enabled: bool | None = None) -> None:
        super().__init__(enabled=sys.stderr.isatty() if enabled is None else enabled)
        self._task = self._bar.add_task("", note=_best(None), visible=False)
        self._shapes = (1, 1)

    def shape_of(self, number: int, count: int) -> None:
        """Which of the shapes comes now."""
        self._shapes = (number, count)

    def start(self, stage: str, shape: AnyShape, total: int) -> None:
        """A stage of a shape begins."""
        number, count = self._shapes
        at = f"[{number}/{count}] " if count > 1 else ""
        # markup: the bracket of the counter is escaped
        text = f"{at}{shape.key()} {stage}".replace("[", "\\[")
        self._bar.reset(self._task, total=total, description=text, note=_best(None), visible=True)

    def trial(self, done: int, best_us: float | None, last_us: float | None) -> None:
        """A trial is finished."""
        best = min((t for t in (best_us, last_us) if t is not None), default=None)
        self._bar.update(self._task, completed=done, note=_best(best))


def _best(time_us: float | None) -> str:
    return f"best {show_us(time_us)}"
