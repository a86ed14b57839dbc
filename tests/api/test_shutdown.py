"""SIGTERM and Ctrl-C: what is under way is answered and stored, who idles is let go, and nothing hangs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.queries import demand

BODY = json.dumps({"items": [{"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 96, "T": 8192}, "count": 3}]}).encode()
HEAD = (
    b"POST /v1/demand HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n"
) % len(BODY)
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def served(database_url, engine, tmp_path):
    """`kdatune serve`: the process and its port."""
    environment = os.environ | {"KDATUNE_DATABASE_URL": database_url}
    log = tmp_path / "server.log"
    with log.open("wb") as err:
        command = [sys.executable, "-m", "kdatune_tuner.cli", "serve", "--port", "0"]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=err, text=True)
    try:
        port = int(server.stdout.readline().split()[3].rsplit(":", 1)[1])
        yield server, port
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]  # every line of the log is one JSON object
    assert all({"at", "level", "logger", "message"} <= set(line) for line in lines)


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def begin(half):
    """Send half of a request. When this is back the app reads it: what asks for the rest is the reading of the body."""
    half.sendall(HEAD)
    said = b""
    while len(said) < len(GO_ON):
        more = half.recv(len(GO_ON) - len(said))
        assert more, said
        said += more
    assert said == GO_ON
    half.sendall(BODY[:20])


def rest(half):
    """All that still comes."""
    answer = b""
    while more := half.recv(4096):
        answer += more
    return answer


def until_refused(port):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            connect(port).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    raise AssertionError("strangers are still let in")


def ended(server):
    return server.wait(60) in (0, -signal.SIGTERM, -signal.SIGINT)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_request_that_is_under_way_is_answered_and_stored(served, engine, kind):
    server, port = served
    with connect(port) as half, connect(port) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in idle.recv(4096)
        begin(half)
        server.send_signal(kind)
        until_refused(port)
        half.sendall(BODY[20:])
        assert rest(half).startswith(b"HTTP/1.1 200")
        assert ended(server)
    with reading(engine) as s:
        assert [row.count for row in demand(s)] == [3]


def test_a_request_that_never_ends_does_not_hold_it_up(served, engine):
    server, port = served
    with connect(port) as half:
        begin(half)
        server.terminate()
        assert ended(server)
        assert b" 408 " not in rest(half)  # not waited for until its body is too slow
    with reading(engine) as s:
        assert demand(s) == []
