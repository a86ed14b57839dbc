"""K2, the recurrence over chunks, in plain Triton: any sm >= 80, and the interpreter on the CPU.

One program carries BV columns of one chain's state through its chunks in order; the state stays fp32 throughout.
"""

import triton
import triton.language as tl

from kdatune_kernels.numerics import AI_SCALE
from kdatune_kernels.numerics import dot
from kdatune_kernels.numerics import narrow


@triton.jit(do_not_specialize=["H", "NC", "segments"])
def recurrence_kernel(
    KQ, KG, AI, DEC, v, o, h0, ht, spans, v_stride_t, NC, H, segments,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, HAS_H0: tl.constexpr, STORE_HT: tl.constexpr,
    V_FIRST: tl.constexpr, HALF: tl.constexpr, TRANSPOSED: tl.constexpr, STAGES: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    """Run o and the final state of every chain from the tiles that K1 wrote.

    v: tokens x H x V, token stride in elements, heads packed; o: the same, packed. h0, ht: [N, H, K, V], or [N, H, V, K]
    if V_FIRST. spans: [N, 4] int32, a row (first token, end token, first chunk, end chunk). If SEGMENTED, every `segments`
    spans are one sequence: ht has N / segments rows, of each sequence's last span.
    """
    TILE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    UNSCALE: tl.constexpr = 1.0 / AI_SCALE if HALF else 1.0
    EXACT: tl.constexpr = KQ.dtype.element_ty == KG.dtype.element_ty  # KG holds what kd lacks of kr
    blocks: tl.constexpr = V // BV
    pid = tl.program_id(0)
    chain = pid // blocks
    n = chain // H
    h = chain % H
    bos = tl.load(spans + 4 * n).to(tl.int64)
    T = tl.load(spans + 4 * n + 1) - bos
    first = tl.load(spans + 4 * n + 2)
    chunks = tl.load(spans + 4 * n + 3) - first
    row = tl.arange(0, BT)
    key = tl.arange(0, K)
    val = pid % blocks * BV + tl.arange(0, BV)
    in_tile = row[:, None] * K + key[None, :]
    in_square = row[:, None] * BT + row[None, :]
    base = chain.to(tl.int64) * (K * V)
    if TRANSPOSED:
        state = base + (val[:, None] * K + key[None, :] if V_FIRST else key[None, :] * V + val[:, None])
        S = tl.zeros([BV, K], tl.float32)
    else:
        state = base + (val[None, :] * K + key[:, None] if V_FIRST else key[:, None] * V + val[None, :])
        S = tl.zeros([K, BV], tl.float32)
    if HAS_H0:
        S += tl.load(h0 + state).to(tl.float32)
    tile0 = h.to(tl.int64) * NC + first
    for c in tl.range(0, chunks, num_stages=STAGES):
        tile = tile0 + c
        kd = tl.load(KQ + tile * (2 * BT * K) + in_tile)
        qd = tl.load(KQ + tile * (2 * BT * K) + BT * K + in_tile)
        kr = tl.load(KG + tile * (BT * K) + in_tile)
        inv = tl.load(AI + tile * (2 * BT * BT) + in_square)
        M = tl.load(AI + tile * (2 * BT * BT) + BT * BT + in_square)
        decay = tl.load(DEC + tile * K + key)
        token = c * BT + row
        where_v = (bos + token)[:, None] * v_stride_t + h * V + val[None, :]
        vals = tl.load(v + where_v, mask=(token < T)[:, None], other=0.0)
        Sb = narrow(S, KQ.dtype.element_ty)
        if TRANSPOSED:
            none = tl.zeros([BV, BT], tl.float32)
            x = tl.trans(vals).to(tl.float32) - dot(Sb, tl.trans(kd), none)
            u = narrow(dot(narrow(x, TILE), tl.trans(inv), none) * UNSCALE, TILE)
            out = dot(Sb, tl.trans(qd), none) + dot(u, tl.trans(M), none) * UNSCALE
            S = S * decay[None, :]
            if EXACT:
                S = dot(u, kd, S)
            S = dot(u, kr, S)
            out = tl.trans(out)
        else:
            none = tl.zeros([BT, BV], tl.float32)
            x = vals.to(tl.float32) - dot(kd, Sb, none)
            u = narrow(dot(inv, narrow(x, TILE), none) * UNSCALE, TILE)
            out = dot(qd, Sb, none) + dot(M, u, none) * UNSCALE
            S = S * decay[:, None]
            if EXACT:
                S = dot(tl.trans(kd), u, S)
            S = dot(tl.trans(kr), u, S)
        where_o = ((bos + token) * H + h)[:, None] * V + val[None, :]
        tl.store(o + where_o, narrow(out, o.dtype.element_ty), mask=(token < T)[:, None])
    if STORE_HT:
        if not SEGMENTED:
            tl.store(ht + state, S)
        elif n % segments == segments - 1:
            tl.store(ht + ((n // segments - n).to(tl.int64) * H * (K * V) + state), S)
