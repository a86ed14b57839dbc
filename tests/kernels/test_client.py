"""The client against real sockets: what it asks, what it keeps, and that nothing a service does reaches a launch."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from loopback_service import CONFIGS
from loopback_service import FAR
from loopback_service import H200
from loopback_service import OTHER
from loopback_service import SHAPE
from loopback_service import Service
from loopback_service import answer
from loopback_service import closed_port
from loopback_service import document
from loopback_service import listening_but_deaf
from loopback_service import snapshot
from loopback_service import wait_for

from kdatune_kernels import demand as demand_module
from kdatune_kernels.client import Client
from kdatune_kernels.client import Feed
from kdatune_kernels.demand import Demand
from kdatune_kernels.demand import Refusal
from kdatune_kernels.disk import DiskCopy
from kdatune_kernels.disk import file_name
from kdatune_kernels.environment import POLL_SECONDS
from kdatune_kernels.environment import Settings
from kdatune_kernels.environment import from_environment
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import to_json
from kdatune_kernels.transport import MAX_BODY_BYTES

ClientMaker = Callable[..., Client]


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.close()


@pytest.fixture
def make_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[ClientMaker]:
    """Clients with a cache directory of the test, closed at its end."""
    caplog.set_level(logging.INFO, "kdatune")
    made: list[Client] = []

    def make(url: str | None, **settings: object) -> Client:
        made.append(Client(dataclasses.replace(Settings(url, tmp_path / "cache"), **settings)))
        return made[-1]

    yield make
    for client in made:
        client.close()


def watch(client: Client, gpu: Gpu = H200) -> Feed:
    """Watch a card and wait for the first poll, which comes by itself."""
    feed = client.watch(gpu)
    wait_for(lambda: feed.polls == 1)
    return feed


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{r.levelname} {r.getMessage()}" for r in caplog.records if r.name == "kdatune"]


def test_the_first_fetch_is_kept_and_copied(service: Service, make_client: ClientMaker, tmp_path: Path, caplog) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)
    feed = watch(client)
    assert feed.service == snapshot(7, {SHAPE: 3})
    assert (feed.disk, feed.newest, client.reachable) == (None, feed.service, True)
    assert service.asked() == ["/v1/snapshots/NVIDIA%20H200"]
    assert lines(caplog) == [
        f"INFO kdatune service {service.url} is reachable: generation 7 of NVIDIA H200, 1 champions"
    ]
    kept = DiskCopy(tmp_path / "cache").read(H200.name)
    assert kept == (snapshot(7, {SHAPE: 3}), '"7"')
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["NVIDIA_H200.json"]


def test_it_asks_again_only_for_what_is_new(service: Service, make_client: ClientMaker, caplog) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)
    feed = watch(client)
    first = feed.service
    client.refresh(20)
    assert feed.service is first
    assert service.requests[-1].headers["If-None-Match"] == '"7"'
    assert (client.counters["fetches"], client.counters["not_modified"]) == (2, 1)
    service.documents[H200.name] = document(8, {SHAPE: 4})
    client.refresh(20)
    assert feed.service == snapshot(8, {SHAPE: 4})
    assert len(lines(caplog)) == 1


def test_the_thread_polls_by_itself(service: Service, make_client: ClientMaker) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url, poll_seconds=0.02)
    feed = client.watch(H200)
    wait_for(lambda: feed.service is not None)
    service.documents[H200.name] = document(8, {SHAPE: 4})
    wait_for(lambda: feed.service == snapshot(8, {SHAPE: 4}))
    assert threading.active_count() >= 2
    names = [thread.name for thread in threading.enumerate() if thread.daemon]
    assert names.count("kdatune") == 1


def test_the_next_process_begins_with_the_copy(service: Service, make_client: ClientMaker) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    first = make_client(service.url)
    watch(first)
    first.close()
    later = make_client(service.url)
    feed = later.watch(H200)
    assert feed.disk == snapshot(7, {SHAPE: 3})
    wait_for(lambda: feed.polls == 1)
    assert later.counters["not_modified"] == 1
    assert feed.service is feed.disk


def test_offline_nothing_is_asked_and_the_copy_is_read(service: Service, make_client: ClientMaker) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    first = make_client(service.url)
    watch(first)
    asked = len(service.requests)
    offline = make_client(service.url, offline=True)
    feed = offline.watch(H200)
    assert offline.refresh(20)
    offline.report()
    assert feed.newest == snapshot(7, {SHAPE: 3})
    assert (feed.service, offline._thread, len(service.requests)) == (None, None, asked)


def test_without_an_address_nothing_is_asked(make_client: ClientMaker) -> None:
    client = make_client(None)
    feed = client.watch(H200)
    assert client.refresh(20)
    assert (feed.newest, client._thread, client.reachable) == (None, None, None)


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.wfile.flush()
    time.sleep(3)


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(MAX_BODY_BYTES // (1 << 20) + 2):
        handler.wfile.write(b" " * (1 << 20))


def cut_off(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"schema": 1')


BAD_ANSWERS: dict[str, tuple[Callable[[BaseHTTPRequestHandler], None], str]] = {
    "500": (lambda h: answer(h, 500, b"oops"), "status 500"),
    "redirect": (lambda h: answer(h, 302, b"", Location="http://127.0.0.1:1/"), "status 302"),
    "unasked 304": (lambda h: answer(h, 304, b""), "status 304"),
    "malformed JSON": (lambda h: answer(h, 200, b'{"schema": 1, "gpu": '), "not JSON: "),
    "not UTF-8": (lambda h: answer(h, 200, b"\xff\xfe"), "not JSON: "),
    "HTML": (lambda h: answer(h, 200, b"<html>portal</html>"), "not JSON: "),
    "empty": (lambda h: answer(h, 200, b""), "not JSON: "),
    "another schema": (lambda h: answer(h, 200, json.dumps({**document(7, {}), "schema": 2}).encode()), "schema 2"),
    "not HTTP": (lambda h: h.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n"), "BadStatusLine"),
    "no answer": (lambda h: None, ""),
    "cut off": (cut_off, ""),
    "too large": (endless, "larger than 8388608 bytes"),
    "drip": (drip, "timed out"),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_bad_answer_changes_nothing_that_is_known(
    kind: str, service: Service, make_client: ClientMaker, caplog
) -> None:
    handle, says = BAD_ANSWERS[kind]
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)
    feed = watch(client)
    feed.etag = None if kind == "unasked 304" else feed.etag
    service.instead = handle
    for _ in range(2):
        assert client.refresh(20)
    assert feed.service == snapshot(7, {SHAPE: 3})
    assert (client.reachable, client.counters["errors"]) == (False, 2)
    service.instead = None
    client.refresh(20)
    assert client.reachable
    first, down, up = lines(caplog)
    assert first.startswith(f"INFO kdatune service {service.url} is reachable: ")
    assert down.startswith(f"WARNING kdatune service {service.url}: ")
    assert says in down
    assert down.endswith("; launches go on with what is known")
    assert up.startswith(f"WARNING kdatune service {service.url} is reachable again: generation 7")


def test_a_closed_port_costs_one_line(make_client: ClientMaker, caplog) -> None:
    url = closed_port()
    client = make_client(url)
    feed = watch(client)
    for _ in range(2):
        assert client.refresh(20)
    assert (feed.newest, client.reachable, client.counters["errors"]) == (None, False, 3)
    (line,) = lines(caplog)
    assert line.startswith(f"WARNING kdatune service {url}: ConnectionRefusedError")


def test_a_black_hole_is_given_up_after_the_time_out(make_client: ClientMaker, caplog) -> None:
    with listening_but_deaf() as url:
        client = make_client(url)
        feed = watch(client)
    assert (feed.newest, client.reachable) == (None, False)
    (line,) = lines(caplog)
    assert "timed out" in line


def test_a_service_that_takes_five_seconds_is_given_up_and_nobody_waits(
    service: Service, make_client: ClientMaker, caplog
) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    service.instead = lambda handler: service.released.wait(5) and None
    client = make_client(service.url)
    feed = client.watch(H200)
    assert (feed.newest, service.answered) == (None, 0)
    assert client.refresh(20)
    assert (feed.newest, client.reachable) == (None, False)
    assert "timed out" in lines(caplog)[0]


def test_an_illegal_config_is_refused_and_reported_and_the_rest_is_used(
    service: Service, make_client: ClientMaker, caplog
) -> None:
    data = document(7, {SHAPE: 3, OTHER: 4})
    data["champions"][0]["config"]["k2"]["num_warps"] = 3
    service.documents[H200.name] = data
    client = make_client(service.url)
    feed = watch(client)
    client.refresh(20)
    assert feed.service == snapshot(7, {OTHER: 4})
    assert (client.counters["refused"], client.reachable) == (1, True)
    warnings = [line for line in lines(caplog) if line.startswith("WARNING")]
    reason = "config refused: k2.num_warps=3 is not one of 4, 8"
    assert warnings == [
        f"WARNING kdatune snapshot of NVIDIA H200: 1 of its entries cannot be used, first {SHAPE.key()}: {reason}"
    ]
    client.report()
    (item,) = service.demand()
    assert (item["shape"], item["count"]) == (to_json(SHAPE), 1)
    assert item["quarantined"]["config"]["k2"]["num_warps"] == 3
    assert item["quarantined"]["reason"] == reason


@pytest.mark.parametrize("status", [404, 422])
def test_a_card_that_the_service_does_not_know_is_no_fault(
    status: int, service: Service, make_client: ClientMaker, caplog
) -> None:
    service.instead = lambda handler: answer(handler, status, b"{}")
    client = make_client(service.url)
    feed = watch(client)
    assert (feed.newest, client.reachable, client.counters["errors"]) == (None, True, 0)
    assert lines(caplog) == [f"INFO kdatune service {service.url} is reachable: it does not know NVIDIA H200"]


@pytest.mark.parametrize(
    ("gpu", "path"),
    [
        (gpu_of("A/B", "8.9", 100), "/v1/snapshots/A%2FB?sm_count=100&compute_capability=8.9"),
        (gpu_of("", "9.0", 132), "/v1/snapshots/?sm_count=132&compute_capability=9.0"),
        (gpu_of("\u00fc?#&../", "9.0", 1), "/v1/snapshots/%C3%BC%3F%23%26..%2F?sm_count=1&compute_capability=9.0"),
        (gpu_of("x" * 500, "9.0", 1), f"/v1/snapshots/{'x' * 500}?sm_count=1&compute_capability=9.0"),
    ],
)
def test_any_gpu_name_makes_a_sound_request(gpu: Gpu, path: str, service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)
    watch(client, gpu)
    assert service.asked() == [path]
    assert client.reachable


def test_another_generation_than_the_pinned_one_is_not_used_and_said_once(
    service: Service, make_client: ClientMaker, tmp_path: Path, caplog
) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    first = make_client(service.url)
    watch(first)
    service.documents[H200.name] = document(8, {SHAPE: 4})
    pinned = make_client(service.url, generation=7)
    feed = pinned.watch(H200)
    for _ in range(3):
        pinned.refresh(20)
    assert feed.newest == snapshot(7, {SHAPE: 3})
    assert feed.service is None
    assert feed.set_aside == "the service's snapshot is of generation 8, KDATUNE_GENERATION pins 7: not used"
    assert len([line for line in lines(caplog) if "pins 7" in line]) == 1
    assert DiskCopy(tmp_path / "cache").read(H200.name) == (snapshot(7, {SHAPE: 3}), '"7"')
    service.documents[H200.name] = document(7, {SHAPE: 3})
    pinned.refresh(20)
    assert (feed.service, feed.set_aside) == (snapshot(7, {SHAPE: 3}), None)


def test_a_token_is_sent_and_never_shown(service: Service, make_client: ClientMaker, caplog) -> None:
    client = make_client(service.url, token="s3cret")
    watch(client)
    assert service.requests[0].headers["Authorization"] == "Bearer s3cret"
    assert service.requests[0].headers["User-Agent"].startswith("kdatune/")
    service.instead = lambda handler: answer(handler, 401, b"")
    client.refresh(20)
    assert "s3cret" not in repr(client.settings) + caplog.text
    assert "status 401" in caplog.text


def test_waiting_grows_while_a_service_is_gone_and_never_beyond_the_usual(make_client: ClientMaker) -> None:
    client = make_client(closed_port())
    feed = Feed(H200)
    waits = []
    for _ in range(9):
        client._poll(feed)
        waits.append(feed.due_seconds - time.monotonic())
    for wait, wanted in zip(waits, [5, 10, 20, 40, 80, 160, 300, 300, 300], strict=True):
        assert 0.75 * wanted <= wait <= 1.2 * wanted
    assert len({round(wait, 6) for wait in waits[-3:]}) == 3


@pytest.mark.parametrize("place", ["under a file", "/proc/kdatune", "no home"])
def test_a_home_that_cannot_be_written_costs_one_warning(
    place: str, service: Service, make_client: ClientMaker, tmp_path: Path, caplog
) -> None:
    (tmp_path / "file").write_text("")
    directory = {"under a file": tmp_path / "file" / "cache", "/proc/kdatune": Path(place), "no home": None}[place]
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url, cache_dir=directory)
    feed = watch(client)
    service.documents[H200.name] = document(8, {SHAPE: 4})
    client.refresh(20)
    assert feed.service == snapshot(8, {SHAPE: 4})
    assert client.copy.errors >= 2
    warnings = [line for line in lines(caplog) if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "snapshot copy" in warnings[0]


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 100, b'{"etag": null, "snapshot": {}, "sha256": "0"}'])
def test_a_damaged_copy_is_left_alone_and_replaced(
    content: bytes, service: Service, make_client: ClientMaker, tmp_path: Path, caplog
) -> None:
    path = tmp_path / "cache" / "NVIDIA_H200.json"
    path.parent.mkdir()
    path.write_bytes(content)
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)
    feed = client.watch(H200)
    assert feed.disk is None
    client.refresh(20)
    assert DiskCopy(path.parent).read(H200.name) == (snapshot(7, {SHAPE: 3}), '"7"')
    assert len([line for line in lines(caplog) if str(path) in line]) == 1


def test_readers_of_the_copy_see_the_old_or_the_new_one(tmp_path: Path) -> None:
    documents = [document(n, {SHAPE: n, OTHER: n + 1}) for n in (1, 2)]
    copies = [DiskCopy(tmp_path) for _ in range(3)]
    copies[0].write(H200.name, documents[0], None)
    stop = threading.Event()

    def write(copy: DiskCopy, data: dict[str, object]) -> None:
        while not stop.is_set():
            copy.write(H200.name, data, None)

    writers = [threading.Thread(target=write, args=pair) for pair in zip(copies[:2], documents, strict=True)]
    for writer in writers:
        writer.start()
    seen = [copies[2].read(H200.name) for _ in range(200)]
    stop.set()
    for writer in writers:
        writer.join()
    assert all(kept is not None and kept[0].generation in (1, 2) for kept in seen)
    assert [copy.errors for copy in copies] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["NVIDIA_H200.json"]


@settings(deadline=None)
@given(st.text(max_size=600))
def test_any_gpu_name_makes_a_sound_file_name(name: str) -> None:
    made = file_name(name)
    assert len(made) <= 105
    assert made.isascii()
    assert Path(made).name == made
    assert not made.startswith(".")
    assert made.endswith(".json")


def test_demand_is_summed_a_key_and_sent_in_bounded_batches(service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 3), Demand(H200.name, OTHER, 1), Demand(H200.name, SHAPE, 4)])
    client.report()
    assert service.demand() == [
        {"gpu": "NVIDIA H200", "kernel": "kda", "shape": to_json(SHAPE), "count": 7},
        {"gpu": "NVIDIA H200", "kernel": "kda", "shape": to_json(OTHER), "count": 1},
    ]
    assert client.counters["reported"] == 2
    client.report()
    assert service.asked("POST") == ["/v1/demand"]
    many = [Demand(H200.name, dataclasses.replace(SHAPE, T=t), 1) for t in range(1, 251)]
    client.outbox.add(many)
    client.report()
    assert len(service.asked("POST")) == 4
    assert len(service.demand()) == 252


def test_demand_that_cannot_be_delivered_waits(service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 3)])
    service.demand_status = 503
    client.report()
    assert (len(client.outbox), client.counters["errors"]) == (1, 1)
    client.outbox.add([Demand(H200.name, SHAPE, 2)])
    service.demand_status = 202
    client.report()
    assert service.demand()[-1]["count"] == 5
    assert len(client.outbox) == 0


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_demand_that_is_refused_is_dropped(status: int, service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 3)])
    service.demand_status = status
    client.report()
    assert (len(client.outbox), client.counters["dropped"], len(service.requests)) == (0, 1, 1)


def test_a_service_that_knows_no_quarantine_still_gets_the_demand(service: Service, make_client: ClientMaker) -> None:
    def strict(handler: BaseHTTPRequestHandler) -> None:
        items = json.loads(service.requests[-1].body)["items"]
        answer(handler, 422 if any("quarantined" in item for item in items) else 202, b"{}")

    service.instead = strict
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 1, Refusal(CONFIGS[0], "launch failed"))])
    client.report()
    assert [sorted(item) for item in service.demand()] == [
        ["count", "gpu", "kernel", "quarantined", "shape"],
        ["count", "gpu", "kernel", "shape"],
    ]
    assert client.counters["reported"] == 1


def test_pending_demand_is_bounded(make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MAX_PENDING", 10)
    client = make_client(closed_port())
    client.outbox.add(Demand(H200.name, dataclasses.replace(SHAPE, T=t), 1) for t in range(1, 26))
    client.report()
    assert (len(client.outbox), client.counters["dropped"]) == (10, 15)


def test_a_count_is_no_larger_than_a_service_takes(service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 10**9)])
    client.report()
    assert service.demand()[0]["count"] == 1_000_000


def test_the_thread_reports_what_it_collects(service: Service, tmp_path: Path) -> None:
    waiting = [Demand(H200.name, FAR, 2)]

    def collect() -> list[Demand]:
        return [waiting.pop()] if waiting else []

    client = Client(Settings(service.url, tmp_path, poll_seconds=0.02), collect)
    client.watch(H200)
    wait_for(lambda: bool(service.demand()))
    client.close()
    assert service.demand() == [{"gpu": "NVIDIA H200", "kernel": "kda", "shape": to_json(FAR), "count": 2}]


def test_a_fault_in_the_thread_ends_neither_it_nor_the_process(service: Service, tmp_path: Path, caplog) -> None:
    def broken() -> list[Demand]:
        raise ZeroDivisionError

    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = Client(Settings(service.url, tmp_path, poll_seconds=0.02), broken)
    feed = client.watch(H200)
    wait_for(lambda: client.counters["errors"] >= 2)
    service.documents[H200.name] = document(8, {SHAPE: 4})
    wait_for(lambda: feed.service == snapshot(8, {SHAPE: 4}))
    client.close()
    assert "fault in the kdatune thread; launches go on with what is known" in caplog.text


FORK = """
import os, sys, threading
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.spec import KNOWN_GPUS, shape_of

