"""Many workers on one piece of work: one process a card, on this host and on others, sharing keys through the database.

To run a list of shapes with workers, as `kdatune tune --workers` does:

    cards = choose_cards("all", replay=False)      # cards.py
    items = [Item(shape), Item(other, seconds=30.0)]
    work = Work(backend="gpu", recording=None, options=options, settings=settings)
    report = run_fleet(engine, items, cards, work, seconds=600.0)

Items are taken in the order given, each by one worker at a time: its key (GPU model, shape, build) is claimed in the
database (store/claims.py), so commands on other hosts that are given the same items and options share them. A worker that
dies gives its key to the others. `run_fleet` returns when every item is done or failed, when no worker is left, or after
Ctrl-C; it does not raise for what befalls a worker: report.interrupted, report.crashes and report.unfinished say it, and
report.results what each item came to (documents of Tuned.to_json()).
"""

import dataclasses
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_tuner.cards import Card
from kdatune_tuner.fleet_member import PATIENCE_S
from kdatune_tuner.fleet_member import Member
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import claims
from kdatune_tuner.store.claims import ClaimState
from kdatune_tuner.store.claims import Keys
from kdatune_tuner.store.claims import Standing
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.tune import Options

_MATE_NAME_CHARS = 60


@dataclass(frozen=True)
class Item:
    """A shape to tune. seconds: a limit of its own; None: its share of the whole time, where there is one."""

    shape: Shape
    seconds: float | None = None


@dataclass(frozen=True)
class Work:
    """How the items are tuned. The workers read the settings from the environment again, except what is given here."""

    backend: str
    recording: Path | None
    options: Options
    settings: Settings

    def plan(self) -> str:
        """What a key is tuned with: commands with equal plans share their work."""
        facts = dataclasses.asdict(self.options)
        return canonical({name: value for name, value in facts.items() if name not in ("trigger", "optuna_storage")})


@dataclass(frozen=True)
class Left:
    """An item that this command did not tune: its shape key, for which GPU model (None: no worker got so far), and why."""

    shape: str
    gpu: str | None
    reason: str

    def to_json(self) -> Json:
        return {"shape": self.shape, "gpu": self.gpu, "reason": self.reason}


@dataclass
class Report:
    """What came of the items.

    results: the documents (Tuned.to_json()) of what was tuned here, also of what an interrupt cut short, with the worker's
        number; in the order of the items. Cards of several models give a document each.
    elsewhere: tuned by workers of other commands, or still held by them. failed: no worker can tune it. unfinished: left.
    crashes: workers that could not go on, by number, and how they ended.
    """

    results: list[Json] = field(default_factory=list)
    elsewhere: list[Left] = field(default_factory=list)
    failed: list[Left] = field(default_factory=list)
    unfinished: list[Left] = field(default_factory=list)
    crashes: dict[int, str] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every item is tuned."""
        return not (self.interrupted or self.failed or self.unfinished)

    def to_json(self) -> Json:
        return {
            "results": self.results,
            "elsewhere": [item.to_json() for item in self.elsewhere],
            "failed": [item.to_json() for item in self.failed],
            "unfinished": [item.to_json() for item in self.unfinished],
            "crashes": [{"worker": number, "reason": reason} for number, reason in self.crashes.items()],
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
        }


Listener = Callable[[int, Json], None]
"""Told what happens: the worker's number and the event (see fleet_worker.py), or one of {"event": "crash", "detail"}."""


def run_fleet(
    engine: Engine,
    items: Sequence[Item],
    cards: Sequence[Card],
    work: Work,
    *,
    seconds: float | None = None,
    listen: Listener = lambda _number, _event: None,
) -> Report:
    """Tune the items with a worker a card. To be called from the main thread.

    Args:
        engine: of the database that the settings name.
        seconds: after this no item gets more than its first trials.

    Raises:
        StoreError: the database refuses before the work has begun.
    """
    started = time.monotonic()
    report = Report()
    items = list({item.shape: item for item in items}.values())
    with reading(engine) as s:
        since = claims.database_now(s)
    order = {
        "plan": work.plan(),
        "shapes": [item.shape.key() for item in items],
        "seconds": [item.seconds for item in items],
        "backend": work.backend,
        "recording": None if work.recording is None else str(work.recording),
        "options": dataclasses.asdict(work.options),
        "since": since.isoformat(),
        "deadline_s": None if seconds is None else started + seconds,
        "lease_seconds": work.settings.claim_lease_s,
    }
    fleet = _Fleet(engine, report, listen, [item.shape.key() for item in items])
    with stoppable():
        try:
            for number, card in enumerate(cards):
                mates = sum(other.name == card.name for other in cards)
                fleet.start(number, card, order | {"mates": mates}, work.settings)
            fleet.watch()
        except KeyboardInterrupt:
            report.interrupted = True
            fleet.stop()
        finally:
            fleet.close()
    report.seconds = time.monotonic() - started
    return report


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM, by which a scheduler stops a job, ends the work as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class _Kind:
    """A GPU model with its build, as a worker that has such a card reports it."""

    gpu: str
    keys: Keys
    since: datetime


