"""Several launchers of one host: one asks the service, the others read the copy, and nobody is left without news."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from loopback_service import H200
from loopback_service import SHAPE
from loopback_service import ClientMaker
from loopback_service import Service
from loopback_service import document
from loopback_service import snapshot
from loopback_service import wait_for
from loopback_service import watch

from kdatune_kernels.environment import Settings
from kdatune_kernels.seat import Seat
from kdatune_kernels.seat import group_of

LAUNCHER = """
import json, os, sys, time
from kdatune_kernels import transport
from kdatune_kernels.client import Client
from kdatune_kernels.environment import from_environment
from kdatune_kernels.spec import KNOWN_GPUS

transport.TIMEOUT_SECONDS = 60.0  # a service that is slow is not gone
client = Client(from_environment())
feed = client.watch(KNOWN_GPUS["NVIDIA H200"])
if "fork" in sys.argv:
    while not feed.polls:
        time.sleep(0.01)
    if child := os.fork():
        os.waitpid(child, 0)
said = None
while True:
    state = {"generation": feed.newest and feed.newest.generation}  # first: who knows has asked or looked before
    state |= {"fetches": client.counters["fetches"], "looks": client.counters["followed"]}
    if state != said:
        said = state
        print(json.dumps(state), flush=True)
    time.sleep(0.01)
"""


SELDOM = {"KDATUNE_POLL_SECONDS": "300"}
"""So that nobody asks because the holder seems to hang: that takes three polls."""


class Launcher:
    """A process that watches a card and says what it knows."""

    def __init__(self, service: Service, folder: Path, *arguments: str, **settings: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KDATUNE_")}
        about = {"KDATUNE_URL": service.url, "KDATUNE_CACHE_DIR": str(folder), "KDATUNE_POLL_SECONDS": "0.3"}
        self.path = folder.with_name(f"said-{os.urandom(4).hex()}")
        with self.path.open("wb") as said:
            command = [sys.executable, "-c", LAUNCHER, *arguments]
            self.process = subprocess.Popen(command, env=kept | about | settings, stdout=said, start_new_session=True)

    @property
    def state(self) -> dict[str, Any]:
        whole = [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return json.loads(whole[-1]) if whole else {"generation": None, "fetches": 0, "looks": 0}

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def launch(service: Service, tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(*arguments: str, **settings: str) -> Launcher:
        started.append(Launcher(service, tmp_path / "cache", *arguments, **settings))
        return started[-1]

    yield start
    for one in started:
        one.end()


def asking(launchers: list[Launcher]) -> list[Launcher]:
    return [one for one in launchers if one.state["fetches"]]


def all_know(launchers: list[Launcher], generation: int) -> Callable[[], bool]:
    return lambda: all(one.state["generation"] == generation for one in launchers)


def test_one_of_several_asks_and_another_goes_on_when_it_is_killed(service: Service, launch) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    launchers = [launch(**SELDOM) for _ in range(3)]
    wait_for(all_know(launchers, 7))
    (holder,) = asking(launchers)
    launchers.remove(holder)
    looks = [one.state["looks"] for one in launchers]
    wait_for(lambda: all(one.state["looks"] >= before + 2 for one, before in zip(launchers, looks, strict=True)))
    assert (asking(launchers), len(service.requests)) == ([], 1)

    os.kill(holder.process.pid, signal.SIGKILL)
    holder.process.wait()
    service.documents[H200.name] = document(8, {SHAPE: 4})
    wait_for(all_know(launchers, 8))
    assert len(asking(launchers)) == 1


def test_a_holder_that_hangs_keeps_nobody_from_news(service: Service, launch) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    holder = launch()
    wait_for(all_know([holder], 7))
    other = launch()
    wait_for(all_know([other], 7))
    os.kill(holder.process.pid, signal.SIGSTOP)
    service.documents[H200.name] = document(8, {SHAPE: 4})
    wait_for(all_know([other], 8))


def test_a_child_does_not_keep_the_seat_of_a_parent_that_is_gone(service: Service, launch) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    parent = launch("fork", **SELDOM)
    wait_for(all_know([parent], 7))  # says the child; it has no thread of its own until it watches
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.process.wait()
    other = launch(**SELDOM)
    wait_for(lambda: bool(other.state["fetches"]))


def test_only_those_who_want_the_same_share(service: Service, launch) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    usual, pinned = launch(), launch(KDATUNE_GENERATION="8")
    wait_for(lambda: len(asking([usual, pinned])) == 2)
    wait_for(all_know([usual], 7))
    assert pinned.state["generation"] is None
    service.documents[H200.name] = document(8, {SHAPE: 4})
    wait_for(all_know([usual, pinned], 8))


def test_a_refresh_asks_the_service_whoever_has_the_seat(service: Service, make_client: ClientMaker) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    holder, other = make_client(service.url), make_client(service.url)
    watch(holder)
    feed = other.watch(H200)
    wait_for(lambda: other.counters["followed"] > 0)
    assert (other.counters["fetches"], feed.newest) == (0, snapshot(7, {SHAPE: 3}))
    service.documents[H200.name] = document(8, {SHAPE: 4})
    assert other.refresh(60)
    assert (other.counters["fetches"], feed.newest) == (1, snapshot(8, {SHAPE: 4}))
    service.documents[H200.name] = document(9, {SHAPE: 5})
    holder.refresh(60)
    wait_for(lambda: feed.newest == snapshot(9, {SHAPE: 5}))


def test_where_no_copy_can_be_kept_each_asks_for_itself(
    service: Service, make_client: ClientMaker, tmp_path: Path
) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    (tmp_path / "file").write_text("")
    # the lock can be had and the copy cannot be written: a folder is in its place
    (tmp_path / "taken" / "NVIDIA_H200.json").mkdir(parents=True)
    for directory in (None, tmp_path / "file" / "cache", tmp_path / "taken"):
        clients = [make_client(service.url, cache_dir=directory, poll_seconds=0.05) for _ in range(2)]
        feeds = [client.watch(H200) for client in clients]
        wait_for(lambda: all(feed.service == snapshot(7, {SHAPE: 3}) for feed in feeds))  # noqa: B023 - waited for here
        for client in clients:
            client.close()
    assert list((tmp_path / "taken").glob("*.tmp")) == []


def test_a_seat_is_free_when_its_holder_leaves(tmp_path: Path) -> None:
    first, second, stranger = (Seat(tmp_path, "card.json", group) for group in ("a", "a", "b"))
    assert (first.take(), second.take(), stranger.take()) == (True, False, True)
    first.leave()
    assert (second.take(), first.take()) == (True, False)
    assert group_of(Settings("http://a")) != group_of(Settings("http://b"))
    assert "s3cret" not in group_of(Settings("http://a", token="s3cret"))
