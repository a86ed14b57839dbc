"""The segment-parallel recurrence, for few chains: passes A and B in plain Triton, and the launches of all three passes.

A chain is cut into P segments of nearly equal chunk counts. A segment maps its start state affinely, S_end = M S + R:

    A   every segment but the last, all at once: M from the identity with values 0, R from zero
    B   every chain: the start states S_p+1 = M_p S_p + R_p, in order, value columns apart
    C   every segment, all at once: the ordinary K2 from its start state, so each segment is one more chain

A sequence of fewer chunks than P has its first segments empty: these start, and end, at the initial state.
M is kept as its diagonal in fp32, which carries what decays slowly, and the rest in fp16. S is narrowed for the product
only, to fp16 after an exact power-of-two scaling of every column.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from kdatune_kernels import launch
from kdatune_kernels.numerics import AI_SCALE
from kdatune_kernels.numerics import dot
from kdatune_kernels.numerics import narrow
from kdatune_kernels.spec import CHUNK_TOKENS
from kdatune_kernels.spec import K2Config

ROWS, STAGES, COLUMNS = 64, 3, 32
"""Rows a program of pass A carries and its pipeline depth, columns a program of pass B carries: the plain Triton kernels."""
STAGES_SM90, REGISTERS_SM90 = 8, 96
"""Chunks in flight in pass A, and registers a thread starts with: the partitions share out 20 warps' worth."""

MAP_SCALE = tl.constexpr(16384.0)
"""The fp16 part of M is stored times 2^14: M is a contraction, so its entries are at most 1."""


@triton.jit
def bounds(spans, n, i, segments):
    """First and end chunk of segment i of sequence n; empty segments come first."""
    first = tl.load(spans + 4 * n + 2)
    chunks = tl.load(spans + 4 * n + 3) - first
    parts = tl.maximum(tl.minimum(chunks, segments), 1)
    j = i - (segments - parts)
    a = tl.maximum(j, 0)
    b = tl.maximum(j + 1, 0)
    # floor(chunks * a / parts), in a form that stays inside int32
    each = chunks // parts
    more = chunks % parts
    return first + each * a + more * a // parts, first + each * b + more * b // parts


