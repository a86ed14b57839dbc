"""Inputs to measure and check on: every kind that must hold (docs/kda.md, "Accuracy"), reproducible by seed."""

from dataclasses import dataclass
from typing import Any
from typing import Literal

import torch

from kdatune_kernels.shape_sets import SKEWED_LENGTHS
from kdatune_kernels.spec import Shape

Kind = Literal["random", "strong", "weak", "correlated", "identical"]
KINDS: tuple[Kind, ...] = ("random", "strong", "weak", "correlated", "identical")


@dataclass(frozen=True)
class Sample:
    """Arguments of chunk_kda for packed sequences of `lengths` tokens: [1, T, heads, size], of one 16-bit dtype."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    initial_state: torch.Tensor | None
    lengths: tuple[int, ...]
    lower_bound: float = -5.0

    def tensors(self) -> dict[str, Any]:
        """The tensor arguments and the bound, by chunk_kda's names."""
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "lower_bound")
        return {name: getattr(self, name) for name in names}


def lengths_of(shape: Shape) -> tuple[int, ...]:
    """Sequence lengths that a shape stands for; what a shape does not say is filled in the same way every time."""
    if shape.varlen and shape.longest_tokens is not None:
        if (shape.N, shape.T, shape.longest_tokens) == (len(SKEWED_LENGTHS), sum(SKEWED_LENGTHS), max(SKEWED_LENGTHS)):
            return SKEWED_LENGTHS
        others = _share(shape.T - shape.longest_tokens, shape.N - 1)
        return (shape.longest_tokens, *others)
    return _share(shape.T, shape.N)


def is_packed(shape: Shape) -> bool:
    """Whether the shape's sequences lie packed with their ends beside them; a dense batch has equal ones."""
    return shape.varlen or shape.T % shape.N != 0


def _share(tokens: int, parts: int) -> tuple[int, ...]:
    return tuple(tokens // parts + (i < tokens % parts) for i in range(parts)) if parts else ()


def make(
    lengths: tuple[int, ...],
    H: int,
    HV: int | None = None,
    *,
    kind: Kind = "random",
    seed: int = 0,
    device: torch.device | str = "cpu",
    initial_state: bool = True,
    state_v_first: bool = False,
    state_dtype: torch.dtype = torch.float32,
    size: int = 128,
    value_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Sample:
    """A sample of one kind.

    random: everything N(0, 1); strong: g = +8 (each log decay about -5); weak: g ~ N(-8, 1); correlated: keys = one
    N(0, 1) vector a head + 0.5 noise, g ~ N(-6, 1), beta logits ~ N(2, 1); identical: the same without the noise.
    K = size, V = value_size (None: the same).
    """
    HV = H if HV is None else HV
    V = size if value_size is None else value_size
    T = sum(lengths)
    draw = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    q, k, v, g = normal(1, T, H, size), normal(1, T, H, size), normal(1, T, HV, V), normal(1, T, HV, size)
    beta = normal(1, T, HV)
    if kind == "strong":
        g = torch.full_like(g, 8.0)
    if kind == "weak":
        g = g - 8.0
    if kind in ("correlated", "identical"):
        k = normal(1, 1, H, size) + (0.5 * k if kind == "correlated" else torch.zeros_like(k))
        g, beta = g - 6.0, beta + 2.0
    state = (normal(len(lengths), HV, size, V) * 0.2).to(state_dtype) if initial_state else None
    if state is not None and state_v_first:
        state = state.transpose(-1, -2).contiguous()
    return Sample(
        q=q.to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        g=g.to(dtype),
        beta=beta.to(dtype),
        A_log=torch.log(torch.rand(HV, generator=draw, device=device) * 1.5 + 0.1),
        dt_bias=normal(HV, size) * 0.5,
        initial_state=state,
        lengths=tuple(lengths),
    )
