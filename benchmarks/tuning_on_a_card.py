"""What tuning promises on a card, measured in one command: how fast, how fair, and what it leaves behind.

python benchmarks/tuning_on_a_card.py --out tuning-h200.json [--steps shape,rate,...] [--sweep-budget 4m]
python benchmarks/tuning_on_a_card.py --fake ...      the same on a made-up card: whether this script works

Steps, each with its goal; what is finished is in the file at once, a step that fails takes no other down:

    rate        timed trials a second of configs that are compiled, through the child process and into the store: >= 50
    tie         a config against itself under another label, 20 paired runs: a tie in >= 19
    lethal      a store out of bounds, an endless kernel, an abort, too much shared memory, a wrong winner: the card is usable
                afterwards and its memory back within 1 MiB
    isolation   three shapes in one process are as fast as in a process of their own: within 3 %
    shape       a new shape tuned, checked and promoted, the compile cache warm from other shapes: <= 15 s, start included
    sweep       the nineteen shapes of a recorded sweep, from an empty database and an empty compile cache: <= 240 s

Exit code 0: every goal of the steps that ran is met.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdatune_kernels.gpu import nvml_handle
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.backend_gpu import GpuBackend
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.promote import Contender
from kdatune_tuner.promote import Policy
from kdatune_tuner.promote import decide
from kdatune_tuner.recording import recorded_shapes
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuner
from kdatune_tuner.worker import DeviceModules
from kdatune_tuner.worker import Worker

TESTS = Path(__file__).resolve().parents[1] / "tests" / "tuner"
NEW_SHAPE = parse_shape("N=2,H=48,T=8192")  # not one of the nineteen
SHAPE = parse_shape("N=1,H=96,T=8192")
SMALL = parse_shape("N=1,H=8,T=1024")
MIB = 1 << 20
Answer = dict[str, Any]


class Bench:
    """The card under test, real or made up, and a folder for databases and caches."""

    def __init__(self, folder: Path, fake: bool, sweep_budget: str | None) -> None:
        self.folder = folder
        self.fake = fake
        self.sweep_budget = sweep_budget
        self.settings = Settings()

    def worker(self, modules: DeviceModules | None = None) -> Worker:
        return Worker(DeviceModules("fake_device", "fake_device") if self.fake else modules)

    def backend(self, modules: DeviceModules | None = None, kind: type[GpuBackend] = GpuBackend) -> GpuBackend:
        return kind(
            self.worker(modules),
            trial_timeout_s=self.settings.trial_timeout_s,
            paired_rounds=self.settings.paired_rounds,
        )

    def database(self, name: str) -> str:
        url = f"sqlite:///{self.folder / name}.db"
        upgrade(url)
        return url

    def kdatune(self, url: str, *arguments: str, cache: Path | None = None) -> tuple[Answer, float]:
        """A `kdatune` command in a process of its own: its document, and the seconds from start to end."""
        command = [sys.executable, __file__, "--as-kdatune", "fake" if self.fake else "card", *arguments, "--json"]
        environment = os.environ | {"KDATUNE_DATABASE_URL": url, "KDATUNE_CACHE_DIR": str(self.folder / "launcher")}
        if cache is not None:
            environment["TRITON_CACHE_DIR"] = str(cache)
        started = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}: exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
        return json.loads(done.stdout), seconds


def used_bytes() -> int | None:
    """Memory of the first visible card in use, whoever uses it; None where NVML does not say."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = nvml_handle(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    return None


def settled_bytes(before_bytes: int | None, wait_seconds: float = 20.0) -> int | None:
    """Bytes in use above `before_bytes`, once the driver has taken back what dead processes held."""
    deadline = time.monotonic() + wait_seconds
    while True:
        now_bytes = used_bytes()
        if before_bytes is None or now_bytes is None:
            return None
        if now_bytes - before_bytes <= MIB or time.monotonic() >= deadline:
            return now_bytes - before_bytes
        time.sleep(0.1)