gpu = KNOWN_GPUS["NVIDIA H200"]
resolver = Resolver()
parent = resolver.resolve_slow("a", shape_of(1, 96, 8192), gpu)
resolver.refresh(timeout_seconds=20)
parent = resolver.resolve_slow("a", shape_of(1, 96, 8192), gpu)
polls = resolver.client.feed(gpu.name).polls
resolver._lock.acquire()            # a fork while another thread is inside
resolver.client._lock.acquire()
resolver.client.outbox._lock.acquire()
child = os.fork()
if child == 0:
    threads = [t.name for t in threading.enumerate()]
    assert threads == ["MainThread"], threads
    assert resolver.lookup("a") == parent
    resolver.resolve_slow("b", shape_of(1, 64, 8192), gpu)
    assert "kdatune" in [t.name for t in threading.enumerate()]
    assert resolver.refresh(timeout_seconds=20)
    assert resolver.client.feed(gpu.name).polls > polls
    resolver.client.report()
    os._exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_child_process_has_a_thread_of_its_own(service: Service, tmp_path: Path) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    ours = {k: v for k, v in os.environ.items() if not k.startswith("KDATUNE_")}
    environment = {**ours, "KDATUNE_URL": service.url, "KDATUNE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    # the parent's launches are the parent's to report
    assert [(item["shape"]["H"], item["count"]) for item in service.demand()] == [(64, 1)]


def test_a_process_ends_while_its_thread_waits_for_the_service(service: Service, tmp_path: Path) -> None:
    service.instead = lambda handler: service.released.wait(20) and None
    script = (
        "from kdatune_kernels.resolve import launcher\n"
        "from kdatune_kernels.spec import KNOWN_GPUS, shape_of\n"
        "config = launcher.resolve_slow(1, shape_of(1, 96, 8192), KNOWN_GPUS['NVIDIA H200'])\n"
        "print(config.k2.variant)\n"
    )
    environment = {**os.environ, "KDATUNE_URL": service.url, "KDATUNE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ws\n", "")
    assert service.answered == 0


def test_the_launcher_imports_neither_torch_nor_anything_else() -> None:
    script = (
        "import sys; before = set(sys.modules); import kdatune_kernels.resolve; import threading\n"
        "outside = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "assert outside == {'kdatune_kernels'}, outside; assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_settings_of_an_empty_environment() -> None:
    home = Path.home() / ".cache" / "kdatune"
    assert from_environment({}) == Settings(None, home, POLL_SECONDS, False, None, None)
    assert not from_environment({}).asks


def test_settings_are_read() -> None:
    settings = from_environment(
        {
            "KDATUNE_URL": " https://tune.example:8321/base/ ",
            "KDATUNE_OFFLINE": "0",
            "KDATUNE_POLL_SECONDS": "30",
            "KDATUNE_GENERATION": "12",
            "KDATUNE_CACHE_DIR": "/var/cache/kdatune",
            "KDATUNE_TOKEN": "abc\n",
        }
    )
    assert settings == Settings("https://tune.example:8321/base", Path("/var/cache/kdatune"), 30.0, False, 12, "abc")
    assert settings.asks
    assert not dataclasses.replace(settings, offline=True).asks


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/kdatune"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/x"}, "/x/kdatune"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "relative"}, "/home/u/.cache/kdatune"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/x", "KDATUNE_CACHE_DIR": "/k"}, "/k"),
    ],
)
def test_where_the_copies_lie(environment: dict[str, str], directory: str) -> None:
    assert from_environment(environment).cache_dir == Path(directory)


