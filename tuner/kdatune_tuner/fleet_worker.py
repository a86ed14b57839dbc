"""One worker of a fleet: a process with one card, which claims keys and tunes them until none is left.

Started by fleet.py as `python -m kdatune_tuner.fleet_worker`: the work as one JSON line on stdin, what happens as JSON
lines on stdout. Ctrl-C reaches it through its parent only; should the parent be killed, it ends in order as well.
"""

import contextlib
import ctypes
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.cli_tune import BackendName
from kdatune_tuner.cli_tune import open_backend
from kdatune_tuner.ledger import uninterrupted
from kdatune_tuner.objective import Backend
from kdatune_tuner.progress import Watch
from kdatune_tuner.promote import Policy
from kdatune_tuner.store import claims
from kdatune_tuner.store import writes
from kdatune_tuner.store.claims import Claim
from kdatune_tuner.store.claims import ClaimLostError
from kdatune_tuner.store.claims import ClaimState
from kdatune_tuner.store.claims import Keys
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuner
from kdatune_tuner.worker import DeviceError

Emit = Callable[..., None]
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_BEATS_A_LEASE = 4
_TRIAL_LINES_A_SECOND = 5.0


@dataclass(frozen=True)
class Assignment:
    """What a worker is told. deadline_s: by time.monotonic(), which all processes of a host share."""

    owner: str
    plan: str
    shapes: tuple[Shape, ...]
    seconds: tuple[float | None, ...]
    backend: str
    recording: Path | None
    options: Options
    since: datetime
    deadline_s: float | None
    lease_seconds: float
    mates: int


def read_assignment(data: Json) -> Assignment:
    """The assignment of a JSON document that fleet.py made."""
    options = dict(data["options"])
    return Assignment(
        owner=data["owner"],
        plan=data["plan"],
        shapes=tuple(parse_shape(text) for text in data["shapes"]),
        seconds=tuple(data["seconds"]),
        backend=data["backend"],
        recording=None if data["recording"] is None else Path(data["recording"]),
        options=Options(**options | {"policy": Policy(**options["policy"])}),
        since=datetime.fromisoformat(data["since"]),
        deadline_s=data["deadline_s"],
        lease_seconds=data["lease_seconds"],
        mates=data["mates"],
    )


class Heart:
    """Says that the holder of a claim lives, from a thread of its own: a trial may take longer than a lease."""

    def __init__(self, engine: Engine, lease_seconds: float) -> None:
        self._engine = engine
        self._lease_seconds = lease_seconds
        self._claim: Claim | None = None
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def hold(self, claim: Claim | None) -> None:
        """Beat for this claim from now on; None: for none."""
        self._claim = claim

    def _beat(self) -> None:
        while True:
            time.sleep(self._lease_seconds / _BEATS_A_LEASE)
            claim = self._claim
            if claim is None:
                continue
            try:
                with writing(self._engine) as s:
                    claims.beat(s, claim, self._lease_seconds)
            except ClaimLostError:
                pass  # it was finished just now, or another has it: the next write of the search tells
            except StoreError as error:
                sys.stderr.write(f"no heartbeat: {error}\n")


class PipeWatch(Watch):
    """Progress as lines to the parent, a few a second."""

    def __init__(self, emit: Emit) -> None:
        super().__init__(enabled=False)
        self._emit = emit
        self._total = 0
        self._stage = ""
        self._said_at = 0.0

    def start(self, stage: str, shape: Shape, total: int) -> None:
        self._stage, self._total = stage, total
        self._emit("stage", shape=shape.key(), stage=stage, done=0, total=total, best_us=None)

    def trial(self, done: int, best_us: float | None, last_us: float | None) -> None:
        now = time.monotonic()
        if now - self._said_at >= 1.0 / _TRIAL_LINES_A_SECOND:
            self._said_at = now
            best = min((t for t in (best_us, last_us) if t is not None), default=None)
            self._emit("stage", stage=self._stage, done=done, total=self._total, best_us=best)


