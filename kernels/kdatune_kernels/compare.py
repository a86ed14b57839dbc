"""Ours beside every peer that can be imported, in one run: interleaved CUDA graphs, errors against fp64.

Needs only torch and Triton: `python -m kdatune_kernels.compare --set headline`.
"""

import argparse
import functools
import importlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from datetime import UTC
from datetime import datetime
from typing import Any

import torch

from kdatune_kernels import bench
from kdatune_kernels import gpu
from kdatune_kernels import kda
from kdatune_kernels import reference
from kdatune_kernels import samples
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.resolve import launcher
from kdatune_kernels.shape_sets import OURS
from kdatune_kernels.shape_sets import PEER_NAMES
from kdatune_kernels.shape_sets import SHAPE_SETS
from kdatune_kernels.shape_sets import peers_of
from kdatune_kernels.shape_sets import shapes_of
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Precision
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json

Stopwatch = Callable[[dict[str, Callable[[], "Outputs"]], int], dict[str, list[float]]]
"""Times in us of calls by name, so many rounds, paired by round."""

_FP64_TOKEN_HEADS = 8192 * 96
_FP64_TOKENS = 65536
_OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


@dataclass(frozen=True)
class Arguments:
    """What every system is called with: [B, T, heads, size], v-first fp32 state in and out."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    h0: torch.Tensor
    lower_bound: float
    cu_seqlens: torch.Tensor | None

    def keywords(self) -> dict[str, Any]:
        """The arguments of chunk_kda, ours and flash-linear-attention's."""
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound", "cu_seqlens")
        return {name: getattr(self, name) for name in names} | {"initial_state": self.h0, "output_final_state": True}


Outputs = tuple[torch.Tensor, torch.Tensor]
Peer = Callable[[Arguments], Callable[[], Outputs]]


def flash_kda(a: Arguments) -> Callable[[], Outputs]:
    """FlashKDA's forward, fp32 state in and out. Raises ImportError where it is not installed."""
    peer = importlib.import_module("flash_kda")
    out, final = torch.empty_like(a.v), torch.empty_like(a.h0)

    def call() -> Outputs:
        peer.fwd(
            a.q, a.k, a.v, a.g, a.beta, a.q.shape[-1] ** -0.5, out, a.A_log, a.dt_bias, a.lower_bound,
            initial_state=a.h0, final_state=final, cu_seqlens=a.cu_seqlens,
        )  # fmt: skip
        return out, final

    return call


def fla(a: Arguments) -> Callable[[], Outputs]:
    """flash-linear-attention's chunk_kda. Raises ImportError where it is not installed."""
    peer = importlib.import_module("fla.ops.kda").chunk_kda
    return lambda: peer(**a.keywords(), **_OPTIONS, safe_gate=True, state_v_first=True)


def ours(config: LaunchConfig | None, precision: Precision | None = None) -> Peer:
    """chunk_kda with a config, None for the resolved one, and a precision, None for the config's."""
    options: dict[str, Any] = {**_OPTIONS, "state_v_first": True, "config": config, "precision": precision}
    return lambda a: lambda: _both(kda.chunk_kda(**a.keywords(), **options))


def _both(outputs: tuple[torch.Tensor, torch.Tensor | None]) -> Outputs:
    o, final = outputs
    if final is None:
        raise AssertionError("output_final_state was asked for")
    return o, final


PEERS: dict[str, Peer] = {"flash_kda": flash_kda, "fla": fla}


def arguments(
    shape: Shape, device: str = "cuda", seed: int = 0, kind: samples.Kind = "random"
) -> tuple[Arguments, samples.Sample]:
    """Inputs of a shape: packed with cu_seqlens where its sequences are unlike, else a dense batch."""
    sample = samples.make(
        samples.lengths_of(shape), shape.H, shape.HV, device=device, seed=seed, kind=kind, state_v_first=True, size=shape.K,
        value_size=shape.V, dtype=torch.bfloat16 if shape.dtype == "bf16" else torch.float16,
    )  # fmt: skip
    names = ("q", "k", "v", "g", "beta")
    if samples.is_packed(shape):
        folded = {name: getattr(sample, name) for name in names}
        ends = torch.tensor([0, *sample.lengths], device=device).cumsum(0)
    else:
        B, T = shape.N, shape.T // shape.N
        folded = {name: getattr(sample, name).view(B, T, *getattr(sample, name).shape[2:]) for name in names}
        ends = None
    if sample.initial_state is None:
        raise AssertionError("samples.make was asked for a state")
    made = Arguments(**folded, A_log=sample.A_log, dt_bias=sample.dt_bias, h0=sample.initial_state,
                     lower_bound=sample.lower_bound, cu_seqlens=ends)  # fmt: skip
    return made, sample


