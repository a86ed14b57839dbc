"""A small stored world to build tests on."""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewMeasurement

H200 = KNOWN_GPUS["NVIDIA H200"]
SHAPE = shape_of(N=1, H=96, T=8192)
BUILD = Build("k" * 16, "s" * 16, "1", "3.6.0", "12.9", "2.13.0", "13.0", "580.1")


@dataclass(frozen=True)
class World:
    """Ids of one GPU model, build and problem, and short ways to add rows that refer to them."""

    gpu_id: int
    build_id: int
    problem_id: int
    gpu: Gpu = H200
    build: Build = BUILD
    shape: Shape = SHAPE
    kernel: str = "kda"

    def config(self, **k2: Any) -> LaunchConfig:
        return LaunchConfig(K1Config(), replace(K2Config(), **k2))

    def new(self, config: LaunchConfig | None = None, **changes: Any) -> NewMeasurement:
        config = config or self.config()
        values: dict[str, Any] = {
            "run_id": None,
            "kernel": self.kernel,
            "gpu_id": self.gpu_id,
            "problem_id": self.problem_id,
            "build_id": self.build_id,
            "config_json": canonical(config),
            "config_hash": digest(config),
            "outcome": Outcome.OK,
            "median_us": 610.2,
        }
        return NewMeasurement(**values | changes)

    def promote(self, s: Session, measurement_id: int, **changes: Any) -> int:
        values: dict[str, Any] = {
            "kernel": self.kernel,
            "gpu_id": self.gpu_id,
            "problem_id": self.problem_id,
            "measurement_id": measurement_id,
            "baseline_measurement_id": None,
            "default_us": 625.0,
            "gain": 1.024,
            "gain_low": 1.01,
            "gain_high": 1.03,
            "decision": "promoted",
            "reason": "faster than the default in a paired run",
        }
        return writes.promote(s, **values | changes)

    def run(self, s: Session, **changes: Any) -> int:
        values: dict[str, Any] = {
            "trigger": "cli",
            "kernel": self.kernel,
            "gpu_id": self.gpu_id,
            "problem_id": self.problem_id,
            "backend": "replay",
            "sampler": "TPESampler",
            "budget_trials": 200,
            "budget_seconds": 600.0,
            "seed": 7,
            "optuna_version": "5.0.0",
        }
        return writes.start_run(s, **values | changes)


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(engine: Engine) -> MakeWorld:
    """Store a GPU model, a build and a problem and give their ids."""

    def make(gpu: Gpu = H200, shape: Shape = SHAPE, build: Build = BUILD, kernel: str = "kda") -> World:
        with writing(engine) as s:
            ids = (writes.put_gpu(s, gpu), writes.put_build(s, build), writes.put_problem(s, kernel, shape))
        return World(*ids, gpu=gpu, build=build, shape=shape, kernel=kernel)

    return make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()
