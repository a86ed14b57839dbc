"""The launcher's side of the service: one daemon thread that polls snapshots and reports demand. Stdlib only.

The launch path never comes here. The thread fails static: whatever the service does (down, slow, wrong, gone), what is
known stays known, one log line says so, and another one says when it is back.

Environment: KDATUNE_URL (no service is asked without it), KDATUNE_OFFLINE=1 (no network; the disk copy is still read),
KDATUNE_POLL_SECONDS (300), KDATUNE_GENERATION (use snapshots of this generation only, so that all ranks agree),
KDATUNE_CACHE_DIR (see disk.py), KDATUNE_TOKEN (sent as bearer token when set).
"""

import json
import logging
import os
import random
import threading
import time
import urllib.parse
import weakref
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

from kdatune_kernels.disk import DiskCopy
from kdatune_kernels.disk import default_cache_dir
from kdatune_kernels.errors import SnapshotError
from kdatune_kernels.http import ServiceError
from kdatune_kernels.http import request
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import parse_json
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json

log = logging.getLogger("kdatune")

POLL_SECONDS = 300.0
FIRST_RETRY_SECONDS = 5.0
REPORT_SECONDS = 60.0
JITTER = 0.2
MAX_PENDING = 4096
BATCH_ITEMS = 100


@dataclass(frozen=True)
class Settings:
    """Where the service is and how it is asked. `from_environment` reads the KDATUNE_ variables."""

    url: str | None = None
    cache_dir: Path | None = None
    poll_seconds: float = POLL_SECONDS
    offline: bool = False
    generation: int | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def asks(self) -> bool:
        """Whether there is a service to ask."""
        return self.url is not None and not self.offline


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment. A value that cannot be read costs a warning and takes the safe side."""
    env = os.environ if environ is None else environ
    cache_dir = default_cache_dir(env)
    return Settings(
        url=_url(env.get("KDATUNE_URL", "").strip()),
        cache_dir=None if cache_dir is None else cache_dir.absolute(),
        poll_seconds=_poll_seconds(env.get("KDATUNE_POLL_SECONDS", "").strip()),
        offline=env.get("KDATUNE_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off"),
        generation=_generation(env.get("KDATUNE_GENERATION", "").strip()),
        token=env.get("KDATUNE_TOKEN", "").strip() or None,
    )


def _url(text: str) -> str | None:
    if not text:
        return None
    try:
        parts = urllib.parse.urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or any(c.isspace() for c in text):
        log.warning("KDATUNE_URL=%r is not an http(s) address; no service is asked", text)
        return None
    return text.rstrip("/")


def _poll_seconds(text: str) -> float:
    try:
        seconds = float(text or POLL_SECONDS)
    except ValueError:
        seconds = -1.0
    if 0 < seconds < 1e6:
        return seconds
    log.warning("KDATUNE_POLL_SECONDS=%r is not a time in seconds; %g is used", text, POLL_SECONDS)
    return POLL_SECONDS


def _generation(text: str) -> int | None:
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text)
    log.warning("KDATUNE_GENERATION=%r is not a whole number; no snapshot is used", text)
    return -1


@dataclass(frozen=True)
class Refusal:
    """A config that must not be launched: refused before the launch or failed at it."""

    config: LaunchConfig
    reason: str


@dataclass
class Demand:
    """A key that was asked for and has no champion of its own, or whose champion was refused."""

    gpu_name: str
    shape: Shape
    count: int
    refusal: Refusal | None = None

    def item(self, *, plain: bool = False) -> Json:
        """As an item of POST /v1/demand; plain leaves out what a service may not know."""
        item = {"gpu": self.gpu_name, "kernel": "kda", "shape": to_json(self.shape), "count": self.count}
        if self.refusal is not None and not plain:
            item["quarantined"] = {"config": to_json(self.refusal.config), "reason": self.refusal.reason}
        return item


class Feed:
    """What is known of one GPU model. Written by one thread at a time, read without a lock."""

    def __init__(self, gpu_name: str) -> None:
        self.gpu_name = gpu_name
        self.service: Snapshot | None = None
        self.disk: Snapshot | None = None
        self.set_aside: str | None = None
        """Why the newest snapshot is not used: another generation is pinned."""
        self.etag: str | None = None
        self.failures = 0
        self.polls = 0
        self.due_seconds = 0.0

    @property
    def newest(self) -> Snapshot | None:
        """What the service said, else what it said to an earlier process."""
        return self.service or self.disk


class Client:
    """The feeds of a process and the thread that keeps them fresh.

    The thread starts at the first `watch`, is a daemon, and does not live through a fork: a child starts its own at its
    first `watch`. `counters` counts fetches, not_modified, errors and reported items.

    Args:
        collect: called by the thread before a report; gives the demand since the last call.
    """

    def __init__(self, settings: Settings, collect: Callable[[], Iterable[Demand]] = tuple) -> None:
        self.settings = settings
        self.copy = DiskCopy(settings.cache_dir)
        self.reachable: bool | None = None
        self.counters: Counter[str] = Counter()
        self._collect = collect
        self._feeds: dict[str, Feed] = {}
        self._pending: dict[tuple[str, Shape, Refusal | None], Demand] = {}
        self._report_due_seconds = 0.0
        self._closed = False
        self._after_fork()
        _CLIENTS.add(self)

    def _after_fork(self) -> None:
        """A child has none of its parent's threads, and the parent reports its own demand."""
        self._lock = threading.Lock()
        self._polled = threading.Condition()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._pending.clear()

    def feed(self, gpu_name: str) -> Feed | None:
        """What is known of a watched GPU model. No lock, no I/O."""
        return self._feeds.get(gpu_name)

    def watch(self, gpu: Gpu) -> Feed:
        """Read the disk copy and start polling; does nothing the second time. Never raises, never waits for a network."""
        feed = self._feeds.get(gpu.name)
        if feed is not None and (self._thread is not None or not self.settings.asks):
            return feed
        with self._lock:
            feed = self._feeds.get(gpu.name)
            if feed is None:
                feed = Feed(gpu.name)
                self._read_copy(feed)
                self._feeds[gpu.name] = feed
            self._start()
        self._wake.set()
        return feed

    def refresh(self, timeout_seconds: float) -> None:
        """Poll every feed now and wait for the answers, at most this long; offline, read the disk copies again."""
        feeds = list(self._feeds.values())
        if not self.settings.asks:
            for feed in feeds:
                self._read_copy(feed)
            return
        wanted = {feed.gpu_name: feed.polls + 1 for feed in feeds}
        for feed in feeds:
            feed.due_seconds = 0.0
        with self._lock:
            self._start()
        self._wake.set()
        with self._polled:
            self._polled.wait_for(lambda: all(f.polls >= wanted[f.gpu_name] for f in feeds), timeout_seconds)

    def close(self) -> None:
        """Stop the thread. For tests and short-lived tools; a launcher never needs it."""
        self._closed = True
        self._wake.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout=10)

    def add_demand(self, demand: Iterable[Demand]) -> None:
        """Keep demand for the next report. Bounded: what does not fit is counted as dropped."""
        with self._lock:
            for one in demand:
                key = (one.gpu_name, one.shape, one.refusal)
                if key in self._pending:
                    self._pending[key].count += one.count
                elif len(self._pending) < MAX_PENDING:
                    self._pending[key] = one
                else:
                    self.counters["dropped"] += 1

    def _start(self) -> None:
        if self._thread is not None or self._closed or not self.settings.asks:
            return
        thread = threading.Thread(target=self._run, name="kdatune", daemon=True)
        self._thread = thread
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is shutting down
            self.counters["errors"] += 1
            log.warning("the kdatune thread cannot start (%s); launches go on with what is known", error)

    def _read_copy(self, feed: Feed) -> None:
        kept = self.copy.read(feed.gpu_name)
        if kept is not None and self._wanted(feed, kept[0], "the disk copy"):
            feed.disk, feed.etag = kept

    def _wanted(self, feed: Feed, snapshot: Snapshot, source: str) -> bool:
        pinned = self.settings.generation
        if pinned is None or snapshot.generation == pinned:
            feed.set_aside = None
            return True
        reason = f"{source} is of generation {snapshot.generation}, KDATUNE_GENERATION pins {pinned}: not used"
        if feed.set_aside != reason:
            feed.set_aside = reason
            log.warning("kdatune snapshot of %s: %s", feed.gpu_name, reason)
        return False

    def _run(self) -> None:
        self._report_due_seconds = time.monotonic() + _jittered(min(REPORT_SECONDS, self.settings.poll_seconds))
        while not self._closed:
            self._wake.clear()
            try:
                wait_seconds = self._turn()
            except Exception:  # noqa: BLE001 - a fault in here must end neither the thread nor the training job
                self.counters["errors"] += 1
                log.exception("fault in the kdatune thread; launches go on with what is known")
                wait_seconds = self.settings.poll_seconds
            self._wake.wait(wait_seconds)

    def _turn(self) -> float:
        """Do what is due; the seconds until something is due again."""
        for feed in list(self._feeds.values()):
            if time.monotonic() >= feed.due_seconds and not self._closed:
                self._poll(feed)
        if time.monotonic() >= self._report_due_seconds:
            self.report()
            self._report_due_seconds = time.monotonic() + _jittered(min(REPORT_SECONDS, self.settings.poll_seconds))
        due_seconds = min([self._report_due_seconds, *(feed.due_seconds for feed in list(self._feeds.values()))])
        return max(0.0, due_seconds - time.monotonic())

    def _poll(self, feed: Feed) -> None:
        poll_seconds = self.settings.poll_seconds
        try:
            said = self._fetch(feed)
        except (ServiceError, SnapshotError) as error:
            self.counters["errors"] += 1
            feed.failures += 1
            self._now(False, str(error))
            wait_seconds = min(poll_seconds, FIRST_RETRY_SECONDS * 2.0 ** min(feed.failures - 1, 20))
        else:
            feed.failures = 0
            self._now(True, said)
            wait_seconds = poll_seconds
        feed.due_seconds = time.monotonic() + _jittered(wait_seconds)
        with self._polled:
            feed.polls += 1
            self._polled.notify_all()

    def _fetch(self, feed: Feed) -> str:
        """Ask for the snapshot once and keep what is new; what the service said, in words."""
        url = f"{self.settings.url}/v1/snapshots/{urllib.parse.quote(feed.gpu_name, safe='')}"
        headers = {"If-None-Match": feed.etag} if feed.etag else {}
        self.counters["fetches"] += 1
        reply = request("GET", url, headers=headers, token=self.settings.token)
        if reply.status == 304 and feed.etag:
            self.counters["not_modified"] += 1
            feed.service = feed.newest
            return f"generation {feed.service.generation}, as known" if feed.service else "nothing new"
        if reply.status == 404:
            return f"nothing for {feed.gpu_name} yet"
        if reply.status != 200:
            raise ServiceError(f"status {reply.status}")
        document = parse_json(reply.body)
        snapshot = parse_snapshot(document, pause=_give_way)
        feed.etag = reply.etag
        said = f"generation {snapshot.generation}, {len(snapshot.champions)} champions"
        if snapshot.skipped:
            first = snapshot.skipped[0]
            said += f", {len(snapshot.skipped)} refused ({first.key}: {first.reason})"
            self.counters["refused"] += len(snapshot.skipped)
        if self._wanted(feed, snapshot, "the service's snapshot"):
            feed.service = snapshot
            self.copy.write(feed.gpu_name, document, reply.etag)
        if self.reachable and snapshot.skipped:
            log.warning("kdatune snapshot of %s: %s", feed.gpu_name, said)
        return said

    def _now(self, reachable: bool, said: str) -> None:
        """Log a change of state, and only a change."""
        before, self.reachable = self.reachable, reachable
        if before is reachable:
            return
        if not reachable:
            log.warning("kdatune service %s: %s; launches go on with what is known", self.settings.url, said)
        elif before is None and "refused" not in said:
            log.info("kdatune service %s is reachable: %s", self.settings.url, said)
        else:
            log.warning(
                "kdatune service %s is reachable%s: %s", self.settings.url, " again" if before is False else "", said
            )

    def report(self) -> None:
        """Send the pending demand, a bounded batch at a time. What cannot be delivered stays for the next time."""
        self.add_demand(self._collect())
        while self._pending:
            with self._lock:
                batch = list(self._pending.items())[:BATCH_ITEMS]
                for key, _ in batch:
                    del self._pending[key]
            try:
                self._send([demand for _, demand in batch])
            except ServiceError:
                self.counters["errors"] += 1
                self.add_demand(demand for _, demand in batch)
                return

    def _send(self, demands: list[Demand]) -> None:
        status = self._post([demand.item() for demand in demands])
        if status in (400, 422) and any(demand.refusal for demand in demands):
            status = self._post([demand.item(plain=True) for demand in demands])
        if status in (408, 425, 429) or status >= 500:
            raise ServiceError(f"status {status}")
        self.counters["reported" if 200 <= status < 300 else "dropped"] += len(demands)

    def _post(self, items: list[Json]) -> int:
        body = json.dumps({"items": items}).encode()
        return request("POST", f"{self.settings.url}/v1/demand", body=body, token=self.settings.token).status


def _give_way() -> None:
    time.sleep(0)


def _jittered(seconds: float) -> float:
    """The time, give or take a fifth: launchers that start together do not ask together for ever."""
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret hangs on it


_CLIENTS: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _renew_clients() -> None:
    for client in list(_CLIENTS):
        client._after_fork()


os.register_at_fork(after_in_child=_renew_clients)
