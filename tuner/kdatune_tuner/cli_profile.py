"""`kdatune profile` and `kdatune explain`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine

from kdatune_kernels.errors import ConfigError
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.space import default_config
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import WHOLE_WORDS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import is_whole
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.backend_gpu import GpuBackend
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import OneShapeOption
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import known_gpu
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.ncu.collect import STAGES
from kdatune_tuner.ncu.collect import stages_in
from kdatune_tuner.ncu.explain import Sentence
from kdatune_tuner.ncu.metrics import BY_FIELD
from kdatune_tuner.ncu.metrics import limiters
from kdatune_tuner.ncu.profiling import PICKS
from kdatune_tuner.ncu.profiling import How
from kdatune_tuner.ncu.profiling import ShapeProfile
from kdatune_tuner.ncu.profiling import profile_json
from kdatune_tuner.ncu.profiling import profile_shape
from kdatune_tuner.ncu.report import StageProfile
from kdatune_tuner.ncu.unavailable import Unavailable
from kdatune_tuner.ncu.why import Subject
from kdatune_tuner.ncu.why import Why
from kdatune_tuner.ncu.why import explain_shape
from kdatune_tuner.objective import Backend
from kdatune_tuner.progress import show_us
from kdatune_tuner.settings import Settings
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.profiles import profiled_gpus

# What the table for people shows; --json and the service have all.
_SHOWN = (
    "issue_active_pct",
    "latency_per_issue",
    "barrier_stall_per_issue",
    "long_scoreboard_stall_per_issue",
    "short_scoreboard_stall_per_issue",
    "mio_throttle_stall_per_issue",
    "executed_inst",
    "registers",
    "smem_bytes",
    "theoretical_occupancy_pct",
    "achieved_occupancy_pct",
    "waves",
    "sm_active_pct",
    "dram_throughput_pct",
    "l2_throughput_pct",
    "tensor_pipe_active_pct",
    "replay_cycles",
    "replay_duration_us",
)


def profile(
    shape: OneShapeOption,
    config: Annotated[str, typer.Option(help=f"which configs, of {', '.join(PICKS)}")] = ",".join(PICKS),
    also: Annotated[
        list[str] | None,
        typer.Option(help='one more config, e.g. {"k1": {"num_warps": 8}}; what it does not say is as in the default'),
    ] = None,
    keep_report: Annotated[
        bool, typer.Option("--keep-report", help="keep the .ncu-rep in KDATUNE_REPORTS_DIR")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Take the hardware counters of a shape's configs on this machine's card, store them, and say why they differ."""
    settings = read_settings()
    wanted = parse_shape(shape)
    if wanted.T == 0:
        raise UsageError(f"{wanted.key()} has no tokens: there is nothing to profile")
    picks = [name.strip() for name in config.split(",") if name.strip()]
    with database(settings.database_url) as engine:
        backend = GpuBackend(trial_timeout_s=settings.trial_timeout_s, paired_rounds=settings.paired_rounds)
        done, why = take(engine, backend, wanted, picks, also or (), settings, keep=keep_report)
    if as_json:
        print_json(profile_json(done) | {"explanation": why.to_json()["explanation"]})
    else:
        _print_profile(done)
        _print_sentences(out(), why)
        if done.report_file is not None:
            out().print(f"report: {Path(settings.reports_dir, done.report_file)}", soft_wrap=True, markup=False)
    failures = done.failures()
    for failure in failures:
        err().print(f"kdatune: {failure.text()}", soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def take(
    engine: Engine,
    backend: Backend,
    shape: Shape,
    picks: Sequence[str],
    also: Sequence[str],
    settings: Settings,
    *,
    keep: bool,
) -> tuple[ShapeProfile, Why]:
    """Profile a shape and explain what is stored of it then.

    Raises:
        UsageError: an unknown pick, or a config of `also` that cannot be read or cannot run.
    """
    extra = [read_also(text, shape, backend.gpu) for text in also]
    how = How(
        ncu=settings.ncu, timeout_s=settings.profile_timeout_s, reports_dir=Path(settings.reports_dir) if keep else None
    )
    done = profile_shape(engine, backend, shape, picks, how, extra)
    with reading(engine) as s:
        return done, explain_shape(s, backend.gpu, shape)


def read_also(text: str, shape: Shape, gpu: Gpu) -> LaunchConfig:
    """A config as JSON. A stage that it names takes the stage's own defaults for what it leaves out.

    Raises:
        UsageError: no JSON object, or an unknown field or value; the message names it.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--also is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError("--also is nested too deeply") from error
    try:
        return from_json(LaunchConfig, _base(data, shape, gpu) | data if isinstance(data, dict) else data, strict=False)
    except ConfigError as error:
        raise UsageError(f"--also: {error}") from error


def _base(data: Json, shape: Shape, gpu: Gpu) -> Json:
    """What a config takes where it leaves a stage out: the default; that of two stages where it names one of theirs."""
    if is_whole(data.get("k2")):
        return {"k1": to_json(K1Config())}
    of = split_default if {"k1", "k2"} & set(data) else default_config
    return to_json(of(shape, gpu))


def explain(
    shape: OneShapeOption,
    gpu: Annotated[str | None, typer.Option("--gpu", help="a GPU model; needed where several were profiled")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say why the configs of a shape differ, from the counters that are stored."""
    wanted = parse_shape(shape)
    with database(read_settings().database_url) as engine:
        card = _profiled_card(engine, wanted, gpu)
        with reading(engine) as s:
            why = explain_shape(s, card, wanted)
    if not why.subjects:
        raise _no_profile(wanted, f" on {card.name}")
    if as_json:
        print_json(why.to_json())
        return
    console = out()
    for one in why.subjects:
        console.print(f"{one.label}: {show_us(one.measured_us)} measured; {_words(one)}", soft_wrap=True, markup=False)
        for stage, reason in one.unavailable.items():
            console.print(f"  {stage.upper()} has no counters: {reason}", soft_wrap=True, markup=False)
    _print_sentences(console, why)


def _no_profile(shape: Shape, where: str = "") -> KdatuneError:
    key = shape.key()
    return KdatuneError(f"{key} has no stored profile{where}; take one with kdatune profile --shape {key}")


def _profiled_card(engine: Engine, shape: Shape, name: str | None) -> Gpu:
    if name is not None:
        return known_gpu(name, engine)
    with reading(engine) as s:
        cards = profiled_gpus(s, shape)
    names = sorted({card.name for card in cards})
    if not cards:
        raise _no_profile(shape)
    if len(names) > 1:
        raise UsageError(f"{shape.key()} is profiled on {', '.join(names)}; say which with --gpu")
    return cards[-1]


def _print_profile(done: ShapeProfile) -> None:
    """One table a stage: a row a counter, a column a config."""
    console = out()
    console.print(
        f"{done.shape.key()} on {done.gpu}: {len(done.configs)} configs, {done.seconds:.1f} s "
        f"({done.ncu_seconds:.1f} s in ncu {done.ncu_version or '-'}, driver {done.driver or '-'})",
        soft_wrap=True,
        markup=False,
    )
    for stage in STAGES:
        configs = [c for c in done.configs if stage in stages_in(c.config)]
        if not configs:
            continue
        table = Table(box=None, pad_edge=False)
        table.add_column(stage.upper())
        table.add_column("unit")
        for c in configs:
            table.add_column(f"{c.label} (with K1)" if c.config.k2.whole else c.label, justify="right")
        profiles = [c.stages.get(stage) for c in configs]
        for name in _SHOWN:
            table.add_row(name, BY_FIELD[name].unit, *(_cell(profile, name) for profile in profiles))
        table.add_row("occupancy held by", "", *(_limiter(profile) for profile in profiles))
        console.print(table, markup=False)
    times = ", ".join(f"{c.label} {show_us(c.measured_us)}" for c in done.configs)
    console.print(f"benchmark, K1 and K2 end to end: {times}", soft_wrap=True, markup=False)


def _cell(profile: StageProfile | Unavailable | None, name: str) -> str:
    """A counter for people; "-" where it was not measured."""
    if not isinstance(profile, StageProfile) or name not in profile.counters:
        return "-"
    value = profile.counters[name]
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.2f}"


def _limiter(profile: StageProfile | Unavailable | None) -> str:
    if not isinstance(profile, StageProfile):
        return "-"
    return ", ".join(limiters(profile.counters)) or "-"


def _words(one: Subject) -> str:
    """What a reader looks at first in a config."""
    k1, k2 = one.config.k1, one.config.k2
    if k2.whole:
        return WHOLE_WORDS[k2.variant]
    k2_more = [f"maxnreg {k2.maxnreg}"] if k2.maxnreg is not None else []
    k2_more += [f"{k2.segments} segments"] if k2.segments > 1 else []
    k2_words = [f"{k2.block_v} columns", f"{k2.stages_in} stages in", f"{k2.stages_out} out", *k2_more]
    return f"K1 {k1.variant} {k1.num_warps} warp(s), K2 {k2.variant} {', '.join(k2_words)}"


def _print_sentences(console: Console, why: Why) -> None:
    for stage in STAGES:
        for sentence in why.sentences[stage]:
            console.print(_line(sentence), soft_wrap=True, markup=False)


def _line(sentence: Sentence) -> str:
    """Causes are indented below the headline that they belong to."""
    indent = "  " if sentence.rule.startswith(("cause_", "against_")) else ""
    return f"{indent}{sentence.text}"
