"""recurrent_kda: the KDA forward token by token in fp32, for decode steps and for the few tokens of speculative decoding."""

from dataclasses import dataclass

import torch

from kdatune_kernels import inputs
from kdatune_kernels import recurrent_step

MAX_TOKENS = 16
"""Tokens a dense sequence may have; beyond one chunk, chunk_kda is the faster and the better tested way."""
SIZES = (64, 128, 256)
PROGRAM = {64: (16, 2), 128: (32, 4), 256: (32, 8)}
"""K -> columns of a state that a program carries, and its warps: the widest found that spill nothing (sm_80, sm_90, sm_100)."""
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    inplace_final_state: bool = False,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    null_slot: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The KDA forward of a few tokens a sequence: outputs and, when asked for, the final state.

    The names are those of flash-linear-attention's `fused_recurrent_kda`. One launch, no sync, fit for CUDA-graph capture;
    tensors it reads on the device (cu_seqlens, slots, accepted counts) may change between replays.

    Args:
        q, k: [B, T, H, K] bf16 or fp16; v: [B, T, HV, V] as q. K and V in {64, 128, 256}, HV a multiple of H. T is at
            most 16, unless cu_seqlens packs the sequences.
        g: [B, T, HV, K], as q or fp32: the raw gate with use_gate_in_kernel, else the log decay.
        beta: [B, T, HV], as q or fp32: logits with use_beta_sigmoid_in_kernel, else in (0, 1).
        A_log: [HV] fp32 or None (0); dt_bias: [HV, K] or [HV * K] fp32 or None (0); both with use_gate_in_kernel only.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; fp32, bf16 or fp16.
        use_qk_l2norm_in_kernel: normalise q and k here, 1e-6 inside the root.
        allow_neg_eigval: 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        lower_bound: in [-5, 0): log decay lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); None: the softplus gate
            -exp(A_log) * softplus(g + dt_bias).
        cu_seqlens: [N + 1] int32 or int64 on the device of q; packed sequences of any length, then B is 1. It is not read on
            the host: entries outside 0..T are taken as 0 or T, and tokens after the last entry get outputs of 0.
        inplace_final_state: write final states into initial_state, rounded to its dtype.
        ssm_state_indices: initial_state is a pool [slots, HV, ...] and a sequence's state lies in slot [n], int32 or int64
            [N]. With [N, S], S >= T, the state after token t goes to slot [n, t], and the first state is the one of token
            num_accepted_tokens[n] - 1, of token 0 without it; that needs inplace_final_state. Of a longer packed sequence
            the tokens past S leave no state. A slot below 0, or null_slot, is padding: outputs are 0 and no state is
            touched. A slot past the pool gives outputs of NaN. Two sequences must not share a slot.
        null_slot: one more slot that means padding, such as 0 where a pool never hands out its first.
        out: [B, T, HV, V] as v, contiguous, to write into.

    Returns:
        o [B, T, HV, V] as v, and the final states: initial_state itself if inplace_final_state, else a new fp32 tensor
        laid out as initial_state, a state a sequence, or None.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name.
        NotImplementedError: a dtype or head size this kernel does not have, by name.

    Accuracy: all arithmetic is fp32; what is rounded is the output, and a state that is kept in 16 bits.
    """
    _check_options(
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, A_log, dt_bias,
        initial_state, inplace_final_state, ssm_state_indices, num_accepted_tokens, null_slot,
    )  # fmt: skip
    inputs.check_scale(scale)
    pooled = ssm_state_indices is not None and isinstance(initial_state, torch.Tensor) and initial_state.dim() > 0
    inputs.check_tensors(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, state_v_first, key_sizes=SIZES, value_sizes=SIZES,
        gate_dtypes=(torch.float32,), state_dtypes=_STATE_DTYPES,
        states=initial_state.shape[0] if pooled and initial_state is not None else None,
    )  # fmt: skip
    inputs.check_scale(scale)
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    N = B
    if cu_seqlens is not None:
        inputs.check_ends("cu_seqlens", cu_seqlens, B)
        N = cu_seqlens.numel() - 1
    elif T > MAX_TOKENS:
        raise ValueError(f"q has T={T}; recurrent_kda takes at most {MAX_TOKENS} tokens a sequence, use chunk_kda")
    slots = _check_slots(q, N, 0 if cu_seqlens is not None else T, ssm_state_indices, num_accepted_tokens)
    in_rows = inplace_final_state or slots is not None
    if initial_state is not None and in_rows and not _rows_are_whole(initial_state):
        raise ValueError("initial_state must be contiguous within a state: it is a pool, or written in place")
    if slots is not None and slots.dim() == 2 and not inplace_final_state:
        raise ValueError("ssm_state_indices [N, S] gives every token's state a slot; it needs inplace_final_state=True")
    o = _output(out, v)
    step = _Step(
        q, k, v, g, beta, A_log, dt_bias, initial_state if in_rows else _whole(initial_state), cu_seqlens, slots,
        num_accepted_tokens, o, float(K**-0.5 if scale is None else scale), state_v_first, inplace_final_state, null_slot,
        use_qk_l2norm_in_kernel, _gate(use_gate_in_kernel, lower_bound), float(lower_bound or 0.0),
        use_beta_sigmoid_in_kernel, allow_neg_eigval,
    )  # fmt: skip
    ht = initial_state if inplace_final_state else None
    if output_final_state and ht is None:
        sizes = (V, K) if state_v_first else (K, V)
        ht = torch.empty(N, HV, *sizes, dtype=torch.float32, device=q.device)
    if N and q.device.type == "cuda" and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            _launch(step, ht, N)
    elif N:
        _launch(step, ht, N)
    return o, ht


@dataclass(frozen=True)
class _Step:
    """Checked arguments of one call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    h0: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    slots: torch.Tensor | None
    accepted: torch.Tensor | None
    o: torch.Tensor
    scale: float
    state_v_first: bool
    in_place: bool
    null_slot: int | None
    l2norm: bool
    gate: int
    lower_bound: float
    sigmoid: bool
    neg_eigval: bool


