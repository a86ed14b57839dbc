"""First byte and weight of the dashboard's pages with 10,000 champions in SQLite, against a running service.

python benchmarks/dashboard_pages.py [--champions 10000] [--requests 15]

First byte is taken over a kept-alive connection on loopback, the page's own work included. Weight is everything that a
browser loads for the page, as sent, but for the chart library.
"""

import argparse
import gzip
import http.client
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import insert

from kdatune_kernels.identity import kernel_hash
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import k1_configs
from kdatune_kernels.space import k2_configs
from kdatune_kernels.space import space_hash
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.store import writes
from kdatune_tuner.store.convert import shape_columns
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import PromotionModel

GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H800", "NVIDIA H100 PCIe", "NVIDIA H20")
NIGHTS = 3
GOAL_FIRST_BYTE_MS = 150.0
GOAL_WEIGHT_KB = 200.0
TRIALS = 450
KEY = f"{quote(GPUS[0])}/N=1,H=96,T=8192"
QUERY = f"gpu={quote(GPUS[0])}&shape=N%3D1%2CH%3D96%2CT%3D8192"
PAGES = {
    "overview": "/",
    "overview, filtered": "/?q=H%3D96&status=slower",
    "configs": "/configs",
    "configs, sorted, page 100": "/configs?sort=configs%3A-speedup&page=configs%3A100",
    "config": f"/configs/{KEY}",
    "profiles": "/profiles",
    "profile": f"/profiles/{KEY}",
    "studies": "/studies",
    "study": f"/studies/{KEY}",
    "waves": "/waves",
    "trends": "/trends",
    "trend": f"/trends/{KEY}",
    "compare two GPUs": f"/compare?gpu_a={quote(GPUS[0])}&gpu_b={quote(GPUS[4])}",
    "compare two configs": f"/compare?{QUERY.replace('gpu=', 'gpu_a=').replace('shape=', 'shape_a=')}&as_b=default",
}
BESIDE = {"regressions (loaded after the page)": "/trends/regressions", "waves chart": "/charts/waves"}


