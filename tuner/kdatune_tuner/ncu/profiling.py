"""Profiles a shape: champion, default and runner-up under Nsight Compute, into the store.

A profile belongs to a measurement, so a config that this build has not measured yet is measured first: its time comes from
the benchmark, never from the profiler. Where counters cannot be had, that is stored with the reason and the remedy.
"""

import hashlib
import os
import time
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import cast

from sqlalchemy import Engine

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.ledger import Known
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.ncu.collect import LAUNCHES
from kdatune_tuner.ncu.collect import Collected
from kdatune_tuner.ncu.collect import Stage
from kdatune_tuner.ncu.collect import collect
from kdatune_tuner.ncu.collect import stages_in
from kdatune_tuner.ncu.collect import stages_of
from kdatune_tuner.ncu.metrics import stored_form
from kdatune_tuner.ncu.report import StageProfile
from kdatune_tuner.ncu.report import read_report
from kdatune_tuner.ncu.unavailable import Unavailable
from kdatune_tuner.ncu.unavailable import unavailable
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import stage_of
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.profiles import put_profile
from kdatune_tuner.store.records import NewProfile

CHAMPION, DEFAULT, RUNNER_UP = "champion", "default", "runner-up"
PICKS = (CHAMPION, DEFAULT, RUNNER_UP)

MAX_REPORT_BYTES = 64 << 20
"""A larger report is not kept: six stages of three launches make about 1 MB."""


@dataclass(frozen=True)
class How:
    """How profiles are taken. reports_dir: where the report is kept; None: it is dropped once it is read."""

    ncu: str | None = None
    timeout_s: float = 120.0
    launches: int = LAUNCHES
    reports_dir: Path | None = None
    trigger: str = "profile"


@dataclass
class ConfigProfile:
    """What came of one config: its labels, its measurement, and each stage's profile or why there is none."""

    labels: list[str]
    config: LaunchConfig
    measurement: Known | None = None
    stages: dict[str, StageProfile | Unavailable] = field(default_factory=dict)
    profile_ids: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return ", ".join(self.labels)

    @property
    def measured_us(self) -> float | None:
        return None if self.measurement is None else self.measurement.result.median_us


@dataclass
class ShapeProfile:
    """What came of profiling a shape."""

    shape: Shape
    gpu: str
    configs: list[ConfigProfile]
    ncu_version: str | None = None
    driver: str | None = None
    report_file: str | None = None
    ncu_seconds: float = 0.0
    seconds: float = 0.0

    def failures(self) -> list[Unavailable]:
        """The distinct reasons why stages have no counters."""
        found = (p for c in self.configs for p in c.stages.values() if isinstance(p, Unavailable))
        return list(dict.fromkeys(found))


def pick_configs(ledger: Ledger, names: Iterable[str], also: Iterable[LaunchConfig] = ()) -> list[ConfigProfile]:
    """The configs to profile, one entry a config, in the order asked for. A name that stands for nothing is left out.

    Raises:
        UsageError: an unknown name, a config that cannot run on the card, or nothing to profile.
    """
    gpu, shape = ledger.backend.gpu, ledger.shape
    champion = ledger.champion()
    known = cast("Mapping[LaunchConfig, Known]", ledger.known("kda"))
    named: dict[str, LaunchConfig | None] = {
        CHAMPION: champion.config if champion else None,
        DEFAULT: default_config(shape, gpu),
        RUNNER_UP: _runner_up(known, champion.config if champion else None),
    }
    wanted: list[tuple[str, LaunchConfig]] = []
    for name in names:
        if name not in named:
            raise UsageError(f"unknown config {name!r}; use {', '.join(PICKS)}, or --also with a config as JSON")
        config = named[name]
        if config is not None:
            wanted.append((name, config))
    for config in also:
        reason = config_ok(config, shape, gpu)
        if reason is not None:
            raise UsageError(f"this config cannot run for {shape.key()} on {gpu.name}: {reason}")
        wanted.append(("also", config))
    if not wanted:
        raise UsageError(f"nothing is known for {shape.key()} on {gpu.name}; run kdatune tune, or profile the default")
    found: dict[LaunchConfig, ConfigProfile] = {}
    for label, config in wanted:
        found.setdefault(config, ConfigProfile([], config)).labels.append(label)
    return list(found.values())


def _runner_up(known: Mapping[LaunchConfig, Known], champion: LaunchConfig | None) -> LaunchConfig | None:
    """The fastest measured pair other than the champion; without a champion, the second fastest."""
    ok = {config: k.result.median_us for config, k in known.items() if k.result.ok and k.result.median_us is not None}
    ranked = [config for config in sorted(ok, key=lambda config: ok[config]) if config != champion]
    if champion is None:
        ranked = ranked[1:]
    return ranked[0] if ranked else None


def profile_shape(
    engine: Engine, backend: Backend, shape: Shape, picks: Sequence[str], how: How, also: Sequence[LaunchConfig] = ()
) -> ShapeProfile:
    """Measure what is not measured yet, profile, store. Gives the backend back: the profiler wants the card alone.

    Raises:
        UsageError: as `pick_configs`.
        KdatuneError: no card, or the database refuses.
    """
    started = time.monotonic()
    ledger = Ledger(engine, backend, shape)
    try:
        configs = pick_configs(ledger, picks, also)
        _measure(ledger, configs, how.trigger)
    finally:
        backend.close()
    done = ShapeProfile(shape, backend.gpu.name, configs)
    for precision in dict.fromkeys(c.config.precision for c in configs):
        _collect(done, [c for c in configs if c.config.precision == precision], how)
    _store(engine, done)
    done.seconds = time.monotonic() - started
    return done


