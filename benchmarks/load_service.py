"""What the service bears: resolve and snapshot 304 against bare FastAPI routes, in one run, client and server on one machine.

python benchmarks/load_service.py [--database URL] [--champions 10000] [--connections 32] [--seconds 5] [--rounds 5]
python benchmarks/load_service.py --soak 600            memory of the server under a mixed load with promotions

The bare routes (benchmarks/bare_app.py) have the same parameters and do nothing. Rounds alternate, bare and ours, so that
another load of the machine meets both. Without --database a SQLite file in a temporary folder is filled; a PostgreSQL
database that is named must be empty.
"""

import argparse
import asyncio
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

from kdatune_kernels.identity import PROTOCOL
from kdatune_kernels.identity import kernel_hash
from kdatune_kernels.space import default_config
from kdatune_kernels.space import space_hash
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewMeasurement

H200 = KNOWN_GPUS["NVIDIA H200"]
BUILD = Build(kernel_hash(), space_hash(), PROTOCOL, "3.6.0", "12.9", "2.13.0", "13.0", "580")
HERE = Path(__file__).parent
SNAPSHOT = "/v1/snapshots/NVIDIA%20H200"


def shapes(count: int) -> list[Shape]:
    """So many different shapes."""
    return [shape_of(1, 96, tokens) for tokens in range(16, 16 * count + 1, 16)]


def promote(url: str, wanted: list[Shape], median_us: float) -> None:
    """A champion for every shape."""
    engine = open_engine(url)
    with writing(engine) as s:
        gpu_id, build_id = writes.put_gpu(s, H200), writes.put_build(s, BUILD)
        for shape in wanted:
            config = default_config(shape, H200)
            key = {"kernel": "kda", "gpu_id": gpu_id, "problem_id": writes.put_problem(s, "kda", shape)}
            new = NewMeasurement(
                run_id=None,
                build_id=build_id,
                config_json=canonical(config),
                config_hash=digest(config),
                outcome="ok",  # type: ignore[arg-type]
                median_us=median_us,
                **key,
            )
            measurement_id = writes.add_measurement(s, new)
            writes.promote(
                s,
                measurement_id=measurement_id,
                baseline_measurement_id=None,
                default_us=median_us * 1.1,
                gain=1.1,
                gain_low=1.05,
                gain_high=1.15,
                decision="promoted",
                reason="load test",
                **key,
            )
    engine.dispose()


class Server:
    """A uvicorn process of one worker."""

    def __init__(self, app: str, log: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "uvicorn", app, "--factory", "--port", "0", "--no-access-log"]
        python_path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | environment | {"PYTHONPATH": python_path}
            )
        self.port = self._port()

    def _port(self) -> int:
        for _ in range(600):
            found = re.search(r"Uvicorn running on http://127\.0\.0\.1:(\d+)", self.log.read_text())
            if found:
                return int(found[1])
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(self.log.read_text())

    def memory_mib(self) -> float:
        """Resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) / 1024 if found else float("nan")

    def cpu_seconds(self) -> float:
        """Processor time used so far, which other loads of the machine change less than they change rates."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Connection(asyncio.Protocol):
    """One keep-alive connection that asks, waits for the whole answer, and asks again."""

    def __init__(self, requests: Iterator[bytes], end: float, tally: "Tally") -> None:
        self.requests = requests
        self.end = end
        self.tally = tally
        self.done = asyncio.get_running_loop().create_future()
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._ask()

    def _ask(self) -> None:
        request = next(self.requests, None)
        if request is None or time.perf_counter() > self.end:
            self.transport.close()
            self.done.set_result(None)
            return
        self.asked = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head_end = self.buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        length = 0
        at = self.buffer.find(b"ontent-length: ", 0, head_end)
        if at < 0:
            at = self.buffer.find(b"ontent-Length: ", 0, head_end)
        if at >= 0:
            length = int(self.buffer[at + 15 : self.buffer.index(b"\r\n", at)])
        if len(self.buffer) < head_end + 4 + length:
            return
        self.tally.add(self.buffer[9:12], time.perf_counter() - self.asked)
        self.buffer = b""
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("closed by the server"))


