"""What a whole chunk_kda call costs the CPU, in us: repeated calls, which launch by a plan, and the long way; both by part.

The target, 60 us, is for repeated calls. Two calls of every signature go the long way, and all that have no plan.

python benchmarks/call_cost.py            on a CUDA card: the launches are real, and timed without waiting for the card
python benchmarks/call_cost.py --fake     anywhere: CPU tensors, an H200's kernels, and a driver that does nothing in its place
                        ... --json       one JSON document on stdout, times in us

With --fake all Python is what it is on an H200: the kernels are compiled for sm_90, Triton binds their arguments and calls its
launcher. Missing are torch's CUDA allocator, the encoding of descriptors, the launch itself, and the questions which device is
current and whether its stream is being captured.
"""

import argparse
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia

from kdatune_kernels import direct
from kdatune_kernels import inputs
from kdatune_kernels import kda
from kdatune_kernels import launch
from kdatune_kernels import repeated
from kdatune_kernels.kda import chunk_kda
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of

TARGET_US = 60.0


H200 = gpu_of("NVIDIA H200", "9.0", 132, 141 << 30, 50 << 20)


class NoCard(nvidia.CudaDriver):
    """Triton's driver of an H200, as far as a launch asks it, without one: what is loaded or launched goes nowhere."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda *_args: ("module", 0, 0, 0, 1024),
            get_device_properties=lambda _device: {"max_shared_mem": H200.smem_per_block_bytes},
            fill_tma_descriptor=lambda *_args: None,
        )
        self.launcher_cls = nvidia.CudaLauncher
        self.get_device_capability = lambda _device: (9, 0)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _device: 0


def without_a_card() -> None:
    """Let calls with CPU tensors launch an H200's kernels into nothing. Knows the launch path of Triton 3.6 only."""
    inputs.INTERPRET = True  # CPU tensors pass the checks
    kda._gpu = lambda _device: H200
    launch._processors = lambda _device: H200.sm_count
    nvidia.library_dirs = list
    nvidia.compile_module_from_src = lambda **_source: SimpleNamespace(launch=lambda *_args: None)
    triton.runtime.driver.set_active(NoCard())


