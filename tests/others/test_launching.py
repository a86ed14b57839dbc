"""The example is launched with what was tuned: from a service, a disk copy, or nothing; a bad config is replaced."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sqlalchemy import Engine

from kdatune_kernels import gpu
from kdatune_kernels import resolve as resolve_module
from kdatune_kernels.disk import DiskCopy
from kdatune_kernels.environment import Settings
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.others import OtherChampion
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.resolve_others import launch_resolved
from kdatune_kernels.snapshot import SCHEMA
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import dump_snapshot
from kdatune_kernels.spec import INTERPRETER
from kdatune_kernels.tunable import Installed
from kdatune_kernels.values import OtherConfig
from kdatune_tuner.backend_others import OtherReplayBackend
from kdatune_tuner.recording_others import load_other_recording
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import reading
from kdatune_tuner.tune import Options
from kdatune_tuner.tune_others import OtherTuner

RECORDING = Path(__file__).parent.parent / "data" / "rmsnorm-interpreter.jsonl.gz"
SHAPE = {"rows": 8, "columns": 500, "dtype": "bf16"}
TUNED = OtherConfig({"rows_per_program": 8, "block_columns": 512, "num_warps": 4})
needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="A CARD IS HERE: the kernel is compiled for it, not interpreted"
)


def champion(kernel: Installed, config: OtherConfig = TUNED, **shape: int) -> OtherChampion:
    return OtherChampion("rmsnorm", INTERPRETER, kernel.shape(SHAPE | shape), config, 1, 10.0, 12.0)


@pytest.fixture
def resolver(tmp_path: Path, rmsnorm: Installed) -> Iterator[Resolver]:
    """A launcher without a service, whose disk copy holds one champion."""
    keep(tmp_path, champion(rmsnorm))
    resolver = Resolver(Settings(cache_dir=tmp_path))
    yield resolver
    resolver.close()


def keep(folder: Path, *others: OtherChampion) -> None:
    document = json.loads(json.dumps(dump_snapshot(Snapshot(SCHEMA, INTERPRETER, 7, others=others))))
    DiskCopy(folder).write(INTERPRETER.name, document, '"7"')


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * weight.double() / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()


def test_from_the_disk_copy(resolver: Resolver, rmsnorm: Installed) -> None:
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == TUNED
    answer = resolver.answer_kernel("rmsnorm", rmsnorm.shape(SHAPE), INTERPRETER)
    assert (answer.layer, answer.match, answer.generation) == ("disk", "exact", 7)
    # dtype is bf16 when left out, and another spelling of a shape is the same shape
    assert resolver.resolve_kernel("rmsnorm", {"columns": 500, "rows": 8}, INTERPRETER) == TUNED
    near = resolver.answer_kernel("rmsnorm", rmsnorm.parse_shape("rows=8,columns=300"), INTERPRETER)
    assert (near.match, near.config) == ("bucket", TUNED)
    far = rmsnorm.parse_shape("rows=8,columns=500,dtype=fp16")
    assert resolver.answer_kernel("rmsnorm", far, INTERPRETER).layer == "default"


def test_frozen_until_refresh(resolver: Resolver, rmsnorm: Installed, tmp_path: Path) -> None:
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == TUNED
    other = OtherConfig({**TUNED, "num_warps": 8})
    keep(tmp_path, champion(rmsnorm, other))
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == TUNED
    assert resolver.refresh()
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == other


def test_a_config_is_checked_by_the_kernel_before_it_is_used(rmsnorm: Installed, tmp_path: Path) -> None:
    keep(tmp_path, champion(rmsnorm, OtherConfig({**TUNED, "num_warps": 3})))
    resolver = Resolver(Settings(cache_dir=tmp_path))
    shape = rmsnorm.shape(SHAPE)
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == rmsnorm.default(shape, INTERPRETER)
    told = resolver.answer_kernel("rmsnorm", shape, INTERPRETER)
    assert "refused: num_warps=3 is not one of" in told.reason


def test_misses_are_counted_and_reported_by_kernel(resolver: Resolver) -> None:
    for _ in range(3):
        resolver.resolve_kernel("rmsnorm", SHAPE | {"rows": 4096}, INTERPRETER)
    resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER)
    counters = resolver.counters()
    assert (counters["hits"], counters["misses"], counters["keys"]) == (1, 3, 2)
    (demand,) = resolver.demand()
    assert demand.item() == {
        "gpu": "Triton interpreter",
        "kernel": "rmsnorm",
        "shape": {"columns": 500, "dtype": "bf16", "rows": 4096},
        "count": 3,
    }
    assert resolver.demand() == []


def test_a_failing_config_is_replaced_and_told(resolver: Resolver, rmsnorm: Installed) -> None:
    resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER)
    default = rmsnorm.default(rmsnorm.shape(SHAPE), INTERPRETER)
    assert resolver.quarantine_kernel("rmsnorm", TUNED, SHAPE, INTERPRETER, "out of registers") == default
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == default
    resolver.refresh()
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == default
    told = [d.item()["quarantined"] for d in resolver.demand() if d.refusal]
    assert told == [{"config": TUNED.json(), "reason": "out of registers"}]
    assert resolver.counters()["quarantined"] == 1
    # the default fails as well: then it is not the config
    assert resolver.quarantine_kernel("rmsnorm", default, SHAPE, INTERPRETER, "again") is None


def test_wrong_arguments_are_named(resolver: Resolver) -> None:
    with pytest.raises(UsageError, match="no kernel 'softmax'"):
        resolver.resolve_kernel("softmax", SHAPE, INTERPRETER)
    with pytest.raises(ShapeError, match="lacks columns"):
        resolver.resolve_kernel("rmsnorm", {"rows": 8}, INTERPRETER)
    with pytest.raises(ShapeError, match="holds a value that is no number, word or flag"):
        resolver.resolve_kernel("rmsnorm", {"rows": [8], "columns": 8}, INTERPRETER)


def test_inside_graph_capture_nothing_is_read_or_kept(resolver: Resolver, rmsnorm: Installed) -> None:
    default = rmsnorm.default(rmsnorm.shape(SHAPE), INTERPRETER)
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER, capturing=True) == default
    assert resolver.counters()["keys"] == 0
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == TUNED


def test_inside_graph_capture_no_answer_from_before_the_copy_was_read_is_kept(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when another thread reads it at that moment."""
    answer = resolver._others.answer
    monkeypatch.setattr(
        resolver._others, "answer", lambda *args: (resolver.client.watch(INTERPRETER), answer(*args))[1]
    )
    resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER, capturing=True)
    assert resolver.counters()["keys"] == 0
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == TUNED


