"""The device side of a trial: outcomes are typed, wrong results are found. Times are taken only on a card."""

import dataclasses

import pytest
import torch
from triton.runtime.errors import OutOfResources

from kdatune_kernels import bench
from kdatune_kernels import launch
from kdatune_kernels import samples
from kdatune_kernels.errors import MeasurementError
from kdatune_kernels.space import PAIRS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import shape_of


@pytest.fixture(scope="module")
def problem(device):
    shape = shape_of(2, 1, 37, varlen=True, longest_tokens=20)
    return bench._open(shape, samples.make((20, 17), 1, device=device), True, copies=1)


def test_good_configs_pass(problem):
    for kernel, config in (("k1", K1Config(num_warps=4)), ("k2", K2Config(transposed=True)), ("kda", bench.BASELINE)):
        result = bench.check(problem, kernel, config)
        assert (result.outcome, result.detail) == ("ok", None)
        assert 0 < result.o_error_ratio < 0.005
        assert 0 < result.state_error_ratio < 0.005


def test_an_element_that_is_not_written_is_incorrect(problem, monkeypatch):
    """Outputs are poisoned with NaN before each run, so that what a run does not write cannot look right."""
    real = launch.run_k2

    def forgets(p, ws, o, ht, config):
        kept = o[3].clone()
        made = real(p, ws, o, ht, config)
        o[3] = kept
        return made

    bench.expected(problem)
    monkeypatch.setattr(launch, "run_k2", forgets)
    result = bench.check(problem, "k2", K2Config())
    assert result.outcome == "incorrect"
    assert result.o_error_ratio is None


def test_a_small_fault_is_incorrect(problem, monkeypatch):
    real = launch.run_k2

    def off(p, ws, o, ht, config):
        made = real(p, ws, o, ht, config)
        ht.mul_(1.006)
        return made

    bench.expected(problem)
    monkeypatch.setattr(launch, "run_k2", off)
    result = bench.check(problem, "k2", K2Config())
    assert result.outcome == "incorrect"
    assert result.state_error_ratio == pytest.approx(0.006, rel=0.1)


def test_two_runs_that_differ_are_nondeterministic(problem, monkeypatch):
    real = launch.run_k2
    runs = []

    def wavers(p, ws, o, ht, config):
        made = real(p, ws, o, ht, config)
        runs.append(1)
        ht[0, 0, 0, 0] += 1e-5 * len(runs)
        return made

    bench.expected(problem)
    monkeypatch.setattr(launch, "run_k2", wavers)
    assert bench.check(problem, "k2", K2Config()).outcome == "nondeterministic"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OutOfResources(240000, 232448, "shared memory"), "resource"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "illegal_access"),
        (RuntimeError("PassManager::run failed"), "compile_error"),
        (RuntimeError("Internal Triton PTX codegen error: `ptxas` stderr: ..."), "compile_error"),
        (RuntimeError("CUDA error: invalid argument"), "launch_error"),
        (MemoryError(), "launch_error"),
    ],
)
def test_failures_are_typed(problem, monkeypatch, error, outcome):
    def fails(*_):
        raise error

    bench.expected(problem)
    monkeypatch.setattr(launch, "run_k1", fails)
    assert bench.check(problem, "k1", K1Config()).outcome == outcome


def test_a_programming_error_propagates(problem, monkeypatch):
    def broken(*_):
        raise KeyError("typo")

    bench.expected(problem)
    monkeypatch.setattr(launch, "run_k1", broken)
    with pytest.raises(KeyError):
        bench.check(problem, "k1", K1Config())


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (shape_of(1, 4, 100), (100,)),
        (shape_of(3, 4, 96), (32, 32, 32)),
        (shape_of(6, 64, 8192, varlen=True, longest_tokens=3063), samples.SKEWED_LENGTHS),
        (shape_of(3, 4, 100, varlen=True, longest_tokens=60), (60, 20, 20)),
        (shape_of(3, 4, 100, varlen=True), (34, 33, 33)),
        (shape_of(1, 4, 60, varlen=True, longest_tokens=60), (60,)),
    ],
)
def test_lengths_of_a_shape(shape, lengths):
    assert samples.lengths_of(shape) == lengths
    assert sum(lengths) == shape.T


def test_a_seed_makes_the_same_sample_and_kinds_differ(device):
    one, two, other = (samples.make((20,), 1, seed=s, device=device) for s in (1, 1, 2))
    assert torch.equal(one.q, two.q)
    assert not torch.equal(one.q, other.q)
    assert float(samples.make((20,), 1, kind="strong", device=device).g.min()) == 8.0
    assert torch.equal(*(samples.make((20,), 1, kind="identical", device=device).k[0, t] for t in (0, 7)))


@pytest.mark.gpu
def test_times_are_paired_and_positive(device):
    problem = bench.open_problem(shape_of(1, 2, 512))
    assert len(problem.copies) > 1, "a small problem rotates over copies, so that the L2 is cold"
    fast, slow = (
        LaunchConfig(K1Config(), K2Config()),
        LaunchConfig(K1Config(num_warps=8), K2Config(stages_in=1, num_warps=8)),
    )
    times = bench.time_interleaved_us(problem, [fast, slow], 5)
    assert [len(t) for t in times] == [5, 5]
    assert all(1.0 < x < 10_000.0 for t in times for x in t)
    alone = bench.time_us(problem, fast.k1)
    assert alone == sorted(alone)


@pytest.mark.gpu
def test_pairs_are_checked_and_timed_whole(device):
    for problem in (bench.small_problem(device), bench.open_problem(shape_of(1, 2, 500))):
        result = bench.check(problem, "kda", PAIRS)
        assert (result.outcome, result.detail, result.spills) == ("ok", None, 0)
        whole, as_k2 = bench.time_interleaved_us(problem, [PAIRS, PAIRS.k2], 3)
        assert min(*whole, *as_k2) > 1.0


def test_pairs_have_tables_and_a_workspace_of_their_own():
    problem = bench.small_problem("cuda" if torch.cuda.is_available() else "cpu")
    p, ws = problem.parts(0, PAIRS.k2)
    assert problem.parts(0, PAIRS.k2)[1] is ws
    assert p.q is problem.copies[0].q
    tiles = p.tables.chunks * 4
    assert p.tables.spans.tolist() == [[0, 256, 0, 8], [256, 331, 8, 11]]
    assert [tuple(x.shape) for x in (ws.KQ, ws.KG, ws.AI, ws.DEC)] == [
        (64 * tiles, 128), (32 * tiles, 128), (64 * tiles, 32), (tiles, 128),
    ]  # fmt: skip
    assert problem.parts(0, K2Config()) == (problem.copies[0], problem.workspaces[0])


@pytest.mark.gpu
def test_too_little_memory_is_typed(device):
    with pytest.raises(MeasurementError, match="does not fit"):
        bench.open_problem(dataclasses.replace(shape_of(1, 96, 1 << 27)))


def test_a_shape_is_measured_on_inputs_of_its_own_sizes_and_dtype():
    shape = shape_of(2, 1, 40, K=64, V=256, dtype="fp16")
    problem = bench.open_problem(shape, "cuda" if torch.cuda.is_available() else "cpu")
    sample = problem.sample
    assert (sample.q.shape[-1], sample.v.shape[-1], sample.q.dtype) == (64, 256, torch.float16)
    result = bench.check(problem, "kda", bench.BASELINE)
    assert (result.outcome, result.detail) == ("ok", None)
    assert problem.outputs[0][0].dtype == torch.float16