def median_us(call: Callable[[], object], rounds: int = 300, inner: int = 20) -> float:
    """Median over rounds of the time of one call. Between rounds the card catches up, so that no queue fills."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(inner):
            call()
        times.append((time.perf_counter() - started) / inner * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return statistics.median(times)


def arguments(device: str, tokens: int, heads: int, state: bool, sequences: int) -> dict[str, Any]:
    """The tensors of a call; more than one sequence are packed."""
    like = {"dtype": torch.bfloat16, "device": device}
    q, k, v, g = (torch.randn(1, tokens, heads, 128, **like) for _ in range(4))
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "g": g, "beta": torch.randn(1, tokens, heads, **like),
        "A_log": torch.zeros(heads, device=device), "dt_bias": torch.zeros(heads * 128, device=device),
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True, "lower_bound": -5.0, "output_final_state": state,
    }  # fmt: skip
    if sequences > 1:
        ends = [i * tokens // sequences for i in range(sequences + 1)]
        given["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    if state:
        given["initial_state"] = torch.zeros(sequences, heads, 128, 128, device=device)
    return given


def parts_of_a_plan(given: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """The pieces of a repeated call that can be timed alone. Empty where there is no plan."""
    repeated.forget()
    for _ in range(3):
        chunk_kda(**given)
    entries = list(repeated._entries.values())
    plan = next(iter(entries[0].plans.values()))[1] if entries else None
    if plan is None:
        return {}
    where, bound = list(direct._bound.items())[-1]
    v, key = given["v"], entries[0].key
    pieces: dict[str, Callable[[], object]] = {
        "look the config up": lambda: kda.launcher.lookup(key),
        "allocate o": lambda: torch.empty_like(v),
        "allocate the block": lambda: torch.empty(plan.block_bytes, dtype=torch.uint8, device=v.device),
        "know the arguments": lambda: direct.bound(plan, where),
    }
    for i, (run, arguments) in enumerate(bound, 1):
        pieces[f"launch {i}"] = functools.partial(run, *arguments)

    def elsewhere() -> None:
        direct._bound.clear()
        direct.bound(plan, where)

    return {**pieces, "make them for other addresses": elsewhere}


def parts(given: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """The pieces of a call the long way that can be timed alone."""
    q, k, v, g, beta = (given[name] for name in ("q", "k", "v", "g", "beta"))
    rest = (given["A_log"], given["dt_bias"], given.get("initial_state"), given.get("cu_seqlens"), False)
    tokens, heads = q.shape[1], v.shape[2]
    tables = launch.dense_tables(1, tokens, q.device, False)
    fold = functools.partial(
        inputs.fold,
        q,
        k,
        v,
        g,
        beta,
        given["A_log"],
        given["dt_bias"],
        -5.0,
        None,
        given.get("initial_state"),
        False,
        tables,
    )
    problem = fold()
    o = torch.empty_like(v).view(tokens, heads, 128)
    card = kda._gpu(q.device)
    config = split_default(shape_of(1, heads, tokens), card)
    make = functools.partial(launch.workspace, tables, heads, 128, "fp16", q.device)
    ws = make()
    k1, k2 = launch.k1_call(problem, ws, config.k1), launch.k2_call(problem, ws, o, None, config.k2)
    key = ("call_cost", q.device, 1, q.shape[2], heads, 128, 128, q.dtype, tokens, False, None, None, False, False)
    kda.launcher.resolve_slow(key, shape_of(1, heads, tokens, initial_state=False, final_state=False), card)
    return {
        "check the tensors": lambda: inputs.check_tensors(q, k, v, g, beta, *rest),
        "fold them": fold,
        "look the config up": lambda: kda.launcher.lookup(key),
        "allocate o": lambda: torch.empty(1, tokens, heads, 128, dtype=v.dtype, device=v.device),
        "allocate the workspace": make,
        "bind K1": lambda: launch.k1_call(problem, ws, config.k1),
        "bind K2": lambda: launch.k2_call(problem, ws, o, None, config.k2),
        "launch K1": k1,
        "launch K2": k2,
    }


@dataclass
class Costs:
    """us of CPU a call, by kind, and of its parts: those of the dense one without states."""

    whole_us: dict[str, float]
    long_way_us: dict[str, float]
    parts_us: dict[str, float]
    long_way_parts_us: dict[str, float]


@torch.no_grad()
def measure(device: str, tokens: int, heads: int, sequences: int) -> Costs:
    """Repeated calls of every kind, and the same calls the long way."""
    ways: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for state in (False, True):
        for packed in (1, 3, sequences):
            call = functools.partial(chunk_kda, **arguments(device, tokens, heads, state, packed))
            name = f"{'dense' if packed == 1 else f'{packed} packed'}, {'with' if state else 'without'} states"
            for way, found in ways.items():
                repeated.enabled = way and direct.FOLLOWED
                for _ in range(20):
                    call()
                found[name] = median_us(call)
    repeated.enabled = direct.FOLLOWED
    given = arguments(device, tokens, heads, False, 1)
    timed = ({name: median_us(call) for name, call in made(given).items()} for made in (parts_of_a_plan, parts))
    return Costs(ways[True], ways[False], *timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=64, help="few, so that the card is done before the CPU is")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=32, help="of the longer one of the packed calls")
    args = parser.parse_args()
    device = "cpu" if args.fake else "cuda"
    if args.fake:
        without_a_card()
    elif not torch.cuda.is_available():
        sys.exit("no CUDA card is visible; --fake measures the host's part without one")
    costs = measure(device, args.tokens, args.heads, args.sequences)
    met = max(costs.whole_us.values()) <= TARGET_US
    where = "an H200's kernels, launched into nothing" if args.fake else torch.cuda.get_device_name()
    if args.json:
        document = {
            "where": where,
            "heads": args.heads,
            "tokens": args.tokens,
            "target_us": TARGET_US,
            "met": met,
            **asdict(costs),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        head = f"chunk_kda, {args.heads} heads, {args.tokens} tokens, {where}: us of CPU a call, median of 300 x 20"
        sys.stdout.write(f"{head}\n  {'':30}repeated   the long way\n")
        for name, us in costs.whole_us.items():
            over = "" if us <= TARGET_US else f"   over {TARGET_US:g}"
            sys.stdout.write(f"  {name:30}{us:8.1f}      {costs.long_way_us[name]:8.1f}{over}\n")
        for way, found in (("a repeated", costs.parts_us), ("the long way of a", costs.long_way_parts_us)):
            sys.stdout.write(f"of {way} dense call without states:\n")
            for name, us in found.items():
                sys.stdout.write(f"  {name:30}{us:8.1f}\n")
    sys.exit(0 if args.fake or met else 1)


if __name__ == "__main__":
    main()
