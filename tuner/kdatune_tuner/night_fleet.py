"""The searches of a night done by workers, one process a card (fleet.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Engine

from kdatune_tuner import fleet
from kdatune_tuner.cards import Card
from kdatune_tuner.fleet import Listener
from kdatune_tuner.fleet import Report
from kdatune_tuner.fleet import Work
from kdatune_tuner.night_report import Item
from kdatune_tuner.night_report import ItemState


@dataclass(frozen=True)
class Fleet:
    """The workers of a night: their cards, all of the model that the night is of, and what they work with."""

    cards: Sequence[Card]
    work: Work
    listen: Listener = lambda _number, _event: None


def search(engine: Engine, workers: Fleet, items: Sequence[Item], seconds: float) -> bool:
    """Tune the items' shapes and note in each what became of it. True where Ctrl-C ended it.

    Raises:
        StoreError: the database refuses before the work has begun.
    """
    wanted = [fleet.Item(item.shape) for item in items if item.shape is not None]
    report = fleet.run_fleet(engine, wanted, workers.cards, workers.work, seconds=seconds, listen=workers.listen)
    for item in items:
        if item.shape is not None:
            _note(item, item.shape.key(), report)
    return report.interrupted


def _note(item: Item, key: str, report: Report) -> None:
    for document in report.results:
        if document["shape"] == key:
            said = document["promotion"]
            decided = "nothing decided" if said is None else f"{said['decision']}: {said['reason']}"
            counts = f"{document['measured']} measured of {document['trials']} by worker {document['worker']}"
            item.seconds, item.result = document["seconds"], f"{counts}; {decided}"
    failed, unfinished, elsewhere = (
        "; ".join(left.reason for left in some if left.shape == key)
        for some in (report.failed, report.unfinished, report.elsewhere)
    )
    crashed = "; ".join(f"worker {number} {how}" for number, how in report.crashes.items())
    if failed:
        item.state, item.result = ItemState.FAILED, failed
    elif unfinished:
        item.state = ItemState.FAILED if crashed and not report.interrupted else ItemState.LEFT
        item.result = "; ".join(filter(None, (item.result, unfinished, crashed)))
    else:
        item.state, item.result = ItemState.DONE, item.result or f"tuned by {elsewhere or 'another command'}"