def fill(url: str, champions: int) -> None:
    """Champions over five cards, each with three nights and its default; one key with a whole search."""
    upgrade(url)
    engine = open_engine(url)
    build = Build(kernel_hash(), space_hash(), "1", "3.6.0", "12.9.86", "2.13.0", "13.0", "580.95.05")
    now = datetime.now(UTC)
    shapes = [shape_of(1, 96, 8192)]
    shapes += [shape_of(1 + n % 8, 8 * (1 + n // 8 % 12), 1024 * (1 + n // 96)) for n in range(champions)]
    shapes = list(dict.fromkeys(shapes))[: -(-champions // len(GPUS))]
    k1s = [c for c in k1_configs() if config_ok(c, shapes[0], KNOWN_GPUS[GPUS[0]]) is None]
    k2s = [c for c in k2_configs() if config_ok(c, shapes[0], KNOWN_GPUS[GPUS[0]]) is None]
    launches = [LaunchConfig(k1s[n % len(k1s)], k2s[(7 * n) % len(k2s)]) for n in range(40)]
    texts = [(canonical(c), digest(c)) for c in launches]
    with writing(engine) as s:
        gpu_ids = [writes.put_gpu(s, KNOWN_GPUS[name]) for name in GPUS]
        build_id = writes.put_build(s, build)
        problems = [{"kernel": "kda", **shape_columns(shape)} for shape in shapes]
        ids = {
            key: pid
            for pid, key in s.execute(insert(ProblemModel).returning(ProblemModel.id, ProblemModel.shape_key), problems)
        }
        measured: list[dict[str, Any]] = []
        served: list[dict[str, Any]] = []
        for n, (gpu_id, shape) in enumerate((g, p) for p in shapes for g in gpu_ids):
            champion, default = texts[n % 40], texts[(n + 1) % 40]
            base_us = 100.0 + n % 900
            for night in range(NIGHTS):
                at = now - timedelta(days=NIGHTS - night)
                measured.append(_row(gpu_id, ids[shape.key()], build_id, champion, base_us * (1 + 0.001 * night), at))
            measured.append(_row(gpu_id, ids[shape.key()], build_id, default, base_us * (0.97 + n % 40 / 100), now))
            served.append(
                {
                    "kernel": "kda",
                    "gpu_id": gpu_id,
                    "problem_id": ids[shape.key()],
                    "measurement_id": len(measured) - NIGHTS,
                    "config_json": champion[0],
                    "config_hash": champion[1],
                    "default_us": base_us * (0.97 + n % 40 / 100),
                    "gain": 1.05,
                    "gain_low": 1.04,
                    "gain_high": 1.06,
                    "decision": "promoted",
                    "reason": "faster than the default in a paired run",
                    "generation": n + 1,
                    "decided_at": now - timedelta(days=NIGHTS),
                }
            )
        for start in range(0, len(measured), 5000):
            s.execute(insert(MeasurementModel), measured[start : start + 5000])
        s.execute(insert(PromotionModel), served)
        k2_problem = writes.put_problem(s, "k2", shapes[0])
        trials = [(canonical(c), digest(c)) for c in k2s[:TRIALS]]
        rows = [_row(gpu_ids[0], k2_problem, build_id, t, 200.0 + n % 200, now, "k2") for n, t in enumerate(trials)]
        s.execute(insert(MeasurementModel), rows)
        for n in range(1000):
            writes.report_demand(s, "NVIDIA B200", "kda", shape_of(1 + n % 8, 8, 1024 * (1 + n)), 1 + n)
    engine.dispose()


def _row(
    gpu_id: int, problem_id: int, build_id: int, config: tuple[str, str], us: float, at: datetime, kernel: str = "kda"
) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "gpu_id": gpu_id,
        "problem_id": problem_id,
        "build_id": build_id,
        "config_json": config[0],
        "config_hash": config[1],
        "outcome": "ok",
        "median_us": us,
        "p20_us": us * 0.99,
        "p80_us": us * 1.01,
        "sample_count": 15,
        "estimated": False,
        "measured_at": at,
        "registers": 168,
        "smem_bytes": 94128,
        "effective_num_warps": 12,
    }


@contextmanager
def serving(url: str) -> Iterator[int]:
    """The service on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "kdatune_tuner.cli", "serve", "--port", str(port)],
        env={**os.environ, "KDATUNE_DATABASE_URL": url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            try:
                http.client.HTTPConnection("127.0.0.1", port, timeout=2).request("GET", "/healthz")
                break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def get(connection: http.client.HTTPConnection, path: str) -> tuple[float, bytes, int]:
    """Milliseconds to the first byte, the body as text, and its size as sent."""
    started = time.perf_counter()
    connection.request("GET", path, headers={"Accept": "text/html", "Accept-Encoding": "gzip"})
    response = connection.getresponse()
    first_byte_ms = (time.perf_counter() - started) * 1e3
    body = response.read()
    if response.status != 200:
        raise SystemExit(f"{path}: {response.status} {body[:300]!r}")
    sent = len(body)
    return first_byte_ms, gzip.decompress(body) if response.getheader("content-encoding") == "gzip" else body, sent


def main() -> int:
    """Print a line a page; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--champions", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=15)
    asked = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'kdatune.db'}"
        fill(url, asked.champions)
        with serving(url) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            # the service reads its champions when it starts, on the same processor
            get(connection, f"/v1/configs/resolve?gpu={quote(GPUS[0])}&N=1&H=96&T=8192")
            assets: dict[str, int] = {}
            sys.stdout.write(
                f"{asked.champions} champions\n{'page':36} {'first':>8} {'median':>8} {'worst':>8} ms  {'weight':>7} kB\n"
            )
            for name, path in (PAGES | BESIDE).items():
                cold_ms, page, sent = get(connection, path)
                times = [get(connection, path)[0] for _ in range(asked.requests)]
                weight = sent
                for address in set(re.findall(rb'(?:src|href)="(/static/[^"]+)"', page)):
                    asset = address.decode()
                    if "plotly" not in asset:
                        if asset not in assets:
                            assets[asset] = get(connection, asset)[2]
                        weight += assets[asset]
                median_ms, weight_kb = statistics.median(times), weight / 1e3
                late = name in PAGES and (median_ms > GOAL_FIRST_BYTE_MS or weight_kb > GOAL_WEIGHT_KB)
                missed += late
                figures = f"{cold_ms:8.1f} {median_ms:8.1f} {max(times):8.1f}     {weight_kb:7.1f}"
                sys.stdout.write(f"{name:36} {figures}{'  MISSED' if late else ''}\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
