"""Runs Nsight Compute on the kernels. Everything that can keep counters away comes back as an `Unavailable`.

Clocks are never changed (--clock-control none). Caches are flushed before each replay pass. The stages of all configs are
launched by one process (kdatune_kernels.profile_target), each in an NVTX range that carries its label.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kdatune_kernels.spec import Json
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import to_json
from kdatune_tuner.ncu.metrics import METRICS
from kdatune_tuner.ncu.unavailable import Unavailable
from kdatune_tuner.ncu.unavailable import said_by_ncu
from kdatune_tuner.ncu.unavailable import unavailable
from kdatune_tuner.objective import stage_of

STAGES = ("k1", "k2")
TARGET = "kdatune_kernels.profile_target"
LAUNCHES = 3
"""Profiled launches of a stage; the stored value of a counter is their median."""

_USUAL_PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda/bin/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")
_VERSION_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Stage:
    """One kernel to profile. Configs that share it share its profile."""

    stage: str
    config: K1Config | K2Config

    @property
    def label(self) -> str:
        return digest(self.config)

    @property
    def name(self) -> str:
        """The name that launches of it carry in the report."""
        return f"{self.stage}/{self.label}"


@dataclass(frozen=True)
class Collected:
    """A run of ncu that left a report. outcomes: by Stage.name, for stages that could not run; seconds: wall clock."""

    report: bytes
    ncu_version: str
    driver: str
    gpu: Json
    build: Json
    outcomes: dict[str, Json]
    command: tuple[str, ...]
    seconds: float


def stages_in(config: LaunchConfig) -> tuple[str, ...]:
    """The stages that are profiled of a config: K1 and K2, or K2 alone where K1 is part of it."""
    return ("k2",) if config.k2.whole else STAGES


def stages_of(configs: Sequence[LaunchConfig]) -> list[Stage]:
    """The distinct stages that the configs launch: all K1 first, then all K2."""
    found = [Stage(stage, stage_of(c, stage)) for stage in STAGES for c in configs if stage in stages_in(c)]
    return list(dict.fromkeys(found))


def find_ncu(named: str | None = None) -> str | None:
    """The ncu program: as named, else on the PATH, else the newest one in the usual places."""
    if named is not None:
        return shutil.which(named)
    on_path = shutil.which("ncu")
    if on_path is not None:
        return on_path
    found = [p for place in _USUAL_PLACES for p in sorted(Path("/").glob(place.lstrip("/"))) if os.access(p, os.X_OK)]
    return str(found[-1]) if found else None


def ncu_version(ncu: str) -> str | None:
    """The version an ncu reports, such as 2025.3.1.0; None when it does not answer."""
    try:
        answer = subprocess.run(
            [ncu, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"Version (\d+(?:\.\d+)+)", answer.stdout)
    return found.group(1) if found else None


def ncu_command(ncu: str, report: Path, target: Sequence[str]) -> list[str]:
    """The command line of a profile run. It must never change a clock."""
    return [
        ncu,
        *("--config-file", "off"),
        *("--clock-control", "none"),
        *("--cache-control", "all"),
        *("--replay-mode", "kernel"),
        *("--profile-from-start", "off"),
        "--nvtx",
        *("--set", "none"),
        *("--metrics", ",".join(metric.counter for metric in METRICS)),
        "--force-overwrite",
        *("--export", str(report)),
        *target,
    ]


def collect(
    shape: Shape,
    stages: Sequence[Stage],
    *,
    precision: str = "fp16",
    ncu: str | None = None,
    timeout_s: float = 120.0,
    launches: int = LAUNCHES,
) -> Collected | Unavailable:
    """Profile stages of a shape on the card of this machine.

    Args:
        precision: that of the tiles K1 hands to K2 (LaunchConfig.precision).
        ncu: the program, where it is not found by itself.
        timeout_s: wall clock after which ncu and everything it started are ended.
    """
    program = find_ncu(ncu)
    if program is None:
        where = "on the PATH" if ncu is None else f"at {ncu}"
        return unavailable("ncu_not_found", f"there is no ncu {where}")
    version = ncu_version(program)
    if version is None:
        return unavailable("ncu_not_found", f"{program} does not say its version")
    with tempfile.TemporaryDirectory(prefix="kdatune-ncu-") as folder:
        request, answer, report = (Path(folder, name) for name in ("request.json", "answer.json", "stages.ncu-rep"))
        request.write_text(json.dumps(_request(shape, stages, precision, launches, answer)))
        command = ncu_command(program, report, [sys.executable, "-m", TARGET, str(request)])
        started = time.monotonic()
        exit_code, output = _run(command, timeout_s)
        seconds = time.monotonic() - started
        said: Json = json.loads(answer.read_text()) if answer.exists() else {}
        failure = _failure(exit_code, output, said, report, timeout_s)
        if failure is not None:
            return failure
        return Collected(
            report=report.read_bytes(),
            ncu_version=version,
            driver=said["build"]["driver"],
            gpu=said["gpu"],
            build=said["build"],
            outcomes={name: one for name, one in said["outcomes"].items() if one["outcome"] != "ok"},
            command=tuple(command),
            seconds=seconds,
        )


def _request(shape: Shape, stages: Sequence[Stage], precision: str, launches: int, answer: Path) -> Json:
    return {
        "shape": shape.key(),
        "stages": [{"stage": s.stage, "label": s.label, "config": to_json(s.config)} for s in stages],
        "precision": precision,
        "launches": launches,
        "device": "cuda",
        "answer": str(answer),
    }


def _failure(exit_code: int | None, output: str, said: Json, report: Path, timeout_s: float) -> Unavailable | None:
    """Why the run is of no use; None when it is. What ncu names comes first: a target may fail because of it."""
    if exit_code is None:
        return unavailable("timeout", f"ncu was not done after {timeout_s:g} s")
    if said.get("outcomes") and report.exists():
        return None
    named = said_by_ncu(output, exit_code)
    if named.code not in ("ncu_failed", "no_kernels"):
        return named
    if "refused" in said:
        return unavailable("no_card", said["refused"])
    if not said:
        last = (output.strip().splitlines() or ["nothing"])[-1]
        return unavailable("target_failed", f"the profiled process left no answer; last said: {last}"[:300])
    failed = [f"{name}: {one['outcome']}, {one['detail']}" for name, one in said["outcomes"].items() if one["detail"]]
    return unavailable("config_failed", "; ".join(failed)[:300]) if failed else named


def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit code and all that was printed; None when the time was up. ncu's children end with it."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            exit_code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        return exit_code, said.read().decode(errors="replace")
