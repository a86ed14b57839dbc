"""The champions in memory: what lets a resolve or a snapshot be answered without asking the database each time.

A `ChampionIndex` is immutable and holds one generation. `ChampionCache` keeps the newest one: it asks the database for
its generation at most every 200 ms, when a request needs it, and reads what has changed only when that has moved. A
promotion thus reaches every worker within a fraction of a second, whoever made it, and an idle service asks nothing.
"""

import asyncio
import gc
import heapq
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kdatune_api.caching import Document
from kdatune_api.caching import document
from kdatune_api.metrics import Metrics
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.index import MatchIndex
from kdatune_kernels.match import Champion
from kdatune_kernels.match import Match
from kdatune_kernels.others import OtherChampion
from kdatune_kernels.others import OtherIndex
from kdatune_kernels.others import OtherMatch
from kdatune_kernels.snapshot import SCHEMA
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import dump_champion
from kdatune_kernels.snapshot import dump_snapshot
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Shape
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OtherShape
from kdatune_tuner.store.changes import Mark
from kdatune_tuner.store.changes import changes
from kdatune_tuner.store.changes import newest_mark
from kdatune_tuner.store.engine import looking
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.other_champions import marked_others
from kdatune_tuner.store.other_champions import other_champions
from kdatune_tuner.store.queries import champions
from kdatune_tuner.store.queries import gpus
from kdatune_tuner.store.staleness import marked

log = logging.getLogger("kdatune.api")

# How old what is served may be. From two thirds of that on a look is under way beside the answers: requests that waited for
# one, or went the long way while it was under way (50 ms under load), were 2 to 4 % of all, and so the p99.
CHECK_EVERY_SECONDS = 0.9
_LOOK_FROM = 2 / 3
# A database that hangs must not hang the answers that are in memory already.
PATIENCE_SECONDS = 0.3
MANY_CHAMPIONS = 1000
# Of the garbage collector, with many champions: every few thousand requests it looked for cycles among the kept answers. p99 of
# questions never asked before, exact and near, was 1.78 and 2.00 of the bare route's with Python's own thresholds, and 1.50 and
# 1.77 with these (32 connections, 10,000 champions, SQLite, two cores).
GC_THRESHOLDS = (50_000, 20, 100)
MAX_VIEWS = 32
MAX_ANSWERS = 10_000


class View:
    """The champions that may be served to one card (same card or same silicon), indexed."""

    def __init__(
        self,
        gpu: Gpu,
        generation: int,
        champions: Iterable[Champion],
        texts: "Texts",
        others: Sequence[OtherChampion] = (),
    ) -> None:
        self.gpu = gpu
        self._others: dict[str, list[OtherChampion]] = {}
        for one in others:
            self._others.setdefault(one.kernel, []).append(one)
        self._other_indices: dict[str, OtherIndex] = {}
        self.generation = generation
        self._texts = texts
        self._snapshot: Document | None = None
        self._lock = threading.Lock()
        self._index = MatchIndex(champions, gpu)

    @property
    def served(self) -> tuple[Champion, ...]:
        """The champions, newest promotion first."""
        return self._index.served

    def find(self, shape: Shape) -> Match:
        """`match.find` over all champions."""
        return self._index.find(shape)

    def find_other(self, kernel: str, shape: OtherShape) -> OtherMatch | None:
        """The same of a kernel of others; None where it is not installed and the very shape is not tuned.

        Raises:
            ConfigError: nothing answers, and the kernel has no default that can be read.
        """
        index = self._other_indices.get(kernel)
        if index is None:
            installed = registry().get(kernel)
            mine = self._others.get(kernel, [])
            index = OtherIndex(mine, self.gpu, installed)
            if mine or installed is not None:  # a caller may make up names: what is kept is bounded
                self._other_indices[kernel] = index
        return index.find(shape)

    @property
    def is_rendered(self) -> bool:
        """Whether `snapshot` takes no time."""
        return self._snapshot is not None

    def render(self) -> Document:
        """Write the snapshot document down, plain and compressed, once."""
        with self._lock:
            if self._snapshot is None:
                of_all = (one for group in self._others.values() for one in group)
                others = [one for one in of_all if self.gpu.sameness(one.gpu) in ("exact", "silicon")]
                empty = Snapshot(SCHEMA, self.gpu, self.generation, others=tuple(others))
                head = json.dumps(dump_snapshot(empty), separators=(",", ":"))
                entries = b",".join(map(self._texts.of, self.served))
                # the document of no champions ends in an empty list: they go inside
                body = head.encode().removesuffix(b"]}") + entries + b"]}"
                self._snapshot = document(self.generation, body, compress=True)
            return self._snapshot

    @property
    def snapshot(self) -> Document:
        """The snapshot document of this card."""
        return self._snapshot or self.render()