def _check_options(
    use_gate: bool,
    use_sigmoid: bool,
    neg_eigval: bool,
    lower_bound: float | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    in_place: bool,
    slots: torch.Tensor | None,
    accepted: torch.Tensor | None,
    null_slot: int | None,
) -> None:
    if neg_eigval and not use_sigmoid:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel=True; pass a doubled beta instead")
    if not use_gate:
        given = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is read with use_gate_in_kernel=True only; without it g is the log decay")
    elif lower_bound is not None:
        inputs.check_lower_bound(lower_bound)
    for name, wanted in (("inplace_final_state", in_place), ("ssm_state_indices", slots is not None)):
        if wanted and initial_state is None:
            raise ValueError(f"{name} needs an initial_state")
    if slots is None and accepted is not None:
        raise ValueError("num_accepted_tokens needs ssm_state_indices [N, S]")
    if slots is None and null_slot is not None:
        raise ValueError("null_slot needs ssm_state_indices")
    if null_slot is not None and (isinstance(null_slot, bool) or not isinstance(null_slot, int)):
        raise TypeError(f"null_slot must be a whole number, not {null_slot!r}")


def _check_slots(
    q: torch.Tensor, N: int, tokens: int, slots: torch.Tensor | None, accepted: torch.Tensor | None
) -> torch.Tensor | None:
    """The slots, checked: [N] for one a sequence, else [N, S] with S >= `tokens`."""
    if slots is None:
        return None
    present = {"q": q, "ssm_state_indices": slots}
    if accepted is not None:
        present["num_accepted_tokens"] = accepted
    for name, x in present.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        if name != "q" and x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be torch.int32 or torch.int64, not {x.dtype}")
    inputs.check_devices(present)
    if slots.dim() not in (1, 2) or slots.shape[0] != N or 0 in slots.shape[1:]:
        raise ValueError(f"ssm_state_indices must be [N] or [N, S], here N={N}, not {list(slots.shape)}")
    if slots.dim() == 2 and slots.shape[1] < tokens:
        raise ValueError(f"ssm_state_indices has {slots.shape[1]} slots a sequence for T={tokens} tokens")
    if accepted is not None:
        if slots.dim() != 2:
            raise ValueError("num_accepted_tokens needs ssm_state_indices [N, S]")
        if list(accepted.shape) != [N]:
            raise ValueError(f"num_accepted_tokens must be [N], here [{N}], not {list(accepted.shape)}")
    return slots


