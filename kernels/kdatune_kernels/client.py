"""The launcher's side of the service: one daemon thread that polls snapshots and reports demand. Stdlib only.

Of several processes of a host one asks, and the others read the copy that it keeps (seat.py). The launch path never comes
here. The thread fails static: whatever the service does (down, slow, wrong, gone), what is
known stays known, one log line says so, and another one says when it is back. Settings: see environment.py.
"""

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

from kdatune_kernels.demand import Demand
from kdatune_kernels.demand import Outbox
from kdatune_kernels.demand import Refusal
from kdatune_kernels.disk import DiskCopy
from kdatune_kernels.disk import file_name
from kdatune_kernels.environment import Settings
from kdatune_kernels.errors import SnapshotError
from kdatune_kernels.seat import Seat
from kdatune_kernels.seat import group_of
from kdatune_kernels.snapshot import Skipped
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import parse_json
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.transport import ServiceError
from kdatune_kernels.transport import request

log = logging.getLogger("kdatune")

FIRST_RETRY_SECONDS = 5.0
REPORT_SECONDS = 60.0
JITTER = 0.2
FOLLOW_SECONDS = 2.0
"""Between two looks at the copy that another process keeps; at first sooner."""
STUCK_POLLS = 3
"""Polls that whoever asks for this host may miss before the others ask for themselves."""


class Feed:
    """What is known of one GPU model. Written under the client's lock or by its thread, read without a lock."""

    def __init__(self, gpu: Gpu, seat: Seat | None = None) -> None:
        self.gpu = gpu
        self.seat = seat or Seat(None, "", "")
        self.asks = self.begun = self.answered = 0
        """Refreshes that asked for the service's own answer; those a poll has begun for; those it has ended for."""
        self.looks = 0
        self.service: Snapshot | None = None
        self.disk: Snapshot | None = None
        self.set_aside: str | None = None
        """Why the newest snapshot is not used: another generation is pinned."""
        self.etag: str | None = None
        self.tagged: Snapshot | None = None
        """What the ETag stands for; None when that was set aside."""
        self.noted: tuple[Skipped, ...] = ()
        self.failures = 0
        self.polls = 0
        self.due_seconds = 0.0

    @property
    def asked_for(self) -> bool:
        """A refresh waits for an answer that no poll was sent for yet."""
        return self.asks > self.begun

    @property
    def newest(self) -> Snapshot | None:
        """What the service said, else what it said to an earlier process."""
        return self.service or self.disk


