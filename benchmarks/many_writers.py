"""Many processes write trials while the service answers reads: is every row there, is every answer good, how fast is it.

python benchmarks/many_writers.py [--database URL] [--processes 64] [--trials 50] [--reads-per-second 200] [--json]

Each process opens the database for itself and stores its trials one by one, each in a transaction of its own, as a tuner
does: a run, its measurements, a promotion at the end. The processes are forked from one that has loaded the libraries, so
that 64 of them need little memory. Without --database a SQLite file in a temporary folder is used; a PostgreSQL database
that is named must be empty. Exit code 0 when nothing was lost and nothing failed.
"""

import argparse
import http.client
import itertools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from load_service import BUILD
from load_service import H200
from load_service import Server
from load_service import promote
from load_service import shapes
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy import text

from kdatune_kernels.space import default_config
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.models import RunModel
from kdatune_tuner.store.records import NewMeasurement

SHAPE = shape_of(1, 96, 8192)
SERVED = 200
READERS = 4


def write_trials(url: str, me: int, trials: int) -> list[float]:
    """A run of so many trials; the milliseconds that each write took."""
    engine = open_engine(url)
    config = default_config(SHAPE, H200)
    took: list[float] = []
    with writing(engine) as s:
        gpu_id, build_id = writes.put_gpu(s, H200), writes.put_build(s, BUILD)
        key = {"kernel": "kda", "gpu_id": gpu_id, "problem_id": writes.put_problem(s, "kda", SHAPE)}
        run_id = writes.start_run(s, trigger="load", backend="replay", sampler="none", **key)
    for number in range(trials):
        new = NewMeasurement(
            run_id=run_id,
            build_id=build_id,
            config_json=canonical(config),
            config_hash=digest(config),
            outcome=Outcome.OK,
            median_us=1000.0 + me * trials + number,
            **key,
        )
        started = time.perf_counter()
        with writing(engine) as s:
            measurement_id = writes.add_measurement(s, new)
        took.append((time.perf_counter() - started) * 1e3)
    with writing(engine) as s:
        gains = dict.fromkeys(("gain", "gain_low", "gain_high", "default_us"))
        told = {"decision": "promoted", "reason": f"process {me}", "baseline_measurement_id": None}
        writes.promote(s, measurement_id=measurement_id, **key, **gains, **told)
        writes.finish_run(s, run_id, outcome_counts={"ok": trials}, gpu_seconds=0.0, state="done")
    engine.dispose()
    return took