def compare(
    shape: Shape,
    peers: Sequence[str],
    rounds: int = 9,
    *,
    card: Gpu | None = None,
    device: str = "cuda",
    stopwatch: Stopwatch | None = None,
) -> dict[str, Any]:
    """One row: median times in us of ours, the default, ours in precision "fast" and each peer, taken in one run, and error
    ratios against fp64.

    A peer that cannot be imported, or that fails on the shape, is None with the reason under "unavailable". Errors are of
    the first "error_heads" value heads: all of them, unless fp64 for all would take too long.
    """
    a, sample = arguments(shape, device)
    systems: dict[str, Peer] = {
        "ours": ours(None),
        "default": ours(default_config(shape, card)),
        "fast": ours(None, "fast"),
    }
    systems |= {name: PEERS[name] for name in peers}
    row: dict[str, Any] = {"shape": shape.key(), "unavailable": {}, "error_heads": error_heads(shape)}
    want = None if row["error_heads"] is None else expected(sample, row["error_heads"])
    calls: dict[str, Callable[[], Outputs]] = {}
    for name, system in systems.items():
        row[f"{name}_us"] = row[f"{name}_o_error_ratio"] = row[f"{name}_state_error_ratio"] = None
        try:
            call = system(a)
            o, final = call()
            if device == "cuda":
                torch.cuda.synchronize()
            if want is not None:
                row |= errors(name, o, final, want)
            calls[name] = call
        except ImportError as error:
            row["unavailable"][name] = f"not installed: {error}"
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if name in OURS:
                raise
            row["unavailable"][name] = f"{type(error).__name__}: {error}"[:200]
    del want
    for name, times in (stopwatch or graph_times)(calls, rounds).items():
        row[f"{name}_us"] = round(statistics.median(times), 2)
        row[f"{name}_p20_us"], row[f"{name}_p80_us"] = (round(x, 2) for x in _p20_p80(times))
    for name in peers:
        if row[f"{name}_us"]:
            row[f"speedup_vs_{name}"] = round(row[f"{name}_us"] / row["ours_us"], 4)
            row[f"fast_speedup_vs_{name}"] = round(row[f"{name}_us"] / row["fast_us"], 4)
    row["speedup_vs_default"] = round(row["default_us"] / row["ours_us"], 4)
    # the captured call does not know how long the longest of packed sequences is
    seen = replace(shape, longest_tokens=None) if samples.is_packed(shape) else shape
    answer = launcher.resolve(replace(seen, state_v_first=True), card)
    row["match"], row["config"] = answer.match, to_json(answer.config)
    return row