def summary(document: Answer) -> Answer:
    """What matters of a tuned shape."""
    said = document["promotion"] or {}
    names = ("shape", "trials", "measured", "outcomes", "default_us", "best_us", "speedup", "seconds")
    return {name: document[name] for name in names} | {
        "decision": said.get("decision"),
        "reason": said.get("reason"),
        "samplers": {name: stage["sampler"] for name, stage in document["stages"].items()},
    }


def step_sweep(bench: Bench) -> Answer:
    """Nineteen shapes from nothing."""
    cache = bench.folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    budget = [] if bench.sweep_budget is None else ["--budget", bench.sweep_budget]
    shapes = [part for shape in recorded_shapes() for part in ("--shape", shape.key())]
    document, seconds = bench.kdatune(
        bench.database("sweep"), "tune", "--backend", "gpu", *shapes, *budget, cache=cache
    )
    tuned = [summary(one) for one in document["results"]]
    speedups = [one["speedup"] for one in tuned if one["speedup"]]
    return {
        "goal": "<= 240 s, every shape promoted",
        "seconds": seconds,
        "trials": sum(one["measured"] for one in tuned),
        "promoted": sum(one["decision"] == "promoted" for one in tuned),
        "geomean_speedup": statistics.geometric_mean(speedups) if speedups else None,
        "shapes": tuned,
        "met": seconds <= 240 and len(tuned) == 19 and all(one["decision"] == "promoted" for one in tuned),
    }


def step_shape(bench: Bench) -> Answer:
    """A new shape, with what other shapes left in the compile cache."""
    cache = bench.folder / "cache"
    url = bench.database("shape")
    warm, warm_seconds = bench.kdatune(url, "tune", "--backend", "gpu", "--shape", SHAPE.key(), cache=cache)
    document, seconds = bench.kdatune(url, "tune", "--backend", "gpu", "--shape", NEW_SHAPE.key(), cache=cache)
    tuned = summary(document)
    return {
        "goal": "<= 15 s from start to end, promoted",
        "seconds": seconds,
        "tuning_seconds": tuned["seconds"],
        "shape": tuned,
        "before": {"seconds": warm_seconds, "shape": summary(warm)},
        "met": seconds <= 15 and tuned["decision"] == "promoted",
    }


def step_rate(bench: Bench) -> Answer:
    """Timed trials a second, compiled and checked before: through the child, and with the store."""
    engine = open_engine(bench.database("rate"))
    with contextlib.closing(bench.backend()) as backend:
        space = backend.space("k2", SHAPE)
        configs = random.Random(0).sample(space, min(60, len(space)))  # noqa: S311 - a sample, no secret
        ready = [c for c in configs if backend.measure("k2", SHAPE, c).ok]
        started = time.perf_counter()
        results = [backend.measure("k2", SHAPE, c) for c in ready]
        alone_seconds = time.perf_counter() - started
        ledger = Ledger(engine, backend, SHAPE)
        with ledger.run("k2", trigger="bench", sampler="none", trials=len(ready), seconds=None, seed=0) as run:
            started = time.perf_counter()
            for config in ready:
                ledger.add(run, "k2", config, backend.measure("k2", SHAPE, config))
            stored_seconds = time.perf_counter() - started
    engine.dispose()
    rate = len(ready) / stored_seconds
    return {
        "goal": ">= 50 trials a second with the store",
        "trials": len(ready),
        "trials_per_second": rate,
        "trials_per_second_without_store": len(ready) / alone_seconds,
        "median_trial_ms": statistics.median(r.gpu_seconds for r in results) * 1e3,
        "met": rate >= 50,
    }


def step_tie(bench: Bench, runs: int = 20) -> Answer:
    """A config against itself: what promotion says of two labels for one binary."""
    policy = Policy(bench.settings.min_gain_pct, bench.settings.unpaired_min_gain_pct, bench.settings.confidence_pct)
    verdicts: Counter[str] = Counter()
    gains: list[float] = []
    with contextlib.closing(bench.backend()) as backend:
        config = default_config(SHAPE, backend.gpu)
        for _ in range(runs):
            pair = backend.measure_pair(SHAPE, config, config)
            rounds = 0 if pair.paired else None
            one = Contender("one label", pair.outcome, pair.samples_us, rounds=rounds)
            other = Contender("another label", pair.outcome, pair.against_us, rounds=rounds)
            decision = decide(one, other, None, policy)
            verdicts[str(decision.decision)] += 1
            gains.append(decision.gain or 0.0)
    return {
        "goal": "a tie in >= 19 of 20 runs, none promoted",
        "verdicts": dict(verdicts),
        "gains": gains,
        "met": verdicts["tie"] >= 19 * runs // 20 and not verdicts["promoted"],
    }


