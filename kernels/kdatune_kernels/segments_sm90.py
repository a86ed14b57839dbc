"""Passes A and B of the segment-parallel recurrence in Gluon for Hopper; `segments` has the algebra and the host side.

Pass A: one CTA a segment of a chain. The 128 rows of the map's transpose (from the identity, values 0) and the 128 rows of
the transposed state (from zero) go through the same chunks, 64 rows a warpgroup, so that every tile is read once for all
256 rows; one more warp loads. A chunk of 64 rows is

    xw    = X kd^T              m64 n16 k128
    u     = (v^T - xw) INV^T    m64 n16 k16
    X     = X 2^G_C + u kr      m64 n128 k16

Pass B: one CTA per 16 value columns of a chain; a segment is S <- M S + R on eight warps of 16 keys each, M and R three
segments ahead in registers, S in fp32 registers and, narrowed, in shared memory as the operand all warps read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from kdatune_kernels.prepare_sm90 import AI_SCALE
from kdatune_kernels.prepare_sm90 import barrier
from kdatune_kernels.prepare_sm90 import tma_load
from kdatune_kernels.recurrence_sm90 import _advance
from kdatune_kernels.recurrence_sm90 import let_next_start
from kdatune_kernels.recurrence_sm90 import wait_for_previous

MAP_SCALE = gl.constexpr(16384.0)

# What A hands to B lies in the order of B's registers, so that both move 16 bytes a thread at a time. B has eight warps, of
# 16 output keys each. M, [k step 8][warp 8][lane 32][8]: the mma operand registers of one k step. R, [16-column block]
# [half][warp 8][lane 32][4]: accumulator registers.
MAP_WRITE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[0, 8], [0, 16], [0, 32], [0, 64], [0, 128]], [[8, 0], [16, 0]], [], [32, 256],
    )
)  # fmt: skip
MAP_READ = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [16, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]], [[1, 0], [2, 0], [4, 0]], [], [32, 128],
    )
)  # fmt: skip
END_READ = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]], [[1, 0], [2, 0], [4, 0]], [], [16, 128],
    )
)  # fmt: skip
# Every thread reads the maxima of all eight warps for the columns it holds.
TOPS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [8, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0], [0, 0]], [], [16, 8],
    )
)  # fmt: skip


@gluon.jit
def _bounds(spans, n, i, segments):
    """First and end chunk of segment i of sequence n; as `segments.bounds`."""
    first = gl.load(spans + 4 * n + 2)
    chunks = gl.load(spans + 4 * n + 3) - first
    parts = gl.maximum(gl.minimum(chunks, segments), 1)
    j = i - (segments - parts)
    a = gl.maximum(j, 0)
    b = gl.maximum(j + 1, 0)
    each = chunks // parts
    more = chunks % parts
    return first + each * a + more * a // parts, first + each * b + more * b // parts


@gluon.jit
def _load_partition(
    kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, empty, chunks, tile0, token0, column,
    STAGES: gl.constexpr, TILE_BYTES: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 1
    for c in range(chunks):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, TILE_BYTES)
        tile = tile0 + c
        tma_load(kd_d, [tile * 32, 0], bar, kd_s.index(slot))
        tma_load(v_d, [token0 + c * 16, column], bar, v_s.index(slot))
        tma_load(inv_d, [tile * 32, 0], bar, inv_s.index(slot))
        tma_load(dec_d, [tile, 0], bar, dec_s.index(slot))
        tma_load(kr_d, [tile * 16, 0], bar, kr_s.index(slot))
        slot, phase = _advance(slot, phase, STAGES)


@gluon.jit
def _halves(X, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.split(gl.permute(gl.reshape(X, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@gluon.jit
def _rows_kd(X, kd, zero, ROWS: gl.constexpr, K: gl.constexpr, L16: gl.constexpr):
    """X kd^T, in flight. By quarters: the bf16 copy of more columns does not fit the 112 registers a thread has here."""
    QUARTER: gl.constexpr = K // 4
    A: gl.constexpr = gl.DotOperandLayout(0, L16, 2)
    left, right = _halves(X, ROWS, K)
    a, b = _halves(left, ROWS, K // 2)
    c, d = _halves(right, ROWS, K // 2)
    a = gl.convert_layout(a.to(kd.dtype), A)
    xw = warpgroup_mma(a, kd.slice(0, QUARTER, dim=1).permute([1, 0]), zero, use_acc=False, is_async=True)
    xw = warpgroup_mma_wait(0, deps=[xw])
    b = gl.convert_layout(b.to(kd.dtype), A)
    xw = warpgroup_mma(b, kd.slice(QUARTER, QUARTER, dim=1).permute([1, 0]), xw, is_async=True)
    xw = warpgroup_mma_wait(0, deps=[xw])
    c = gl.convert_layout(c.to(kd.dtype), A)
    xw = warpgroup_mma(c, kd.slice(2 * QUARTER, QUARTER, dim=1).permute([1, 0]), xw, is_async=True)
    xw = warpgroup_mma_wait(0, deps=[xw])
    d = gl.convert_layout(d.to(kd.dtype), A)
    return warpgroup_mma(d, kd.slice(3 * QUARTER, QUARTER, dim=1).permute([1, 0]), xw, is_async=True)


@gluon.jit
def _rows_partition(
    kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals, ends, chunks, place,
    K: gl.constexpr, V: gl.constexpr, FIRST: gl.constexpr, IS_MAP: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Carry 64 rows from row FIRST on: of the transposed map if IS_MAP, else of the transposed state."""
    ROWS: gl.constexpr = 16 * WARPS
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    L16: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 16, 16])
    TILE: gl.constexpr = kr_s.dtype
    UNSCALE: gl.constexpr = 1.0 / AI_SCALE if TILE == gl.float16 else 1.0
    EXACT: gl.constexpr = kd_s.dtype == TILE
    row = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    key = gl.arange(0, K, layout=gl.SliceLayout(0, WIDE))
    zero = gl.full([ROWS, 16], 0.0, gl.float32, L16)
    X = gl.full([ROWS, K], 0.0, gl.float32, WIDE)
    if IS_MAP:
        X = gl.where(row[:, None] == key[None, :], 1.0, X)
    slot = 0
    phase = 0
    for _ in range(chunks):
        mbarrier.wait(full.index(slot), phase)
        xw = _rows_kd(X, kd_s.index(slot), zero, ROWS, K, L16)
        if not IS_MAP:
            vals = v_s.index(slot).slice(FIRST, ROWS, dim=1).permute([1, 0]).load(L16)
        xw = warpgroup_mma_wait(0, deps=[xw])
        if IS_MAP:
            x = -xw
        else:
            x = vals.to(gl.float32) - xw
        xa = gl.convert_layout(x.to(TILE), gl.DotOperandLayout(0, L16, 2))
        u = warpgroup_mma(xa, inv_s.index(slot).permute([1, 0]), zero, use_acc=False, is_async=True)
        decay = dec_s.index(slot).reshape([K]).load(gl.SliceLayout(0, WIDE))
        X = X * decay[None, :]
        u = warpgroup_mma_wait(0, deps=[u])
        ua = gl.convert_layout((u * UNSCALE).to(TILE), gl.DotOperandLayout(0, WIDE, 2))
        grown = X
        if EXACT:  # kr is kd and what kd lacks of it
            grown = warpgroup_mma(ua, kd_s.index(slot), grown, is_async=True)
        grown = warpgroup_mma(ua, kr_s.index(slot), grown, is_async=True)
        X = warpgroup_mma_wait(0, deps=[grown])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = _advance(slot, phase, STAGES)
    if IS_MAP:
        eye = row[:, None] == key[None, :]
        gl.store(diagonals + place * K + row, gl.sum(gl.where(eye, X, 0.0), axis=1))
        rest = gl.where(eye, 0.0, X * MAP_SCALE).to(gl.float16)
        # Turned 8 x 8 block by block, the rows of M^T are M in the registers of pass B: see MAP_READ.
        rest = gl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [rest], dtype=gl.float16, is_pure=True, pack=2
        )
        rest = gl.permute(gl.reshape(rest, [WARPS, 2, 8, K // 16, 2, 4, 2]), [0, 3, 2, 5, 1, 4, 6])
        rest = gl.convert_layout(gl.reshape(rest, [WARPS * K // 16, 256]), MAP_WRITE, assert_trivial=True)
        block = gl.arange(0, WARPS * K // 16, layout=gl.SliceLayout(1, MAP_WRITE))
        inside = gl.arange(0, 256, layout=gl.SliceLayout(0, MAP_WRITE))
        gl.store(maps + place * (K * K) + FIRST * K + (block[:, None] * 256 + inside[None, :]), rest)
    else:
        END_WRITE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
        X = gl.permute(gl.reshape(X, [ROWS // 16, 2, 4, 2, K // 16, 2, 8]), [0, 1, 4, 6, 2, 5, 3])
        X = gl.convert_layout(gl.reshape(X, [ROWS * K // 128, 128]), END_WRITE)
        block = gl.arange(0, ROWS * K // 128, layout=gl.SliceLayout(1, END_WRITE))
        inside = gl.arange(0, 128, layout=gl.SliceLayout(0, END_WRITE))
        gl.store(ends + place * (K * V) + FIRST * K + (block[:, None] * 128 + inside[None, :]), X)


@gluon.jit(do_not_specialize=["H", "NC", "segments"])
def maps_sm90(
    kd_d, kr_d, inv_d, dec_d, v_d, maps, diagonals, ends, spans, NC, H, segments,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """As `segments.maps_kernel`; kd_d .. v_d are TMA descriptors, boxes [16, K], [16, K], [16, 16], [1, K], [16, V].

    maps and ends are ordered as MAP_READ and END_READ say. Needs maxnreg=96: the partitions share out those registers.
    """
    let_next_start()
    pid = gl.program_id(0)
    h = pid % H
    n = pid // H // (segments - 1)
    i = pid // H % (segments - 1)
    begin, end = _bounds(spans, n, i, segments)
    chunks = end - begin
    tile0 = h * NC + begin
    token0 = gl.load(spans + 4 * n) + (begin - gl.load(spans + 4 * n + 2)) * 16
    column = h * V
    place = ((n * (segments - 1) + i) * H + h).to(gl.int64)

    kd_s = gl.allocate_shared_memory(kd_d.dtype, [STAGES, 16, K], kd_d.layout)
    kr_s = gl.allocate_shared_memory(kr_d.dtype, [STAGES, 16, K], kr_d.layout)
    inv_s = gl.allocate_shared_memory(inv_d.dtype, [STAGES, 16, 16], inv_d.layout)
    dec_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], dec_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 16, V], v_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=4)
    fence_async_shared()
    TILE_BYTES: gl.constexpr = (32 * K + 16 * 16 + 16 * V) * 2 + K * 4
    # The argument tuples stand inline: a tuple that has a name turns its constexprs into tensors.
    gl.warp_specialize([
        (_rows_partition, (kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals, ends, chunks, place, K, V, 0, True,
                           STAGES, num_warps)),
        (_rows_partition, (kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals, ends, chunks, place, K, V, 64, True,
                           STAGES, num_warps)),
        (_rows_partition, (kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals, ends, chunks, place, K, V, 0, False,
                           STAGES, num_warps)),
        (_rows_partition, (kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals, ends, chunks, place, K, V, 64, False,
                           STAGES, num_warps)),
        (_load_partition, (kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, empty, chunks, tile0, token0,
                           column, STAGES, TILE_BYTES)),
    ], [4, 4, 4, 1], [112, 112, 112, 32])  # fmt: skip


@gluon.jit
def _column_maxima(S, top_s, BV: gl.constexpr, ACC: gl.constexpr, WARPS: gl.constexpr):
    """The largest |entry| of every column of S [16 * WARPS, BV], in the column slice of ACC."""
    of_warp = gl.max(gl.reshape(gl.abs(S), [WARPS, 16, BV]), axis=1)
    top_s.permute([1, 0]).store(of_warp)
    barrier()
    return gl.convert_layout(gl.max(top_s.load(TOPS), axis=1), gl.SliceLayout(0, ACC))


@gluon.jit
def _half_map(maps, ACC: gl.constexpr):
    """64 keys' worth of M as it lies in memory, two fp16 an int32.

    Not as fp16: Triton carries those through a loop one by one, and would wait for the load right where it takes them apart.
    """
    block = gl.arange(0, 32, layout=gl.SliceLayout(1, MAP_READ))
    inside = gl.arange(0, 128, layout=gl.SliceLayout(0, MAP_READ))
    return gl.load(maps + (block[:, None] * 128 + inside[None, :]))


@gluon.jit
def _operand(raw, ACC: gl.constexpr):
    """What `_half_map` read as an mma operand [128, 64]."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [raw], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    M = gl.permute(gl.reshape(gl.join(even, odd), [4, 8, 8, 4, 2, 2, 2]), [1, 5, 2, 0, 4, 3, 6])
    return gl.convert_layout(gl.reshape(M, [128, 64]), gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)


@gluon.jit
def _map_of(maps, diagonals, ends, place, key, column, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
            ACC: gl.constexpr):  # fmt: skip
    """The two halves of M, its diagonal, and BV columns of R, of one segment."""
    lo = _half_map(maps + place * (K * K // 2), ACC)
    hi = _half_map(maps + place * (K * K // 2) + K * K // 4, ACC)
    block = gl.arange(0, K * BV // 128, layout=gl.SliceLayout(1, END_READ))
    inside = gl.arange(0, 128, layout=gl.SliceLayout(0, END_READ))
    r = gl.load(ends + place * (K * V) + column * K + (block[:, None] * 128 + inside[None, :]))
    r = gl.permute(gl.reshape(r, [BV // 8, K // 16, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    r = gl.convert_layout(gl.reshape(r, [K, BV]), ACC, assert_trivial=True)
    return lo, hi, gl.load(diagonals + place * K + key), r


@gluon.jit
def _next_state(S, lo, hi, d, r, top_s, narrow_s, to, wanted, K: gl.constexpr, BV: gl.constexpr, ACC: gl.constexpr,
                WARPS: gl.constexpr):  # fmt: skip
    """M S + R; S itself is written to `to` if wanted."""
    # every column in fp16 after an exact scaling: its largest entry is in [2^14, 2^15)
    top = _column_maxima(S, top_s, BV, ACC, WARPS).to(gl.int32, bitcast=True) & 0x7F800000
    top = gl.minimum(gl.maximum(top, 67 << 23), 187 << 23) - (14 << 23)
    shrink = (0x7F000000 - top).to(gl.float32, bitcast=True)
    grow = top.to(gl.float32, bitcast=True) * (1.0 / MAP_SCALE)
    narrow_s.store((S * shrink[None, :]).to(gl.float16))
    barrier()
    gl.store(to, S, mask=wanted)
    # mma, not wgmma: as fast for 16 columns, and without the fence that wgmma's operand in shared memory needs, which compiles
    # to a memory barrier while later segments are being loaded. Two accumulators, for half the depth.
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    zero = gl.full([K, BV], 0.0, gl.float32, ACC)
    low = mma_v2(_operand(lo, ACC), narrow_s.slice(0, K // 2, dim=0).load(B), zero)
    high = mma_v2(_operand(hi, ACC), narrow_s.slice(K // 2, K // 2, dim=0).load(B), zero)
    return S * d[:, None] + ((low + high) * grow[None, :] + r)


@gluon.jit(do_not_specialize=["H", "segments"])
def combine_sm90(
    maps, diagonals, ends, starts, h0, spans, segment_spans, H, segments,
    K: gl.constexpr, V: gl.constexpr, HAS_H0: gl.constexpr, V_FIRST: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `segments.combine_kernel`, 16 columns a program; maps and ends as `maps_sm90` orders them."""
    BV: gl.constexpr = 16
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    blocks: gl.constexpr = V // BV
    pid = gl.program_id(0)
    column = pid % blocks * BV
    chain = pid // blocks
    n = chain // H
    h = chain % H
    first = gl.load(spans + 4 * n + 2)
    parts = gl.maximum(gl.minimum(gl.load(spans + 4 * n + 3) - first, segments), 1)
    leading = segments - parts
    key = gl.arange(0, K, layout=gl.SliceLayout(1, ACC))
    val = column + gl.arange(0, BV, layout=gl.SliceLayout(0, ACC))
    if V_FIRST:
        at = val[None, :] * K + key[:, None]
    else:
        at = key[:, None] * V + val[None, :]
    S = gl.full([K, BV], 0.0, gl.float32, ACC)
    if HAS_H0:
        S += gl.load(h0 + chain.to(gl.int64) * (K * V) + at).to(gl.float32)
    narrow_s = gl.allocate_shared_memory(gl.float16, [K, BV], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    top_s = gl.allocate_shared_memory(gl.float32, [BV, num_warps], gl.SwizzledSharedLayout(4, 1, 2, [1, 0]))
    wait_for_previous()  # spans and h0 are older than pass A, whose programs start only when what came before has ended
    let_next_start()
    # Three segments in flight. The last rounds may do one or two segments too many, of which nothing is written.
    place = (n * (segments - 1) * H + h).to(gl.int64)
    last = segments - 2
    a0, b0, d0, r0 = _map_of(maps, diagonals, ends, place + gl.minimum(leading, last) * H, key, column, K, V, BV, ACC)
    a1, b1, d1, r1 = _map_of(
        maps, diagonals, ends, place + gl.minimum(leading + 1, last) * H, key, column, K, V, BV, ACC
    )
    a2, b2, d2, r2 = _map_of(
        maps, diagonals, ends, place + gl.minimum(leading + 2, last) * H, key, column, K, V, BV, ACC
    )
    if pid % (H * blocks) == 0:  # one program of the sequence writes its rows of the table
        WHERE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
        i = gl.arange(0, 64, layout=WHERE)
        begin, end = _bounds(spans, n, i, segments)
        t0 = gl.load(spans + 4 * n)
        t1 = gl.load(spans + 4 * n + 1)
        to = segment_spans + (n * segments + i) * 4
        gl.store(to, gl.minimum(t0 + (begin - first) * 16, t1), mask=i < segments)
        gl.store(to + 1, gl.minimum(t0 + (end - first) * 16, t1), mask=i < segments)
        gl.store(to + 2, begin, mask=i < segments)
        gl.store(to + 3, end, mask=i < segments)
    starts += (n * segments * H + h).to(gl.int64) * (K * V) + at
    stride = H.to(gl.int64) * (K * V)  # from one segment's state to the next
    for i in range(leading):
        gl.store(starts + i * stride, S)
    every = at >= 0
    for i in range(leading, segments, 3):
        to = starts + i * stride
        S = _next_state(S, a0, b0, d0, r0, top_s, narrow_s, to, every, K, BV, ACC, num_warps)
        a0, b0, d0, r0 = _map_of(maps, diagonals, ends, place + gl.minimum(i + 3, last) * H, key, column, K, V, BV, ACC)
        S = _next_state(
            S, a1, b1, d1, r1, top_s, narrow_s, to + stride, every & (i + 1 < segments), K, BV, ACC, num_warps
        )
        a1, b1, d1, r1 = _map_of(maps, diagonals, ends, place + gl.minimum(i + 4, last) * H, key, column, K, V, BV, ACC)
        S = _next_state(
            S, a2, b2, d2, r2, top_s, narrow_s, to + 2 * stride, every & (i + 2 < segments), K, BV, ACC, num_warps
        )
        a2, b2, d2, r2 = _map_of(maps, diagonals, ends, place + gl.minimum(i + 5, last) * H, key, column, K, V, BV, ACC)
