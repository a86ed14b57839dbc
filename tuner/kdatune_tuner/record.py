"""A full sweep of a real card: every config checked, every good one timed on every shape, the best crossed as pairs.

Phase 1 compiles and checks in parallel child processes, where a hang or a crash costs one child and types one config.
Phase 2 times, one config after another in one child, so that nothing else runs on the card. Every row is on disk as soon
as it is known; the same command goes on where an earlier one stopped.

Needs nothing but torch and Triton: on a machine without the other libraries `python -m kdatune_tuner.record FILE
[LIMIT_SECONDS]` does what `kdatune record` does.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from statistics import median

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.space import WHOLES
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import legal_k1
from kdatune_kernels.space import legal_k2
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import to_json
from kdatune_tuner.objective import StageConfig
from kdatune_tuner.recording import CHECK_FIELDS
from kdatune_tuner.recording import SweepWriter
from kdatune_tuner.recording import meta_row
from kdatune_tuner.recording import recorded_shapes
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.records import utc_now
from kdatune_tuner.worker import DeviceModules
from kdatune_tuner.worker import Worker

STAGES = ("k1", "k2")
_SAMPLES = 5
_PAIRED_PER_STAGE = 4
_STEADY_TRIES, _STEADY = 4, 1.02
"""How often the pairs of a shape are timed at most, and by what factor the first may differ when it is timed again."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep came to. complete: nothing of it is left to do."""

    path: Path
    checks: int
    timings: int
    pairs: int
    failed: int
    complete: bool
    seconds: float


