"""Which config a launch uses: service -> disk copy -> bundled snapshot -> analytic default. Stdlib only.

The launch path is `launcher.lookup(key)`: one dict get and an increment. A key is any hashable the caller makes of what
decides the config; only a key that is not known yet costs more, once.

What is frozen: a key that has been resolved keeps its config in this process, whatever arrives in the background. A key
that has not been resolved takes the newest snapshot known at that moment. Only `refresh` resolves anew (and, beyond
MAX_KEYS keys, the oldest are forgotten). A config in quarantine is replaced by the default everywhere, for good;
the default in quarantine by two kernels, then by the plain ones.

Inside CUDA-graph capture (`capturing=True`) nothing is started, read from the cache directory, waited for or locked. An
answer given before the disk copy of the card has been read is used once and not kept.
"""

import logging
import operator
import os
import threading
import weakref
from collections import Counter
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdatune_kernels.client import Client
from kdatune_kernels.client import Feed
from kdatune_kernels.demand import Demand
from kdatune_kernels.demand import Refusal
from kdatune_kernels.environment import Settings
from kdatune_kernels.environment import from_environment
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.errors import SnapshotError
from kdatune_kernels.index import MatchIndex
from kdatune_kernels.match import Champion
from kdatune_kernels.match import Match
from kdatune_kernels.match import find
from kdatune_kernels.resolve_others import Layer
from kdatune_kernels.resolve_others import OtherAnswer
from kdatune_kernels.resolve_others import OtherAnswers
from kdatune_kernels.resolve_others import default_answer
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape

log = logging.getLogger("kdatune")

MAX_KEYS = 16384
"""Of serving with ragged lengths: every T is a key. 16,384 of them take about 8 MB."""

FEW = 200
"""Champions that are looked at one by one, 2.5 us each, for a key that is not known yet; more are indexed once."""

BUNDLED = Path(__file__).with_name("bundled.json")


@dataclass(frozen=True)
class Answer(Match):
    """A Match with the layer it came from and that layer's generation (None for the default)."""

    layer: Layer = "default"
    generation: int | None = None


@dataclass(frozen=True)
class LayerAnswer:
    """What one layer has to say, for people: its state, its own best match, and whether that is what is launched."""

    layer: Layer
    state: str
    match: Match | None
    used: bool


class _Entry:
    """A resolved key and its launches."""

    __slots__ = ("answer", "config", "count", "gpu", "kernel", "reported", "shape")

    def __init__(
        self, answer: Answer | OtherAnswer, shape: Shape | OtherShape, gpu: Gpu | None, kernel: str = "kda"
    ) -> None:
        self.answer = answer
        self.config: Any = answer.config
        self.kernel = kernel
        self.shape = shape
        self.gpu = gpu
        self.count = 0
        self.reported = 0


