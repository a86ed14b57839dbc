"""`kdatune tune --workers`: the same search spread over the cards of this host, and over hosts that share the database."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.progress import TaskID

from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.cards import Card
from kdatune_tuner.cards import choose_cards
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import err
from kdatune_tuner.fleet import Item
from kdatune_tuner.fleet import Report
from kdatune_tuner.fleet import Work
from kdatune_tuner.fleet import run_fleet
from kdatune_tuner.progress import Bar
from kdatune_tuner.progress import show_us
from kdatune_tuner.recording import SHIPPED
from kdatune_tuner.recording import recorded_shapes
from kdatune_tuner.settings import Settings
from kdatune_tuner.tune import Options


def tune_with_workers(
    workers: str,
    backend: str,
    recording: Path | None,
    settings: Settings,
    options: Options,
    shapes: Sequence[Shape],
    seconds: float | None,
    *,
    announce: bool = False,
) -> Report:
    """Tune the shapes (none: the default ones) with workers; progress goes to stderr.

    Args:
        announce: say that a recording is replayed, because nobody asked for it.

    Raises:
        UsageError: `workers` is neither "all" nor a number of cards there are.
        DeviceError: no card is visible.
        RecordingError: the recording cannot be read, or does not hold a shape.
        StoreError: the database is missing or refuses.
    """
    replay = backend == "replay"
    cards = choose_cards(workers, replay=replay)
    if replay:
        # a shape that nobody can tune is wrong usage, said before any process is started
        held = ReplayBackend.open(recording)
        for shape in shapes:
            held.space("k1", shape)
        shapes = shapes or held.default_shapes()
        if announce:
            err().print(f"kdatune: no card is visible; replaying {SHIPPED.name}, recorded on {held.gpu.name}")
    shapes = shapes or recorded_shapes()
    with database(settings.database_url) as engine, FleetWatch(cards, len(shapes)) as watch:
        return run_fleet(
            engine,
            [Item(shape) for shape in shapes],
            cards,
            Work(backend, recording, options, settings),
            seconds=seconds,
            listen=watch.take,
        )


class FleetWatch(Bar):
    """What a person sees: a bar a worker where stderr is a terminal, else a line whenever something has come to an end."""

    def __init__(self, cards: Sequence[Card], total: int) -> None:
        self._cards = cards
        self._total = total
        self._ended = 0
        self._shapes: dict[int, str] = {}
        self._live = sys.stderr.isatty()
        super().__init__(enabled=self._live)
        self._all = self._bar.add_task("shapes", total=total, note="")
        self._tasks: dict[int, TaskID] = {
            number: self._bar.add_task(f"worker {number}: starting on {card}", total=None, note="")
            for number, card in enumerate(cards)
        }

    def take(self, number: int, event: Json) -> None:
        """Something happened in a worker."""
        match event["event"]:
            case "start":
                self._shapes[number] = event["shape"]
                if event["attempt"] > 1:
                    self._say(number, f"{event['shape']}: goes on where another worker ended")
            case "stage":
                text = f"worker {number}: {self._shapes.get(number, '')} {event['stage']}".replace("[", "\\[")
                self._bar.update(
                    self._tasks[number],
                    description=text,
                    total=event["total"],
                    completed=event["done"],
                    note=f"best {show_us(event['best_us'])}",
                )
            case "done":
                self._ended += 1
                self._bar.update(self._all, completed=self._ended)
                document = event["document"]
                said = document["promotion"]
                decision = f", {said['decision']}" if said else ""
                self._say(
                    number,
                    f"{event['shape']}: best {show_us(document['best_us'])} of {document['trials']} trials"
                    f"{decision}, {document['seconds']:.1f} s ({self._ended} of {self._total})",
                )
            case "lost" | "failed":
                self._say(number, f"{event['shape']}: {event['event']}: {event['detail']}")
            case "crash":
                self._bar.update(self._tasks[number], description=f"worker {number}: ended", note="")
                self._say(number, event["detail"])
            case "nothing left":
                self._bar.update(self._tasks[number], description=f"worker {number}: nothing left", note="")

    def _say(self, number: int, text: str) -> None:
        line = f"kdatune: worker {number} ({self._cards[number]}): {text}"
        (self._bar.console if self._live else err()).print(line, markup=False, highlight=False)
