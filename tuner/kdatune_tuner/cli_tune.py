"""`kdatune tune` and `kdatune record`."""

import signal
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated

import typer
from rich.table import Table
from sqlalchemy import Engine

from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.values import OUR_KERNELS
from kdatune_kernels.values import OtherShape
from kdatune_tuner.backend_gpu import GpuBackend
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.cli_fleet import tune_with_workers
from kdatune_tuner.cli_others import check_served
from kdatune_tuner.cli_others import installed
from kdatune_tuner.cli_others import other_backend
from kdatune_tuner.cli_others import other_shapes
from kdatune_tuner.cli_others import record_kernel
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import ShapeOption
from kdatune_tuner.cli_support import card_visible
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import parse_seconds
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.fleet import Report
from kdatune_tuner.objective import Backend
from kdatune_tuner.progress import Watch
from kdatune_tuner.progress import show_us
from kdatune_tuner.promote import Policy
from kdatune_tuner.record import Recorder
from kdatune_tuner.recording import SHIPPED
from kdatune_tuner.recording import recorded_shapes
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.staleness import marked
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuned
from kdatune_tuner.tune import Tuner
from kdatune_tuner.tune_others import OtherTuner

INTERRUPTED = 130


class BackendName(StrEnum):
    """Where measurements come from."""

    GPU = "gpu"
    REPLAY = "replay"