class Resolver:
    """The config answers of a process. `launcher` is the one that launches use.

    Args:
        settings: None reads the environment when the first key is resolved.
        bundled: the snapshot that ships with the package.
    """

    def __init__(self, settings: Settings | None = None, bundled: Path = BUNDLED) -> None:
        self._settings = settings
        self._bundled_path = bundled
        self._made: dict[str, Client] = {}
        self._bundled: Snapshot | None = None
        self._bundled_error: str | None = None
        self._entries: dict[Hashable, _Entry] = {}
        self._past: Counter[str] = Counter()
        self._quarantined: dict[Hashable, str] = {}
        self._refusals: list[Demand] = []
        self._indexed: dict[Gpu, tuple[list[Snapshot], MatchIndex]] = {}
        self._others = OtherAnswers()
        self._lock = threading.Lock()
        _RESOLVERS.add(self)

    def lookup(self, key: Hashable) -> LaunchConfig | None:
        """The config of a resolved key, None for another. The launch path: no lock, no I/O, no allocation."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.count += 1
        config: LaunchConfig = entry.config
        return config

    def resolve_slow(self, key: Hashable, shape: Shape, gpu: Gpu | None, *, capturing: bool = False) -> LaunchConfig:
        """Resolve a key that `lookup` does not know, and keep the answer. Never raises for lack of a service."""
        unread = capturing and gpu is not None and self.client.feed(gpu.name) is None
        answer = self.resolve(shape, gpu, capturing=capturing)
        if unread:
            return answer.config
        entry = self._entries.setdefault(key, _Entry(answer, shape, gpu))
        entry.count += 1
        if len(self._entries) > MAX_KEYS and not capturing:
            self._forget(MAX_KEYS // 4)
        config: LaunchConfig = entry.config
        return config

    def resolve(self, shape: Shape, gpu: Gpu | None, *, capturing: bool = False) -> Answer:
        """The newest answer for a shape on a card (None: the interpreter), with its layer. Keeps nothing."""
        if gpu is None:
            return Answer("default", "none", default_config(shape, None), "no card: Triton's interpreter")
        feed = self.client.feed(gpu.name) if capturing else self.client.watch(gpu)
        served = None if feed is None else feed.newest
        layers: list[tuple[Layer, Snapshot]] = [("bundled", self.bundled())]
        if feed is not None and served is not None:
            layers.insert(0, ("service" if served is feed.service else "disk", served))
        found = self._find([snapshot for _, snapshot in layers], shape, gpu)
        if found.champion is None:
            return self._default(
                shape, gpu, found, found.reason if feed is None else _and(found.reason, feed.set_aside)
            )
        refused = self._quarantined.get((found.config.k1, found.config.k2))
        if refused is not None:
            return self._default(
                shape, gpu, found, f"config of {found.champion.shape.key()} is in quarantine: {refused}"
            )
        layer, snapshot = next(one for one in layers if _holds(one[1].champions, found.champion))
        return _answer(found, layer, snapshot.generation)

    def quarantine(self, config: LaunchConfig, shape: Shape, gpu: Gpu, reason: str) -> LaunchConfig | None:
        """Take a config that failed at launch out of use in this process and report it; the config to launch instead.

        None when nothing is left: then it is not the config, and the launch's own error is the one to raise.
        """
        pair = (config.k1, config.k2)
        reason = reason[:500]
        with self._lock:
            if pair not in self._quarantined:
                self._quarantined[pair] = reason
                self._refusals.append(Demand(gpu.name, shape, 1, Refusal(config, reason)))
                log.warning(
                    "kdatune config of %s failed on %s and is in quarantine for this process; another is used: %s",
                    shape.key(),
                    gpu.name,
                    reason,
                )
        for entry in list(self._entries.values()):
            if not isinstance(entry.shape, Shape) or not isinstance(entry.answer, Answer):
                continue  # of another kernel
            if entry.gpu is not None and (entry.config.k1, entry.config.k2) == pair:
                entry.answer = self._default(
                    entry.shape, entry.gpu, entry.answer, f"its config is in quarantine: {reason}"
                )
                entry.config = entry.answer.config
        instead = self._default(shape, gpu, None, reason).config
        return None if (instead.k1, instead.k2) in self._quarantined else instead

    def resolve_kernel(
        self, kernel: str, shape: Mapping[str, Any], gpu: Gpu, *, capturing: bool = False
    ) -> OtherConfig:
        """The config of another kernel (docs/kernels-of-others.md), frozen in this process like KDA's.

        Args:
            shape: the fields of the kernel's problem shape; those with a default may be left out.
            gpu: the card of the tensors: `gpu.of(device)`.

        Raises:
            UsageError: no such kernel is installed. ShapeError: the shape lacks a field or has one of another kind.
            ConfigError: nothing answers, and the kernel has no default that can be read.
        """
        key = (kernel, gpu.name, *shape.items())
        try:
            entry = self._entries.get(key)
        except TypeError as error:
            raise ShapeError(f"the shape of {kernel} holds a value that is no number, word or flag: {error}") from error
        if entry is None:
            wanted = registry().require(kernel).shape(shape)
            unread = capturing and self.client.feed(gpu.name) is None
            answer = self.answer_kernel(kernel, wanted, gpu, capturing=capturing)
            if unread:
                return answer.config
            entry = self._entries.setdefault(key, _Entry(answer, wanted, gpu, kernel))
            if len(self._entries) > MAX_KEYS and not capturing:
                self._forget(MAX_KEYS // 4)
        entry.count += 1
        config: OtherConfig = entry.config
        return config

    def answer_kernel(self, kernel: str, shape: OtherShape, gpu: Gpu, *, capturing: bool = False) -> OtherAnswer:
        """The newest answer for a shape of another kernel, with its layer. Keeps nothing. Raises as `resolve_kernel`."""
        feed = self.client.feed(gpu.name) if capturing else self.client.watch(gpu)
        return self._others.answer(kernel, shape, gpu, feed, self._quarantined)

    def quarantine_kernel(
        self, kernel: str, config: OtherConfig, shape: Mapping[str, Any], gpu: Gpu, reason: str
    ) -> OtherConfig | None:
        """Take a config of another kernel out of use, as `quarantine`; the default to launch instead, None without one."""
        installed = registry().require(kernel)
        wanted, reason = installed.shape(shape), reason[:500]
        with self._lock:
            if (kernel, config) not in self._quarantined:
                self._quarantined[kernel, config] = reason
                self._refusals.append(Demand(gpu.name, wanted, 1, Refusal(config, reason), kernel))
                log.warning(
                    "kdatune config of %s %s failed on %s and is in quarantine for this process; another is used: %s",
                    kernel,
                    wanted.key(),
                    gpu.name,
                    reason,
                )
        for entry in list(self._entries.values()):
            if entry.kernel == kernel and entry.config == config:
                assert isinstance(entry.shape, OtherShape)  # noqa: S101 - of another kernel
                assert entry.gpu is not None  # noqa: S101
                entry.answer = default_answer(
                    installed, entry.shape, entry.gpu, f"its config is in quarantine: {reason}"
                )
                entry.config = entry.answer.config
        instead = installed.default(wanted, gpu)
        return None if (kernel, instead) in self._quarantined else instead

    def refresh(self, gpu: Gpu | None = None, *, timeout_seconds: float = 3.0) -> bool:
        """Take what is newest: ask the service now, wait for its answer at most this long, resolve every key anew.

        Call it where a change of config does no harm: at the start, between epochs, on all ranks.

        Args:
            gpu: a card to ask for that no launch has asked for yet.

        Returns:
            Whether the service has answered (or there is none to ask); with False what was known is used on.
        """
        if gpu is not None:
            self.client.watch(gpu)
        answered = self.client.refresh(timeout_seconds)
        self._forget(len(self._entries))
        return answered

    def explain(self, shape: Shape, gpu: Gpu) -> list[LayerAnswer]:
        """What each layer has for a shape, in the order they are asked. Exactly one is marked as used."""
        used = self.resolve(shape, gpu)
        feed = self.client.watch(gpu)
        bundled = self.bundled()
        layers: list[tuple[Layer, str, Snapshot | None]] = [
            ("service", self._service_state(feed), feed.service),
            ("disk", self._disk_state(feed), feed.disk),
            ("bundled", self._bundled_error or _state(bundled), bundled),
        ]
        told = [
            LayerAnswer(layer, state, None if known is None else find(known.champions, shape, gpu), used.layer == layer)
            for layer, state, known in layers
        ]
        default = self._default(shape, gpu, used if used.layer == "default" else None, "the analytic default")
        return [
            *told,
            LayerAnswer(
                "default", used.reason if used.layer == "default" else "not needed", default, used.layer == "default"
            ),
        ]

    def counters(self) -> dict[str, int]:
        """Launches since the start: hits (an exact champion), misses (none), stale (a champion due for re-tuning).

        Beside them: keys resolved now, configs in quarantine, errors of any kind, and the client's own counters.
        """
        counts = Counter(self._past)
        for entry in list(self._entries.values()):
            _count(counts, entry)
        client = self.client
        errors = client.counters["errors"] + client.copy.errors + (self._bundled_error is not None)
        always = {"hits": 0, "misses": 0, "stale": 0}
        now = {"keys": len(self._entries), "quarantined": len(self._quarantined), "errors": errors}
        return {**always, **client.counters, **counts, **now}

    def demand(self) -> list[Demand]:
        """The misses and refusals since the last call. The client's thread takes them from here."""
        with self._lock:
            refusals, self._refusals = self._refusals, []
            return [*refusals, *_misses(self._entries.values())]

    @property
    def client(self) -> Client:
        """The client of this resolver, made at first use. No I/O, no thread."""
        if not self._made:
            settings = from_environment() if self._settings is None else self._settings
            self._made.setdefault("client", Client(settings, self.demand))  # without a lock: of two the first stays
        return self._made["client"]

    def bundled(self) -> Snapshot:
        """The snapshot that ships with the package; an empty one when that cannot be read."""
        if self._bundled is None:
            try:
                self._bundled = parse_snapshot(self._bundled_path.read_bytes())
            except (OSError, SnapshotError) as error:
                self._bundled_error = f"{self._bundled_path.name} cannot be read: {error}"
                self._bundled = Snapshot(1, Gpu("none", "0.0", 1), 0)
                log.warning("kdatune %s; install the package anew", self._bundled_error)
        return self._bundled

    def close(self) -> None:
        """Stop the client's thread. For tools and tests."""
        for client in self._made.values():
            client.close()

    def renew(self) -> None:
        """What a child process must not share: the lock, and what its parent reports. Called after a fork."""
        self._lock = threading.Lock()
        self._refusals = []
        for entry in self._entries.values():
            entry.reported = entry.count

    def _find(self, snapshots: list[Snapshot], shape: Shape, gpu: Gpu) -> Match:
        champions = [champion for snapshot in snapshots for champion in snapshot.champions]
        if len(champions) <= FEW:
            return find(champions, shape, gpu)
        known = self._indexed.get(gpu)
        if known is None or len(known[0]) != len(snapshots) or any(map(operator.is_not, known[0], snapshots)):
            known = self._indexed[gpu] = (snapshots, MatchIndex(champions, gpu))
        return known[1].find(shape)

    def _default(self, shape: Shape, gpu: Gpu, found: Match | None, reason: str) -> Answer:
        """The analytic default; where that is in quarantine too, that of two kernels, then plain Triton."""
        level = "none" if found is None else found.gpu_level
        config = default_config(shape, gpu)
        if (config.k1, config.k2) in self._quarantined:
            others = (split_default(shape, gpu), default_config(shape, None))
            legal = [c for c in others if config_ok(c, shape, gpu) is None] or [config]
            config = next((c for c in legal if (c.k1, c.k2) not in self._quarantined), legal[-1])
        return Answer("default", level, config, reason)

    def _forget(self, count: int) -> None:
        """Drop the oldest keys; their launches stay counted and reported."""
        with self._lock:
            oldest = [(key, self._entries[key]) for key in list(self._entries)[:count]]
            for key, entry in oldest:
                del self._entries[key]
                _count(self._past, entry)
            misses = _misses(entry for _, entry in oldest)
        if self.client.settings.asks:
            self.client.outbox.add(misses)

    def _service_state(self, feed: Feed) -> str:
        settings = self.client.settings
        if settings.url is None:
            return "KDATUNE_URL is not set"
        if settings.offline:
            return "KDATUNE_OFFLINE is set"
        asked = {None: "not asked yet", False: "unreachable", True: "reachable"}[self.client.reachable]
        known = "nothing known" if feed.service is None else _state(feed.service)
        return ", ".join(filter(None, (f"{settings.url} {asked}", known, feed.set_aside)))

    def _disk_state(self, feed: Feed) -> str:
        directory = self.client.settings.cache_dir
        return f"{'no copy found' if feed.disk is None else _state(feed.disk)} in {directory or 'no home directory'}"


