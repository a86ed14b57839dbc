"""Passes A and B of the segment-parallel recurrence in Gluon for Hopper; `segments` has the algebra and the host side.

Pass A: one CTA a segment of a chain. The 128 rows of the map's transpose (from the identity, values 0) and the 128 rows of
the transposed state (from zero) go through the same chunks, 64 rows a warpgroup, so that every tile is read once for all
256 rows; read per 64 rows, as K2 reads them, the pass waits for the L2. A chunk of 64 rows is

    xw    = X kd^T              m64 n16 k128
    u     = (v^T - xw) INV^T    m64 n16 k16
    X     = X 2^G_C + u kr      m64 n128 k16

Pass B: one CTA per BV value columns of a chain; a segment is S <- M S + R, M read from the ring that TMA fills, S in fp32
registers and, as fp16 after a power-of-two scaling of every column, in shared memory as the B operand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
def _fetch(
    kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, slot, tile, token, column, wanted,
    TILE_BYTES: gl.constexpr,
):  # fmt: skip
    bar = full.index(slot)
    mbarrier.expect(bar, TILE_BYTES, pred=wanted)
    tma_load(kd_d, [tile * 32, 0], bar, kd_s.index(slot), pred=wanted)
    tma_load(dec_d, [tile, 0], bar, dec_s.index(slot), pred=wanted)
    tma_load(v_d, [token, column], bar, v_s.index(slot), pred=wanted)
    tma_load(inv_d, [tile * 32, 0], bar, inv_s.index(slot), pred=wanted)
    tma_load(kr_d, [tile * 16, 0], bar, kr_s.index(slot), pred=wanted)


@gluon.jit
def _rows_partition(
    kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals, starts, chunks, tile0,
    token0, column, map_row, state0, K: gl.constexpr, V: gl.constexpr, FIRST: gl.constexpr, IS_MAP: gl.constexpr,
    FETCHES: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, TILE_BYTES: gl.constexpr, V_FIRST: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Carry 64 rows from row FIRST on: of the transposed map if IS_MAP, else of the transposed state.

    FETCHES: this partition also refills the ring, LAG chunks behind its own.
    """
    ROWS: gl.constexpr = 16 * WARPS
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    L16: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 16, 16])
    TILE: gl.constexpr = kr_s.dtype
    UNSCALE: gl.constexpr = 1.0 / AI_SCALE if TILE == gl.float16 else 1.0
    row = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    key = gl.arange(0, K, layout=gl.SliceLayout(0, WIDE))
    zero = gl.full([ROWS, 16], 0.0, gl.float32, L16)
    X = gl.full([ROWS, K], 0.0, gl.float32, WIDE)
    if IS_MAP:
        X = gl.where(row[:, None] == key[None, :], 1.0, X)
    slot = 0
    phase = 0
    old = 0
    old_phase = 0
    for c in range(chunks):
        # In two halves: the bf16 copy of all 128 columns at once does not fit the 128 registers a thread has here.
        lo, hi = gl.split(gl.permute(gl.reshape(X, [ROWS, 2, K // 2]), [0, 2, 1]))
        lo = gl.convert_layout(lo.to(gl.bfloat16), gl.DotOperandLayout(0, L16, 2))
        mbarrier.wait(full.index(slot), phase)
        kd = kd_s.index(slot)
        xw = warpgroup_mma(lo, kd.slice(0, K // 2, dim=1).permute([1, 0]), zero, use_acc=False, is_async=True)
        xw = warpgroup_mma_wait(0, deps=[xw])
        hi = gl.convert_layout(hi.to(gl.bfloat16), gl.DotOperandLayout(0, L16, 2))
        xw = warpgroup_mma(hi, kd.slice(K // 2, K // 2, dim=1).permute([1, 0]), xw, is_async=True)
        if not IS_MAP:
            vals = v_s.index(slot).slice(FIRST, ROWS, dim=1).permute([1, 0]).load(L16)
        if FETCHES:
            if c >= LAG:
                mbarrier.wait(empty.index(old), old_phase)
                ahead = c - LAG + STAGES
                _fetch(kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, old, tile0 + ahead,
                       token0 + ahead * 16, column, ahead < chunks, TILE_BYTES)  # fmt: skip
                old, old_phase = _advance(old, old_phase, STAGES)
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
        grown = warpgroup_mma(ua, kr_s.index(slot), X, is_async=True)
        X = warpgroup_mma_wait(0, deps=[grown])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = _advance(slot, phase, STAGES)
    if IS_MAP:
        eye = row[:, None] == key[None, :]
        gl.store(diagonals + map_row + row, gl.sum(gl.where(eye, X, 0.0), axis=1))
        rest = gl.where(eye, 0.0, X * MAP_SCALE).to(gl.float16)
        gl.store(maps + (map_row + row).to(gl.int64)[:, None] * K + key[None, :], rest)
    elif V_FIRST:
        gl.store(starts + state0 + row[:, None] * K + key[None, :], X)
    else:
        gl.store(starts + state0 + key[None, :] * V + row[:, None], X)


@gluon.jit(do_not_specialize=["H", "NC", "segments"])
def maps_sm90(
    kd_d, kr_d, inv_d, dec_d, v_d, maps, diagonals, starts, spans, NC, H, segments,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    V_FIRST: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `segments.maps_kernel`; kd_d .. v_d are TMA descriptors, boxes [16, K], [16, K], [16, 16], [1, K], [16, V]."""
    wait_for_previous()
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
    map_row = ((n * (segments - 1) + i) * H + h) * K
    state0 = ((n * segments + i + 1) * H + h).to(gl.int64) * (K * V)

    kd_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 16, K], kd_d.layout)
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
    for s in range(STAGES):
        _fetch(kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, s, tile0 + s, token0 + s * 16, column,
               s < chunks, TILE_BYTES)  # fmt: skip
    # The argument tuples stand inline: a tuple that has a name turns its constexprs into tensors.
    gl.warp_specialize([
        (_rows_partition, (kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals,
                           starts, chunks, tile0, token0, column, map_row, state0, K, V, 0, True, True, STAGES, LAG,
                           TILE_BYTES, V_FIRST, num_warps)),
        (_rows_partition, (kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals,
                           starts, chunks, tile0, token0, column, map_row, state0, K, V, 64, True, False, STAGES, LAG,
                           TILE_BYTES, V_FIRST, num_warps)),
        (_rows_partition, (kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals,
                           starts, chunks, tile0, token0, column, map_row, state0, K, V, 0, False, False, STAGES, LAG,
                           TILE_BYTES, V_FIRST, num_warps)),
        (_rows_partition, (kd_d, kr_d, inv_d, dec_d, v_d, kd_s, kr_s, inv_s, dec_s, v_s, full, empty, maps, diagonals,
                           starts, chunks, tile0, token0, column, map_row, state0, K, V, 64, False, False, STAGES, LAG,
                           TILE_BYTES, V_FIRST, num_warps)),
    ], [4, 4, 4], [128, 128, 128])  # fmt: skip


@gluon.jit(do_not_specialize=["H", "segments"])
def combine_sm90(
    maps_d, diagonals, starts, h0, spans, segment_spans, H, segments,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    HAS_H0: gl.constexpr, V_FIRST: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `segments.combine_kernel`; maps_d is a TMA descriptor, box [K, K]."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BV, 16])
    COLS: gl.constexpr = gl.SliceLayout(0, ACC)
    blocks: gl.constexpr = V // BV
    pid = gl.program_id(0)
    chain = pid // blocks
    n = chain // H
    h = chain % H
    first = gl.load(spans + 4 * n + 2)
    parts = gl.maximum(gl.minimum(gl.load(spans + 4 * n + 3) - first, segments), 1)
    leading = segments - parts
    steps = parts - 1
    key = gl.arange(0, K, layout=gl.SliceLayout(1, ACC))
    val = pid % blocks * BV + gl.arange(0, BV, layout=COLS)
    if V_FIRST:
        at = val[None, :] * K + key[:, None]
    else:
        at = key[:, None] * V + val[None, :]
    stride = H.to(gl.int64) * (K * V)  # from one segment's state to the next
    S = gl.full([K, BV], 0.0, gl.float32, ACC)
    if HAS_H0:
        S += gl.load(h0 + chain.to(gl.int64) * (K * V) + at).to(gl.float32)
    maps_s = gl.allocate_shared_memory(gl.float16, [STAGES, K, K], maps_d.layout)
    state_s = gl.allocate_shared_memory(
        gl.float16, [K, BV], gl.NVMMASharedLayout(swizzle_byte_width=2 * BV, element_bitwidth=16, rank=2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    wait_for_previous()  # spans and h0 are older than pass A, whose programs start only when what came before has ended
    let_next_start()
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
    row0 = ((n * (segments - 1) + leading) * H + h) * K
    for s in range(STAGES):
        mbarrier.expect(full.index(s), K * K * 2, pred=s < steps)
        tma_load(maps_d, [row0 + s * H * K, 0], full.index(s), maps_s.index(s), pred=s < steps)
    starts += (n * segments * H + h).to(gl.int64) * (K * V)
    for _ in range(leading + 1):
        gl.store(starts + at, S)
        starts += stride
    # starts now is where the state after the first segment that has chunks goes, and where pass A put its R
    r = gl.load(starts + at, mask=(at >= 0) & (steps > 0), other=0.0)
    d = gl.load(diagonals + row0 + key, mask=(key >= 0) & (steps > 0), other=0.0)
    zero = gl.full([K, BV], 0.0, gl.float32, ACC)
    slot = 0
    phase = 0
    for i in range(steps):
        # every column in fp16 after an exact scaling: its largest entry is in [1, 2)
        top = gl.max(gl.abs(S), axis=0).to(gl.int32, bitcast=True) & 0x7F800000
        top = gl.minimum(gl.maximum(top, 67 << 23), 187 << 23)
        shrink = (0x7F000000 - top).to(gl.float32, bitcast=True)
        grow = top.to(gl.float32, bitcast=True) * (1.0 / MAP_SCALE)
        state_s.store((S * shrink[None, :]).to(gl.float16))
        fence_async_shared()
        barrier()
        if i > 0:  # the slot before is free: every warp has passed the barrier
            last = slot - 1
            if slot == 0:
                last = STAGES - 1
            ahead = i - 1 + STAGES
            mbarrier.expect(full.index(last), K * K * 2, pred=ahead < steps)
            tma_load(maps_d, [row0 + ahead * H * K, 0], full.index(last), maps_s.index(last), pred=ahead < steps)
        mbarrier.wait(full.index(slot), phase)
        acc = warpgroup_mma(maps_s.index(slot).permute([1, 0]), state_s, zero, use_acc=False, is_async=True)
        more = i + 1 < steps
        next_starts = starts + stride
        r_next = gl.load(next_starts + at, mask=(at >= 0) & more, other=0.0)
        d_next = gl.load(diagonals + row0 + (i + 1) * H * K + key, mask=(key >= 0) & more, other=0.0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        S = S * d[:, None] + (acc * grow[None, :] + r)
        gl.store(starts + at, S)
        starts = next_starts
        r = r_next
        d = d_next
        slot, phase = _advance(slot, phase, STAGES)