class _Fleet:
    """The workers of this command."""

    def __init__(self, engine: Engine, report: Report, listen: Listener, shapes: Sequence[str]) -> None:
        self._engine = engine
        self._report = report
        self._listen = listen
        self._shapes = list(dict.fromkeys(shapes))
        self._members: list[Member] = []
        self._ready = selectors.DefaultSelector()
        self._kinds: dict[Keys, _Kind] = {}

    def start(self, number: int, card: Card, order: Json, settings: Settings) -> None:
        """Start a worker on a card."""
        owner = f"{socket.gethostname()[:_MATE_NAME_CHARS]} {os.getpid()}.{number} {secrets.token_hex(4)}"
        environment = os.environ | {"KDATUNE_DATABASE_URL": settings.database_url}
        if card.device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = card.device
        member = Member(number, order | {"owner": owner}, environment)
        self._members.append(member)
        self._ready.register(member.lines, selectors.EVENT_READ, member)

    def watch(self) -> None:
        """Take in what the workers say until all have ended."""
        while self._ready.get_map():
            for key, _ in self._ready.select():
                self._take(key.data)

    def stop(self) -> None:
        """Tell all to end and take in what they say; a second Ctrl-C, or no end in time, kills them."""
        try:
            for member in self._members:
                if member.process.poll() is None:
                    # not SIGINT: one that is starting in a background job ignores that, as its shell told it to
                    member.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_S
            while self._ready.get_map() and time.monotonic() < deadline:
                for key, _ in self._ready.select(1.0):
                    self._take(key.data)
        except KeyboardInterrupt:
            pass

    def close(self) -> None:
        """End what still runs, free what it held, and say what became of every item."""
        for member in self._members:
            member.close()
        self._ready.close()
        for member in self._members:
            if not member.ended:
                self._free(member, None)
        place = {shape: number for number, shape in enumerate(self._shapes)}
        self._report.results.sort(key=lambda document: (place[document["shape"]], document["gpu"]))
        if not self._kinds:
            self._report.unfinished = [Left(shape, None, "no worker has started on it") for shape in self._shapes]
        try:
            with reading(self._engine) as s:
                for kind in self._kinds.values():
                    self._settle(kind, claims.standing(s, kind.keys, kind.since))
        except StoreError as error:
            self._report.unfinished = [Left(shape, None, str(error)) for shape in self._shapes]

    def _take(self, member: Member) -> None:
        for event in member.read():
            self._note(member, event)
            self._listen(member.number, event)
        if member.ended:
            self._ready.unregister(member.lines)
            how = member.end_of_life()
            if how is not None:
                told = how if member.shape is None else f"{how}; it was tuning {member.shape}"
                self._report.crashes[member.number] = told
                self._listen(member.number, {"event": "crash", "detail": told})
            self._free(member, how)

    def _note(self, member: Member, event: Json) -> None:
        match event["event"]:
            case "hello":
                keys = Keys(event["gpu_id"], event["build_id"], tuple(event["problem_ids"]), event["plan"])
                since = datetime.fromisoformat(event["since"])
                before = self._kinds.get(keys)
                self._kinds[keys] = _Kind(event["gpu"], keys, min(since, before.since) if before else since)
            case "start":
                member.shape = event["shape"]
            case "done" | "interrupted":
                member.shape = None
                if event["document"] is not None:
                    self._report.results.append(event["document"] | {"worker": member.number})
            case "lost" | "failed":
                member.shape = None
            case "refused":
                member.refused = event["detail"]

    def _settle(self, kind: _Kind, standing: Sequence[Standing]) -> None:
        """Where the keys of a GPU model stand at the end."""
        done = {d["shape"] for d in self._report.results if d["gpu"] == kind.gpu and d["state"] == "done"}
        for shape, key in zip(self._shapes, standing, strict=True):
            if key.state is ClaimState.DONE and shape not in done:
                self._report.elsewhere.append(Left(shape, kind.gpu, f"tuned by {key.owner}"))
            elif key.state is ClaimState.FAILED:
                self._report.failed.append(Left(shape, kind.gpu, str(key.detail)))
            elif key.state is ClaimState.HELD and not key.free:
                self._report.elsewhere.append(Left(shape, kind.gpu, f"{key.owner} is at it"))
            elif key.state is not ClaimState.DONE and shape not in done:
                self._report.unfinished.append(Left(shape, kind.gpu, key.detail or "no worker is left"))

    def _free(self, member: Member, how: str | None) -> None:
        """What a dead worker held goes to the others at once; were this host to die, its lease would end."""
        try:
            with writing(self._engine) as s:
                claims.release(s, member.owner, detail=how)
        except StoreError as error:
            self._listen(member.number, {"event": "crash", "detail": f"what it held stays so for its lease: {error}"})
