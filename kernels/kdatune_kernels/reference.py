"""The token recurrence in plain torch: the only ground truth, and the ratios that compare a result with it."""

from typing import Literal

import torch

EPS = 1e-6

Gate = Literal["bounded", "softplus", "log"]


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    lengths: list[int] | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
    *,
    gate: Gate = "bounded",
    qk_l2norm: bool = True,
    beta_sigmoid: bool = True,
    neg_eigval: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states of the KDA recurrence, token by token in `dtype`.

    Args:
        q, k: [B, T, H, K] raw queries and keys; L2-normalised here, EPS inside the root.
        v: [B, T, HV, V]; value head h reads q/k head h // (HV / H).
        g: [B, T, HV, K] raw gate; beta: [B, T, HV] logits; A_log: [HV] or None (0); dt_bias: [HV, K] or [HV * K] or None.
        initial_state: [N, HV, K, V], or [N, HV, V, K] if state_v_first.
        lengths: tokens of each packed sequence (then B is 1); None: B sequences of T tokens.
        gate: the log decay is "bounded" lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), "softplus"
            -exp(A_log) * softplus(g + dt_bias), or "log" g itself.
        qk_l2norm, beta_sigmoid: off where q and k are normalised and beta is in (0, 1) already; neg_eigval doubles beta.

    Returns:
        o [B, T, HV, V] and the final state, laid out as initial_state is, both in `dtype`.

    Source: docs/kda.md, "Token recurrence".
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    lengths = [T] * B if lengths is None else lengths
    N, longest = len(lengths), max(lengths, default=0)
    device = q.device
    starts = torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)
    ends = starts + torch.tensor(lengths, device=device)

    def rows(x: torch.Tensor, group: int = 1) -> torch.Tensor:
        return x.reshape(B * T, *x.shape[2:]).repeat_interleave(group, dim=1).to(dtype)

    qn, kn = rows(q, HV // H), rows(k, HV // H)
    if qk_l2norm:
        qn = qn * torch.rsqrt((qn * qn).sum(-1, keepdim=True) + EPS)
        kn = kn * torch.rsqrt((kn * kn).sum(-1, keepdim=True) + EPS)
    qn = qn * (K**-0.5 if scale is None else scale)
    gain = torch.ones(HV, dtype=dtype, device=device) if A_log is None else torch.exp(A_log.to(dtype))
    bias = torch.zeros(HV, K, dtype=dtype, device=device) if dt_bias is None else dt_bias.to(dtype).reshape(HV, K)
    if gate == "bounded":
        if lower_bound is None:
            raise ValueError("the bounded gate needs a lower_bound")
        decay = torch.exp(lower_bound * torch.sigmoid(gain[:, None] * (rows(g) + bias)))
    elif gate == "softplus":
        decay = torch.exp(-gain[:, None] * torch.nn.functional.softplus(rows(g) + bias, threshold=40.0))
    else:
        decay = torch.exp(rows(g))
    strength, values = torch.sigmoid(rows(beta)) if beta_sigmoid else rows(beta), rows(v)
    if neg_eigval:
        strength = 2.0 * strength
    S = torch.zeros(N, HV, K, V, dtype=dtype, device=device)
    if initial_state is not None:
        S = S + (initial_state.transpose(-1, -2) if state_v_first else initial_state).to(dtype)
    o = torch.zeros(B * T, HV, V, dtype=dtype, device=device)
    for step in range(longest):
        live = torch.nonzero(starts + step < ends).flatten()
        at = (starts + step)[live]
        every = len(live) == N
        state = S if every else S[live]
        state = state * decay[at][..., None]
        read = torch.einsum("nhk,nhkv->nhv", kn[at], state)
        u = strength[at][..., None] * (values[at] - read)
        state = state + kn[at][..., None] * u[..., None, :]
        o[at] = torch.einsum("nhk,nhkv->nhv", qn[at], state)
        if every:
            S = state
        else:
            S[live] = state
    final = S.transpose(-1, -2).contiguous() if state_v_first else S
    return o.reshape(B, T, HV, V), final


def error_ratio(x: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS(reference - x) / RMS(reference); nan when x is not finite, 0 when both are all zero."""
    difference = (reference - x.to(reference.dtype)).norm()
    size = reference.norm()
    if float(size) == 0.0:
        return 0.0 if float(difference) == 0.0 else float("inf") if bool(difference.isfinite()) else float("nan")
    return float(difference / size)


def worst_window(o: torch.Tensor, reference: torch.Tensor, tokens: int = 16) -> float:
    """The largest error ratio over any window of `tokens` tokens of any head; a global RMS hides a local fault.

    o, reference: [B, T, HV, V].
    """
    T = reference.shape[1]
    difference = (reference - o.to(reference.dtype)).square().sum(-1)
    size = reference.square().sum(-1)
    pad = (0, 0, 0, -T % tokens)

    def windows(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, pad).unflatten(1, (-1, tokens)).sum(2)

    if T == 0:
        return 0.0
    ratio = (windows(difference) / windows(size).clamp_min(torch.finfo(reference.dtype).tiny)).sqrt()
    return float(ratio.max())
