"""The client against real sockets: what it asks, what it keeps, and that nothing a service does reaches a launch."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from loopback_service import H200
from loopback_service import OTHER
from loopback_service import SHAPE
from loopback_service import ClientMaker
from loopback_service import Service
from loopback_service import answer
from loopback_service import closed_port
from loopback_service import document
from loopback_service import lines
from loopback_service import listening_but_deaf
from loopback_service import snapshot
from loopback_service import wait_for
from loopback_service import watch

from kdatune_kernels import client as client_module
from kdatune_kernels import transport
from kdatune_kernels.client import FIRST_RETRY_SECONDS
from kdatune_kernels.client import Client
from kdatune_kernels.client import Feed
from kdatune_kernels.demand import Demand
from kdatune_kernels.disk import DiskCopy
from kdatune_kernels.environment import Settings
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import to_json
from kdatune_kernels.transport import MAX_BODY_BYTES


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
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == ["NVIDIA_H200.json"]


def test_it_asks_again_only_for_what_is_new(service: Service, make_client: ClientMaker, caplog) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)
    feed = watch(client)
    first = feed.service
    client.refresh(60)
    assert feed.service is first
    assert service.requests[-1].headers["If-None-Match"] == '"7"'
    assert (client.counters["fetches"], client.counters["not_modified"]) == (2, 1)
    service.documents[H200.name] = document(8, {SHAPE: 4})
    client.refresh(60)
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
    wait_for(lambda: feed.polls > 0)
    assert later.counters["not_modified"] == 1
    assert feed.service is feed.disk


def test_offline_nothing_is_asked_and_the_copy_is_read(service: Service, make_client: ClientMaker) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    first = make_client(service.url)
    watch(first)
    asked = len(service.requests)
    offline = make_client(service.url, offline=True)
    feed = offline.watch(H200)
    assert offline.refresh(60)
    offline.report()
    assert feed.newest == snapshot(7, {SHAPE: 3})
    assert (feed.service, offline._thread, len(service.requests)) == (None, None, asked)


def test_without_an_address_nothing_is_asked(make_client: ClientMaker) -> None:
    client = make_client(None)
    feed = client.watch(H200)
    assert client.refresh(60)
    assert (feed.newest, client._thread, client.reachable) == (None, None, None)


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.wfile.flush()
    handler.rfile.read(1)  # until the client gives up


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
    kind: str, service: Service, make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    handle, says = BAD_ANSWERS[kind]
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)
    feed = watch(client)
    feed.etag = None if kind == "unasked 304" else feed.etag
    service.instead = handle
    with monkeypatch.context() as hasty:
        if kind == "drip":
            hasty.setattr(transport, "TIMEOUT_SECONDS", 0.2)
        for _ in range(2):
            assert client.refresh(60)
    assert feed.service == snapshot(7, {SHAPE: 3})
    assert (client.reachable, client.counters["errors"]) == (False, 2)
    service.instead = None
    client.refresh(60)
    assert client.reachable
    first, down, up = lines(caplog)
    assert first.startswith(f"INFO kdatune service {service.url} is reachable: ")
    assert down.startswith(f"WARNING kdatune service {service.url}: ")
    assert says in down
    assert down.endswith("; launches go on with what is known")
    assert up.startswith(f"WARNING kdatune service {service.url} is reachable again: generation 7")


def test_a_closed_port_costs_one_line(make_client: ClientMaker, caplog) -> None:
    with closed_port() as url:
        client = make_client(url)
        feed = watch(client)
        for _ in range(2):
            assert client.refresh(60)
    assert (feed.newest, client.reachable, client.counters["errors"]) == (None, False, 3)
    (line,) = lines(caplog)
    assert line.startswith(f"WARNING kdatune service {url}: ConnectionRefusedError")


def test_a_black_hole_is_given_up_after_the_time_out(make_client: ClientMaker, monkeypatch, caplog) -> None:
    monkeypatch.setattr(transport, "TIMEOUT_SECONDS", 0.2)
    with listening_but_deaf() as url:
        client = make_client(url)
        feed = watch(client)
    assert (feed.newest, client.reachable) == (None, False)
    (line,) = lines(caplog)
    assert "timed out" in line


def test_a_service_that_takes_a_minute_is_given_up_and_nobody_waits(
    service: Service, make_client: ClientMaker, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(transport, "TIMEOUT_SECONDS", 0.2)
    service.documents[H200.name] = document(7, {SHAPE: 3})
    service.instead = lambda handler: service.released.wait(60) and None
    client = make_client(service.url)
    feed = client.watch(H200)
    assert (feed.newest, service.answered) == (None, 0)
    assert client.refresh(60)
    assert (feed.newest, client.reachable) == (None, False)
    assert "timed out" in lines(caplog)[0]


def test_a_refresh_waits_for_an_answer_that_was_asked_for_after_it(service: Service, make_client: ClientMaker) -> None:
    asked = threading.Event()

    def answer_late(handler: BaseHTTPRequestHandler) -> None:
        service.instead = None
        asked.set()
        assert service.released.wait(60)
        answer(handler, 200, json.dumps(document(7, {SHAPE: 3})).encode(), ETag='"7"')

    service.instead = answer_late
    client = make_client(service.url)
    feed = client.watch(H200)
    assert asked.wait(60)
    service.documents[H200.name] = document(8, {SHAPE: 4})
    threading.Timer(0.2, service.released.set).start()
    assert client.refresh(60)
    assert feed.service == snapshot(8, {SHAPE: 4})


def test_an_illegal_config_is_refused_and_reported_and_the_rest_is_used(
    service: Service, make_client: ClientMaker, caplog
) -> None:
    data = document(7, {SHAPE: 3, OTHER: 4})
    data["champions"][0]["config"]["k2"]["num_warps"] = 3
    service.documents[H200.name] = data
    client = make_client(service.url)
    feed = watch(client)
    client.refresh(60)
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
        pinned.refresh(60)
    assert feed.newest == snapshot(7, {SHAPE: 3})
    assert feed.service is None
    assert feed.set_aside == "the service's snapshot is of generation 8, KDATUNE_GENERATION pins 7: not used"
    assert len([line for line in lines(caplog) if "pins 7" in line]) == 1
    assert DiskCopy(tmp_path / "cache").read(H200.name) == (snapshot(7, {SHAPE: 3}), '"7"')
    service.documents[H200.name] = document(7, {SHAPE: 3})
    pinned.refresh(60)
    assert (feed.service, feed.set_aside) == (snapshot(7, {SHAPE: 3}), None)


def test_a_token_is_sent_and_never_shown(service: Service, make_client: ClientMaker, caplog) -> None:
    client = make_client(service.url, token="s3cret")
    watch(client)
    assert service.requests[0].headers["Authorization"] == "Bearer s3cret"
    assert service.requests[0].headers["User-Agent"].startswith("kdatune/")
    service.instead = lambda handler: answer(handler, 401, b"")
    client.refresh(60)
    assert "s3cret" not in repr(client.settings) + caplog.text
    assert "status 401" in caplog.text


def poll_and_wait(client: Client, feed: Feed) -> tuple[float, float]:
    """Poll once; at least and at most so many seconds are waited then: the poll itself took some time, too."""
    started = time.monotonic()
    client._poll(feed)
    return feed.due_seconds - time.monotonic(), feed.due_seconds - started


def assert_about(waits: list[tuple[float, float]], wanted: list[int]) -> None:
    for (least, most), seconds in zip(waits, wanted, strict=True):
        assert least <= 1.2 * seconds
        assert most >= 0.8 * seconds


def test_waiting_grows_while_a_service_is_gone_and_never_beyond_the_usual(
    make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FIRST_RETRY_SECONDS", FIRST_RETRY_SECONDS)
    with closed_port() as url:
        client, feed = make_client(url), Feed(H200)
        waits = [poll_and_wait(client, feed) for _ in range(9)]
    assert_about(waits, [5, 10, 20, 40, 80, 160, 300, 300, 300])
    assert len({round(most, 6) for _, most in waits[-3:]}) == 3


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


def test_a_close_while_the_thread_begins_a_turn_is_not_missed(service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)

    class Wake(threading.Event):
        def clear(self) -> None:
            if client.counters["fetches"]:
                client._closed = True
                self.set()
            super().clear()

    client._wake = Wake()
    watch(client)
    client._wake.set()
    client._thread.join(30)
    assert not client._thread.is_alive()


def test_what_is_known_never_goes_back_while_a_copy_is_taken_over(make_client: ClientMaker) -> None:
    class Seen(Feed):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            generations.append(self.newest.generation)

    generations: list[int] = []
    client, feed = make_client(None), Feed(H200)
    feed.disk, feed.service = snapshot(7, {SHAPE: 3}), snapshot(8, {SHAPE: 4})
    feed.__class__ = Seen
    client.copy.write(H200.name, document(9, {SHAPE: 5}), None)
    client._follow(feed)
    assert set(generations) == {8, 9}
    assert generations == sorted(generations)


def test_a_proxy_of_the_environment_is_not_asked_for_the_loopback(
    service: Service, make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    service.documents[H200.name] = document(7, {SHAPE: 3})
    with closed_port() as nobody:
        monkeypatch.setenv("http_proxy", nobody)
        client = make_client(service.url)
        watch(client)
    assert client.reachable


def test_waiting_begins_anew_when_a_service_was_back(
    service: Service, make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FIRST_RETRY_SECONDS", FIRST_RETRY_SECONDS)
    client = make_client(service.url)
    feed = Feed(H200)
    service.documents[H200.name] = document(7, {SHAPE: 3})
    waits = []
    for status in (500, 500, 500, None, 500):
        service.instead = None if status is None else lambda handler: answer(handler, 500, b"")
        waits.append(poll_and_wait(client, feed))
    assert_about(waits, [5, 10, 20, 300, 5])


def test_a_thread_that_cannot_start_is_tried_again(
    service: Service, make_client: ClientMaker, monkeypatch, caplog
) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as no_more:
        no_more.setattr(threading.Thread, "start", refuse)
        feed = client.watch(H200)
    assert lines(caplog) == [
        "WARNING the kdatune thread cannot start (can't start new thread); launches go on with what is known"
    ]
    client.watch(H200)
    wait_for(lambda: feed.service == snapshot(7, {SHAPE: 3}))
