"""A small service on the loopback that speaks the snapshot and demand calls, well or badly, and what tests launch for."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from kdatune_kernels.client import Client
from kdatune_kernels.client import Feed
from kdatune_kernels.match import Champion
from kdatune_kernels.snapshot import SCHEMA
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import dump_snapshot
from kdatune_kernels.space import k2_configs
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import shape_of

H200 = KNOWN_GPUS["NVIDIA H200"]
SHAPE = shape_of(1, 96, 8192)
OTHER = shape_of(1, 64, 8192)
FAR = shape_of(1, 1, 16)
CONFIGS = [LaunchConfig(K1Config(), k2) for k2 in k2_configs() if k2.variant == "ws"]
"""Configs that are not the default of any shape here, to tell champions apart."""


def snapshot(generation: int, champions: dict[Shape, int], gpu: Gpu = H200, **rest: Any) -> Snapshot:
    """A snapshot whose champions are told apart by their place in CONFIGS."""
    found = [Champion(gpu, shape, CONFIGS[i], generation, 600.0, 620.0, **rest) for shape, i in champions.items()]
    return Snapshot(SCHEMA, gpu, generation, tuple(found))


def document(generation: int, champions: dict[Shape, int], gpu: Gpu = H200, **rest: Any) -> dict[str, Any]:
    """The same as JSON data."""
    data: dict[str, Any] = json.loads(json.dumps(dump_snapshot(snapshot(generation, champions, gpu, **rest))))
    return data


class Request:
    """What came in."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body


class Service:
    """Serves `documents` by GPU name, unless `instead` takes the connection over. `requests` holds what was asked."""

    def __init__(self) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.demand_status = 202
        self.requests: list[Request] = []
        self.answered = 0
        self.instead: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.released = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service._take(self)

            def do_POST(self) -> None:
                service._take(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def asked(self, method: str = "GET") -> list[str]:
        """The paths that were asked for."""
        return [request.path for request in self.requests if request.method == method]

    def demand(self) -> list[dict[str, Any]]:
        """Every demand item that was posted."""
        return [item for r in self.requests if r.method == "POST" for item in json.loads(r.body)["items"]]

    def _take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.requests.append(Request(handler.command, handler.path, dict(handler.headers), body))
        with contextlib.suppress(OSError):  # the client may have given up
            if self.instead is not None:
                self.instead(handler)
            elif handler.command == "POST":
                answer(handler, self.demand_status, b"{}")
            else:
                self._serve(handler)
        self.answered += 1

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.removeprefix("/v1/snapshots/").split("?")[0].replace("%20", " ")
        found = self.documents.get(name)
        if found is None:
            answer(handler, 404, b'{"title": "unknown GPU"}')
            return
        etag = f'"{found["generation"]}"'
        if handler.headers.get("If-None-Match") == etag:
            answer(handler, 304, b"", ETag=etag)
            return
        answer(handler, 200, json.dumps(found).encode(), ETag=etag)


def answer(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    """One whole HTTP answer."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    if status != 304:
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@contextlib.contextmanager
def listening_but_deaf() -> Iterator[str]:
    """An address that takes connections and never says a word: a black hole, as a client sees it."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(16)
        yield f"http://127.0.0.1:{deaf.getsockname()[1]}"


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """An address where nothing listens, nor anybody else can begin to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until it holds; fails the test when it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.005)


ClientMaker = Callable[..., Client]
"""What the fixture make_client gives: make_client(url, **settings)."""


def watch(client: Client, gpu: Gpu = H200) -> Feed:
    """Watch a card and wait for the first poll, which comes by itself."""
    feed = client.watch(gpu)
    wait_for(lambda: feed.polls > 0)
    return feed


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{r.levelname} {r.getMessage()}" for r in caplog.records if r.name == "kdatune"]