class Tally:
    """Statuses and times of the answers of one round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.statuses: dict[bytes, int] = {}

    def add(self, status: bytes, seconds: float) -> None:
        self.seconds.append(seconds)
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


async def drive(port: int, requests: Iterator[bytes], connections: int, seconds: float) -> tuple[Tally, float]:
    """One round: the tally and how long it took."""
    tally = Tally()
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(lambda: Connection(requests, started + seconds, tally), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    await asyncio.gather(*(one.done for one in made))
    return tally, time.perf_counter() - started


def get(path: str, **headers: str) -> bytes:
    """The bytes of a request."""
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def resolve_query(shape: Shape) -> str:
    return urllib.parse.urlencode({"gpu": H200.name, "kernel": "kda", "N": shape.N, "H": shape.H, "T": shape.T})


def etag_of(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", SNAPSHOT)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.headers["ETag"]


def compare(args: argparse.Namespace, ours: Server, bare: Server, champions: list[Shape]) -> bool:
    """Measure and print; whether every target is met."""
    etag = etag_of(ours.port)
    again = [get(f"/v1/configs/resolve?{resolve_query(shape)}") for shape in champions[:1000]]
    bare_resolve = [get(f"/resolve?{resolve_query(shape)}") for shape in champions[:1000]]
    every = iter([get(f"/v1/configs/resolve?{resolve_query(shape)}") for shape in champions[1000:]])
    near = iter(
        [get(f"/v1/configs/resolve?{resolve_query(shape_of(1, 96, 16 * i + 3))}") for i in range(1, 5 * len(champions))]
    )
    not_modified = get(SNAPSHOT, **{"If-None-Match": etag})
    rounds: list[tuple[str, Server, Callable[[], Iterator[bytes]], bytes]] = [
        ("bare route", bare, lambda: cycle(bare_resolve), b"200"),
        ("resolve, asked before", ours, lambda: cycle(again), b"200"),
        ("resolve, exact, never asked before", ours, lambda: every, b"200"),
        ("resolve, near, never asked before", ours, lambda: near, b"200"),
        ("bare 304", bare, lambda: cycle([get("/not-modified")]), b"304"),
        ("snapshot 304", ours, lambda: cycle([not_modified]), b"304"),
    ]
    rates: dict[str, list[float]] = {}
    tails: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    asyncio.run(drive(ours.port, iter(again), 4, 60))  # what is asked again has been asked before
    for number in range(args.rounds):
        for name, server, make, wanted in rounds:
            share = 0.2 if "never" in name else 1.0  # the supply of new questions is finite
            cpu_before = server.cpu_seconds()
            tally, seconds = asyncio.run(drive(server.port, make(), args.connections, args.seconds * share))
            if not tally.seconds:
                continue
            if set(tally.statuses) != {wanted}:
                raise RuntimeError(f"{name}: {tally.statuses}, wanted {wanted!r}")
            rates.setdefault(name, []).append(len(tally.seconds) / seconds)
            tails.setdefault(name, []).append(tally.quantile_ms(0.99))
            costs.setdefault(name, []).append((server.cpu_seconds() - cpu_before) / len(tally.seconds) * 1e6)
        sys.stderr.write(f"round {number + 1} of {args.rounds}\n")
    met = True
    sys.stdout.write(f"{'':36} {'requests/s':>11} {'of bare':>8} {'p99 ms':>8} {'of bare':>8} {'CPU us':>8}\n")
    for name, found in rates.items():
        base = "bare 304" if "304" in name else "bare route"
        rate, tail = statistics.median(found), statistics.median(tails[name])
        share = rate / statistics.median(rates[base])
        tail_share = tail / statistics.median(tails[base])
        sys.stdout.write(
            f"{name:36} {rate:11,.0f} {share:8.2f} {tail:8.2f} {tail_share:8.2f} {statistics.median(costs[name]):8.0f}\n"
        )
        if not name.startswith("bare"):
            met = met and share >= 0.7 and tail_share <= 1.5
    sys.stdout.write(f"targets (>= 0.7 of the rate, <= 1.5 of the p99): {'met' if met else 'MISSED'}\n")
    return met


def soak(args: argparse.Namespace, ours: Server, url: str, champions: list[Shape]) -> bool:
    """A mixed load for so long, a promotion every 5 s; prints the server's memory, and whether it stays flat."""
    end = time.monotonic() + args.soak
    etag = etag_of(ours.port)
    mix = [get(f"/v1/configs/resolve?{resolve_query(shape)}") for shape in champions[:2000]]
    number = 0
    seen: list[float] = []
    requests = 0
    while time.monotonic() < end:
        fresh = [
            get(f"/v1/configs/resolve?{resolve_query(shape_of(1, 96, 16 * (number + i) + 3))}") for i in range(200)
        ]
        cards = [get(f"/v1/snapshots/Card%20{number + i}?sm_count={100 + i}&compute_capability=9.0") for i in range(3)]
        odd = [get(SNAPSHOT, **{"If-None-Match": etag}), get("/v1/promotions?limit=50"), get("/nope"), get("/metrics")]
        batch = cycle([*mix, *fresh, *cards, *odd])
        tally, _ = asyncio.run(drive(ours.port, batch, args.connections, 5.0))
        requests += len(tally.seconds)
        if any(status.startswith(b"5") for status in tally.statuses):
            raise RuntimeError(f"{tally.statuses}")
        promote(url, [champions[number % len(champions)]], 500.0 + number)
        number += 200
        seen.append(ours.memory_mib())
        sys.stderr.write(f"{args.soak - (end - time.monotonic()):6.0f} s  {seen[-1]:7.1f} MiB\n")
    quarter = max(1, len(seen) // 4)
    early, late = statistics.median(seen[quarter : 2 * quarter]), statistics.median(seen[-quarter:])
    sys.stdout.write(
        f"{requests:,} requests, {len(seen)} promotions in {args.soak} s; memory in the second quarter {early:.1f} MiB, "
        f"in the last {late:.1f} MiB ({(late / early - 1) * 100:+.1f} %)\n"
    )
    return late <= early * 1.03


@contextmanager
def database(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="kdatune-load-") as folder:
        yield f"sqlite:///{folder}/kdatune.db"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database")
    parser.add_argument("--champions", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--soak", type=int, default=0)
    args = parser.parse_args()
    with database(args.database) as url, tempfile.TemporaryDirectory() as logs:
        upgrade(url)
        champions = shapes(args.champions)
        promote(url, champions, 600.0)
        ours = Server("kdatune_api.app:create_app", Path(logs) / "ours.log", {"KDATUNE_DATABASE_URL": url})
        bare = None
        try:
            if args.soak:
                met = soak(args, ours, url, champions)
            else:
                bare = Server("bare_app:create_app", Path(logs) / "bare.log", {})
                met = compare(args, ours, bare, champions)
            health = http.client.HTTPConnection("127.0.0.1", ours.port, timeout=10)
            health.request("GET", "/readyz")
            sys.stdout.write(json.dumps(json.load(health.getresponse())) + "\n")
            health.close()
        finally:
            for server in (ours, bare):
                if server is not None:
                    server.stop()
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
