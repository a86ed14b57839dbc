"""A device module that needs no card: it times by formula and fails as it is told. The child process imports it by name.

KDATUNE_FAKE names a folder. `fates.json` there maps the digest of a config to what becomes of it; every measurement appends
a line to `calls.txt`, so that a test can count what was measured. `unsteady.txt` there says how many whole launches are
still timed 15 % too long; below 0, every second.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from kdatune_kernels.errors import MeasurementError
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import gpu_of


@dataclass(frozen=True)
class CheckResult:
    """As bench.CheckResult, which would import torch: two seconds a child."""

    outcome: str
    detail: str | None = None
    o_error_ratio: float | None = None
    state_error_ratio: float | None = None
    registers: int | None = None
    spills: int | None = None
    smem_bytes: int | None = None
    effective_num_warps: int | None = None
    compile_s: float | None = None


FOLDER = Path(os.environ["KDATUNE_FAKE"])


def current():
    if "KDATUNE_FAKE_CARD" in os.environ:
        return KNOWN_GPUS[os.environ["KDATUNE_FAKE_CARD"]]
    return gpu_of(os.environ.get("KDATUNE_FAKE_NAME", "Fake A100"), "8.0", 108, 40 << 30)


def current_build():
    return Build("fake", os.environ.get("KDATUNE_FAKE_SPACE", "fake"), "1", "3.6.0", "12.9", "2.13", "13.0", "580.1")


def clock_state():
    return 1410, "none"


def small_problem(device):
    return "small"


def open_problem(shape, device):
    if shape.T > 1 << 30:
        raise MeasurementError("launch_error", f"{shape.key()} does not fit the free device memory")
    return shape


def warm_up(device):
    pass


def fate(config):
    path = FOLDER / "fates.json"
    fates = json.loads(path.read_text()) if path.exists() else {}
    return fates.get(digest(config), {})


def note(what, config):
    with (FOLDER / "calls.txt").open("a") as calls:
        calls.write(f"{what} {digest(config)} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')}\n")


def check(problem, kernel, config):
    note("check", config)
    parts = [config.k1, config.k2] if isinstance(config, LaunchConfig) else [config]
    for part in parts:
        match fate(part).get("check"):
            case "abort":
                os.write(2, b"LLVM ERROR: cannot select\n")
                os.abort()
            case "hang":
                while True:
                    time.sleep(1)  # whoever else is on the machine needs the processor
            case "mistake":
                raise KeyError("a mistake of ours")
            case "print":
                os.write(1, b"a compiler that talks\n")
            case None:
                pass
            case outcome:
                return CheckResult(outcome, f"told to be {outcome}", o_error_ratio=0.5)
    return CheckResult("ok", o_error_ratio=0.001, state_error_ratio=0.002, registers=96, spills=0, smem_bytes=4096)


def base_us(config):
    if isinstance(config, LaunchConfig):
        return base_us(config.k1) + base_us(config.k2)
    told = fate(config).get("us")
    if told is not None:
        return told
    # no two configs alike, none below 100
    return 100.0 + int(digest(config)[:4], 16) / 1000.0 + (10.0 if isinstance(config, K1Config) else 0.0)


def steadiness(config):
    path = FOLDER / "unsteady.txt"
    left = int(path.read_text()) if path.exists() and isinstance(config, LaunchConfig) else 0
    if left:
        path.write_text(str(left - 1))
    return 1.15 if left > 0 or left % 2 else 1.0


def time_us(problem, config, samples=5):
    note("time", config)
    time.sleep(float(os.environ.get("KDATUNE_FAKE_SECONDS", "0")))
    parts = [config.k1, config.k2] if isinstance(config, LaunchConfig) else [config]
    for part in parts:
        if "time" in fate(part):
            raise MeasurementError(fate(part)["time"], "told to fail when timed")
    us = base_us(config) * steadiness(config)
    return [us * (1.0 + 0.001 * i) for i in range(samples)]


def time_interleaved_us(problem, configs, samples=9):
    # the clock drifts by a tenth over the run: only pairs of the same round can be compared
    return [[base_us(config) * (1.0 + 0.1 * i / samples) for i in range(samples)] for config in configs]