@triton.jit(do_not_specialize=["H", "NC", "segments"])
def maps_kernel(
    KQ, KG, AI, DEC, v, maps, diagonals, ends, spans, v_stride_t, NC, H, segments,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass A: BR rows of the transposed map or of the transposed state of one segment.

    maps: [N, segments - 1, H, K, K] fp16, M^T times MAP_SCALE with a zero diagonal; diagonals: [N, segments - 1, H, K]
    and ends: [N, segments - 1, H, V, K], the transposed R, fp32. The last segment has no part here, so every chunk met is
    whole.
    """
    TILE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    UNSCALE: tl.constexpr = 1.0 / AI_SCALE if HALF else 1.0
    EXACT: tl.constexpr = KQ.dtype.element_ty == KG.dtype.element_ty  # as recurrence_kernel
    blocks: tl.constexpr = (K + V) // BR
    pid = tl.program_id(0)
    part = pid % blocks * BR
    h = pid // blocks % H
    n = pid // blocks // H // (segments - 1)
    i = pid // blocks // H % (segments - 1)
    is_map = part < K
    begin, end = bounds(spans, n, i, segments)
    token0 = tl.load(spans + 4 * n).to(tl.int64) + (begin - tl.load(spans + 4 * n + 2)) * BT
    row = tl.where(is_map, part, part - K) + tl.arange(0, BR)
    key = tl.arange(0, K)
    t = tl.arange(0, BT)
    in_tile = t[:, None] * K + key[None, :]
    in_square = t[:, None] * BT + t[None, :]
    eye = row[:, None] == key[None, :]
    none = tl.zeros([BR, BT], tl.float32)
    X = tl.where(eye & is_map, 1.0, tl.zeros([BR, K], tl.float32))
    tile0 = h.to(tl.int64) * NC + begin
    for c in tl.range(0, end - begin, num_stages=STAGES):
        tile = tile0 + c
        kd = tl.load(KQ + tile * (2 * BT * K) + in_tile)
        kr = tl.load(KG + tile * (BT * K) + in_tile)
        inv = tl.load(AI + tile * (2 * BT * BT) + in_square)
        decay = tl.load(DEC + tile * K + key)
        where_v = (token0 + c * BT + t)[:, None] * v_stride_t + h * V + row[None, :]
        vals = tl.load(v + where_v, mask=(t >= 0)[:, None] & (not is_map), other=0.0)
        x = tl.trans(vals).to(tl.float32) - dot(narrow(X, KQ.dtype.element_ty), tl.trans(kd), none)
        u = narrow(dot(narrow(x, TILE), tl.trans(inv), none) * UNSCALE, TILE)
        X = X * decay[None, :]
        if EXACT:
            X = dot(u, kd, X)
        X = dot(u, kr, X)
    place = ((n * (segments - 1) + i) * H + h).to(tl.int64)
    in_rows = row[:, None] * K + key[None, :]
    if is_map:
        tl.store(diagonals + place * K + row, tl.sum(tl.where(eye, X, 0.0), 1))
        tl.store(maps + place * (K * K) + in_rows, tl.where(eye, 0.0, X * MAP_SCALE).to(tl.float16))
    else:
        tl.store(ends + place * (K * V) + in_rows, X)


@triton.jit(do_not_specialize=["H", "segments"])
def combine_kernel(
    maps, diagonals, ends, starts, h0, spans, segment_spans, H, segments,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    HAS_H0: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """Pass B: BV columns of one chain's start states. starts: [N, segments, H, K, V] fp32, or [.., V, K] if V_FIRST.

    Also writes segment_spans: [N * segments, 4] int32, the `spans` of the segments; segments <= 64.
    """
    blocks: tl.constexpr = V // BV
    pid = tl.program_id(0)
    chain = pid // blocks
    n = chain // H
    h = chain % H
    first = tl.load(spans + 4 * n + 2)
    parts = tl.maximum(tl.minimum(tl.load(spans + 4 * n + 3) - first, segments), 1)
    leading = segments - parts
    if pid % (H * blocks) == 0:
        i = tl.arange(0, 64)
        begin, end = bounds(spans, n, i, segments)
        t0 = tl.load(spans + 4 * n)
        t1 = tl.load(spans + 4 * n + 1)
        to = segment_spans + (n * segments + i) * 4
        tl.store(to, tl.minimum(t0 + (begin - first) * BT, t1), mask=i < segments)
        tl.store(to + 1, tl.minimum(t0 + (end - first) * BT, t1), mask=i < segments)
        tl.store(to + 2, begin, mask=i < segments)
        tl.store(to + 3, end, mask=i < segments)
    key = tl.arange(0, K)
    val = pid % blocks * BV + tl.arange(0, BV)
    at = val[None, :] * K + key[:, None] if V_FIRST else key[:, None] * V + val[None, :]
    in_map = key[:, None] * K + key[None, :]
    S = tl.zeros([K, BV], tl.float32)
    if HAS_H0:
        S += tl.load(h0 + chain.to(tl.int64) * (K * V) + at).to(tl.float32)
    to = starts + (n * segments * H + h).to(tl.int64) * (K * V) + at
    stride = H.to(tl.int64) * (K * V)  # from one segment's state to the next
    for i in range(leading + 1):
        tl.store(to + i * stride, S)
    place = ((n * (segments - 1) + leading) * H + h).to(tl.int64)
    none = tl.zeros([K, BV], tl.float32)
    for i in range(leading + 1, segments):
        M = tl.trans(tl.load(maps + place * (K * K) + in_map))
        d = tl.load(diagonals + place * K + key)
        r = tl.load(ends + place * (K * V) + val[None, :] * K + key[:, None])
        # every column in fp16 after an exact scaling: its largest entry is in [2^14, 2^15)
        top = tl.max(tl.abs(S), 0).to(tl.int32, bitcast=True) & 0x7F800000
        top = tl.minimum(tl.maximum(top, 67 << 23), 187 << 23) - (14 << 23)
        narrowed = (S * (0x7F000000 - top).to(tl.float32, bitcast=True)[None, :]).to(tl.float16)
        grow = top.to(tl.float32, bitcast=True) * (1.0 / MAP_SCALE)
        S = S * d[:, None] + (dot(M, narrowed, none) * grow[None, :] + r)
        tl.store(to + i * stride, S)
        place += H


@dataclass(frozen=True)
class Scratch:
    """What passes between A, B and C; uninitialised, all that is read is written first."""

    maps: torch.Tensor
    diagonals: torch.Tensor
    ends: torch.Tensor
    starts: torch.Tensor
    spans: torch.Tensor


def scratch(sequences: int, heads: int, segments: int, K: int, V: int, device: torch.device) -> Scratch:
    """About 160 KiB a segment of a chain (K = V = 128)."""
    f32, places = torch.float32, sequences * (segments - 1) * heads
    return Scratch(
        maps=torch.empty(places, K, K, dtype=torch.float16, device=device),
        diagonals=torch.empty(places, K, dtype=f32, device=device),
        ends=torch.empty(places, V, K, dtype=f32, device=device),
        starts=torch.empty(sequences * segments, heads, K, V, dtype=f32, device=device),
        spans=torch.empty(sequences * segments, 4, dtype=torch.int32, device=device),
    )


def segmented_call(
    problem: launch.Problem, ws: launch.Workspace, o: torch.Tensor, ht: torch.Tensor | None, config: K2Config
) -> Callable[[], Any]:
    """The three passes of K2 with config.segments > 1, bound to their arguments; the call returns what C returned."""
    p, tables, P = problem, problem.tables, config.segments
    buffers = scratch(tables.sequences, p.heads, P, p.q.shape[2], p.v.shape[2], o.device)
    passes = _passes_sm90 if config.variant == "ws" else _passes_triton
    a, b = passes(p, ws, buffers, P)
    cut = replace(tables, spans=buffers.spans, sequences=tables.sequences * P)
    c = launch.chains_call(replace(p, h0=buffers.starts, tables=cut), ws, o, ht, config)

    def run() -> Any:
        a()
        b()
        return c()

    return run


def _passes_triton(
    p: launch.Problem, ws: launch.Workspace, buffers: Scratch, P: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    tables, heads, K, V = p.tables, p.heads, p.q.shape[2], p.v.shape[2]
    a = functools.partial(
        maps_kernel[(tables.sequences * (P - 1) * heads * ((K + V) // ROWS),)],
        ws.KQ, ws.KG, ws.AI, ws.DEC, p.v, buffers.maps, buffers.diagonals, buffers.ends, tables.spans, p.v.stride(0),
        tables.chunks, heads, P, K=K, V=V, BT=CHUNK_TOKENS, BR=ROWS, HALF=ws.half, STAGES=STAGES,
        num_warps=4,
    )  # fmt: skip
    b = functools.partial(
        combine_kernel[(tables.sequences * heads * (V // COLUMNS),)],
        buffers.maps, buffers.diagonals, buffers.ends, buffers.starts, p.h0 if p.h0 is not None else ws.DEC,
        tables.spans, buffers.spans, heads, P, K=K, V=V, BT=CHUNK_TOKENS, BV=COLUMNS, HAS_H0=p.h0 is not None,
        V_FIRST=p.state_v_first, num_warps=8,
    )  # fmt: skip
    return a, b


def _passes_sm90(
    p: launch.Problem, ws: launch.Workspace, buffers: Scratch, P: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from kdatune_kernels import segments_sm90

    tables, heads, K, V = p.tables, p.heads, p.q.shape[2], p.v.shape[2]
    described = launch.described
    a = functools.partial(
        segments_sm90.maps_sm90[(tables.sequences * (P - 1) * heads,)],
        described(ws.KQ, CHUNK_TOKENS, K), described(ws.KG, CHUNK_TOKENS, K), described(ws.AI, CHUNK_TOKENS, CHUNK_TOKENS),
        launch.described_decay(ws.DEC), described(launch.flat(p.v), CHUNK_TOKENS, V), buffers.maps, buffers.diagonals,
        buffers.ends, tables.spans, tables.chunks, heads, P, K=K, V=V, STAGES=STAGES_SM90, num_warps=4, maxnreg=REGISTERS_SM90,
    )  # fmt: skip
    b = functools.partial(
        segments_sm90.combine_sm90[(tables.sequences * heads * (V // 16),)],
        buffers.maps.view(torch.int32), buffers.diagonals, buffers.ends, buffers.starts,
        p.h0 if p.h0 is not None else ws.DEC, tables.spans, buffers.spans, heads, P, K=K, V=V,
        HAS_H0=p.h0 is not None, V_FIRST=p.state_v_first, num_warps=8, launch_pdl=True,
    )  # fmt: skip
    return a, b
