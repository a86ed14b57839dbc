"""chunk_kda and the launcher: which config runs, and what happens when one does not."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from kda_calls import assert_within_gates
from kda_calls import call

from kdatune_kernels import kda
from kdatune_kernels import launch
from kdatune_kernels import samples
from kdatune_kernels.environment import Settings
from kdatune_kernels.match import Champion
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import dump_snapshot
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import default_config
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import shape_of

CARD = torch.cuda.is_available()
H200 = KNOWN_GPUS["NVIDIA H200"]
PLAIN = LaunchConfig(K1Config(num_warps=4), K2Config(block_v=128, transposed=True))


@pytest.fixture
def resolver(tmp_path, monkeypatch):
    """A launcher of the test's own whose bundled snapshot holds one plain Triton champion for 40 tokens of one head."""
    gpu = kda.gpu.of_device(0) if CARD else H200
    shape = Shape(N=1, H=1, T=40, HV=1)
    champion = Champion(gpu=gpu, shape=shape, config=PLAIN, generation=1, measured_us=10.0, default_us=11.0)
    path = tmp_path / "bundled.json"
    path.write_text(canonical(dump_snapshot(Snapshot(1, gpu, 1, (champion,)))))
    made = Resolver(Settings(url=None, cache_dir=tmp_path), path)
    monkeypatch.setattr(kda, "launcher", made)
    yield made
    made.close()


@pytest.fixture
def launched(monkeypatch):
    """The configs that were launched, in order; the launches are real."""
    configs = []
    real = launch.run_k2

    def run(problem, ws, o, ht, config):
        configs.append(config)
        return real(problem, ws, o, ht, config)

    monkeypatch.setattr(launch, "run_k2", run)
    return configs


@pytest.fixture
def sample(device):
    return samples.make((40,), 1, device=device)


def test_the_champion_runs(resolver, launched, sample, monkeypatch):
    if not CARD:
        monkeypatch.setattr(kda, "_gpu", lambda device: H200)
    assert_within_gates(sample, *call(sample))
    assert launched == [PLAIN.k2]
    call(sample)
    assert launched == [PLAIN.k2, PLAIN.k2]
    assert resolver.counters()["hits"] == 2


def test_another_flag_is_another_key(resolver, launched, sample, monkeypatch):
    """State flags are part of the key: the answer comes from the nearest champion and is counted as a miss."""
    if not CARD:
        monkeypatch.setattr(kda, "_gpu", lambda device: H200)
    call(sample, output_final_state=False)
    assert launched == [PLAIN.k2]
    assert resolver.counters()["misses"] == 1
    assert [demand.shape.final_state for demand in resolver.demand()] == [False]


def test_the_interpreter_gets_the_default(resolver, launched, sample):
    if CARD:
        pytest.skip("a card is there")
    call(sample)
    assert launched == [default_config(Shape(N=1, H=1, T=40, HV=1), None).k2]


def test_a_config_that_fails_at_launch_is_replaced_and_reported(resolver, launched, sample, monkeypatch, caplog):
    """Without a card every Gluon launch fails, and with one the planted failure does: outputs are right all the same."""
    monkeypatch.setattr(kda, "_gpu", lambda device: H200)
    failing = default_config(Shape(N=1, H=1, T=40, HV=1), H200)
    served = dataclasses.replace(failing, k1=dataclasses.replace(failing.k1, transposed_dots=False))
    monkeypatch.setattr(resolver, "bundled", lambda: Snapshot(1, H200, 1, (_champion(served),)))
    real = launch.run_k1

    def run(problem, ws, config):
        if config.variant != "triton":
            raise RuntimeError("out of resource: shared memory")
        return real(problem, ws, config)

    monkeypatch.setattr(launch, "run_k1", run)
    with caplog.at_level(logging.WARNING, "kdatune"):
        o, ht = call(sample)
    assert_within_gates(sample, o, ht)
    assert resolver.counters()["quarantined"] == 2, "the champion, then the Gluon default; plain Triton ran"
    assert "out of resource" in caplog.text
    refused = [demand.refusal.config for demand in resolver.demand() if demand.refusal is not None]
    assert refused == [served, failing]
    launched.clear()
    call(sample)
    assert [config.variant for config in launched] == ["triton"]


def _champion(config):
    shape = Shape(N=1, H=1, T=40, HV=1)
    return Champion(gpu=H200, shape=shape, config=config, generation=1, measured_us=10.0, default_us=11.0)


def test_a_champion_by_pairs_never_fails_a_call_that_it_does_not_serve(launched, sample, monkeypatch, device):
    """In the interpreter pairs would fail: by the default of two stages these calls run, the third and later ones, too."""
    monkeypatch.setattr(kda.launcher, "lookup", lambda key: PAIRS)
    states = torch.empty(2, 1, 1, 128, 128, device=device)
    for options in ({"precision": "bf16"}, {"precision": "fast"}, {"checkpoints": states, "checkpoint_tokens": 16}):
        for _ in range(4):
            assert_within_gates(sample, *call(sample, **options))
    assert PAIRS.k2 not in launched


def test_a_programming_error_is_not_swallowed(resolver, sample, monkeypatch):
    def broken(problem, ws, config):
        raise AttributeError("a typo")

    monkeypatch.setattr(launch, "run_k1", broken)
    with pytest.raises(AttributeError, match="a typo"):
        call(sample)
    assert resolver.counters()["quarantined"] == 0


def test_by_a_triton_that_cannot_compile_them_pairs_run_as_two_stages(monkeypatch):
    """3.9.0 refuses a view of their K1; a champion of pairs must not cost a launcher a failed compile."""
    key = (torch.device("cpu"), 1, 32, 32, 128, 128, torch.bfloat16, 8192, False, None, torch.float32, True, True)
    asked = SimpleNamespace(precision=None, checkpoints=None, key=key)
    assert kda._as_launched(asked, PAIRS) == PAIRS
    monkeypatch.setattr(kda, "PAIRS_COMPILE", False)
    assert kda._as_launched(asked, PAIRS) == split_default(shape_of(1, 32, 8192, state_v_first=True), None)
