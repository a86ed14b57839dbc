"""The device side of a trial: run a config on NaN-poisoned buffers, compare, and time it by the protocol.

Protocol 1: the card is warmed to a steady clock first; launches go through a CUDA graph of about 1.2 ms; the launches of a
graph rotate over copies of the tensors that together pass three times the L2, so that each finds it cold; samples are
graph replays by CUDA events, in us a launch; where several configs are compared their replays alternate and the order
rotates from round to round.
"""

import contextlib
import functools
import io
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any

import torch

from kdatune_kernels import inputs
from kdatune_kernels import launch
from kdatune_kernels import reference
from kdatune_kernels import samples
from kdatune_kernels.errors import MeasurementError
from kdatune_kernels.spec import CHUNK_TOKENS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Precision
from kdatune_kernels.spec import Shape

Config = K1Config | K2Config | LaunchConfig

GATE = 0.005
"""Largest error ratio of o and of the final state (docs/kda.md)."""
BASELINE = LaunchConfig(K1Config(), K2Config())
"""Plain Triton K1 and K2: what a candidate of the other kernel runs with, and the reference of problems too long for fp64."""
_FP64_TOKEN_HEADS = 40_000
_GRAPH_US = 1200.0
_MAX_SCRATCH_BYTES = 2 << 30