def error_heads(shape: Shape) -> int | None:
    """How many value heads are compared with fp64: whole groups, as many as take seconds. None: not even one."""
    group = shape.HV // shape.H
    groups = min(shape.H, _FP64_TOKEN_HEADS // max(shape.T, 1) // group)
    return groups * group if groups and shape.longest <= _FP64_TOKENS else None


def expected(sample: samples.Sample, heads: int) -> Outputs:
    """Outputs and final states of the first `heads` value heads in fp64, v-first."""
    group = sample.v.shape[2] // sample.q.shape[2]
    cut = {name: getattr(sample, name)[:, :, :heads] for name in ("v", "g", "beta")}
    cut |= {name: getattr(sample, name)[:, :, : heads // group] for name in ("q", "k")}
    cut |= {"A_log": sample.A_log[:heads], "dt_bias": sample.dt_bias[:heads]}
    if sample.initial_state is not None:
        cut["initial_state"] = sample.initial_state[:, :heads]
    part = replace(sample, **cut)
    return reference.recurrence(**part.tensors(), lengths=list(sample.lengths), state_v_first=True)


def errors(name: str, o: torch.Tensor, final: torch.Tensor, want: Outputs) -> dict[str, float]:
    """Error ratios of a system's outputs over the heads that `want` has, with its name in the keys."""
    heads = want[0].shape[2]
    mine = o[:, :, :heads].reshape(want[0].shape)
    return {
        f"{name}_o_error_ratio": reference.error_ratio(mine, want[0]),
        f"{name}_state_error_ratio": reference.error_ratio(final[:, :heads], want[1]),
        f"{name}_worst_window": reference.worst_window(mine, want[0]),
    }


def graph_times(calls: dict[str, Callable[[], Outputs]], rounds: int) -> dict[str, list[float]]:
    """The calls as CUDA graphs, their replays interleaved."""
    runs = [bench.capture(functools.partial(_same, call), 1).replay_us for call in calls.values()]
    return dict(zip(calls, bench.interleave(runs, rounds), strict=True))


def _same(call: Callable[[], Outputs], _: int) -> Callable[[], Outputs]:
    return call


def _p20_p80(times: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]


def run(
    shapes: Sequence[Shape], peers: Sequence[str], say: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """The whole comparison as one document: provenance, one row a shape, geomean and least speed-up a peer.

    say: called with every row as it is done.
    """
    bench.warm_up()
    rows = []
    card, build = gpu.current(), gpu.current_build()
    for shape in shapes:
        rows.append(compare(shape, peers, card=card))
        say(rows[-1])
        torch.cuda.empty_cache()
    document: dict[str, Any] = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "gpu": to_json(card),
        "build": to_json(build),
        "method": "whole calls in CUDA graphs, replays interleaved, order rotated, median of 9; fp32 state in and out, v-first",
        "rows": rows,
    }
    return document | summary(rows, peers)


def summary(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> dict[str, float]:
    """Geomean and least speed-up over each peer that ran on some shape, in the served precision and in "fast"."""
    found: dict[str, float] = {}
    for name, kind in itertools.product(peers, ("", "fast_")):
        ratios = [row[key] for row in rows if (key := f"{kind}speedup_vs_{name}") in row]
        if ratios:
            found[f"{kind}geomean_vs_{name}"] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)
            found[f"{kind}least_vs_{name}"] = min(ratios)
    return found


def line(row: dict[str, Any], peers: Sequence[str]) -> str:
    """One row for people."""

    def shown(name: str) -> str:
        return f"{row[f'{name}_us']:9.1f}" if row.get(f"{name}_us") else f"{'-':>9}"

    ratios = " ".join(f"{row.get(f'speedup_vs_{name}', math.nan):6.3f}x" for name in peers)
    error = row["ours_o_error_ratio"]
    tail = "" if error is None else f"  o {error:.2e} state {row['ours_state_error_ratio']:.2e}"
    return f"{row['shape']:<52}{''.join(map(shown, OURS))}{''.join(shown(p) for p in peers)}  {ratios}{tail}"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m kdatune_kernels.compare`: the table on stderr, with --json the document on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", default=None, help=", ".join(SHAPE_SETS))
    parser.add_argument("--shape", action="append", default=[])
    parser.add_argument("--peers", default=",".join(PEER_NAMES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        peers = peers_of(options.peers)
        shapes = list(shapes_of(options.set or (None if options.shape else "headline"), options.shape))
    except (UsageError, ShapeError) as error:
        parser.error(str(error))
    try:
        gpu.current()
    except UsageError as error:
        sys.stderr.write(f"compare: {error}\n")
        return 1
    sys.stderr.write(f"{'shape':<52}{'ours_us':>9}{'default':>9}{'fast':>9}{''.join(f'{p:>9}' for p in peers)}\n")
    document = run(shapes, peers, lambda row: print(line(row, peers), file=sys.stderr, flush=True))  # noqa: T201  progress
    for name in peers:
        if f"geomean_vs_{name}" in document:
            for kind in ("", "fast_"):
                geomean, least = (document[f"{kind}{what}_vs_{name}"] for what in ("geomean", "least"))
                sys.stderr.write(f"{kind}geomean over {name}: {geomean}x, least {least}x\n")
    if options.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
