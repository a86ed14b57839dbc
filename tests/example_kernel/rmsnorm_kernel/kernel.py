"""The kernel, its launch, and what kdatune needs to measure it: inputs, launch, check."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kdatune_kernels import gpu
from kdatune_kernels.resolve_others import launch_resolved

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {kind: name for name, kind in DTYPES.items()}
# Of the largest error over the largest output: a unit in the last place (half would do on a card, but Triton's interpreter
# cuts bf16 off), and for fp32 what its sums may lose.
TOLERANCES = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}


@triton.jit
def rmsnorm_kernel(x, weight, y, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start_of_row = row.to(tl.int64)[:, None] * columns
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        part = tl.load(x + start_of_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += part * part
    scale = tl.rsqrt(tl.sum(squares, axis=1) / columns + eps)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        part = tl.load(x + start_of_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
        out = part * scale[:, None] * factor[None, :]
        tl.store(y + start_of_row + column[None, :], out.to(y.dtype.element_ty), mask=inside)


def run(x, weight, y, eps, config):
    """Launch with a config. x, y: [rows, columns], contiguous; weight: [columns]."""
    rows, columns = x.shape
    programs = triton.cdiv(rows, config["rows_per_program"])
    rmsnorm_kernel[(programs,)](
        x, weight, y, rows, columns, eps,
        ROWS=config["rows_per_program"], BLOCK=config["block_columns"], num_warps=config["num_warps"],
    )  # fmt: skip
    return y


def rmsnorm(x, weight, eps=1e-6):
    """What users call: the config is the one that kdatune knows to be the best for this shape on this card.

    x: [rows, columns], contiguous, bf16, fp16 or fp32; weight: [columns].
    """
    if x.dtype not in NAMES or x.ndim != 2 or not x.is_contiguous():
        raise TypeError(f"x must be a contiguous matrix of {', '.join(DTYPES)}, not {x.dtype} {list(x.shape)}")
    y = torch.empty_like(x)
    shape = {"rows": x.shape[0], "columns": x.shape[1], "dtype": NAMES[x.dtype]}
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    with torch.cuda.device_of(x):  # the card of the tensors, which need not be the current one
        return launch_resolved(
            "rmsnorm", shape, gpu.of(x.device), lambda config: run(x, weight, y, eps, config), capturing=capturing
        )


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    weight: torch.Tensor
    y: torch.Tensor
    eps: float = 1e-6


def inputs(shape: Any, seed: int, device: str) -> Inputs:
    """Tensors of a shape, with room for the output."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape["rows"], shape["columns"], generator=draw).to(device, DTYPES[shape["dtype"]])
    weight = torch.rand(shape["columns"], generator=draw).to(device, DTYPES[shape["dtype"]])
    return Inputs(x, weight, torch.empty_like(x))


def launch(given: Inputs, config: Any) -> torch.Tensor:
    """One launch into the output's room."""
    return run(given.x, given.weight, given.y, given.eps, config)


def check(given: Inputs, y: torch.Tensor) -> dict[str, float]:
    """The largest error against fp64, over its tolerance."""
    x = given.x.double()
    want = x * given.weight.double() / (x.square().mean(dim=1, keepdim=True) + given.eps).sqrt()
    return {"y": ((y.double() - want).abs().max() / want.abs().max()).item() / TOLERANCES[y.dtype]}
