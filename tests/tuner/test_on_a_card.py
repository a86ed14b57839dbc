"""Tuning on a real card: what kills tuners leaves the card usable and its memory free. Skipped, and said, without one.

On a card machine: pytest tests/tuner/test_on_a_card.py
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdatune_kernels.gpu import nvml_handle
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.backend_gpu import GpuBackend
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.promote import Policy
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuner
from kdatune_tuner.worker import DeviceModules
from kdatune_tuner.worker import Worker

SHAPE = parse_shape("N=1,H=8,T=1024")
MIB = 1 << 20


def without_card() -> str | None:
    """Why these tests cannot run here. torch is asked in a child: this process must hold nothing of the card."""
    if shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi"
    probe = "import torch, triton; assert torch.cuda.is_available()"
    asked = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=300)
    return None if asked.returncode == 0 else (asked.stderr.strip().splitlines() or ["no CUDA card"])[-1]


@pytest.fixture(scope="module", autouse=True)
def card() -> None:
    why = without_card()
    if why is not None:
        pytest.skip(f"NO CARD ({why}): lethal trials, device memory and isolation are not tested on one")


pytestmark = pytest.mark.gpu


def used_bytes() -> int:
    """Memory of the first visible card that is in use, by the driver, whoever uses it."""
    import pynvml

    pynvml.nvmlInit()
    handle = nvml_handle(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def settled(before_bytes: int) -> int:
    """Bytes in use above `before_bytes` once the driver has taken back what dead processes held, at most 20 s later."""
    deadline = time.monotonic() + 20
    while used_bytes() - before_bytes > MIB and time.monotonic() < deadline:
        time.sleep(0.1)
    return used_bytes() - before_bytes


class TwelveConfigs(GpuBackend):
    """A space of twelve: six K1, six K2."""

    def space(self, kernel, shape):
        return super().space(kernel, shape)[:6]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[object]:
    url = f"sqlite:///{tmp_path / 'k.db'}"
    upgrade(url)
    engine = open_engine(url)
    yield engine
    engine.dispose()


def test_lethal_trials_leave_the_card_usable(engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_bytes = used_bytes()
    fates_path = tmp_path / "fates.json"
    fates_path.write_text("{}")
    monkeypatch.setenv("KDATUNE_LETHAL", str(fates_path))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    modules = DeviceModules("lethal_device", "kdatune_kernels.gpu")
    backend = TwelveConfigs(Worker(modules), trial_timeout_s=120.0, paired_rounds=15)
    k1s, k2s = backend.space("k1", SHAPE), backend.space("k2", SHAPE)
    wrong = k2s[3]
    fates = {k1s[1]: "abort", k1s[2]: "store", k2s[1]: "endless", k2s[2]: "shared", wrong: "wrong"}
    fates_path.write_text(json.dumps({digest(config): fate for config, fate in fates.items()}))
    backend.close()  # the child that is there has read no fates
    backend._timeout_s = 30.0
    tuned = Tuner(engine, backend, Options(trials=12, policy=Policy())).tune(SHAPE)
    assert tuned.state == "done"
    with reading(engine) as s:
        rows = {row.config_hash: row for row in queries.page_measurements(s, limit=1000) if row.kernel != "kda"}
        champion = queries.champions(s)[0]
    typed = {
        k1s[1]: Outcome.ABORT,
        k1s[2]: Outcome.ILLEGAL_ACCESS,
        k2s[1]: Outcome.TIMEOUT,
        k2s[2]: Outcome.RESOURCE,
        wrong: Outcome.INCORRECT,
    }
    for config in (*k1s, *k2s):
        row = rows[digest(config)]
        assert row.outcome == typed.get(config, Outcome.OK), (config, row.detail)
    assert champion.config.k2 != wrong
    assert tuned.best.k2 != wrong
    assert backend.measure("k2", SHAPE, k2s[5]).ok
    backend.close()
    assert settled(before_bytes) <= MIB
    # and for a process that has seen none of it
    probe = "import torch; x = torch.ones(1 << 20, device='cuda'); assert float(x.sum()) == 1 << 20"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=300)


# Takes all but so many MiB of the card, says "ready", and holds it until its stdin is closed.
HOG = """
import sys, torch
torch.ones(1, device="cuda")
free = torch.cuda.mem_get_info()[0] - int(sys.argv[1]) * (1 << 20)
held = []
for size in (1 << 30, 1 << 27, 1 << 24, 1 << 21):
    while free >= size:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        free = torch.cuda.mem_get_info()[0] - int(sys.argv[1]) * (1 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


def test_tuning_ends_well_with_150_mib_free(engine) -> None:
    before_bytes = used_bytes()
    backend = TwelveConfigs(Worker(), trial_timeout_s=120.0, paired_rounds=15)
    # its context is made before the card is filled: the 150 MiB are what is left for tensors
    assert backend.measure("k2", SHAPE, backend.space("k2", SHAPE)[0]).ok
    with subprocess.Popen(
        [sys.executable, "-c", HOG, "150"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as hog:
        try:
            assert hog.stdout.readline() == "ready\n"
            tuned = Tuner(engine, backend, Options(trials=12, policy=Policy())).tune(SHAPE)
            large = backend.measure("k2", parse_shape("N=1,H=96,T=65536"), backend.space("k2", SHAPE)[0])
        finally:
            hog.kill()
    starts = backend.worker.starts
    backend.close()
    assert tuned.state == "done"
    assert tuned.outcomes().get("ok", 0) == tuned.trials, tuned.outcomes()
    assert tuned.promotion.decision == "promoted"
    # what does not fit says so and costs no restart
    assert large.outcome is Outcome.LAUNCH_ERROR
    assert "does not fit the free device memory" in large.detail
    assert starts == 1
    assert settled(before_bytes) <= MIB


def test_a_killed_tuner_gives_the_card_back(tmp_path: Path) -> None:
    before_bytes = used_bytes()
    url = f"sqlite:///{tmp_path / 'k.db'}"
    upgrade(url)
    command = [sys.executable, "-m", "kdatune_tuner.cli", "tune", "--backend", "gpu", "--shape", SHAPE.key()]
    with subprocess.Popen(command, env=os.environ | {"KDATUNE_DATABASE_URL": url}, stderr=subprocess.DEVNULL) as tuner:
        deadline = time.monotonic() + 240
        while used_bytes() - before_bytes < 100 * MIB and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2)
        tuner.kill()
    assert settled(before_bytes) <= MIB