def tune(
    shape: ShapeOption = None,
    kernel: Annotated[
        str, typer.Option(help="k1 or k2 alone, the pair (kda), or an installed kernel of others")
    ] = "kda",
    trials: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="configs a stage, those measured earlier included")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="stop after this time, e.g. 90s, 10m")] = None,
    gpu_budget: Annotated[
        str | None, typer.Option(help="stop a shape's search after this time on the card, e.g. 5s")
    ] = None,
    backend: Annotated[BackendName | None, typer.Option(help="default: gpu where a card is visible")] = None,
    recording: Annotated[Path | None, typer.Option(help="sweep file of the replay backend")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="of the search")] = 0,
    workers: Annotated[
        str | None,
        typer.Option(help="all, or how many: one process a card; hosts that share the database share the shapes"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search the best config of problem shapes and promote it when it beats what is served."""
    settings = read_settings()
    other = None if kernel in OUR_KERNELS else installed(kernel)
    shapes = _shapes(shape or []) if other is None else []
    seconds = None if budget is None else parse_seconds(budget, "--budget")
    card_seconds = None if gpu_budget is None else parse_seconds(gpu_budget, "--gpu-budget")
    if recording is not None and backend is BackendName.GPU:
        raise UsageError("--recording belongs to --backend replay")
    if workers is not None:
        if other is not None:
            raise UsageError(f"--workers shares the shapes of kda; tune {kernel} without it")
        options = replace(make_options(settings, kernel, trials, seed, "tune"), gpu_seconds=card_seconds)
        name = choose_backend(backend, recording)
        announce = backend is None and recording is None
        report = tune_with_workers(
            workers, name.value, recording, settings, options, shapes, seconds, announce=announce
        )
        _show_report(report, as_json)
        return
    with database(settings.database_url) as engine:
        options = replace(make_options(settings, kernel, trials, seed, "tune"), gpu_seconds=card_seconds)
        wanted: Sequence[Shape | OtherShape]
        if other is None:
            source = open_backend(backend, recording, settings)
            wanted = shapes or stale_first(engine, source)
        else:
            source = other_backend(other, backend is BackendName.REPLAY, recording, settings)
            wanted = other_shapes(other, shape or [], source)
        with Watch() as watch:
            tuner = Tuner(engine, source, options, watch)
            if other is not None:
                tuner = OtherTuner(engine, source, options, other, watch)
            done, interrupted = tune_all(tuner, wanted, seconds)
    if as_json:
        documents = [tuned.to_json() for tuned in done]
        print_json(documents[0] if len(wanted) == 1 and documents else {"results": documents})
    else:
        print_table([row_of(tuned) for tuned in done])
    if interrupted:
        stored = sum(tuned.measured for tuned in done)
        err().print(f"kdatune: interrupted; {stored} finished trials are stored, the same command goes on from there")
        raise typer.Exit(INTERRUPTED)


def record(
    out_file: Annotated[Path, typer.Option("--out", help="the sweep file, e.g. h200.jsonl.gz")],
    shape: ShapeOption = None,
    limit_seconds: Annotated[float | None, typer.Option(min=1, help="stop then; the same command goes on")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="children that compile side by side")] = None,
    kernel: Annotated[str, typer.Option(help="kda, or an installed kernel of others")] = "kda",
) -> None:
    """Sweep every config on this machine's card into a file that the replay backend reads."""
    settings = read_settings()
    if check_served(kernel) != "kda":
        if limit_seconds is not None or processes is not None:
            raise UsageError(
                f"--limit-seconds and --processes belong to kda; {kernel} is recorded one config at a time"
            )
        with _part_kept(out_file):
            record_kernel(installed(kernel), out_file, shape or [], " ".join(["kdatune", *sys.argv[1:]]), settings)
        return
    recorder = Recorder(
        out_file,
        _shapes(shape or []) or recorded_shapes(),
        command=" ".join(["kdatune", *sys.argv[1:]]),
        processes=processes,
        limit_seconds=limit_seconds,
        trial_timeout_s=settings.trial_timeout_s,
        say=err().print,
    )
    with _part_kept(out_file):
        sweep = recorder.run()
    rest = "" if sweep.complete else "; the limit was reached, the same command records the rest"
    out().print(
        f"{sweep.path}: {sweep.checks} configs checked, {sweep.timings} timings and {sweep.pairs} pairs, "
        f"{sweep.failed} failed, {sweep.seconds:.0f} s{rest}"
    )


@contextmanager
def _part_kept(out_file: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        err().print(
            f"kdatune: interrupted; what is finished is in {out_file}.part, the same command goes on from there"
        )
        raise typer.Exit(INTERRUPTED) from None


def _shapes(texts: Sequence[str]) -> list[Shape]:
    shapes = [parse_shape(text) for text in texts]
    empty = [shape.key() for shape in shapes if shape.T == 0]
    if empty:
        raise UsageError(f"{empty[0]} has no tokens: there is nothing to measure")
    return list(dict.fromkeys(shapes))


def stale_first(engine: Engine, source: Backend) -> list[Shape]:
    """The backend's shapes, after those whose champion was measured with another build than today's, oldest first."""
    shapes = source.default_shapes()
    with reading(engine) as s:
        champions = queries.champions(s, source.gpu)
    stale = [c.shape for c in marked(champions, in_use=source.build) if c.stale_reason is not None]
    # a recording holds its own shapes only
    return list(dict.fromkeys([*(s for s in stale if source.name == "gpu" or s in shapes), *shapes]))


def open_backend(name: BackendName | None, recording: Path | None, settings: Settings) -> Backend:
    """The backend of that name; without one the card where there is one, else the shipped recording (said on stderr).

    Raises:
        DeviceError: gpu is asked for and no card can be used.
        RecordingError: the sweep file cannot be read.
    """
    if choose_backend(name, recording) is BackendName.GPU:
        return GpuBackend(trial_timeout_s=settings.trial_timeout_s, paired_rounds=settings.paired_rounds)
    replay = ReplayBackend.open(recording)
    if name is None and recording is None:
        err().print(f"kdatune: no card is visible; replaying {SHIPPED.name}, recorded on {replay.gpu.name}")
    return replay


def choose_backend(name: BackendName | None, recording: Path | None) -> BackendName:
    """What is meant where nothing is said: the card where there is one, else a replay."""
    if name is not None:
        return name
    return BackendName.GPU if recording is None and card_visible() else BackendName.REPLAY


def make_options(settings: Settings, kernel: str, trials: int | None, seed: int, trigger: str) -> Options:
    """Search options from the settings and what the command line says."""
    return Options(
        kernel=kernel,
        trials=trials or settings.trials,
        least_gain_pct=settings.least_gain_pct,
        seed=seed,
        finalists=settings.finalists,
        policy=Policy(settings.min_gain_pct, settings.unpaired_min_gain_pct, settings.confidence_pct),
        trigger=trigger,
        optuna_storage=settings.optuna_storage,
    )


def tune_all(tuner: Tuner, shapes: Sequence[Shape | OtherShape], seconds: float | None) -> tuple[list[Tuned], bool]:
    """Tune shapes one after another, each with its share of the time. The flag: whether Ctrl-C (or SIGTERM) ended it."""
    deadline = None if seconds is None else time.monotonic() + seconds
    done: list[Tuned] = []
    # a scheduler stops a job with SIGTERM: it ends as Ctrl-C does
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number, shape in enumerate(shapes, 1):
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) / (len(shapes) - number + 1)
            tuner.watch.shape_of(number, len(shapes))
            done.append(tuner.tune(shape, left))
    except KeyboardInterrupt:
        if tuner.last is not None and tuner.last not in done:
            done.append(tuner.last)
        return done, True
    finally:
        signal.signal(signal.SIGTERM, before)
        tuner.backend.close()
    return done, False


def _show_report(report: Report, as_json: bool) -> None:
    """What came of `--workers`: the summary or the document, what is not as it should be on stderr, the exit code."""
    if as_json:
        print_json(report.to_json())
    else:
        print_table([row_of_document(document) for document in report.results])
    console = err()
    for left in (*report.elsewhere, *report.failed, *report.unfinished):
        on = "" if left.gpu is None else f" on {left.gpu}"
        console.print(f"kdatune: {left.shape}{on}: {left.reason}")
    if report.interrupted:
        stored = sum(document["measured"] for document in report.results)
        console.print(f"kdatune: interrupted; {stored} finished trials are stored, the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    if not report.complete:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Row:
    """One line of the summary."""

    shape: Shape | OtherShape
    trials: int | None
    default_us: float | None
    best_us: float | None
    decision: str

    @property
    def speedup(self) -> float | None:
        return self.default_us / self.best_us if self.default_us and self.best_us else None


def row_of(tuned: Tuned) -> Row:
    """The summary line of a tuned shape."""
    said = tuned.promotion
    decision = tuned.state if said is None else f"{said.decision}: {said.reason}"
    return Row(tuned.shape, tuned.trials, tuned.default_us, tuned.best_us, decision)


def row_of_document(document: Json) -> Row:
    """The summary line of a tuned shape's document."""
    said = document["promotion"]
    decision = document["state"] if said is None else f"{said['decision']}: {said['reason']}"
    return Row(
        parse_shape(document["shape"]), document["trials"], document["default_us"], document["best_us"], decision
    )


def print_table(rows: Sequence[Row]) -> None:
    """One line a shape and the geomean of the speed-ups, for people."""
    table = Table(box=None, pad_edge=False)
    for name in ("shape", "trials", "default", "best", "speed-up", "decision"):
        left = name in ("shape", "decision")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "decision")
    for row in rows:
        table.add_row(
            row.shape.key(),
            "-" if row.trials is None else str(row.trials),
            show_us(row.default_us),
            show_us(row.best_us),
            "-" if row.speedup is None else f"{row.speedup:.3f}x",
            row.decision,
        )
    console = out()
    console.print(table, markup=False)
    speedups = [row.speedup for row in rows if row.speedup is not None]
    if len(speedups) > 1:
        console.print(f"geomean speed-up over the default: {geometric_mean(speedups):.3f}x of {len(speedups)} shapes")