class FleetWorker:
    """Claims keys one after another and tunes them."""

    def __init__(self, engine: Engine, backend: Backend, work: Assignment, emit: Emit) -> None:
        self._engine = engine
        self._backend = backend
        self._work = work
        self._emit = emit
        self._heart = Heart(engine, work.lease_seconds)
        self._tuner = Tuner(engine, backend, work.options, PipeWatch(emit))
        with writing(engine) as s:
            ids = tuple(writes.put_problem(s, "kda", shape) for shape in work.shapes)
            self._keys = Keys(writes.put_gpu(s, backend.gpu), writes.put_build(s, backend.build), ids, work.plan)
            self._since = claims.round_of(s, self._keys, work.since)
        self._shapes = dict(zip(ids, work.shapes, strict=True))
        self._seconds = dict(zip(ids, work.seconds, strict=True))
        facts = {"gpu_id": self._keys.gpu_id, "build_id": self._keys.build_id, "problem_ids": ids, "plan": work.plan}
        emit("hello", gpu=backend.gpu.name, since=self._since.isoformat(), **facts)

    def run(self) -> None:
        """Tune until no key is left; while others hold the last ones, wait until the deadline: they may die.

        Raises:
            DeviceError: the card cannot be used any more. The key is free again.
            StoreError: the database refuses.
        """
        pause_s = min(1.0, self._work.lease_seconds / 10)
        while True:
            claim = self._take()
            if claim is not None:
                self._tune(claim)
                continue
            with reading(self._engine) as s:
                standing = claims.standing(s, self._keys, self._since)
            if not any(key.free or key.state is ClaimState.HELD for key in standing):
                break
            deadline_s = self._work.deadline_s
            if deadline_s is not None and time.monotonic() >= deadline_s and not any(key.free for key in standing):
                break  # what others are at is theirs
            self._backend.close()  # others work: the card is not kept from anybody
            time.sleep(pause_s)
        self._emit("nothing left")

    def _take(self) -> Claim | None:
        with reading(self._engine) as s:
            if not any(key.free for key in claims.standing(s, self._keys, self._since)):
                return None
        with uninterrupted(), writing(self._engine) as s:
            return claims.take(s, self._keys, self._work.owner, self._work.lease_seconds, self._since)

    def _share_s(self, problem_id: int) -> float | None:
        """The time that a key gets: its own limit, and its share of what is left."""
        own, deadline_s = self._seconds[problem_id], self._work.deadline_s
        if deadline_s is None:
            return own
        with reading(self._engine) as s:
            standing = claims.standing(s, self._keys, self._since)
        left = 1 + sum(key.free for key in standing)
        share_s = max(0.0, deadline_s - time.monotonic()) / math.ceil(left / self._work.mates)
        return share_s if own is None else min(own, share_s)

    def _tune(self, claim: Claim) -> None:
        shape = self._shapes[claim.problem_id]
        self._heart.hold(claim)
        self._emit("start", shape=shape.key(), attempt=claim.attempts)
        try:
            tuned = self._tuner.tune(
                shape, self._share_s(claim.problem_id), fence=lambda s: claims.check_held(s, claim)
            )
            with uninterrupted():
                with writing(self._engine) as s:
                    claims.finish(s, claim, tuned.run_id)
                self._emit("done", shape=shape.key(), document=tuned.to_json())
        except KeyboardInterrupt:
            last = self._tuner.last
            document = None if last is None or last.shape != shape else last.to_json()
            with contextlib.suppress(StoreError), uninterrupted(), writing(self._engine) as s:
                claims.release(s, claim.owner)
            self._emit("interrupted", shape=shape.key(), document=document)
            raise
        except ClaimLostError as error:
            self._emit("lost", shape=shape.key(), detail=str(error))
        except (DeviceError, StoreError):
            raise  # of this card or this host, not of the key
        except KdatuneError as error:
            with contextlib.suppress(ClaimLostError), uninterrupted():
                with writing(self._engine) as s:
                    claims.fail(s, claim, str(error))
                self._emit("failed", shape=shape.key(), detail=str(error))
        finally:
            self._heart.hold(None)


def main() -> None:
    """Exit codes: 0 no key is left, 1 this worker cannot go on, 130 interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    parent = int(sys.argv[1])
    _end_with_parent(parent)
    # libraries print: file descriptor 1 becomes stderr, lines go through a copy of the pipe
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **facts: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            lines.write(json.dumps({"event": event} | facts) + "\n")
            lines.flush()

    work = read_assignment(json.loads(sys.stdin.readline()))
    settings = read_settings()
    try:
        engine = open_engine(settings.database_url)
        try:
            with contextlib.closing(open_backend(BackendName(work.backend), work.recording, settings)) as backend:
                FleetWorker(engine, backend, work, emit).run()
        finally:
            engine.dispose()
    except KdatuneError as error:
        emit("refused", detail=str(error))  # what it holds the parent frees, as for one that died
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _end_with_parent(parent: int) -> None:
    """A parent that is killed takes its workers along as Ctrl-C would: what they hold is free at once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