@pytest.mark.parametrize(
    ("name", "value", "field", "taken"),
    [
        ("KDATUNE_URL", "127.0.0.1:8321", "url", None),
        ("KDATUNE_URL", "file:///etc/passwd", "url", None),
        ("KDATUNE_URL", "http://", "url", None),
        ("KDATUNE_URL", "http://host:99999", "url", None),
        ("KDATUNE_URL", "http://host:0", "url", None),
        ("KDATUNE_URL", "http://[::1", "url", None),
        ("KDATUNE_URL", "http://a b/", "url", None),
        ("KDATUNE_URL", "http://host/?x=1", "url", None),
        ("KDATUNE_URL", "http://user:s3cret@host", "url", None),
        ("KDATUNE_POLL_SECONDS", "soon", "poll_seconds", POLL_SECONDS),
        ("KDATUNE_POLL_SECONDS", "0", "poll_seconds", POLL_SECONDS),
        ("KDATUNE_POLL_SECONDS", "nan", "poll_seconds", POLL_SECONDS),
        ("KDATUNE_POLL_SECONDS", "inf", "poll_seconds", POLL_SECONDS),
        ("KDATUNE_GENERATION", "latest", "generation", -1),
        ("KDATUNE_GENERATION", "-5", "generation", -1),
        ("KDATUNE_TOKEN", "s3cret\r\nX: y", "token", None),
    ],
)
def test_a_setting_that_cannot_be_read_costs_one_warning(
    name: str, value: str, field: str, taken: object, caplog: pytest.LogCaptureFixture
) -> None:
    settings = from_environment({name: value})
    assert getattr(settings, field) == taken
    (line,) = lines(caplog)
    assert line.startswith(f"WARNING {name}")
    assert "s3cret" not in line


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("true", True), ("yes", True), ("", False), ("No", False)])
def test_offline_is_read(value: str, offline: bool) -> None:
    assert from_environment({"KDATUNE_OFFLINE": value}).offline is offline


def test_a_proxy_of_the_environment_is_not_asked_for_the_loopback(
    service: Service, make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", closed_port())
    monkeypatch.delenv("no_proxy", raising=False)
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)
    watch(client)
    assert client.reachable