class TwelveConfigs(GpuBackend):
    """A space of twelve: six K1, six K2."""

    def space(self, kernel: str, shape: Shape) -> list[Any]:
        return super().space(kernel, shape)[:6]


def lethal_backend(bench: Bench) -> tuple[GpuBackend, dict[Any, Outcome]]:
    """A backend some of whose configs kill, and what each of those must be typed as."""
    fates_path = bench.folder / "lethal.json"
    fates_path.write_text("{}")
    os.environ["KDATUNE_LETHAL"] = str(fates_path)
    backend = bench.backend(DeviceModules("lethal_device", "kdatune_kernels.gpu"), TwelveConfigs)
    k1s, k2s = backend.space("k1", SMALL), backend.space("k2", SMALL)
    deeds = {k1s[1]: "abort", k1s[2]: "store", k2s[1]: "endless", k2s[2]: "shared", k2s[3]: "wrong"}
    outcomes = dict(
        zip(
            deeds,
            (Outcome.ABORT, Outcome.ILLEGAL_ACCESS, Outcome.TIMEOUT, Outcome.RESOURCE, Outcome.INCORRECT),
            strict=True,
        )
    )
    fates_path.write_text(json.dumps({digest(config): deed for config, deed in deeds.items()}))
    if bench.fake:
        told: dict[str, dict[str, object]] = {
            "abort": {"check": "abort"},
            "store": {"time": "illegal_access"},
            "endless": {"check": "hang"},
            "shared": {"check": "resource"},
            "wrong": {"check": "incorrect", "us": 0.001},
        }
        fates = {digest(config): told[deed] for config, deed in deeds.items()}
        (Path(os.environ["KDATUNE_FAKE"]) / "fates.json").write_text(json.dumps(fates))
    backend.close()  # the child that is there has read no fates
    return backend, outcomes


def step_lethal(bench: Bench) -> Answer:
    """The configs that kill tuners."""
    before_bytes = used_bytes()
    backend, wanted = lethal_backend(bench)
    backend._timeout_s = 10.0 if bench.fake else 15.0  # an endless kernel costs all of it
    engine = open_engine(bench.database("lethal"))
    tuned = Tuner(engine, backend, Options(trials=12, policy=Policy())).tune(SMALL)
    with reading(engine) as s:
        rows = {row.config_hash: row for row in queries.page_measurements(s, limit=1000) if row.kernel != "kda"}
        champion = queries.champions(s)[0]
    engine.dispose()
    got = {digest(config): str(rows[digest(config)].outcome) for config in wanted}
    wrong = next(config for config, outcome in wanted.items() if outcome is Outcome.INCORRECT)
    usable = backend.measure("k2", SMALL, backend.space("k2", SMALL)[5]).ok
    backend.close()
    left_bytes = settled_bytes(before_bytes)
    typed = got == {digest(config): str(outcome) for config, outcome in wanted.items()}
    return {
        "goal": "each typed, the wrong one not served, the card usable, memory back within 1 MiB",
        "outcomes": sorted(got.values()),
        "details": {row.outcome: row.detail for row in rows.values() if row.outcome != "ok"},
        "seconds": tuned.seconds,
        "card_usable": usable,
        "memory_left_bytes": left_bytes,
        "met": typed and usable and tuned.state == "done" and champion.config.k2 != wrong and (left_bytes or 0) <= MIB,
    }


