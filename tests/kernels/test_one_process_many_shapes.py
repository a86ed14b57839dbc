"""Calls of different shapes in one process: each runs with its own config, whatever ran before, and nothing is written to."""

import pytest
import torch
from kda_calls import assert_within_gates
from kda_calls import call

from kdatune_kernels import bench
from kdatune_kernels import kda
from kdatune_kernels import launch
from kdatune_kernels import samples
from kdatune_kernels.environment import Settings
from kdatune_kernels.match import Champion
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import dump_snapshot
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical

CARD = torch.cuda.is_available()
LONG = 8192 if CARD else 64
MANY = 64 if CARD else 4


def _champions() -> dict[tuple[int, ...], tuple[Shape, LaunchConfig]]:
    """By sequence lengths: the shape and a plain Triton config that no other of them has."""
    plain = {
        (16,): (K1Config(num_warps=4), K2Config(block_v=32)),
        (LONG,): (K1Config(num_warps=2), K2Config(block_v=64, transposed=True)),
        (16,) * MANY: (K1Config(num_warps=1), K2Config(block_v=128, transposed=True)),
    }
    return {
        lengths: (
            Shape(
                N=len(lengths),
                H=1,
                HV=1,
                T=sum(lengths),
                varlen=len(lengths) > 1,
                longest_tokens=max(lengths) if len(lengths) > 1 else None,
            ),
            LaunchConfig(*stages),
        )
        for lengths, stages in plain.items()
    }


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The configs of both stages that were launched, in order, with a launcher that has a champion for each shape."""
    gpu = kda.gpu.of_device(0) if CARD else KNOWN_GPUS["NVIDIA H200"]
    monkeypatch.setattr(kda, "_gpu", lambda device: gpu)
    champions = tuple(Champion(gpu, *found, 1, 10.0, 11.0) for found in _champions().values())
    path = tmp_path / "bundled.json"
    path.write_text(canonical(dump_snapshot(Snapshot(1, gpu, 1, champions))))
    resolver = Resolver(Settings(url=None, cache_dir=tmp_path), path)
    monkeypatch.setattr(kda, "launcher", resolver)
    configs: list[K1Config | K2Config] = []
    run_k1, run_k2 = launch.run_k1, launch.run_k2
    monkeypatch.setattr(launch, "run_k1", lambda p, ws, config: (configs.append(config), run_k1(p, ws, config))[1])
    monkeypatch.setattr(
        launch, "run_k2", lambda p, ws, o, ht, config: (configs.append(config), run_k2(p, ws, o, ht, config))[1]
    )
    yield configs
    resolver.close()


def test_each_shape_runs_with_its_own_config(launched, device):
    """16 tokens first, then a long sequence, then many; then the same again, from what is remembered."""
    for _ in range(2):
        for lengths, (_, config) in _champions().items():
            sample = samples.make(lengths, 1, device=device)
            launched.clear()
            o, ht = call(sample)
            assert launched == [config.k1, config.k2], lengths
            assert_within_gates(sample, o, ht)


@pytest.mark.parametrize("kernel", ["k1", "k2", "kda"])
def test_a_trial_does_not_write_to_its_inputs(kernel, device):
    """What a trial runs on is what the next one runs on: gates, states and lengths included."""
    shape = Shape(N=2, H=1, HV=1, T=37, varlen=True, longest_tokens=20)
    problem = bench._open(shape, samples.make((20, 17), 1, device=device), True, copies=1)
    first = problem.copies[0]
    named = {name: getattr(first, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")}
    before = {name: x.clone() for name, x in named.items()}
    spans = first.tables.spans.clone()
    for stages in (
        LaunchConfig(K1Config(num_warps=4), K2Config()),
        LaunchConfig(K1Config(), K2Config(transposed=True)),
    ):
        config = {"k1": stages.k1, "k2": stages.k2, "kda": stages}[kernel]
        assert bench.check(problem, kernel, config).outcome == "ok"
    for name, x in before.items():
        assert torch.equal(named[name], x), name
    assert torch.equal(first.tables.spans, spans)
