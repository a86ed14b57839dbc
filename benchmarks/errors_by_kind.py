"""Error ratios to the fp64 recurrence by kind of input: ours in every precision, the decode step, and every importable peer.

On a card, or without one in Triton's interpreter (TRITON_INTERPRET=1), where T should be small. Prints a Markdown table, times
1e-3: o / final state / worst 16-token window.

    TRITON_INTERPRET=1 python benchmarks/errors_by_kind.py --tokens 512 --heads 2
    python benchmarks/errors_by_kind.py --tokens 512,2048,65536 --heads 4
"""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from kdatune_kernels import compare
from kdatune_kernels import samples
from kdatune_kernels.kda import chunk_kda
from kdatune_kernels.recurrent import recurrent_kda
from kdatune_kernels.spec import shape_of

OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}


def ours(precision: str, a: compare.Arguments) -> Callable[[], Any]:
    """chunk_kda with the resolved config, in a precision."""
    return lambda: chunk_kda(**a.keywords(), **OPTIONS, precision=precision)


def decode(a: compare.Arguments) -> Callable[[], Any]:
    """recurrent_kda over the whole packed sequence."""
    ends = torch.tensor([0, a.q.shape[1]], device=a.q.device)
    return lambda: recurrent_kda(**a.keywords() | {"cu_seqlens": ends}, **OPTIONS)


SYSTEMS: dict[str, Any] = {
    "chunk_kda": functools.partial(ours, "fp16"),
    "chunk_kda, fast": functools.partial(ours, "fast"),
    "chunk_kda, bf16 tiles": functools.partial(ours, "bf16"),
    "recurrent_kda": decode,
    "FlashKDA": compare.flash_kda,
    "fla": compare.fla,
}


def table(tokens: list[int], heads: int, dtype: str, key_size: int) -> list[str]:
    """The lines of the table; a system that cannot be imported, or that refuses the inputs, has no column."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for T in tokens:
        for kind in samples.KINDS:
            shape = shape_of(1, heads, T, K=key_size, V=key_size, dtype=dtype)
            a, sample = compare.arguments(shape, device, kind=kind)
            want = compare.expected(sample, heads)
            row = cells[kind, T] = {}
            for name, system in SYSTEMS.items():
                try:
                    o, final = system(a)()
                except (ImportError, NotImplementedError):
                    continue
                found = compare.errors("x", o, final, want)
                parts = (found[f"x_{part}"] * 1e3 for part in ("o_error_ratio", "state_error_ratio", "worst_window"))
                row[name] = " / ".join(f"{part:.3g}" for part in parts)
    names = [name for name in SYSTEMS if any(name in row for row in cells.values())]
    lines = [f"| input | T | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    return lines + [
        f"| {kind} | {T} | {' | '.join(row.get(n, '-') for n in names)} |" for (kind, T), row in cells.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--key-size", type=int, choices=(64, 128), default=128, help="K, and V with it")
    options = parser.parse_args()
    lines = table([int(text) for text in options.tokens.split(",")], options.heads, options.dtype, options.key_size)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