def fork_writer(url: str, me: int, trials: int, gate: int, answers: int) -> int:
    """A process that waits at the gate, writes, and answers one line; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.read(gate, 1)
        took = write_trials(url, me, trials)
        line = {"me": me, "ms": [round(ms, 2) for ms in took]}
        code = 0
    except BaseException:  # noqa: BLE001 - told to the parent, which fails by it
        line = {"me": me, "error": traceback.format_exc(limit=-1)}
    handle = os.open(f"{os.environ['MANY_WRITERS']}/{me}.json", os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(handle, json.dumps(line).encode())
    os.close(handle)
    os.write(answers, b".")
    os._exit(code)


@dataclass
class Reads:
    """What was asked while the writers were at work."""

    ms: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


def paths() -> Iterator[str]:
    """What clients ask: mostly resolve, sometimes a snapshot or a page of a list."""
    resolve = "/v1/configs/resolve?gpu=NVIDIA%20H200&kernel=kda&N=1&H=96&T="
    for number in itertools.count():
        match number % 10:
            case 7:
                yield "/v1/snapshots/NVIDIA%20H200"
            case 8:
                yield "/v1/measurements?limit=20"
            case 9:
                yield "/v1/runs?limit=20"
            case _:
                yield f"{resolve}{16 * (number % (2 * SERVED) + 1)}"


@contextmanager
def readers(port: int, rate: float) -> Iterator[Reads]:
    """READERS clients that together ask `rate` times a second until the block is left."""
    reads, done = Reads(), threading.Event()

    def ask(first: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        due = time.perf_counter() + first / rate
        for path in itertools.islice(paths(), first, None, READERS):
            if done.wait(max(0.0, due - time.perf_counter())):
                break
            due += READERS / rate
            started = time.perf_counter()
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
                reads.statuses[str(answer.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                reads.errors.append(f"{path}: {error!r}")
                connection.close()
            reads.ms.append((time.perf_counter() - started) * 1e3)
        connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        yield reads
    finally:
        done.set()
        for thread in threads:
            thread.join()


def quantile(ordered: list[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else None


def counted(url: str, processes: int, trials: int) -> list[str]:
    """What is missing or wrong in the database; nothing, if all is well."""
    engine = open_engine(url)
    wrong = []
    with reading(engine) as s:
        times = sorted(s.scalars(select(MeasurementModel.median_us).where(MeasurementModel.run_id.is_not(None))))
        generations = sorted(s.scalars(select(PromotionModel.generation)))
        done = s.scalar(select(func.count()).select_from(RunModel).where(RunModel.state == "done"))
    if times != [1000.0 + number for number in range(processes * trials)]:
        wrong.append(f"{len(times)} rows of {processes * trials}, {len(set(times))} of them different")
    if generations != list(range(1, SERVED + processes + 1)):
        wrong.append(f"{len(generations)} generations, {SERVED + processes} were handed out")
    if done != processes:
        wrong.append(f"{done} runs are done of {processes}")
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            check = connection.scalar(text("PRAGMA integrity_check"))
            if check != "ok":
                wrong.append(f"integrity_check: {check}")
    engine.dispose()
    return wrong


def measure(url: str, processes: int, trials: int, rate: float, folder: Path) -> dict[str, Any]:
    """Everything at once, and what came of it."""
    upgrade(url)
    promote(url, shapes(SERVED), 600.0)
    os.environ["MANY_WRITERS"] = str(folder)
    gate, opener = os.pipe()
    answers, told = os.pipe()
    # forked before there are threads
    pids = [fork_writer(url, me, trials, gate, told) for me in range(processes)]
    server = Server("kdatune_api.app:create_app", folder / "server.log", {"KDATUNE_DATABASE_URL": url})
    try:
        with readers(server.port, rate) as reads:
            while len(reads.ms) < READERS:
                time.sleep(0.01)
            started = time.perf_counter()
            os.write(opener, b"g" * processes)
            ended = 0
            while ended < processes:
                ended += len(os.read(answers, processes))
            seconds = time.perf_counter() - started
        memory_mib = server.memory_mib()
    finally:
        server.stop()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    lines = [json.loads((folder / f"{me}.json").read_text()) for me in range(processes)]
    ordered = sorted(ms for line in lines for ms in line.get("ms", []))
    asked = sorted(reads.ms)
    wrong = [line["error"] for line in lines if "error" in line] + reads.errors + counted(url, processes, trials)
    wrong += [f"answers with status {s}: {n}" for s, n in reads.statuses.items() if s != "200"]
    return {
        "database": url.split(":", maxsplit=1)[0],
        "processes": processes,
        "trials": trials,
        "exit_codes": sorted(set(codes)),
        "wrong": wrong,
        "seconds": round(seconds, 2),
        "writes_per_second": round(processes * trials / seconds, 1),
        "write_p50_ms": quantile(ordered, 0.5),
        "write_p99_ms": quantile(ordered, 0.99),
        "write_worst_ms": quantile(ordered, 1.0),
        "reads": len(asked),
        "read_statuses": dict(reads.statuses),
        "reads_per_second": round(len(asked) / seconds, 1),
        "read_p50_ms": quantile(asked, 0.5),
        "read_p99_ms": quantile(asked, 0.99),
        "read_worst_ms": quantile(asked, 1.0),
        "server_mib": round(memory_mib, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database")
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--reads-per-second", type=float, default=200.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kdatune-writers-") as folder:
        url = args.database or f"sqlite:///{folder}/kdatune.db"
        found = measure(url, args.processes, args.trials, args.reads_per_second, Path(folder))
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        for name, value in found.items():
            sys.stdout.write(f"{name:18} {value}\n")
    sys.exit(0 if not found["wrong"] and found["exit_codes"] == [0] else 1)


if __name__ == "__main__":
    main()