def test_many_threads_agree(resolver: Resolver) -> None:
    found: list[OtherConfig] = []
    threads = [
        threading.Thread(
            target=lambda: found.extend(resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) for _ in range(50))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {TUNED}
    assert resolver.counters()["hits"] >= 390  # counting takes no lock: a few may be lost


@needs_interpreter
def test_launched_with_the_champion(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "launcher", resolver)
    from rmsnorm_kernel import kernel

    used: list[OtherConfig] = []
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args: (used.append(args[-1]), run(*args))[1])
    x, weight = torch.randn(8, 500, dtype=torch.bfloat16), torch.rand(500, dtype=torch.bfloat16)
    y = kernel.rmsnorm(x, weight)
    assert used == [TUNED]
    want = rms_norm(x, weight)
    assert (y.double() - want).abs().max() <= 2.0**-7 * want.abs().max()
    with pytest.raises(TypeError, match="x must be a contiguous matrix of bf16, fp16, fp32"):
        kernel.rmsnorm(x.t(), weight)


@needs_interpreter
def test_a_launch_that_fails_goes_on_with_the_default(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "launcher", resolver)
    tried: list[OtherConfig] = []

    def launch(config: OtherConfig) -> str:
        tried.append(config)
        if config == TUNED:
            raise RuntimeError("Triton Error [CUDA]: out of resource")
        return "launched"

    assert launch_resolved("rmsnorm", SHAPE, gpu.of(torch.device("cpu")), launch) == "launched"
    assert launch_resolved("rmsnorm", SHAPE, INTERPRETER, launch) == "launched"
    assert [config == TUNED for config in tried] == [True, False, False]

    def mistaken(_: OtherConfig) -> str:
        raise KeyError("a mistake of the caller's")

    with pytest.raises(KeyError, match="a mistake of the caller's"):
        launch_resolved("rmsnorm", SHAPE, INTERPRETER, mistaken)
    assert resolver.counters()["quarantined"] == 1


