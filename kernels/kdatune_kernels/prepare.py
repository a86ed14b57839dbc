"""K1, the chunk preparation, in plain Triton: any sm >= 80, and the interpreter on the CPU.

One program prepares CHUNKS consecutive chunks of one value head; tile index = head * NC + chunk.

Source: the chunk algebra with BT = 16 of docs/kda.md; symbols are the same.
"""

import triton
import triton.language as tl

from kdatune_kernels.numerics import AI_SCALE
from kdatune_kernels.numerics import EPS
from kdatune_kernels.numerics import LOG2E
from kdatune_kernels.numerics import dot
from kdatune_kernels.numerics import dot32
from kdatune_kernels.numerics import narrow
from kdatune_kernels.numerics import unit_lower_inverse


@triton.jit
def _rows(base, offset, key, valid):
    """Rows of a tokens x K matrix as fp32, 0 where not valid."""
    return tl.load(base + offset[:, None] + key[None, :], mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["beta_stride_t", "beta_stride_h", "H", "NC"])
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, KQ, KG, AI, DEC, chunk_token, chunk_length,
    q_stride_t, k_stride_t, g_stride_t, beta_stride_t, beta_stride_h, NC, H, lower_bound, scale,
    K: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, HEAD_FAST: tl.constexpr,
    HALF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write the tiles [kd; qd], kr - kd, [INV b; M] and 2^G_C of every chunk; kd there is the tile as rounded.

    If not EXACT (precision "fast"): kr in the place of kr - kd, and the products of L and M from bf16 operands.

    q, k: tokens x H/GROUP x K; g: tokens x H x K; beta: tokens x H; token strides in elements, heads packed.
    KQ: [tiles * 32, K], KG: [tiles * 16, K] and AI: [tiles * 32, 16], fp16 if HALF (AI times AI_SCALE) else bf16, and KQ bf16
    if not EXACT; DEC: [tiles, K] fp32.
    """
    TILE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    pid = tl.program_id(0)
    groups = tl.cdiv(NC, CHUNKS)
    if HEAD_FAST:
        h = pid % H
        first = pid // H * CHUNKS
    else:
        h = pid // groups
        first = pid % groups * CHUNKS
    hq = h // GROUP
    row = tl.arange(0, BT)
    key = tl.arange(0, K)
    gain = tl.exp2(tl.load(A_log + h).to(tl.float32) * LOG2E)
    bias = tl.load(dt_bias + h * K + key).to(tl.float32)
    in_tile = row[:, None] * K + key[None, :]
    in_square = row[:, None] * BT + row[None, :]
    for i in range(CHUNKS):
        c = first + i
        n = 0
        if c < NC:
            n = tl.load(chunk_length + c)
        if n > 0:
            token = tl.load(chunk_token + c).to(tl.int64) + row
            valid = row < n
            qn = _rows(q + hq * K, token * q_stride_t, key, valid)
            kn = _rows(k + hq * K, token * k_stride_t, key, valid)
            gate = _rows(g + h * K, token * g_stride_t, key, valid)
            b = tl.load(beta + token * beta_stride_t + h * beta_stride_h, mask=valid, other=0.0).to(tl.float32)
            b = tl.where(valid, 1.0 / (1.0 + tl.exp2(-b * LOG2E)), 0.0)
            qn = qn * (tl.rsqrt(tl.sum(qn * qn, 1) + EPS) * scale)[:, None]
            kn = kn * tl.rsqrt(tl.sum(kn * kn, 1) + EPS)[:, None]
            a = lower_bound * LOG2E / (1.0 + tl.exp2(-(gain * LOG2E) * (gate + bias[None, :])))
            a = tl.where(valid[:, None], a, 0.0)
            G = tl.cumsum(a, 0)
            decay = tl.exp2(tl.sum(a, 0))
            grown = tl.exp2(G)
            ki = kn * tl.exp2(-G)
            kd = kn * grown
            qd = qn * grown
            kd_tile = narrow(kd, KQ.dtype.element_ty)
            qd_tile = narrow(qd, KQ.dtype.element_ty)
            if EXACT:
                kr = ki * decay[None, :] - kd_tile.to(tl.float32)
                M = dot32(qd, tl.trans(ki))
                L = dot32(kd, tl.trans(ki))
            else:
                kr = ki * decay[None, :]
                kit = tl.trans(narrow(ki, tl.bfloat16))
                zero = tl.zeros([BT, BT], tl.float32)
                M = dot(qd_tile, kit, zero)
                L = dot(kd_tile, kit, zero)
            M = tl.where(row[:, None] >= row[None, :], M, 0.0)
            L = tl.where(row[:, None] > row[None, :], L * b[:, None], 0.0)
            X = unit_lower_inverse(L, row, row) * b[None, :]
            if HALF:
                X = X * AI_SCALE
                M = M * AI_SCALE
            tile = h.to(tl.int64) * NC + c
            tl.store(KQ + tile * (2 * BT * K) + in_tile, kd_tile)
            tl.store(KQ + tile * (2 * BT * K) + BT * K + in_tile, qd_tile)
            tl.store(KG + tile * (BT * K) + in_tile, narrow(kr, TILE))
            tl.store(AI + tile * (2 * BT * BT) + in_square, narrow(X, TILE))
            tl.store(AI + tile * (2 * BT * BT) + BT * BT + in_square, narrow(M, TILE))
            tl.store(DEC + tile * K + key, decay)


@triton.jit(do_not_specialize=["N", "NC", "T"])
def plan_kernel(
    cu_seqlens, spans, chunk_token, chunk_length, N, NC, T,
    BT: tl.constexpr, CHUNKS: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Lay out the chunks of packed sequences on the device, with no host sync.

    cu_seqlens: [N + 1] int32 or int64. Writes spans [N, 4] int32, a row (first token, end token, first chunk, end
    chunk), and chunk_token, chunk_length [NC] int32, where NC is the host's upper bound; chunks past the last have
    length 0. Whatever cu_seqlens holds, every number written stays inside 0..T and 0..NC, so that a wrong one cannot make
    the kernels leave their buffers.
    """
    c = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    token = tl.zeros([CHUNKS], tl.int32)
    length = tl.zeros([CHUNKS], tl.int32)
    base = 0
    for s0 in range(0, N, SEQS):
        s = s0 + tl.arange(0, SEQS)
        begin = tl.load(cu_seqlens + s, mask=s < N, other=0).to(tl.int64)
        end = tl.load(cu_seqlens + s + 1, mask=s < N, other=0).to(tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), T).to(tl.int32)
        end = tl.maximum(tl.minimum(tl.maximum(end, 0), T).to(tl.int32), begin)
        count = (end - begin + BT - 1) // BT
        last = base + tl.cumsum(count, 0)
        first = last - count
        mine = (c[:, None] >= first[None, :]) & (c[:, None] < last[None, :])
        at = begin[None, :] + (c[:, None] - first[None, :]) * BT
        token += tl.sum(tl.where(mine, at, 0), 1)
        length += tl.sum(tl.where(mine, tl.minimum(end[None, :] - at, BT), 0), 1)
        if tl.program_id(0) == 0:
            tl.store(spans + 4 * s, begin, mask=s < N)
            tl.store(spans + 4 * s + 1, end, mask=s < N)
            tl.store(spans + 4 * s + 2, tl.minimum(first, NC), mask=s < N)
            tl.store(spans + 4 * s + 3, tl.minimum(last, NC), mask=s < N)
        base += tl.sum(count, 0)
    tl.store(chunk_token + c, token, mask=c < NC)
    tl.store(chunk_length + c, length, mask=c < NC)


@triton.jit(do_not_specialize=["N", "T", "EACH"])
def dense_plan_kernel(
    spans, chunk_token, chunk_length, N, T, EACH,
    BT: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The tables of `plan_kernel` for N sequences of T tokens each, EACH = ceil(T / BT) chunks a sequence."""
    c = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    inside = c % EACH * BT
    tl.store(chunk_token + c, c // EACH * T + inside, mask=c < N * EACH)
    tl.store(chunk_length + c, tl.minimum(T - inside, BT), mask=c < N * EACH)
    tl.store(spans + 4 * c, c * T, mask=c < N)
    tl.store(spans + 4 * c + 1, (c + 1) * T, mask=c < N)
    tl.store(spans + 4 * c + 2, c * EACH, mask=c < N)
    tl.store(spans + 4 * c + 3, (c + 1) * EACH, mask=c < N)