def _gate(use_gate: bool, lower_bound: float | None) -> int:
    if not use_gate:
        return recurrent_step.LOG
    return recurrent_step.SOFTPLUS if lower_bound is None else recurrent_step.BOUNDED


def _output(out: torch.Tensor | None, v: torch.Tensor) -> torch.Tensor:
    if out is None:
        return torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, not {type(out).__name__}")
    if out.shape != v.shape or out.dtype != v.dtype or out.device != v.device or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous {list(v.shape)} {v.dtype} on {v.device}, as v is")
    return out


def _rows_are_whole(state: torch.Tensor) -> bool:
    """Whether every state of a pool is contiguous; the pool itself may have gaps, or overlap nothing else."""
    heads, rows, columns = state.shape[1:]
    return bool(state.stride()[1:] == (rows * columns, columns, 1) and state.stride(0) >= heads * rows * columns)


def _whole(state: torch.Tensor | None) -> torch.Tensor | None:
    return None if state is None else state.contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, T, heads, ...] as [B * T, heads, ...], any strides but the last; one token a sequence needs no copy ever."""
    B, T = x.shape[:2]
    last = x.dim() == 4 and x.stride(-1) != 1 and x.shape[-1] > 1
    if last or (B > 1 and T > 1 and x.stride(0) != T * x.stride(1)):
        x = x.contiguous()
    return x.as_strided((B * T, *x.shape[2:]), (x.stride(0) if T == 1 else x.stride(1), *x.stride()[2:]))


def _launch(step: _Step, ht: torch.Tensor | None, N: int) -> None:
    """One launch; a pointer that the kernel never follows stands in for what is absent."""
    s = step
    q, k, v, g, beta = (_rows(x) for x in (s.q, s.k, s.v, s.g, s.beta))
    H, K, HV, V = q.shape[1], q.shape[2], v.shape[1], v.shape[2]
    none = s.o
    slots, cu, h0 = s.slots, s.cu_seqlens, s.h0
    block_v, warps = PROGRAM[K]
    each_token = slots is not None and slots.dim() == 2
    recurrent_step.recurrent_kernel[(N * HV * (V // block_v),)](
        q, k, v, g, beta,
        inputs.zeros(HV, q.device) if s.A_log is None else s.A_log.contiguous(),
        inputs.zeros(HV * K, q.device) if s.dt_bias is None else s.dt_bias.contiguous(),
        s.o, none if h0 is None else h0, none if ht is None else ht,
        none if cu is None else cu.contiguous(),
        none if slots is None else slots,
        none if s.accepted is None else s.accepted.contiguous(),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), g.stride(0), g.stride(1),
        beta.stride(0), beta.stride(1), 0 if h0 is None else h0.stride(0), 0 if ht is None else ht.stride(0),
        0 if slots is None else slots.stride(0), slots.stride(1) if slots is not None and each_token else 0,
        N, s.q.shape[1] if cu is None else s.q.shape[0] * s.q.shape[1], HV, 0 if h0 is None else h0.shape[0],
        -1 if s.null_slot is None else s.null_slot, slots.shape[1] if slots is not None and each_token else 1,
        s.lower_bound, s.scale,
        K=K, V=V, BV=block_v, GROUP=HV // H, VARLEN=cu is not None, HAS_H0=h0 is not None, STORE_HT=ht is not None,
        V_FIRST=s.state_v_first, SLOTTED=slots is not None, IN_PLACE=s.in_place, EACH_TOKEN=each_token,
        ACCEPTED=s.accepted is not None, L2NORM=s.l2norm, GATE=s.gate, SIGMOID=s.sigmoid, NEG_EIGVAL=s.neg_eigval,
        num_warps=warps,
    )  # fmt: skip
