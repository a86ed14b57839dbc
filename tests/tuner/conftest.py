"""Recordings and devices to tune on: a real sweep, a small made-up one, and a device that fails as it is told."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdatune_kernels.space import split_default
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.backend_gpu import GpuBackend
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.recording import SweepWriter
from kdatune_tuner.recording import load_recording
from kdatune_tuner.recording import meta_row
from kdatune_tuner.worker import DeviceModules
from kdatune_tuner.worker import Worker

REAL_SWEEP = Path(__file__).parent.parent / "data" / "h200-earlier-kernels.jsonl.gz"
H200 = KNOWN_GPUS["NVIDIA H200"]
SHAPE = shape_of(1, 48, 2048)
BUILD = Build("kernels", "space", "1", "3.6.0", "12.9", "2.13", "13.0", "580.1")


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What the commands of a test see: no settings of this machine, a database file of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KDATUNE_")}
    return kept | {"KDATUNE_DATABASE_URL": f"sqlite:///{tmp_path / 'kdatune.db'}"}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """`kdatune` as a real process, to its end; warnings are errors."""

    def call(*arguments: str | Path, **more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "kdatune_tuner.cli", *map(str, arguments)],
            env=environment | {"PYTHONWARNINGS": "error"} | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return call


@pytest.fixture(scope="session")
def real_sweep_path() -> Path:
    """An excerpt of a real sweep: 72 K1 and 448 K2 configs on three shapes of an H200; no default, no pairs."""
    return REAL_SWEEP


@pytest.fixture
def real_sweep(real_sweep_path: Path) -> ReplayBackend:
    return ReplayBackend(load_recording(real_sweep_path))


SweepMaker = Callable[..., ReplayBackend]


@pytest.fixture
def make_sweep(tmp_path: Path) -> SweepMaker:
    """A made-up sweep of few configs: K1 and K2 configs with their samples, the first of each being the default's."""

    def make(
        k1_us: list[float],
        k2_us: list[float],
        pairs: dict[tuple[int, int], float] | None = None,
        *,
        shape: Shape = SHAPE,
        build: Build = BUILD,
        outcomes: dict[tuple[str, int], str] | None = None,
        spread: float = 0.001,
        name: str = "made.jsonl.gz",
    ) -> ReplayBackend:
        default = split_default(shape, H200)
        k1s = [default.k1, *(K1Config(num_warps=w, chunks_per_program=c) for w in (1, 2, 4, 8) for c in (1, 2, 4))]
        k2s = [default.k2, *(K2Config(block_v=b, stages_in=s) for b in (32, 64, 128) for s in (1, 2, 3, 4))]
        writer = SweepWriter(tmp_path / name)
        writer.add(
            meta_row(H200, build, recorded_at="2026-11-29T00:00:00Z", command="made up", regime="none", spaces={})
        )
        for kernel, configs, times in (("k1", k1s, k1_us), ("k2", k2s, k2_us)):
            for i, us in enumerate(times):
                outcome = (outcomes or {}).get((kernel, i), "ok")
                writer.add({"t": "check", "kernel": kernel, "i": i, "config": to_json(configs[i]), "outcome": outcome})
                if outcome == "ok":
                    writer.add(
                        {"t": "time", "kernel": kernel, "i": i, "shape": shape.key(), "samples_us": around(us, spread)}
                    )
        for (i1, i2), us in (pairs or {}).items():
            writer.add({"t": "pair", "i1": i1, "i2": i2, "shape": shape.key(), "samples_us": around(us, spread)})
        writer.finish()
        return ReplayBackend(load_recording(tmp_path / name))

    return make


def around(us: float, spread: float) -> list[float]:
    """Five sorted samples about a median."""
    return [us * (1.0 + spread * step) for step in (-2, -1, 0, 1, 2)]


class FakeDevice:
    """The device of fake_device.py as a test steers it."""

    modules = DeviceModules("fake_device", "fake_device")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fates: dict[str, dict[str, object]] = {}
        self.workers: list[Worker] = []

    def fate(self, config: K1Config | K2Config, **what: object) -> None:
        """What becomes of a config: check=..., time=... or us=..."""
        self.fates[digest(config)] = what
        (self.folder / "fates.json").write_text(json.dumps(self.fates))

    def calls(self, what: str) -> list[str]:
        """Digests of the configs that were checked or timed, in order."""
        path = self.folder / "calls.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == what]

    def worker(self) -> Worker:
        self.workers.append(Worker(self.modules))
        return self.workers[-1]

    def backend(self, timeout_s: float = 20.0) -> GpuBackend:
        return GpuBackend(self.worker(), trial_timeout_s=timeout_s, paired_rounds=9)


@pytest.fixture
def fake_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """A card that fails as it is told; its children find fake_device.py through PYTHONPATH."""
    folder = tmp_path / "fake"
    folder.mkdir()
    monkeypatch.setenv("KDATUNE_FAKE", str(folder))
    kept = filter(None, [os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *kept]))
    device = FakeDevice(folder)
    yield device
    for worker in device.workers:
        worker.close()