class Recorder:
    """Records one sweep file.

    Args:
        path: the finished file; FILE.part beside it holds the rows until then.
        processes: children of phase 1.
        limit_seconds: stop after this, pack what there is, and leave the part file for the next call.
        say: told a line at each milestone.

    Raises:
        DeviceError: no card can be used (from `run`).
    """

    def __init__(
        self,
        path: Path,
        shapes: Sequence[Shape],
        *,
        command: str,
        processes: int | None = None,
        limit_seconds: float | None = None,
        trial_timeout_s: float = 120.0,
        modules: DeviceModules | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._shapes = shapes
        self._command = command
        self._processes = processes or min(16, os.cpu_count() or 1)
        self._timeout_s = trial_timeout_s
        self._modules = modules or DeviceModules()
        self._say = say
        self._started = time.monotonic()
        self._deadline = None if limit_seconds is None else self._started + limit_seconds
        self._done: dict[tuple[object, ...], Json] = {}

    def run(self) -> Sweep:
        """Record what is missing and pack the file."""
        worker = Worker(self._modules)
        try:
            hello = worker.hello()
            gpu, build = from_json(Gpu, hello["gpu"]), from_json(Build, hello["build"])
            spaces = self._spaces(gpu)
            writer = self._writer(gpu, build, hello["regime"], spaces)
            try:
                worker.close()  # phase 1 fills the card
                self._check_all(writer, spaces)
                for number, shape in enumerate(self._shapes, 1):
                    if not self._late():
                        self._time_shape(writer, worker, spaces, shape, gpu)
                        self._say(f"{number}/{len(self._shapes)} {shape.key()} {self._elapsed()}")
            except BaseException:
                writer.close()
                raise
            complete = not self._late()
            writer.finish(keep_part=not complete)
        finally:
            worker.close()
        kinds = [row["t"] for row in writer.rows]
        return Sweep(
            path=self._path,
            checks=kinds.count("check"),
            timings=kinds.count("time"),
            pairs=kinds.count("pair"),
            failed=sum(row.get("outcome", "ok") != "ok" for row in writer.rows),
            complete=complete,
            seconds=time.monotonic() - self._started,
        )

    def _spaces(self, gpu: Gpu) -> dict[str, list[StageConfig]]:
        """Every config that the search considers on one of the shapes, defaults included. The place is the config's index.

        What has no stages stands last among K2, and the K1 that it goes with, which is not launched, among K1.
        """
        considered = [_considered(shape, gpu) for shape in self._shapes]
        wholes = [w for w in WHOLES if any(config_ok(w, shape, gpu) is None for shape in self._shapes)]
        considered += [{"k1": [whole.k1], "k2": [whole.k2]} for whole in wholes]
        return {stage: list(dict.fromkeys(c for one in considered for c in one[stage])) for stage in STAGES}

    def _writer(self, gpu: Gpu, build: Build, regime: str, spaces: dict[str, list[StageConfig]]) -> SweepWriter:
        writer = SweepWriter(self._path)
        meta = meta_row(
            gpu,
            build,
            recorded_at=rfc3339(utc_now()),
            command=self._command,
            regime=f"{regime}; {_SAMPLES} samples each",
            spaces={stage: len(configs) for stage, configs in spaces.items()},
        )
        same = ("gpu", "build", "kernel_spaces")
        if writer.rows and all(writer.rows[0].get(name) == meta[name] for name in same):
            self._say(f"going on with {len(writer.rows)} rows of {writer.part}")
        else:
            writer.restart()
            writer.add(meta)
        self._done = {_key(row): row for row in writer.rows}
        return writer

    def _add(self, writer: SweepWriter, row: Json) -> None:
        writer.add(row)
        self._done[_key(row)] = row

    def _check_all(self, writer: SweepWriter, spaces: dict[str, list[StageConfig]]) -> None:
        """Phase 1."""
        missing = [
            {"t": "check", "kernel": stage, "i": i, "config": to_json(config)}
            for stage in STAGES
            for i, config in enumerate(spaces[stage])
            if ("check", stage, i) not in self._done
        ]
        with _pool(self._modules, min(self._processes, len(missing)), self._timeout_s) as check:
            futures = [check(row) for row in missing]
            for future in as_completed(futures):
                row, reply = future.result()
                fields = {name: reply.get(name) for name in CHECK_FIELDS}
                self._add(writer, row | {"outcome": reply["outcome"]} | fields)
                if self._late():
                    break
        bad = sum(row["outcome"] != "ok" for row in self._done.values() if row["t"] == "check")
        self._say(f"checked {len(missing)} configs, {bad} of all failed {self._elapsed()}")

    def _time_shape(
        self, writer: SweepWriter, worker: Worker, spaces: dict[str, list[StageConfig]], shape: Shape, gpu: Gpu
    ) -> None:
        """Phase 2: stages, then pairs."""
        for stage in STAGES:
            considered = set(_considered(shape, gpu)[stage])
            numbered = [(i, config) for i, config in enumerate(spaces[stage]) if config in considered]
            # An order of its own for every shape, so that a drift of the card does not favour one corner of the space.
            random.Random(shape.key()).shuffle(numbered)  # noqa: S311  an order, not a secret
            for i, config in numbered:
                if self._done.get(("check", stage, i), {}).get("outcome") == "ok":
                    row = {"t": "time", "kernel": stage, "i": i, "shape": shape.key()}
                    self._time(writer, worker, row, stage, to_json(config))
        self._time_pairs(writer, worker, spaces, shape, self._pairs(spaces, shape, gpu))

    def _time_pairs(
        self,
        writer: SweepWriter,
        worker: Worker,
        spaces: dict[str, list[StageConfig]],
        shape: Shape,
        places: list[tuple[int, int]],
    ) -> None:
        """Time pairs until the first one takes as long at the end as at the beginning; what is left then is stored.

        One run on an H200 that timed pairs only began each of fifteen shapes with up to ten of them 3 to 18 % too slow.
        """
        rows = [{"t": "pair", "shape": shape.key(), "i1": i1, "i2": i2} for i1, i2 in places]
        if all(_key(row) in self._done for row in rows):
            return
        configs = [
            {"k1": to_json(spaces["k1"][i1]), "k2": to_json(spaces["k2"][i2]), "precision": "fp16"} for i1, i2 in places
        ]
        for _ in range(_STEADY_TRIES):
            if self._late():
                return
            timed = [self._timed(worker, row, "kda", config) for row, config in zip(rows, configs, strict=True)]
            again = self._timed(worker, rows[0], "kda", configs[0])
            if _alike(timed[0], again):
                break
        else:
            self._say(
                f"{shape.key()}: the card was not steady in {_STEADY_TRIES} rounds; its pairs are those of the last"
            )
        for row in timed:
            if _key(row) not in self._done:  # a part file may hold some from before it was cut off
                self._add(writer, row)

    def _time(self, writer: SweepWriter, worker: Worker, row: Json, kernel: str, config: Json) -> None:
        if _key(row) not in self._done and not self._late():
            self._add(writer, self._timed(worker, row, kernel, config))

    def _timed(self, worker: Worker, row: Json, kernel: str, config: Json) -> Json:
        """The row with what came of timing it."""
        request = {"op": "time", "kernel": kernel, "shape": row["shape"], "config": config, "samples": _SAMPLES}
        reply = worker.call(request, self._timeout_s)
        if reply["outcome"] == "ok":
            return row | {"samples_us": [round(s, 3) for s in reply["samples_us"]]}
        return row | {"outcome": reply["outcome"], "detail": reply.get("detail")}

    def _pairs(self, spaces: dict[str, list[StageConfig]], shape: Shape, gpu: Gpu) -> list[tuple[int, int]]:
        """The best of both stages crossed, the default pair, and what has no stages, and no times of them."""
        best: list[list[int]] = []
        for stage in STAGES:
            times = {
                row["i"]: median(row["samples_us"])
                for row in self._done.values()
                if row["t"] == "time" and row["kernel"] == stage and row["shape"] == shape.key() and "samples_us" in row
            }
            best.append(sorted(times, key=lambda i, times=times: times[i])[:_PAIRED_PER_STAGE])  # type: ignore[misc]
        pairs = list(product(best[0], best[1]))
        both = _places(spaces, split_default(shape, gpu))
        if all(("time", stage, i, shape.key()) in self._done for stage, i in zip(STAGES, both, strict=True)):
            pairs.append(both)
        for whole in WHOLES:
            if config_ok(whole, shape, gpu) is None:
                place = _places(spaces, whole)
                if self._done.get(("check", "k2", place[1]), {}).get("outcome") == "ok":
                    pairs.append(place)
        return list(dict.fromkeys(pairs))

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _elapsed(self) -> str:
        return f"({time.monotonic() - self._started:.0f} s)"


def _alike(first: Json, again: Json) -> bool:
    """Whether two timings of one pair are within _STEADY; a failed one says nothing about the card."""
    if "samples_us" not in first or "samples_us" not in again:
        return True
    a, b = median(first["samples_us"]), median(again["samples_us"])
    return bool(max(a, b) <= _STEADY * min(a, b))


def _considered(shape: Shape, gpu: Gpu) -> dict[str, list[StageConfig]]:
    """The stages of a shape: its search space, and its default of two stages."""
    default = split_default(shape, gpu)
    return {"k1": [*legal_k1(shape, gpu), default.k1], "k2": [*legal_k2(shape, gpu), default.k2]}


def _places(spaces: dict[str, list[StageConfig]], config: LaunchConfig) -> tuple[int, int]:
    return spaces["k1"].index(config.k1), spaces["k2"].index(config.k2)


Checked = tuple[Json, Json]


@contextmanager
def _pool(modules: DeviceModules, processes: int, timeout_s: float) -> Iterator[Callable[[Json], "Future[Checked]"]]:
    """Children that check configs side by side; on leaving, all are ended and what waits is dropped."""
    workers = [Worker(modules) for _ in range(max(1, processes))]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def check(row: Json) -> Checked:
        worker = idle.get()
        try:
            return row, worker.call({"op": "check"} | _checked(row), timeout_s)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(len(workers))
    try:
        yield lambda row: pool.submit(check, row)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.interrupt()
        pool.shutdown(wait=True)
        for worker in workers:
            worker.close()


def _checked(row: Json) -> Json:
    """What is asked for a check row: its stage, or the whole launch where K1 is part of K2."""
    for whole in WHOLES:
        if row["config"] == to_json(whole.k2):
            return {"kernel": "kda", "config": to_json(whole)}
    return {"kernel": row["kernel"], "config": row["config"]}


def _key(row: Json) -> tuple[object, ...]:
    """What a row is about: rows of equal keys are the same measurement."""
    match row["t"]:
        case "check":
            return ("check", row["kernel"], row["i"])
        case "time":
            return ("time", row["kernel"], row["i"], row["shape"])
        case "pair":
            return ("pair", row["i1"], row["i2"], row["shape"])
        case kind:
            return (kind,)


def main(arguments: Sequence[str]) -> int:
    """The sweep without the command line's libraries. Exit codes: 0 done, 1 failed, 2 wrong usage."""

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    if not 1 <= len(arguments) <= 2 or not all(part.isdigit() for part in arguments[1:]):
        say("usage: python -m kdatune_tuner.record FILE [LIMIT_SECONDS]")
        return 2
    limit = float(arguments[1]) if len(arguments) == 2 else None
    path = Path(arguments[0])
    command = f"kdatune record --out {path.name}"
    try:
        say(str(Recorder(path, recorded_shapes(), command=command, limit_seconds=limit, say=say).run()))
    except KdatuneError as error:
        say(f"kdatune: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