def step_isolation(bench: Bench) -> Answer:
    """Three shapes one after another in one process, and each in a fresh one."""
    shapes = [parse_shape(key) for key in ("N=1,H=96,T=16", "N=1,H=96,T=8192", "N=64,H=96,T=65536")]

    def pair_us(backend: GpuBackend, shape: Shape) -> float:
        config: LaunchConfig = default_config(shape, backend.gpu)
        runs = [backend.measure_pair(shape, config) for _ in range(3)]
        failed = next((run for run in runs if not run.ok), None)
        if failed is not None:
            raise RuntimeError(f"{shape.key()}: {failed.outcome}: {failed.detail}")
        return min(run.median_us or 0.0 for run in runs)

    with contextlib.closing(bench.backend()) as together:
        shared = [pair_us(together, shape) for shape in shapes]
    alone = []
    for shape in shapes:
        with contextlib.closing(bench.backend()) as fresh:
            alone.append(pair_us(fresh, shape))
    ratios = [a / b for a, b in zip(shared, alone, strict=True)]
    return {
        "goal": "within 3 %",
        "shapes": [shape.key() for shape in shapes],
        "in_one_process_us": shared,
        "in_a_fresh_process_us": alone,
        "ratios": ratios,
        "met": all(abs(ratio - 1.0) <= 0.03 for ratio in ratios),
    }


STEPS: dict[str, Callable[[Bench], Answer]] = {
    "rate": step_rate,
    "tie": step_tie,
    "lethal": step_lethal,
    "isolation": step_isolation,
    "shape": step_shape,
    "sweep": step_sweep,
}


@contextlib.contextmanager
def made_up_card(folder: Path, fake: bool) -> Iterator[None]:
    """The device modules of the tests can be imported by the children; with `fake` they need no card."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if fake:
        (folder / "fake").mkdir()
        os.environ["KDATUNE_FAKE"] = str(folder / "fake")
    yield


def as_kdatune(fake: bool) -> None:
    """`kdatune`, on the made-up card where one is asked for."""
    from kdatune_tuner import cli
    from kdatune_tuner import cli_tune

    if fake:
        modules = DeviceModules("fake_device", "fake_device")
        cli_tune.open_backend = lambda *_: GpuBackend(Worker(modules))  # type: ignore[assignment]
    cli.main()


def main() -> None:
    if sys.argv[1:2] == ["--as-kdatune"]:
        fake = sys.argv[2] == "fake"
        del sys.argv[1:3]
        as_kdatune(fake)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file; else it goes to stdout at the end")
    parser.add_argument("--steps", default=",".join(STEPS), help="comma-separated, in this order")
    parser.add_argument("--sweep-budget", help="passed on as kdatune tune --budget")
    parser.add_argument("--fake", action="store_true", help="a made-up card")
    args = parser.parse_args()
    wanted = args.steps.split(",")
    unknown = [name for name in wanted if name not in STEPS]
    if unknown:
        parser.error(f"unknown step(s) {', '.join(unknown)}; there are {', '.join(STEPS)}")
    with tempfile.TemporaryDirectory(prefix="kdatune-card-") as name, made_up_card(Path(name), args.fake):
        bench = Bench(Path(name), args.fake, args.sweep_budget)
        with contextlib.closing(bench.backend()) as backend:
            found: Answer = {
                "gpu": to_json(backend.gpu),
                "build": to_json(backend.build),
                "regime": backend.regime,
                "python": platform.python_version(),
                "cpus": os.cpu_count(),
                "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "steps": {},
            }
        for step in wanted:
            started = time.perf_counter()
            try:
                answer = STEPS[step](bench)
            except Exception as error:  # noqa: BLE001 - one step that fails is a result; the others still run
                answer = {"met": False, "error": f"{type(error).__name__}: {error}"}
            found["steps"][step] = answer | {"step_seconds": round(time.perf_counter() - started, 2)}
            sys.stderr.write(f"{step:10} {'met' if answer['met'] else 'MISSED'} {answer.get('error', '')}\n")
            if args.out is not None:
                args.out.write_text(json.dumps(found, indent=2) + "\n")
    if args.out is None:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    sys.exit(0 if all(answer["met"] for answer in found["steps"].values()) else 1)


if __name__ == "__main__":
    main()