class Client:
    """The feeds of a process and the thread that keeps them fresh.

    The thread starts at the first `watch` and is a daemon. It does not live through a fork: a child starts its own when
    it watches next. `counters` counts fetches, not_modified, looks at another process's copy (followed), refused entries,
    reported and dropped items, and errors.

    Args:
        collect: called by the thread before a report; gives the demand since its last call.
    """

    def __init__(self, settings: Settings, collect: Callable[[], Iterable[Demand]] = tuple) -> None:
        self.settings = settings
        self.copy = DiskCopy(settings.cache_dir)
        self.reachable: bool | None = None
        self.counters: Counter[str] = Counter()
        self.outbox = Outbox(self.counters)
        self._collect = collect
        self._feeds: dict[str, Feed] = {}
        self._report_due_seconds = 0.0
        self._closed = False
        self._renew()
        _CLIENTS.add(self)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._polled = threading.Condition()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def renew(self) -> None:
        """Forget the parent's thread, locks, seats and unsent demand. Called in a child process after a fork."""
        self._renew()
        for feed in self._feeds.values():
            feed.seat.leave()
        self.outbox.renew()

    def feed(self, gpu_name: str) -> Feed | None:
        """What is known of a watched GPU model. No lock, no I/O."""
        return self._feeds.get(gpu_name)

    def watch(self, gpu: Gpu) -> Feed:
        """Read the disk copy and start polling; the second time, nothing. Never raises, never waits for a network."""
        feed = self._feeds.get(gpu.name)
        if feed is not None and (self._thread is not None or not self.settings.asks):
            return feed
        with self._lock:
            feed = self._feeds.get(gpu.name)
            if feed is None:
                feed = Feed(gpu, Seat(self.settings.cache_dir, file_name(gpu.name), group_of(self.settings)))
                self._read_copy(feed)
                self._feeds[gpu.name] = feed
            self._start()
        self._wake.set()
        return feed

    def refresh(self, timeout_seconds: float) -> bool:
        """Poll every feed now and wait for the answers, at most this long. True when all are in.

        Offline and without a service the disk copies are read again.
        """
        feeds = list(self._feeds.values())
        if not self.settings.asks:
            for feed in feeds:
                self._read_copy(feed)
            return True
        with self._lock:
            for feed in feeds:
                feed.asks += 1
            wanted = [(feed, feed.asks) for feed in feeds]
            self._start()
        self._wake.set()
        with self._polled:
            # not the answer to a poll that was on its way before: it may be older than what the caller knows of
            return self._polled.wait_for(lambda: all(feed.answered >= asks for feed, asks in wanted), timeout_seconds)

    def report(self) -> None:
        """Send the demand that has gathered. The thread does this by itself."""
        if self.settings.url is not None and self.settings.asks:
            self.outbox.add(self._collect())
            self.outbox.send(self.settings.url, self.settings.token)

    def close(self) -> None:
        """Stop the thread. For tools and tests; a launcher never needs it."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        for feed in self._feeds.values():
            feed.seat.leave()

    def _start(self) -> None:
        if self._thread is not None or self._closed or not self.settings.asks:
            return
        thread = threading.Thread(target=self._run, name="kdatune", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is shutting down
            self.counters["errors"] += 1
            log.warning("the kdatune thread cannot start (%s); launches go on with what is known", error)
        else:
            self._thread = thread

    def _read_copy(self, feed: Feed) -> None:
        kept = self.copy.read(feed.gpu.name)
        if kept is not None and self._wanted(feed, kept[0], "the disk copy"):
            feed.disk, feed.etag = kept
            feed.tagged = feed.disk

    def _wanted(self, feed: Feed, snapshot: Snapshot, source: str) -> bool:
        pinned = self.settings.generation
        if pinned is None or snapshot.generation == pinned:
            feed.set_aside = None
            return True
        reason = f"{source} is of generation {snapshot.generation}, KDATUNE_GENERATION pins {pinned}: not used"
        if feed.set_aside != reason:
            feed.set_aside = reason
            log.warning("kdatune snapshot of %s: %s", feed.gpu.name, reason)
        return False

    def _run(self) -> None:
        self._report_due_seconds = time.monotonic() + self._report_seconds()
        while True:
            self._wake.clear()
            if self._closed:  # looked at after the clearing: a close between the two would wake nobody
                return
            try:
                wait_seconds = self._turn()
            except Exception:  # a fault in here must end neither the thread nor the process that launches
                self.counters["errors"] += 1
                log.exception("fault in the kdatune thread; launches go on with what is known")
                wait_seconds = self.settings.poll_seconds
            self._wake.wait(wait_seconds)

    def _turn(self) -> float:
        """Do what is due; the seconds until something is due again."""
        for feed in list(self._feeds.values()):
            if (feed.asked_for or time.monotonic() >= feed.due_seconds) and not self._closed:
                if self._is_asked_by_another(feed):
                    self._follow(feed)
                else:
                    self._poll(feed)
        if time.monotonic() >= self._report_due_seconds and not self._closed:
            self.report()
            self._report_due_seconds = time.monotonic() + self._report_seconds()
        dues = [0.0 if feed.asked_for else feed.due_seconds for feed in list(self._feeds.values())]
        due_seconds = min([self._report_due_seconds, *dues])
        return max(0.0, due_seconds - time.monotonic())

    def _report_seconds(self) -> float:
        return _jittered(min(REPORT_SECONDS, self.settings.poll_seconds))

    def _is_asked_by_another(self, feed: Feed) -> bool:
        if feed.asked_for or feed.seat.take():
            return False
        return feed.seat.idle_seconds() < STUCK_POLLS * self.settings.poll_seconds

    def _follow(self, feed: Feed) -> None:
        """Take over what another process of this host has been told."""
        self.counters["followed"] += 1
        kept = self.copy.read_changed(feed.gpu.name, pause=_give_way)
        if kept is not None and self._wanted(feed, kept[0], "the disk copy"):
            feed.disk, feed.etag = kept
            feed.tagged = feed.disk
            feed.service = None  # last: a launch that resolves now must not see an older copy
        feed.due_seconds = time.monotonic() + _jittered(min(FOLLOW_SECONDS, 0.1 * 2.0 ** min(feed.looks, 10)))
        feed.looks += 1

    def _poll(self, feed: Feed) -> None:
        is_extra = feed.asked_for and not feed.seat.take()
        feed.begun = feed.asks
        feed.seat.note()
        try:
            said = self._fetch(feed)
        except (ServiceError, SnapshotError) as error:
            self.counters["errors"] += 1
            feed.failures += 1
            self._now(False, str(error))
            # 5, 10, 20 s ... up to the usual poll: soon back when the service is, and never asked more than usual
            wait_seconds = min(self.settings.poll_seconds, FIRST_RETRY_SECONDS * 2.0 ** min(feed.failures - 1, 20))
        else:
            feed.failures = 0
            self._now(True, said)
            wait_seconds = self.settings.poll_seconds
        feed.due_seconds = time.monotonic() + _jittered(FOLLOW_SECONDS if is_extra else wait_seconds)
        with self._polled:
            feed.polls += 1
            feed.answered = feed.begun
            self._polled.notify_all()

    def _fetch(self, feed: Feed) -> str:
        """Ask for the snapshot once and keep what is new; what the service said, in words."""
        url = f"{self.settings.url}/v1/snapshots/{urllib.parse.quote(feed.gpu.name, safe='')}{_facts(feed.gpu)}"
        headers = {"If-None-Match": feed.etag} if feed.etag else {}
        self.counters["fetches"] += 1
        reply = request("GET", url, headers=headers, token=self.settings.token)
        if reply.status == 304 and feed.etag:
            self.counters["not_modified"] += 1
            if feed.tagged is None:
                return feed.set_aside or "nothing new"
            feed.service = feed.tagged
            return f"generation {feed.service.generation} of {feed.gpu.name}, as known"
        if reply.status in (404, 422):  # 422: the name is known, of a card with another SM count
            return f"it does not know {feed.gpu.name}"
        if reply.status != 200:
            raise ServiceError(f"status {reply.status}")
        document = parse_json(reply.body)
        snapshot = parse_snapshot(document, pause=_give_way)
        feed.etag, feed.tagged = reply.etag, None
        if self._wanted(feed, snapshot, "the service's snapshot"):
            feed.service = feed.tagged = snapshot
            if not self.copy.write(feed.gpu.name, document, reply.etag):
                feed.seat.renounce()
        self._note_refused(feed, snapshot)
        return f"generation {snapshot.generation} of {feed.gpu.name}, {len(snapshot.champions)} champions"

    def _note_refused(self, feed: Feed, snapshot: Snapshot) -> None:
        """One line for entries that could not be used, and word to the service; nothing the second time."""
        before, feed.noted = feed.noted, snapshot.skipped
        if not snapshot.skipped or snapshot.skipped == before:
            return
        first = snapshot.skipped[0]
        self.counters["refused"] += len(snapshot.skipped)
        log.warning(
            "kdatune snapshot of %s: %d of its entries cannot be used, first %s: %s",
            feed.gpu.name,
            len(snapshot.skipped),
            first.key,
            first.reason,
        )
        self.outbox.add(
            Demand(feed.gpu.name, one.shape, 1, Refusal(one.config, one.reason))
            for one in snapshot.skipped
            if one.shape is not None and one.config is not None
        )

    def _now(self, reachable: bool, said: str) -> None:
        """Log a change of state, and only a change."""
        before, self.reachable = self.reachable, reachable
        if before is reachable:
            return
        if not reachable:
            log.warning("kdatune service %s: %s; launches go on with what is known", self.settings.url, said)
        elif before is None:
            log.info("kdatune service %s is reachable: %s", self.settings.url, said)
        else:
            log.warning("kdatune service %s is reachable again: %s", self.settings.url, said)


def _facts(gpu: Gpu) -> str:
    """What a service needs to serve a card it has never heard of with the champions of its silicon."""
    if gpu.name in KNOWN_GPUS:
        return ""
    return f"?sm_count={gpu.sm_count}&compute_capability={gpu.compute_capability}"


def _give_way() -> None:
    time.sleep(0)


def _jittered(seconds: float) -> float:
    """The time, give or take a fifth: launchers that start together do not ask together for ever."""
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret hangs on it


_CLIENTS: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _renew_clients() -> None:
    for client in list(_CLIENTS):
        client.renew()


os.register_at_fork(after_in_child=_renew_clients)
