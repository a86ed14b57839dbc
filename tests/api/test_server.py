"""The real server in a process of its own, asked over HTTP, also by the launcher's own client."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from kdatune_kernels import transport
from kdatune_kernels.client import Client
from kdatune_kernels.demand import Demand
from kdatune_kernels.environment import Settings
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.queries import demand

RESOLVE = "/v1/configs/resolve?gpu=NVIDIA+H200&N=1&H=96&T=8192"


@contextmanager
def serving(database_url: str, log: Path, workers: int = 1, **environment: str) -> Iterator[str]:
    """The service's URL. Checks at the end that it went down in good order."""
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "kdatune_api.app:create_app",
        "--factory",
        "--port",
        "0",
        "--no-access-log",
        "--timeout-worker-healthcheck",
        "120",  # else a worker that starts slowly is killed, and another is started
    ]
    environment = os.environ | {"KDATUNE_DATABASE_URL": database_url} | environment
    with log.open("wb") as out:
        server = subprocess.Popen([*command, "--workers", str(workers)], env=environment, stdout=out, stderr=out)
        try:
            yield _url(server, log, workers)
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) in (0, -signal.SIGTERM)
        finally:
            server.kill()
            server.wait()
    said = log.read_text()
    assert said.count("Application shutdown complete") == workers, said
    assert "Traceback" not in said, said


def _url(server: subprocess.Popen[bytes], log: Path, workers: int) -> str:
    """Where it serves, once every worker has looked at the database: before that SIGTERM ends one without a word."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        said = log.read_text()
        found = re.search(r"Uvicorn running on (http://127\.0\.0\.1:\d+)", said)
        started = min(said.count("Application startup complete"), said.count('"serving generation '))
        if found and started >= workers:
            return found[1]
        assert server.poll() is None, said
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def get(url: str, **headers: str) -> tuple[int, httpx2.Headers, bytes]:
    """Status, headers and body, on a connection of its own: which worker answers is left to chance."""
    response = httpx2.get(url, headers=headers, timeout=60)
    return response.status_code, response.headers, response.content


def until(ask, wanted, seconds=60.0):
    """Ask until the answer is the wanted one; the last answer."""
    end = time.monotonic() + seconds
    while (answer := ask()) != wanted and time.monotonic() < end:
        time.sleep(0.02)
    return answer


def test_a_server_serves_what_is_promoted_while_it_runs(database_url, shelf, helpers, tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "TIMEOUT_SECONDS", 60.0)  # a launcher gives up after 2 s, and tells all once more
    with serving(database_url, tmp_path / "server.log") as url:
        status, headers, body = get(url + RESOLVE)
        assert (status, json.loads(body)["match"]) == (200, "default")
        assert get(url + RESOLVE, **{"If-None-Match": headers["ETag"]})[::2] == (304, b"")
        stored = shelf.promote()
        assert until(lambda: json.loads(get(url + RESOLVE)[2])["match"], "exact") == "exact"
        status, headers, body = get(
            url + RESOLVE, **{"If-None-Match": headers["ETag"], "X-Request-ID": "over-the-wire"}
        )
        assert (status, json.loads(body)["config"]) == (200, to_json(stored.config))
        assert headers["X-Request-ID"] == "over-the-wire"
        status, headers, body = get(url + "/v1/snapshots/A%2FB")
        assert (status, headers["Content-Type"]) == (404, "application/problem+json")
        assert get(url + "/readyz")[0] == 200

        misses = iter([[Demand("NVIDIA H200", helpers.SHAPE, 3)]])
        client = Client(Settings(url=url, cache_dir=tmp_path / "cache"), lambda: next(misses, ()))
        try:
            known = client.watch(helpers.H200)
            unknown = client.watch(gpu_of("NVIDIA H200 Next", "9.0", 132))
            assert client.refresh(60.0)
            assert [c.config for c in known.newest.champions] == [stored.config]
            assert [c.config for c in unknown.newest.champions] == [stored.config]
            client.report()
        finally:
            client.close()
    with reading(shelf.engine) as s:
        assert [(row.gpu_name, row.shape, row.count) for row in demand(s)] == [("NVIDIA H200", helpers.SHAPE, 3)]
    lines = [json.loads(line) for line in (tmp_path / "server.log").read_text().splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines if line.get("request_id") == "over-the-wire"] == [200]


def test_two_workers_serve_and_count_as_one(local_url, local_shelf, tmp_path):
    counts = tmp_path / "metrics"
    counts.mkdir()
    local_shelf.promote(shape_of(1, 96, 8192))
    with serving(local_url, tmp_path / "server.log", workers=2, PROMETHEUS_MULTIPROC_DIR=str(counts)) as url:
        answers = {get(url + RESOLVE)[1]["ETag"] for _ in range(40)}
        assert len(answers) == 1
        pattern = r'^kdatune_http_requests_total\{method="GET",route="/v1/configs/resolve",status="200"\} (.*)$'
        # the other worker counts a moment after it has answered
        assert until(lambda: re.findall(pattern, get(url + "/metrics")[2].decode(), re.MULTILINE), ["40.0"]) == ["40.0"]


def test_a_promotion_reaches_every_worker(database_url, shelf, tmp_path):
    """Of two workers, each of which has served the generation before; the lower of their generations is in /metrics."""
    counts = tmp_path / "metrics"
    counts.mkdir()
    pattern = re.compile(r"^kdatune_generation (\d+)\.0$", re.MULTILINE)

    def lowest_served() -> int:
        get(url + RESOLVE)
        return int(pattern.findall(get(url + "/metrics")[2].decode())[0])

    with serving(database_url, tmp_path / "server.log", workers=2, PROMETHEUS_MULTIPROC_DIR=str(counts)) as url:
        for median_us in (620.0, 610.0, 600.0):
            stored = shelf.promote(shape_of(1, 96, 8192), median_us=median_us)
            assert until(lowest_served, stored.generation) == stored.generation
            answers = [json.loads(get(url + RESOLVE)[2]) for _ in range(20)]
            assert {(a["match"], a["generation"], a["measured_us"]) for a in answers} == {
                ("exact", stored.generation, median_us)
            }