@dataclass
class Problem:
    """Tensors of one shape on the card: several copies to rotate over, outputs, and the reference once it is asked for.

    tables: makes its chunk tables in steps of so many tokens.
    """

    shape: Shape
    sample: samples.Sample
    copies: list[launch.Problem]
    workspaces: list[launch.Workspace]
    outputs: list[tuple[torch.Tensor, torch.Tensor | None]]
    precision: Precision
    tables: Callable[..., launch.ChunkTables]
    expected: tuple[torch.Tensor, torch.Tensor | None] | None = field(default=None)
    pairs: list[tuple[launch.Problem, launch.Workspace]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.sample.q.device

    def parts(self, i: int, k2: K2Config) -> tuple[launch.Problem, launch.Workspace]:
        """Copy i with tables and workspace in the steps of a K2; those of 32 tokens are made when they are first asked for."""
        if k2.step_tokens == CHUNK_TOKENS:
            return self.copies[i], self.workspaces[i]
        if not self.pairs:
            tables = self.tables(step=k2.step_tokens)
            for one in self.copies:
                ws = launch.workspace(tables, one.heads, self.shape.K, self.precision, self.device)
                self.pairs.append((replace(one, tables=tables), ws))
        return self.pairs[i]


@dataclass(frozen=True)
class CheckResult:
    """A config's verdict on one problem; outcome is an Outcome value."""

    outcome: str
    detail: str | None = None
    o_error_ratio: float | None = None
    state_error_ratio: float | None = None
    registers: int | None = None
    spills: int | None = None
    smem_bytes: int | None = None
    effective_num_warps: int | None = None
    compile_s: float | None = None


def small_problem(device: torch.device | str = "cuda", precision: Precision = "fp16") -> Problem:
    """The problem every config is checked on: two ragged sequences, four heads, with a reference in fp64."""
    shape = Shape(N=2, H=4, HV=4, T=331, varlen=True, longest_tokens=256)
    return _open(shape, samples.make((256, 75), 4, device=device), precision, copies=1)


def open_problem(
    shape: Shape, device: torch.device | str = "cuda", seed: int = 0, precision: Precision = "fp16"
) -> Problem:
    """Tensors of a shape, with enough copies to keep the L2 cold.

    Raises:
        MeasurementError: outcome "launch_error" when the card has too little free memory for one copy.
    """
    try:
        sample = samples.make(
            samples.lengths_of(shape),
            shape.H,
            shape.HV,
            seed=seed,
            device=device,
            initial_state=shape.initial_state,
            state_v_first=shape.state_v_first,
            state_dtype=torch.float32 if shape.state_dtype == "fp32" else torch.bfloat16,
            size=shape.K,
            value_size=shape.V,
            dtype=torch.bfloat16 if shape.dtype == "bf16" else torch.float16,
        )
        return _open(shape, sample, precision)
    except torch.cuda.OutOfMemoryError as error:
        raise MeasurementError("launch_error", f"{shape.key()} does not fit the free device memory") from error


def _open(shape: Shape, sample: samples.Sample, precision: Precision, copies: int | None = None) -> Problem:
    device = sample.q.device
    tokens = sum(sample.lengths)
    if samples.is_packed(shape):
        ends = torch.tensor([0, *sample.lengths], device=device).cumsum(0)
        make_tables = functools.partial(launch.packed_tables, ends, tokens)
    else:
        make_tables = functools.partial(launch.dense_tables, shape.N, tokens // shape.N, device, False)
    tables = make_tables()
    scale = None
    first = inputs.fold(
        sample.q, sample.k, sample.v, sample.g, sample.beta, sample.A_log, sample.dt_bias, sample.lower_bound, scale,
        sample.initial_state, shape.state_v_first, tables,
    )  # fmt: skip
    each = sum(x.numel() * x.element_size() for x in (first.q, first.k, first.v, first.g)) * 5 // 4
    each += tables.chunks * first.heads * launch.WORKSPACE_BYTES_PER_TILE
    count = copies_for(device, each) if copies is None else copies
    problems = [first] + [
        replace(
            first, q=first.q.clone(), k=first.k.clone(), v=first.v.clone(), g=first.g.clone(), beta=first.beta.clone()
        )
        for _ in range(count - 1)
    ]
    state = (shape.V, shape.K) if shape.state_v_first else (shape.K, shape.V)
    outputs: list[tuple[torch.Tensor, torch.Tensor | None]] = [
        (
            torch.empty(tokens, first.heads, shape.V, dtype=sample.v.dtype, device=device),
            torch.empty(shape.N, first.heads, *state, device=device) if shape.final_state else None,
        )
        for _ in range(count)
    ]
    spaces = [launch.workspace(tables, first.heads, shape.K, precision, device) for _ in range(count)]
    if device.type == "cuda":
        # K2 is timed on what K1 really hands it: the data decides the power a card draws, and so its clock.
        for problem, ws in zip(problems, spaces, strict=True):
            launch.run_k1(problem, ws, BASELINE.k1)
    return Problem(shape, sample, problems, spaces, outputs, precision, make_tables)


def copies_for(device: torch.device, each_bytes: int) -> int:
    """Copies that together pass three times the L2, within 2 GiB and a quarter of the free memory; at least one."""
    if device.type != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    free_bytes = torch.cuda.mem_get_info(device)[0]
    wanted = -(-3 * l2_bytes // each_bytes)
    affordable = min(_MAX_SCRATCH_BYTES, free_bytes // 4) // each_bytes
    return int(max(1, min(wanted, affordable, 16)))


def _with(config: Config) -> LaunchConfig:
    """The whole launch that a config of one kernel is checked in."""
    if isinstance(config, LaunchConfig):
        return config
    if isinstance(config, K1Config):
        return LaunchConfig(config, BASELINE.k2)
    return LaunchConfig(BASELINE.k1, config)


def bound_call(problem: Problem, config: Config, i: int) -> Callable[[], Any]:
    """The launches that are timed for a config on copy i."""
    if isinstance(config, K1Config):
        return launch.k1_call(problem.copies[i], problem.workspaces[i], config)
    of_k2 = config if isinstance(config, K2Config) else config.k2
    p, ws = problem.parts(i, of_k2)
    k2 = launch.k2_call(p, ws, *problem.outputs[i], of_k2)
    if isinstance(config, K2Config) or of_k2.whole:
        return k2
    k1 = launch.k1_call(p, ws, config.k1)

    def both() -> None:
        k1()
        k2()

    return both


def expected(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the problem's outputs must be near: the fp64 recurrence, or for long problems the plain Triton kernels."""
    if problem.expected is None:
        shape, sample = problem.shape, problem.sample
        if shape.T * shape.HV <= _FP64_TOKEN_HEADS or problem.device.type == "cpu":
            o, ht = reference.recurrence(
                **sample.tensors(), lengths=list(sample.lengths), state_v_first=shape.state_v_first
            )
            problem.expected = (o.view(-1, *o.shape[2:]), ht if shape.final_state else None)
        else:
            launch.run_k1(problem.copies[0], problem.workspaces[0], BASELINE.k1)
            o, final = problem.outputs[0]
            launch.run_k2(problem.copies[0], problem.workspaces[0], o, final, BASELINE.k2)
            problem.expected = (o.clone(), None if final is None else final.clone())
    return problem.expected


def check(problem: Problem, kernel: str, config: Config) -> CheckResult:
    """Compile a config, run it twice on NaN-poisoned buffers and compare with the reference. Never raises for a bad config.

    A K1 is checked with the plain Triton K2 and a K2 with the plain Triton K1; kernel "kda" takes a LaunchConfig.
    """
    whole = _with(config)
    started = time.perf_counter()
    try:
        with quiet():
            want_o, want_ht = expected(problem)
            first = _poisoned_run(problem, whole, kernel)
            compile_s = time.perf_counter() - started
            o, ht = problem.outputs[0]
            kept = (o.clone(), None if ht is None else ht.clone())
            _poisoned_run(problem, whole, kernel)
    except MeasurementError as error:
        return CheckResult(error.outcome, error.detail, compile_s=time.perf_counter() - started)
    o_ratio = reference.error_ratio(o, want_o)
    state_ratio = None if ht is None or want_ht is None else reference.error_ratio(ht, want_ht)
    outcome, detail = "ok", None
    if not o_ratio < GATE or (state_ratio is not None and not state_ratio < GATE):
        outcome, detail = (
            "incorrect",
            f"error ratios o {o_ratio:.3g}, state {state_ratio}, gate {GATE}",
        )
    elif not torch.equal(kept[0], o) or (ht is not None and kept[1] is not None and not torch.equal(kept[1], ht)):
        outcome, detail = "nondeterministic", "two runs on the same input differ"
    return CheckResult(
        outcome=outcome,
        detail=detail,
        o_error_ratio=_finite(o_ratio),
        state_error_ratio=_finite(state_ratio),
        registers=getattr(first, "n_regs", None),
        spills=getattr(first, "n_spills", None),
        smem_bytes=getattr(getattr(first, "metadata", None), "shared", None),
        effective_num_warps=getattr(getattr(first, "metadata", None), "num_warps", None),
        compile_s=compile_s,
    )


def _finite(x: float | None) -> float | None:
    return x if x is not None and x == x and x not in (float("inf"), float("-inf")) else None


def _poisoned_run(problem: Problem, config: LaunchConfig, kernel: str) -> Any:
    """One run of K1 and K2 on buffers full of NaN; returns the compiled kernel under test. Raises MeasurementError."""
    (p, ws), (o, ht) = problem.parts(0, config.k2), problem.outputs[0]
    for buffer in (ws.KQ, ws.KG, ws.AI, ws.DEC, o, *(() if ht is None else (ht,))):
        buffer.fill_(float("nan"))
    with typed():
        k1 = None if config.k2.whole else launch.run_k1(p, ws, config.k1)
        k2 = launch.run_k2(p, ws, o, ht, config.k2)
        _synchronize(problem.device)
    return k1 if kernel == "k1" else k2


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The compiler prints what it dislikes about a config; the typed outcome says it already."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """Turn what the compiler, the driver or the card raises into a MeasurementError with its outcome."""
    try:
        yield
    except MeasurementError:
        raise
    except Exception as error:
        outcome = launch.outcome_of(error)
        if outcome is None:
            raise
        text = str(error).strip().splitlines()
        line = next((part for part in text if "fatal" in part or "error" in part.lower()), text[-1] if text else "")
        raise MeasurementError(outcome, f"{type(error).__name__}: {line}"[:240]) from None


def warm_up(device: torch.device | str = "cuda", seconds: float = 0.4) -> None:
    """Load the card until its clock is steady: the first tenths of a second run on an idle clock."""
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize(device)


def time_us(problem: Problem, config: Config, samples: int = 5) -> list[float]:
    """Sorted times of one launch in us. Raises MeasurementError with the outcome of a config that fails."""
    return sorted(time_interleaved_us(problem, [config], samples)[0])


def time_interleaved_us(problem: Problem, configs: Sequence[Config], samples: int = 9) -> list[list[float]]:
    """Times of one launch in us, one list a config, paired by round: sample i of every config is of the same round."""
    runs = []
    for config in configs:
        with typed(), quiet():
            runs.append(capture(functools.partial(bound_call, problem, config), len(problem.copies)))
    return interleave([run.replay_us for run in runs], samples)


@dataclass(frozen=True)
class Graph:
    """A captured CUDA graph and how many launches one replay holds."""

    graph: torch.cuda.CUDAGraph
    launches: int
    calls: tuple[Callable[[], Any], ...]
    """What was captured: it owns scratch that the replays write."""

    def replay_us(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0 / self.launches


def capture(call_of: Callable[[int], Callable[[], Any]], copies: int) -> Graph:
    """A graph of about 1.2 ms of launches that rotates over the copies; call_of(i) is the launch on copy i."""
    calls = [call_of(i) for i in range(copies)]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    calls[0]()
    start.record()
    calls[-1]()
    end.record()
    end.synchronize()
    estimate_us = max(start.elapsed_time(end) * 1000.0, 5.0)
    rounds = max(1, min(32 // copies or 1, round(_GRAPH_US / estimate_us / copies)))
    launches = max(2, rounds * copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            calls[i % copies]()
    graph.replay()
    torch.cuda.synchronize()
    return Graph(graph, launches, tuple(calls))


def interleave(runs: Sequence[Callable[[], float]], samples: int) -> list[list[float]]:
    """What several timed runs say, alternating, the order rotated by one each round."""
    times: list[list[float]] = [[] for _ in runs]
    order = list(range(len(runs)))
    for _ in range(samples):
        for i in order:
            times[i].append(runs[i]())
        order = order[1:] + order[:1]
    return times