class Texts:
    """Champions as the bytes of their snapshot entries, each written once: of 10,000 a promotion changes one.

    Known by the number of their promotion, which is unique; what is kept must be equal in all else.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Champion, bytes]] = {}

    def of(self, champion: Champion) -> bytes:
        """The entry of a champion."""
        known = self._known.get(champion.generation)
        if known is not None and known[0] == champion:
            return known[1]
        text = json.dumps(dump_champion(champion), separators=(",", ":")).encode()
        self._known[champion.generation] = (champion, text)
        return text

    def keep(self, champions: Iterable[Champion]) -> None:
        """Forget all others."""
        wanted = {champion.generation for champion in champions}
        self._known = {number: entry for number, entry in list(self._known.items()) if number in wanted}


@dataclass(frozen=True)
class Answer:
    """An answer that is ready to be sent: of which route, and how it was found (None: it is no resolve)."""

    document: Document
    match: str | None
    route: str


class ChampionIndex:
    """Every champion of one generation, newest promotion first. Immutable but for what it remembers to save work."""

    def __init__(
        self,
        mark: Mark,
        found: Iterable[Champion],
        tuned: Sequence[Gpu],
        texts: Texts | None = None,
        others: Iterable[OtherChampion] = (),
    ) -> None:
        self.others = tuple(sorted(others, key=lambda c: -c.generation))
        self.mark = mark
        self.generation = mark.generation
        self.found = tuple(sorted(found, key=lambda c: -c.generation))
        self.tuned = tuple(tuned)
        self.texts = texts or Texts()
        self._by_gpu: dict[Gpu, list[Champion]] = {}
        for champion in self.found:
            self._by_gpu.setdefault(champion.gpu, []).append(champion)
        self.gpus: dict[str, list[Gpu]] = {}
        for gpu in tuned:
            self.gpus.setdefault(gpu.name, []).append(gpu)
        self.answers: dict[bytes, Answer] = {}
        self.snapshots: dict[bytes, Answer] = {}
        self._views: dict[Gpu, View] = {}

    @property
    def count(self) -> int:
        return len(self.found) + len(self.others)

    def view(self, gpu: Gpu) -> View:
        """What may be served to the card. Made once a card and generation."""
        view = self._views.get(gpu)
        if view is None:
            if len(self._views) >= MAX_VIEWS:  # a caller may make up cards: forget, rather than grow
                self._views.clear()
                self.snapshots.clear()
            view = self._views[gpu] = self._make_view(gpu)
        return view

    def follow(self, before: "ChampionIndex") -> None:
        """Make the views that were asked for before, here and not while a request waits."""
        self.texts.keep(self.found)
        for gpu in list(before._views):
            if gpu in self._by_gpu or any(one.gpu == gpu for one in self.others):
                self.view(gpu)

    def remember(self, question: bytes, answer: Answer) -> None:
        """Keep the answer to this very question for as long as this generation is served; the oldest are forgotten.

        Snapshots are kept apart, and no longer than the view they are of: one can take megabytes.
        """
        kept = self.answers if answer.match is not None else self.snapshots
        if len(kept) >= MAX_ANSWERS:
            for old in list(islice(kept, MAX_ANSWERS // 10)):
                del kept[old]
        kept[question] = answer

    def recall(self, question: bytes) -> Answer | None:
        """The answer that was given to this very question."""
        return self.answers.get(question) or self.snapshots.get(question)

    def _make_view(self, gpu: Gpu) -> View:
        served: list[list[Champion]] = []
        others: list[Champion] = []  # of a card that may not be served, one tells how near it is
        for tuned, group in self._by_gpu.items():
            if gpu.sameness(tuned) in ("exact", "silicon"):
                served.append(group)
            else:
                others.append(group[0])
        merged = heapq.merge(*served, key=lambda champion: -champion.generation)
        return View(gpu, self.generation, [*merged, *others], self.texts, self.others)


AnyChampion = TypeVar("AnyChampion", Champion, OtherChampion)


def _unmarked(champion: AnyChampion) -> AnyChampion:
    """As the store gave it: what is stale is decided anew, by what is newest now."""
    return champion if champion.stale_reason is None else replace(champion, stale_reason=None)


def _retrieve(waiting: "asyncio.Future[ChampionIndex]") -> None:
    """Take note of an error that nobody waits for any more; `_check` has logged it."""
    if not waiting.cancelled():
        waiting.exception()


class ChampionCache:
    """Keeps the newest ChampionIndex. Thread-safe.

    Args:
        engine: opens the database, or raises StoreError.
        check_every_seconds: how old the last look at the database may be. The next begins, with a request, at 2/3 of that.
    """

    def __init__(self, engine: Callable[[], Engine], metrics: Metrics, check_every_seconds: float) -> None:
        self._engine = engine
        self._metrics = metrics
        self._every = check_every_seconds
        self._index: ChampionIndex | None = None
        self._asked_at = self._checked_at = -math.inf
        self._checking: Future[ChampionIndex] | None = None
        self._failing = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "kdatune-champions")

    async def current(self) -> ChampionIndex:
        """The champions as of at most `check_every_seconds` ago; the last ones known when the database fails.

        Raises:
            StoreError: the database cannot be read and has not been read before.
        """
        index = self.fresh
        return index if index is not None else await self._ask()

    @property
    def fresh(self) -> ChampionIndex | None:
        """The champions, when the database was looked at recently enough; else None. Begins the next look in time."""
        age = time.monotonic() - self._checked_at
        if age >= self._every:
            return None
        if age >= self._every * _LOOK_FROM and self._checking is None:
            self._begin()
        return self._index

    def warm(self) -> None:
        """Begin to read the champions, so that the first request need not wait. Never raises: it is logged."""
        self._begin()

    def close(self) -> None:
        """End the thread that asks the database."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _ask(self) -> ChampionIndex:
        known = self._index
        checking = self._begin()
        patience = self._asked_at + PATIENCE_SECONDS - time.monotonic()
        waiting = asyncio.wrap_future(checking)
        waiting.add_done_callback(_retrieve)
        if known is None:
            return await asyncio.shield(waiting)
        await asyncio.wait({waiting}, timeout=max(0.0, patience))
        if waiting.done() and waiting.exception() is None:
            return waiting.result()
        return known

    def _begin(self) -> "Future[ChampionIndex]":
        """The check that is under way, begun by this call where there was none."""
        with self._lock:
            if self._checking is None:
                self._checking = self._thread.submit(self._check)
                self._asked_at = time.monotonic()
            return self._checking

    def _check(self) -> ChampionIndex:
        """Runs in the one thread: look at the generation, read the champions when it has moved."""
        try:
            index = self._look()
        except (KdatuneError, SQLAlchemyError) as error:
            if not self._failing:
                known = "nothing" if self._index is None else f"generation {self._index.generation}"
                log.warning("the database fails, %s can be served: %s", known, error)
            self._failing = True
            raise
        except Exception:
            log.exception("a fault while the champions were read; what is known is served")
            raise
        else:
            if self._failing:
                log.info("the database answers again, generation %d", index.generation)
            self._failing = False
            if index is not self._index:
                self._index = index
                # not before: who reads in /metrics that a generation is served is served it
                self._metrics.generation.set(index.generation)
                self._metrics.champions.set(index.count)
                log.info("serving generation %d, %d champions", index.generation, index.count)
            return index
        finally:
            self._checked_at = time.monotonic()
            with self._lock:
                self._checking = None

    def _look(self) -> ChampionIndex:
        known, engine = self._index, self._engine()
        if known is not None:
            with looking(engine) as connection:
                if newest_mark(connection) == known.mark:
                    return known
        with reading(engine) as session:
            newest = newest_mark(session)
            cards = gpus(session)
            # a card whose facts are other ones by now is another value in every one of its champions
            same_cards = known is not None and known.tuned == tuple(cards)
            changed = changes(session, known.mark) if known is not None and same_cards else None
            if known is None or changed is None:
                found = champions(session)
                others = other_champions(session)
            else:
                found = [_unmarked(c) for c in known.found if c.shape not in changed.shapes]
                found.extend(changed.champions)
                others = [_unmarked(c) for c in known.others if (c.kernel, c.shape) not in changed.other_keys]
                others.extend(changed.others)
        texts = None if known is None else known.texts
        index = ChampionIndex(newest, marked(found), cards, texts, marked_others(others))
        if known is not None:
            index.follow(known)
        if changed is None and index.count >= MANY_CHAMPIONS:
            # They stay: a garbage collector that walks over 10,000 of them every few thousand answers stops the service
            # for 50 to 150 ms each time. What is dropped later is freed all the same, by its count of references.
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
        self._metrics.reloads.labels("all" if changed is None else "changes").inc()
        return index
