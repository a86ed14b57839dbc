"""A champion that no card can launch, written past every check into the database: a launcher computes right all the same."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sqlalchemy import text

from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store import intake
from kdatune_tuner.store.engine import reading

SHAPE = shape_of(1, 1, 48)

# A launcher of its own process that takes itself to be on an H200: the refusal is what is looked at, so the config that it
# uses instead is one that Triton's interpreter can run.
LAUNCHER = """
import json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
from kdatune_kernels import kda, launch, reference, samples, transport
from kdatune_kernels.spec import KNOWN_GPUS, to_json
transport.TIMEOUT_SECONDS = 60.0  # it gives up after 2 s, and launches with what it knows
card = KNOWN_GPUS["NVIDIA H200"]
kda._gpu = lambda device: card
launched = []
run_k2 = launch.run_k2
def run(problem, ws, o, ht, config):
    launched.append(to_json(config))
    return run_k2(problem, ws, o, ht, config)
launch.run_k2 = run
assert kda.launcher.refresh(card, timeout_seconds=60)
sample = samples.make((48,), 1, device="cpu")
flags = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
o, ht = kda.chunk_kda(**sample.tensors(), **flags, output_final_state=True)
want_o, want_ht = reference.recurrence(**sample.tensors(), lengths=[48])
kda.launcher.client.report()
errors = [reference.error_ratio(o, want_o), reference.error_ratio(ht, want_ht)]
print(json.dumps({"errors": errors, "launched": launched, "counters": kda.launcher.counters()}))
"""


@contextmanager
def serving(database_url: str, log: Path) -> Iterator[str]:
    """The URL of a real server."""
    command = [sys.executable, "-m", "uvicorn", "kdatune_api.app:create_app", "--factory", "--port", "0"]
    with log.open("wb") as out:
        environment = os.environ | {"KDATUNE_DATABASE_URL": database_url}
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        end = time.monotonic() + 120
        while not (found := re.search(r"Uvicorn running on (http://127\.0\.0\.1:\d+)", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        server.terminate()
        server.wait(60)


def test_a_poisoned_entry(database_url: str, shelf, tmp_path: Path, helpers) -> None:
    sound = LaunchConfig(K1Config(), K2Config())
    deep = K2Config("ws", 128, 8, 16, 4, load_warps=1, store_warps=1, load_regs=24, store_regs=24)
    poisoned = replace(sound, k2=deep)
    reason = config_ok(
        poisoned, SHAPE, helpers.H200
    )  # 16 stages are 300,000 bytes of shared memory, the card has 232,448
    assert reason is not None
    shelf.promote(SHAPE, sound)
    with shelf.engine.begin() as connection:
        connection.execute(text("UPDATE promotion SET config_json = :config"), {"config": canonical(poisoned)})
    with serving(database_url, tmp_path / "server.log") as url:
        environment = os.environ | {"KDATUNE_URL": url, "KDATUNE_CACHE_DIR": str(tmp_path / "cache")}
        launcher = subprocess.run(
            [sys.executable, "-c", LAUNCHER], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert launcher.returncode == 0, launcher.stderr
    did = json.loads(launcher.stdout)
    assert max(did["errors"]) < 0.005
    assert to_json(deep) not in did["launched"]
    assert did["launched"][-1]["variant"] == "triton"
    assert reason in launcher.stderr
    with reading(shelf.engine) as s:
        rows = {row.config_hash: row.reason for row in intake.page_quarantined(s)}
    assert reason in rows[digest(poisoned)]
