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
report.results holds what each item came to (the document of Tuned.to_json()).
"""

import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import IO
from typing import Any

from sqlalchemy import Engine

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_tuner.cards import Card
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import claims
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.tune import Options

WORKER_COMMAND = [sys.executable, "-m", "kdatune_tuner.fleet_worker"]
_PATIENCE_S = 30.0  # for a worker that was told to end: a trial on the card may have to be killed first
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


@dataclass
class Report:
    """What came of the items, by their shape keys.

    results: the documents of those that were tuned here, also of those an interrupt cut short, with the worker's number.
    elsewhere: those that workers of other commands tuned, and who.
    failed: those that no worker can tune, and why.
    unfinished: those that are left.
    crashes: workers that could not go on, and how they ended.
    """

    results: dict[str, Json] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    crashes: dict[int, str] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every item is tuned."""
        return not (self.interrupted or self.failed or self.unfinished)

    def to_json(self) -> Json:
        return {
            "results": list(self.results.values()),
            "elsewhere": [{"shape": shape, "owner": owner} for shape, owner in self.elsewhere.items()],
            "failed": [{"shape": shape, "reason": reason} for shape, reason in self.failed.items()],
            "unfinished": self.unfinished,
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
    with _stoppable():
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
def _stoppable() -> Iterator[None]:
    """SIGTERM, by which a scheduler stops a job, ends the work as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Member:
    """A worker process as its parent sees it."""

    def __init__(self, number: int, order: Json, environment: dict[str, str]) -> None:
        self.number = number
        self.owner = order["owner"]
        self.shape: str | None = None
        self.refused: str | None = None
        self.ended = False
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        # a group of its own: Ctrl-C in the terminal reaches the parent, which tells each worker once
        self.process = subprocess.Popen(
            [*WORKER_COMMAND, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=environment,
            process_group=0,
        )
        assert self.process.stdin is not None  # noqa: S101 - for the type checker
        assert self.process.stdout is not None  # noqa: S101
        self.lines = self.process.stdout
        self._pending = b""
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: its exit tells

    def read(self) -> list[Json]:
        """The events that are there; sets `ended` where the pipe is closed."""
        chunk = os.read(self.lines.fileno(), 1 << 16)
        self.ended = not chunk
        *whole, self._pending = (self._pending + chunk).split(b"\n")
        return [json.loads(line) for line in whole]

    def end_of_life(self) -> str | None:
        """How it ended, where that was not in order. It is waited for, and killed when it does not end."""
        try:
            code = self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code in (0, 130) or self.refused is not None:
            return self.refused
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.stderr.seek(0)
        said = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended with {how}" + (f": {said[-1][:300]}" if said else "")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.lines.close()
        self.stderr.close()


class _Fleet:
    """The workers of this command."""

    def __init__(self, engine: Engine, report: Report, listen: Listener, shapes: Sequence[str]) -> None:
        self._engine = engine
        self._report = report
        self._listen = listen
        self._shapes = shapes
        self._members: list[_Member] = []
        self._ready = selectors.DefaultSelector()

    def start(self, number: int, card: Card, order: Json, settings: Settings) -> None:
        """Start a worker on a card."""
        owner = f"{socket.gethostname()[:_MATE_NAME_CHARS]} {os.getpid()}.{number} {secrets.token_hex(4)}"
        environment = os.environ | {"KDATUNE_DATABASE_URL": settings.database_url}
        if card.device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = card.device
        member = _Member(number, order | {"owner": owner}, environment)
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
                    member.process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + _PATIENCE_S
            while self._ready.get_map() and time.monotonic() < deadline:
                for key, _ in self._ready.select(1.0):
                    self._take(key.data)
        except KeyboardInterrupt:
            pass

    def close(self) -> None:
        """End what still runs, free what it held, and count what is left."""
        for member in self._members:
            member.close()
        self._ready.close()
        for member in self._members:
            if not member.ended:
                self._free(member, None)
        order = {shape: place for place, shape in enumerate(self._shapes)}
        self._report.results = dict(sorted(self._report.results.items(), key=lambda kept: order[kept[0]]))
        accounted = {*self._report.results, *self._report.elsewhere, *self._report.failed}
        cut_short = [shape for shape, document in self._report.results.items() if document["state"] != "done"]
        self._report.unfinished = [s for s in dict.fromkeys(self._shapes) if s not in accounted or s in cut_short]

    def _take(self, member: _Member) -> None:
        for event in member.read():
            self._note(member, event)
            self._listen(member.number, event)
        if member.ended:
            self._ready.unregister(member.lines)
            how = member.end_of_life()
            if how is not None:
                at = "" if member.shape is None else f" while it tuned {member.shape}"
                self._report.crashes[member.number] = how + at
                self._listen(member.number, {"event": "crash", "detail": how + at})
            self._free(member, how)

    def _note(self, member: _Member, event: Json) -> None:
        report = self._report
        match event["event"]:
            case "start":
                member.shape = event["shape"]
            case "done":
                report.results[event["shape"]] = event["document"] | {"worker": member.number}
                member.shape = None
            case "interrupted":
                if event["document"] is not None:
                    report.results[event["shape"]] = event["document"] | {"worker": member.number}
                member.shape = None
            case "lost" | "failed":
                member.shape = None
            case "refused":
                member.refused = event["detail"]
            case "standing":
                self._settle(event["keys"])

    def _settle(self, keys: dict[str, Any]) -> None:
        """What a worker found when no key was left."""
        for shape, key in keys.items():
            if key["state"] == "failed":
                self._report.failed[shape] = key["detail"]
            elif key["state"] == "done" and shape not in self._report.results:
                mine = next((m for m in self._members if m.owner == key["owner"]), None)
                if mine is None:
                    self._report.elsewhere[shape] = key["owner"]

    def _free(self, member: _Member, how: str | None) -> None:
        """What a dead worker held goes to the others at once; were this host to die, its lease would end."""
        try:
            with writing(self._engine) as s:
                claims.release(s, member.owner, detail=how)
        except StoreError as error:
            self._listen(member.number, {"event": "crash", "detail": f"its key stays held for its lease: {error}"})