def _measure(ledger: Ledger, configs: Sequence[ConfigProfile], trigger: str) -> None:
    """Give every config its measurement; one that fails keeps its typed reason instead of a profile."""
    known = ledger.known("kda")
    missing = [c for c in configs if c.config not in known]
    for c in configs:
        c.measurement = known.get(c.config)
    if missing:
        with ledger.run("kda", trigger=trigger, sampler="none", trials=len(missing), seconds=None, seed=None) as run:
            for c in missing:
                c.measurement = ledger.add(run, "kda", c.config, ledger.backend.measure_pair(ledger.shape, c.config))
    for c in configs:
        if c.measurement is not None and not c.measurement.result.ok:
            told = f"measured {c.measurement.result.outcome}: {c.measurement.result.detail or 'no detail'}"
            c.stages = dict.fromkeys(stages_in(c.config), unavailable("config_failed", told))


def _collect(done: ShapeProfile, configs: Sequence[ConfigProfile], how: How) -> None:
    """Run the profiler on the stages of configs of one precision, and hand out what it found."""
    todo = [c for c in configs if not c.stages]
    if not todo:
        return
    got = collect(
        done.shape,
        stages_of([c.config for c in todo]),
        precision=todo[0].config.precision,
        ncu=how.ncu,
        timeout_s=how.timeout_s,
        launches=how.launches,
    )
    read = got if isinstance(got, Unavailable) else read_report(got.report)
    if isinstance(got, Collected):
        done.ncu_version, done.driver = got.ncu_version, got.driver
        done.ncu_seconds += got.seconds
        if how.reports_dir is not None and not isinstance(read, Unavailable):
            done.report_file = keep_report(how.reports_dir, got.report)
    for c in todo:
        for stage in stages_in(c.config):
            c.stages[stage] = _of_stage(Stage(stage, stage_of(c.config, stage)), got, read)


def _of_stage(
    stage: Stage, got: Collected | Unavailable, read: Mapping[str, StageProfile] | Unavailable
) -> StageProfile | Unavailable:
    if isinstance(got, Collected) and stage.name in got.outcomes:
        failed = got.outcomes[stage.name]
        return unavailable("config_failed", f"{failed['outcome']}: {failed['detail']}")
    if isinstance(read, Unavailable):
        return read
    if stage.name not in read or not read[stage.name].counters:
        return unavailable("bad_report", f"the report holds no counters of {stage.name}")
    return read[stage.name]


def keep_report(folder: Path, report: bytes) -> str:
    """Keep a report under a name made of its content, and return the name.

    Raises:
        KdatuneError: the folder cannot be written, or the report is too large.
    """
    if len(report) > MAX_REPORT_BYTES:
        raise KdatuneError(f"the report has {len(report)} bytes; more than {MAX_REPORT_BYTES} are not kept")
    name = f"{hashlib.sha256(report).hexdigest()[:16]}.ncu-rep"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{name}.{os.getpid()}.part"
        part.write_bytes(report)
        part.replace(folder / name)
    except OSError as error:
        raise KdatuneError(
            f"the report cannot be kept in {folder}: {error.strerror}; set KDATUNE_REPORTS_DIR"
        ) from error
    return name


def _store(engine: Engine, done: ShapeProfile) -> None:
    with writing(engine) as s:
        for c in done.configs:
            if c.measurement is None:
                continue
            for stage, profile in c.stages.items():
                c.profile_ids[stage] = put_profile(s, _new_profile(done, c.measurement.measurement_id, stage, profile))


def _new_profile(
    done: ShapeProfile, measurement_id: int, stage: str, profile: StageProfile | Unavailable
) -> NewProfile:
    if isinstance(profile, Unavailable):
        return NewProfile(
            measurement_id=measurement_id,
            stage=stage,
            unavailable_reason=profile.text(),
            ncu_version=done.ncu_version,
            driver=done.driver,
        )
    return NewProfile(
        measurement_id=measurement_id,
        stage=stage,
        counters=stored_form(profile.counters),
        issue_active_pct=profile.counters.get("issue_active_pct"),
        barrier_stall_per_issue=profile.counters.get("barrier_stall_per_issue"),
        ncu_version=done.ncu_version,
        driver=done.driver,
        report_file=done.report_file,
    )


def profile_json(done: ShapeProfile) -> Json:
    """The document that `kdatune profile --json` prints, without the explanation."""
    return {
        "shape": done.shape.key(),
        "gpu": done.gpu,
        "ncu_version": done.ncu_version,
        "driver": done.driver,
        "report_file": done.report_file,
        "seconds": round(done.seconds, 3),
        "ncu_seconds": round(done.ncu_seconds, 3),
        "configs": [
            {
                "labels": c.labels,
                "config": to_json(c.config),
                "measurement_id": None if c.measurement is None else c.measurement.measurement_id,
                "measured_us": c.measured_us,
                "stages": {
                    stage: _stage_json(c.profile_ids.get(stage), profile) for stage, profile in c.stages.items()
                },
            }
            for c in done.configs
        ],
    }


def _stage_json(profile_id: int | None, profile: StageProfile | Unavailable) -> Json:
    if isinstance(profile, Unavailable):
        why = {"code": profile.code, "reason": profile.reason, "remedy": profile.remedy}
        return {"profile_id": profile_id, "counters": None, "unavailable": why}
    return {
        "profile_id": profile_id,
        "kernels": list(profile.kernels),
        "launches": profile.launches,
        "counters": stored_form(profile.counters),
        "absent": list(profile.absent),
        "unavailable": None,
    }