def _answer(found: Match, layer: Layer, generation: int) -> Answer:
    return Answer(
        found.match,
        found.gpu_level,
        found.config,
        found.reason,
        found.champion,
        found.expected_regret,
        layer=layer,
        generation=generation,
    )


def _holds(champions: Iterable[Champion], wanted: Champion) -> bool:
    return any(champion is wanted for champion in champions)


def _and(reason: str, more: str | None) -> str:
    return reason if more is None else f"{reason}; {more}"


def _state(snapshot: Snapshot) -> str:
    refused = f", {len(snapshot.skipped)} refused" if snapshot.skipped else ""
    return f"generation {snapshot.generation}, {len(snapshot.champions)} champions{refused}"


def _count(counts: Counter[str], entry: _Entry) -> None:
    counts["hits" if entry.answer.match == "exact" else "misses"] += entry.count
    if entry.answer.stale_reason is not None:
        counts["stale"] += entry.count


def _misses(entries: Iterable[_Entry]) -> list[Demand]:
    """The launches without an exact champion that have not been told yet; marks them as told."""
    found = []
    for entry in list(entries):
        fresh = entry.count - entry.reported
        if fresh > 0 and entry.gpu is not None and entry.answer.match != "exact":
            entry.reported += fresh
            found.append(Demand(entry.gpu.name, entry.shape, fresh, kernel=entry.kernel))
    return found


_RESOLVERS: "weakref.WeakSet[Resolver]" = weakref.WeakSet()

launcher = Resolver()
"""The process's own: what chunk_kda asks."""


def _renew_resolvers() -> None:
    for resolver in list(_RESOLVERS):
        resolver.renew()


os.register_at_fork(after_in_child=_renew_resolvers)