@pytest.mark.gpu
def test_launched_on_a_card(rmsnorm: Installed) -> None:
    from rmsnorm_kernel import kernel

    for rows, columns, dtype in ((1, 1, torch.float32), (300, 1000, torch.float16), (4096, 8192, torch.bfloat16)):
        x, weight = (
            torch.randn(rows, columns, dtype=dtype, device="cuda"),
            torch.rand(columns, dtype=dtype, device="cuda"),
        )
        want = rms_norm(x, weight)
        error = (kernel.rmsnorm(x, weight).double() - want).abs().max()
        assert error <= kernel.TOLERANCES[dtype] * want.abs().max(), (rows, columns, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.rmsnorm(x, weight)
    graph.replay()
    assert torch.equal(y, kernel.rmsnorm(x, weight))


LAUNCH = """
import json, sys, torch
from kdatune_kernels import transport
from kdatune_kernels.resolve import launcher
from kdatune_kernels.spec import INTERPRETER
from rmsnorm_kernel.kernel import rmsnorm
transport.TIMEOUT_SECONDS = 120.0  # the server may still be starting
if sys.argv[1] == "asks":
    assert launcher.refresh(INTERPRETER, timeout_seconds=120.0)
torch.manual_seed(0)
x, weight = torch.randn(8, 500, dtype=torch.bfloat16), torch.rand(500, dtype=torch.bfloat16)
y = rmsnorm(x, weight).double()
rmsnorm(torch.randn(2, 40), torch.rand(40))
want = x.double() * weight.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt()
shape = {"rows": 8, "columns": 500, "dtype": "bf16"}
launcher.client.report()
print(json.dumps({
    "config": launcher.resolve_kernel("rmsnorm", shape, INTERPRETER).json(),
    "counters": launcher.counters(),
    "error": ((y - want).abs().max() / want.abs().max()).item(),
}))
"""


@needs_interpreter
def test_the_whole_way(engine: Engine, database_url: str, rmsnorm: Installed, tmp_path: Path) -> None:
    """Tuned, stored, served by a real server, launched in another process; then launched again with the server gone."""
    backend = OtherReplayBackend(rmsnorm, load_other_recording(RECORDING))
    tuned = OtherTuner(engine, backend, Options(kernel="rmsnorm"), rmsnorm).tune(backend.default_shapes()[0])
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(16)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "kdatune_api.app:create_app",
            "--factory",
            "--fd",
            str(bound.fileno()),
        ]
        server = subprocess.Popen(
            command,
            env=os.environ | {"KDATUNE_DATABASE_URL": database_url},
            pass_fds=[bound.fileno()],
            stderr=subprocess.DEVNULL,
        )
        try:
            served = launched(url, tmp_path, "asks")
        finally:
            server.terminate()
            server.wait()
    assert served["config"] == tuned.best.json()  # type: ignore[union-attr]
    assert served["error"] <= 2.0**-7
    assert served["counters"]["reported"] == 1
    with reading(engine) as s:
        (missed,) = queries.demand(s)
    assert (missed.kernel, missed.shape.key()) == ("rmsnorm", "columns=40,dtype=fp32,rows=2")
    alone = launched(url, tmp_path, "goes on")
    assert alone["config"] == served["config"]
    assert alone["counters"]["hits"] == 2


def launched(url: str, cache: Path, how: str) -> dict[str, object]:
    environment = os.environ | {"KDATUNE_URL": url, "KDATUNE_CACHE_DIR": str(cache), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, how], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, object] = json.loads(done.stdout)
    return said


def test_a_known_key_costs_one_look(resolver: Resolver) -> None:
    """No timing here (benchmarks/call_cost.py times launches): nothing is parsed, matched or asked the second time."""
    resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER)
    resolver._others = None  # type: ignore[assignment] - whatever would look for an answer again fails
    assert resolver.resolve_kernel("rmsnorm", SHAPE, INTERPRETER) == TUNED
