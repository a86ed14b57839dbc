"""The token recurrence as one kernel, for decode steps, in plain Triton: any sm >= 80, and the interpreter on the CPU.

One program carries BV columns of one chain's state through its tokens, in fp32. It is none of `identity.KERNEL_SOURCES`:
nothing is tuned here, so no measurement hangs on it.

Source: docs/kda.md, "Token recurrence".
"""

import triton
import triton.language as tl

from kdatune_kernels.numerics import EPS
from kdatune_kernels.numerics import LOG2E
from kdatune_kernels.numerics import narrow

BOUNDED, SOFTPLUS, LOG = 0, 1, 2
"""GATE: how the log decay comes from g, as `reference.Gate` names it."""


@triton.jit
def _sigmoid(x):
    small = tl.exp2(-tl.abs(x) * LOG2E)  # never overflows
    part = 1.0 / (1.0 + small)
    return tl.where(x >= 0, part, small * part)


@triton.jit
def _softplus(x):
    """log(1 + e^x), with its relative accuracy kept where it is tiny: a slow channel decays over thousands of steps."""
    small = tl.exp2(-tl.abs(x) * LOG2E)
    one = 1.0 + small
    lost = one == 1.0
    return tl.maximum(x, 0.0) + tl.where(lost, small, tl.log(one) * (small / tl.where(lost, 1.0, one - 1.0)))


@triton.jit
def _is_slot(slot, null_slot, pool):
    return (slot >= 0) & (slot != null_slot) & (slot < pool)


@triton.jit(do_not_specialize=["N", "T", "H", "pool", "null_slot", "width"])
def recurrent_kernel(
    q, k, v, g, beta, A_log, dt_bias, o, h0, ht, cu_seqlens, slots, accepted,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, g_stride_t, g_stride_h,
    beta_stride_t, beta_stride_h, h0_stride_n, ht_stride_n, slots_stride_n, slots_step,
    N, T, H, pool, null_slot, width, lower_bound, scale,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, VARLEN: tl.constexpr,
    HAS_H0: tl.constexpr, STORE_HT: tl.constexpr, V_FIRST: tl.constexpr, SLOTTED: tl.constexpr, IN_PLACE: tl.constexpr,
    EACH_TOKEN: tl.constexpr, ACCEPTED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
):  # fmt: skip
    """Run o and the final states of N sequences of T tokens each, or of T packed ones if VARLEN.

    q, k: tokens x H/GROUP x K; v: tokens x H x V; g: tokens x H x K; beta: tokens x H; o: tokens x H x V, packed.
    h0, ht: rows of [H, K, V], or [H, V, K] if V_FIRST, a row a sequence; if SLOTTED a row of h0 a slot of a pool of `pool`,
    and of ht too if IN_PLACE. slots: [N], or [N, width] if EACH_TOKEN: then the state after every token goes to its own slot,
    and the first state is the one of token accepted[n] - 1 (of token 0 if not ACCEPTED). A slot below 0 or null_slot is
    padding: o is 0 and no state is touched. A slot past the pool gives NaN and touches nothing either.
    Whatever cu_seqlens holds, no access leaves the tokens; tokens of no sequence before the first and after the last get 0.
    """
    blocks: tl.constexpr = V // BV
    pid = tl.program_id(0)
    n = (pid // blocks // H).to(tl.int64)
    h = pid // blocks % H
    key = tl.arange(0, K)
    val = pid % blocks * BV + tl.arange(0, BV)
    if VARLEN:
        bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.maximum(tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int64), T), bos)
    else:
        bos = n * T
        end = bos + T
    to = o + (h * V + val)
    stride_o = H.to(tl.int64) * V
    nothing = tl.zeros([BV], tl.float32)
    if VARLEN:
        if n == 0:
            for t in range(bos):
                tl.store(to + t * stride_o, nothing.to(o.dtype.element_ty))
        if n == N - 1:
            for t in range(end, T):
                tl.store(to + t * stride_o, nothing.to(o.dtype.element_ty))
    live = True
    start = n
    if SLOTTED:
        at = 0
        if ACCEPTED:
            at = tl.minimum(tl.maximum(tl.load(accepted + n).to(tl.int32), 1), width) - 1
        start = tl.load(slots + n * slots_stride_n + at * slots_step).to(tl.int64)
        live = _is_slot(start, null_slot, pool)
        if start >= pool:
            nothing += float("nan")
    state = h.to(tl.int64) * (K * V)
    if V_FIRST:
        inside = val[:, None] * K + key[None, :]
        S = tl.zeros([BV, K], tl.float32)
    else:
        inside = key[:, None] * V + val[None, :]
        S = tl.zeros([K, BV], tl.float32)
    if HAS_H0:
        if live:
            S += tl.load(h0 + start * h0_stride_n + state + inside).to(tl.float32)
    if not live:
        for t in range(bos, end):
            tl.store(to + t * stride_o, nothing.to(o.dtype.element_ty))
        S += tl.sum(nothing) * 0.0
        end = bos
    hq = h // GROUP
    gain = tl.exp2(tl.load(A_log + h).to(tl.float32) * LOG2E)
    bias = tl.load(dt_bias + h * K + key).to(tl.float32)
    for t in range(bos, end):
        qn = tl.load(q + t * q_stride_t + hq * q_stride_h + key).to(tl.float32)
        kn = tl.load(k + t * k_stride_t + hq * k_stride_h + key).to(tl.float32)
        a = tl.load(g + t * g_stride_t + h * g_stride_h + key).to(tl.float32)
        x = tl.load(v + t * v_stride_t + h * v_stride_h + val).to(tl.float32)
        b = tl.load(beta + t * beta_stride_t + h * beta_stride_h).to(tl.float32)
        if L2NORM:
            qn = qn * tl.rsqrt(tl.sum(qn * qn) + EPS)
            kn = kn * tl.rsqrt(tl.sum(kn * kn) + EPS)
        qn = qn * scale
        if GATE == 0:
            a = lower_bound * _sigmoid(gain * (a + bias))
        elif GATE == 1:
            a = -gain * _softplus(a + bias)
        decay = tl.exp2(a * LOG2E)
        if SIGMOID:
            b = _sigmoid(b)
        if NEG_EIGVAL:
            b = 2.0 * b
        if V_FIRST:
            S = S * decay[None, :]
            u = b * (x - tl.sum(S * kn[None, :], 1))
            S = S + u[:, None] * kn[None, :]
            out = tl.sum(S * qn[None, :], 1)
        else:
            S = S * decay[:, None]
            u = b * (x - tl.sum(S * kn[:, None], 0))
            S = S + kn[:, None] * u[None, :]
            out = tl.sum(S * qn[:, None], 0)
        tl.store(to + t * stride_o, narrow(out, o.dtype.element_ty))
        if EACH_TOKEN:
            step = t - bos
            if step < width:
                slot = tl.load(slots + n * slots_stride_n + step * slots_step).to(tl.int64)
                if _is_slot(slot, null_slot, pool):
                    tl.store(ht + slot * ht_stride_n + state + inside, narrow(S, ht.dtype.element_ty))
    if STORE_HT:
        if not EACH_TOKEN:
            if IN_PLACE and SLOTTED:
                if end > bos:
                    tl.store(ht + start * ht_stride_n + state + inside, narrow(S, ht.dtype.element_ty))
            else:
                tl.store(ht + n * ht_stride_n + state + inside, narrow(S, ht.dtype.element_ty))
