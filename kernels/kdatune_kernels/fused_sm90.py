"""K1 and K2 in one kernel, in Gluon for Hopper: tiles are made beside the recurrence that eats them, in shared memory.

Persistent: one CTA an SM, every CTA takes the chains pid, pid + CTAs, ... A chain is worked off in groups of four chunks,
64 tokens. A ring of RING groups holds what the workspace of the split kernels holds, and a group lives in one place:

    load      raw q, k, g by TMA into the places of qd, kd, kr          raw
    prepare   K1 of the four chunks, one a warp, in place               full
    mma       K2 of the four chunks, the state in registers             empty

Partitions: one of MMA (as recurrence_sm90, all 128 rows of a state), one that prepares (four warps, one program over
[4, 16, 128], so the code of K1 exists once), and one warp each that loads q, k and g, loads v and stores o. The arithmetic is
that of `prepare_sm90.prepare_tma` (transposed dots, fast reciprocal) and of `recurrence_sm90.recurrence_ws`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from kdatune_kernels.prepare_sm90 import AI_SCALE
from kdatune_kernels.prepare_sm90 import EPS
from kdatune_kernels.prepare_sm90 import LOG2E
from kdatune_kernels.prepare_sm90 import _add
from kdatune_kernels.prepare_sm90 import _exp2
from kdatune_kernels.prepare_sm90 import _last
from kdatune_kernels.prepare_sm90 import _reciprocal
from kdatune_kernels.prepare_sm90 import _rsqrt
from kdatune_kernels.prepare_sm90 import _sigmoid2
from kdatune_kernels.prepare_sm90 import _tiles
from kdatune_kernels.prepare_sm90 import _widen
from kdatune_kernels.prepare_sm90 import barrier
from kdatune_kernels.prepare_sm90 import tma_load
from kdatune_kernels.prepare_sm90 import tma_store
from kdatune_kernels.recurrence_sm90 import _advance
from kdatune_kernels.recurrence_sm90 import _hand_over

RING, STAGES_V, STAGES_OUT = gl.constexpr(3), gl.constexpr(4), gl.constexpr(2)
"""Groups in the ring (one in flight, one in the making, one being eaten), chunks of v and of o in flight: 222 KB."""
PRIVATE_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))  # its name in Triton 3.6
MAXNREG = 168
"""Registers a thread starts with: they size the pool that the partitions share out, all 65,536."""
PREPARE_REGS, IO_REGS = gl.constexpr(216), gl.constexpr(32)
"""Registers of the partition that prepares and of those that move; MMA takes what is left, 256."""


def _tile_bases(rows: int, columns: int, swizzle_bytes: int) -> list[tuple[int, int]]:
    """Where a step of one 16-bit element, two, four, ... leads in a tile that TMA and wgmma read: (row, column)."""
    wide = min(swizzle_bytes // 2, columns)
    first = {128: 1, 32: 4}[swizzle_bytes]  # the row from which on rows take part in the swizzle, up to row 4
    bases = [(0, 1 << i) for i in range(wide.bit_length() - 1)]
    for i in range(rows.bit_length() - 1):
        moved = 8 * (1 << i) // first if first <= 1 << i <= 4 else 0
        bases.append((1 << i, moved))
    return bases + [(0, wide << i) for i in range((columns // wide).bit_length() - 1)]


def _key(column: int) -> int:
    """The key that prepare calls by this name, of what stands in a column: bit 3 -> 5, 4 -> 3, 5 -> 4.

    So the four lanes of a quad, which hold neighbouring eights of keys, read 16 bytes each from other banks under the
    128-byte swizzle. Every tensor with keys is named alike, so no product notices.
    """
    return (column & 71) | (column & 8) << 2 | (column & 48) >> 1


def _grouped(bases: list[tuple[int, int]], renamed: bool, *sizes: int) -> gl.SharedLinearLayout:
    """A group of four tiles, [4, *sizes, columns], sizes the parts of a row's number, the slowest first."""
    found = []
    for row, column in bases:
        parts: list[int] = []
        for size in reversed(sizes):
            parts.insert(0, row % size)
            row //= size  # noqa: PLW2901
        found.append([0, *parts, _key(column) if renamed else column])
    idle = [0] * (len(sizes) + 1)
    return gl.SharedLinearLayout([*found, [1, *idle], [2, *idle]], [], 1024)


# [kd; qd], kr, [INV; M] and 2^G_C of a group as prepare reads and writes them
KQ_GROUP = gl.constexpr(_grouped(_tile_bases(32, 128, 128), True, 2, 16))
KR_GROUP = gl.constexpr(_grouped(_tile_bases(16, 128, 128), True, 16))
AI_GROUP = gl.constexpr(_grouped(_tile_bases(32, 16, 32), False, 2, 16))
DEC_GROUP = gl.constexpr(gl.SharedLinearLayout([*([0, _key(1 << i)] for i in range(7)), [1, 0], [2, 0]], [], 128))
# The prefix sum, fp32: blocks of 32 keys, 16-byte pieces swizzled by row.
PREFIX_GROUP = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 4], [0, 2, 8], [0, 4, 16], [0, 8, 0],
         [0, 0, 32], [0, 0, 64], [1, 0, 0], [2, 0, 0]], [], 128,
    )
)  # fmt: skip
VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# The layouts of prepare_sm90 with the chunk of the group in front, one a warp.
OPERAND = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 16, 32],
    )
)  # fmt: skip
OPERAND_OF_TWO = gl.constexpr(  # the same with the axis that tells kd from qd
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 8, 0]],
        [[0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 1, 16, 32],
    )
)  # fmt: skip
ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
MMA_A = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 8))
MMA_B = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 8))
TF32_A = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
TF32_B = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 2))
COLS = gl.constexpr(gl.BlockedLayout([1, 16, 4], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0]))  # a row a lane: one comparison
ROWS_OF_TWO = gl.constexpr(gl.BlockedLayout([1, 1, 1, 8], [1, 1, 16, 2], [4, 1, 1, 1], [3, 2, 1, 0]))


@gluon.jit
def _as(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory seen as another type, shape and layout."""
    if PRIVATE_REINTERPRET:
        return memory._reinterpret(dtype, shape, layout)
    else:
        return memory.reinterpret(dtype, shape, layout)


@gluon.jit
def _afresh(x):
    """x (int32), but what is computed from it is computed here: hoisted out of the loops, it is spilled by ptxas."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _span(spans, chain, H):
    """First token and tokens of a chain's sequence."""
    token0 = gl.load(spans + 4 * (chain // H))
    return token0, gl.load(spans + 4 * (chain // H) + 1) - token0


@gluon.jit
def _load_partition(q_d, k_d, g_d, kq_s, kr_s, raw, empty, spans, H, chains, ctas, GROUP: gl.constexpr):
    # A [32, 128] tile in memory: k left, q left, k right, q right, each [16, 64].
    pieces = _as(kq_s, gl.bfloat16, [RING * 16, 16, 64], gl.constexpr(k_d.layout))
    gates = _as(kr_s, gl.bfloat16, [RING * 4, 16, 128], gl.constexpr(g_d.layout))
    slot = 0
    phase = 1
    for chain in range(gl.program_id(0), chains, ctas):
        token0, tokens = _span(spans, chain, H)
        h = chain % H
        at = h // GROUP * 128
        for group in range((tokens + 63) // 64):
            mbarrier.wait(empty.index(slot), phase)
            bar = raw.index(slot)
            mbarrier.expect(bar, 3 * 64 * 128 * 2)
            for j in gl.static_range(4):
                token = token0 + group * 64 + 16 * j
                tile = slot * 4 + j
                tma_load(k_d, [token, at], bar, pieces.index(tile * 4))
                tma_load(q_d, [token, at], bar, pieces.index(tile * 4 + 1))
                tma_load(k_d, [token, at + 64], bar, pieces.index(tile * 4 + 2))
                tma_load(q_d, [token, at + 64], bar, pieces.index(tile * 4 + 3))
                tma_load(g_d, [token, h * 128], bar, gates.index(tile))
            slot, phase = _advance(slot, phase, RING)


@gluon.jit
def _load_values_partition(v_d, v_s, full, empty, spans, H, chains, ctas):
    slot = 0
    phase = 1
    for chain in range(gl.program_id(0), chains, ctas):
        token0, tokens = _span(spans, chain, H)
        column = chain % H * 128
        for c in range((tokens + 15) // 16):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, 16 * 128 * 2)
            tma_load(v_d, [token0 + c * 16, column], bar, v_s.index(slot))
            slot, phase = _advance(slot, phase, STAGES_V)


@gluon.jit
def _store_partition(o_d, o_ptr, o_s, ready, spent, spans, H, chains, ctas):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    slot = 0
    phase = 0
    for chain in range(gl.program_id(0), chains, ctas):
        token0, tokens = _span(spans, chain, H)
        column = chain % H * 128
        whole = tokens // 16
        for c in range(whole):
            mbarrier.wait(ready.index(slot), phase)
            tma_store(o_d, [token0 + c * 16, column], o_s.index(slot))
            tma.store_wait(0)
            mbarrier.arrive(spent.index(slot), count=1)
            slot, phase = _advance(slot, phase, STAGES_OUT)
        if whole * 16 < tokens:  # the ragged last chunk: rows past the end belong to another sequence
            mbarrier.wait(ready.index(slot), phase)
            out = o_s.index(slot).load(LAYOUT)
            row = whole * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
            col = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
            at = o_ptr + (token0 + row).to(gl.int64)[:, None] * (H * 128) + (column + col)[None, :]
            gl.store(at, out, mask=(row < tokens)[:, None] & (col < 128)[None, :])
            barrier()  # every lane has read the slot before it is given back
            mbarrier.arrive(spent.index(slot), count=1)
            slot, phase = _advance(slot, phase, STAGES_OUT)


@gluon.jit
def _dot_t32(a, bt, acc):
    """acc + a @ bt^T of fp32 tiles in the accumulator layout, a warp each, on the tf32 tensor cores."""
    return mma_v2(
        gl.convert_layout(a, TF32_A), gl.convert_layout(bt.permute([0, 2, 1]), TF32_B), acc, input_precision="tf32"
    )


@gluon.jit
def _unit_lower_inverse(L, LT, row, col, zero):
    """`prepare_sm90._unit_lower_inverse` of four."""
    apart = row ^ col
    below = row > col
    eye = gl.where(apart == 0, 1.0, 0.0)
    X = gl.where((apart == 1) & below, -L, eye)
    XT = gl.where((apart == 1) & (col > row), -LT, eye)
    for level in gl.static_range(1, 4):
        N = gl.where(((apart >> level) == 1) & below, -L, 0.0)
        YT = _dot_t32(XT, N, zero)
        grown = _dot_t32(X, YT, X)
        if level < 3:
            XT = _dot_t32(YT, X, XT)
        X = grown
    return X


@gluon.jit
def _dot_block(a, b, acc):
    """`prepare_sm90._dot_block` of four."""
    return mma_v2(
        gl.convert_layout(a, MMA_A, assert_trivial=True),
        gl.convert_layout(b.permute([0, 2, 1]), MMA_B, assert_trivial=True), acc, input_precision="tf32",
    )  # fmt: skip


@gluon.jit
def _block(tiles, x):
    """32 keys of a group's rows in operand order, raw."""
    block = tiles.slice(32 * x, 32, dim=3).load(OPERAND_OF_TWO).reshape([4, 16, 32])
    return gl.convert_layout(block, OPERAND, assert_trivial=True)


@gluon.jit
def _factors(ks, qs, diagonal, zero, scale):
    """1 / norm of every row of k, and of q times scale, in the row slice of OPERAND; the squares by the tensor cores."""
    kk = zero
    qq = zero
    for x in gl.static_range(4):
        kx = _block(ks, x)
        qx = _block(qs, x)
        kk = mma_v2(gl.convert_layout(kx, MMA_A, assert_trivial=True),
                    gl.convert_layout(kx.permute([0, 2, 1]), MMA_B, assert_trivial=True), kk)  # fmt: skip
        qq = mma_v2(gl.convert_layout(qx, MMA_A, assert_trivial=True),
                    gl.convert_layout(qx.permute([0, 2, 1]), MMA_B, assert_trivial=True), qq)  # fmt: skip
    k2 = gl.convert_layout(gl.sum(gl.where(diagonal, kk, 0.0), 2), gl.SliceLayout(2, OPERAND))
    q2 = gl.convert_layout(gl.sum(gl.where(diagonal, qq, 0.0), 2), gl.SliceLayout(2, OPERAND))
    return _rsqrt(k2 + EPS), _rsqrt(q2 + EPS) * scale


@gluon.jit
def _clear_past_end(kq, gates, left):
    """Zero the rows from `left` on: they belong to another sequence, or to nobody."""
    chunk = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, ROWS_OF_TWO))))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, ROWS_OF_TWO))))
    keep = row[None, None, :, None] < left - chunk[:, None, None, None] * 16
    kq.store(gl.where(keep, kq.load(ROWS_OF_TWO), 0.0))
    chunk = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))
    gates.store(gl.where(row[None, :, None] < left - chunk[:, None, None] * 16, gates.load(ROWS), 0.0))


@gluon.jit
def _prepare_partition(
    prefix_s, kq_s, kr_s, ai_s, dec_s, raw, full, beta, A_log, dt_bias, spans, beta_stride_t, beta_stride_h,
    H, chains, ctas, bound2, scale,
):  # fmt: skip
    """Make the tiles of group after group, in the places of their inputs."""
    K: gl.constexpr = 128
    TILE: gl.constexpr = kr_s.dtype
    SCALE: gl.constexpr = AI_SCALE if TILE == gl.float16 else 1.0
    KIND: gl.constexpr = kq_s.dtype
    EXACT: gl.constexpr = KIND == TILE
    raw_ring = _as(kq_s, gl.bfloat16, [RING, 4, 2, 16, K], gl.constexpr(KQ_GROUP))
    kq_ring = _as(kq_s, KIND, [RING, 4, 2, 16, K], gl.constexpr(KQ_GROUP))
    gate_ring = _as(kr_s, gl.bfloat16, [RING, 4, 16, K], gl.constexpr(KR_GROUP))
    kr_ring = _as(kr_s, TILE, [RING, 4, 16, K], gl.constexpr(KR_GROUP))
    ai_ring = _as(ai_s, TILE, [RING, 4, 2, 16, 16], gl.constexpr(AI_GROUP))
    dec_ring = _as(dec_s, gl.float32, [RING, 4, K], gl.constexpr(DEC_GROUP))
    key = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, COLS)))
    column = (key & 71) | ((key >> 2) & 8) | ((key & 24) << 1)  # `_key` backwards
    gate_chunk = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, COLS)))[:, None, None]
    gate_row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLS)))[None, :, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ACC)))[None, :, None]
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, None, :]
    chunk = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, ACC)))[:, None, None]
    zero = gl.full([4, 16, 16], 0.0, gl.float32, ACC)
    slot = 0
    phase = 0
    for chain in range(gl.program_id(0), chains, ctas):
        token0, tokens = _span(spans, chain, H)
        h = chain % H
        gain = -_exp2(gl.load(A_log + h) * LOG2E) * LOG2E
        bias = gl.load(dt_bias + h * K + column) * gain
        betas = beta + token0.to(gl.int64) * beta_stride_t + h * beta_stride_h
        for group in range((tokens + 63) // 64):
            left = tokens - group * 64
            # rows past the end read the last valid row again
            at_beta = group * 64 + chunk * 16 + gl.minimum(col, left - chunk * 16 - 1)
            raw_beta = gl.load(betas + at_beta.to(gl.int64) * beta_stride_t).to(gl.float32)
            mbarrier.wait(raw.index(slot), phase)
            raw_kq = raw_ring.index(slot)
            kq = kq_ring.index(slot)
            gates = gate_ring.index(slot)
            krs = kr_ring.index(slot)
            squares = ai_ring.index(slot)
            decays = dec_ring.index(slot)
            ks = raw_kq.slice(0, 1, dim=1)
            qs = raw_kq.slice(1, 1, dim=1)
            if left < 64:
                _clear_past_end(raw_kq, gates, left)
            rk, rq = _factors(ks, qs, row == col, zero, scale)
            per_row = gl.where(gate_row < left - gate_chunk * 16, bound2, 0.0)
            gate = _sigmoid2(_widen(gates.load(COLS)) * gain + bias[None, None, :])
            G = gl.associative_scan(gate * per_row, 1, _add)
            prefix_s.store(G)
            decays.store(_exp2(gl.reduce(G, 1, _last)))
            LT = zero
            M = zero
            for x in gl.static_range(4):
                kf = _widen(_block(ks, x))
                qf = _widen(_block(qs, x))
                grown = _exp2(prefix_s.slice(32 * x, 32, dim=2).load(OPERAND))
                dx = decays.slice(32 * x, 32, dim=1).load(gl.SliceLayout(1, OPERAND))
                kn = kf * rk[:, :, None]
                ki = kn * _reciprocal(grown)
                kr = ki * dx[:, None, :]
                kd_tile, qd_tile, kr_tile, kd, qd, ki = _tiles(
                    kn * grown, qf * rq[:, :, None] * grown, ki, kr, TILE, EXACT
                )
                kq.slice(32 * x, 32, dim=3).store(gl.join(kd_tile, qd_tile).permute([0, 3, 1, 2]))
                krs.slice(32 * x, 32, dim=2).store(kr_tile)
                LT = _dot_block(ki, kd, LT)
                M = _dot_block(ki, qd, M)
            b = _sigmoid2(raw_beta * -LOG2E)  # of a row past the end: anything, since its k, q and v are zero
            LT = LT * b
            Mt = (gl.where(col >= row, M, 0.0) * SCALE).to(TILE).permute([0, 2, 1])
            squares.slice(1, 1, dim=1).store(Mt.reshape([4, 1, 16, 16]))
            X = _unit_lower_inverse(gl.convert_layout(LT.permute([0, 2, 1]), ACC), LT, row, col, zero)
            squares.slice(0, 1, dim=1).store((X * (b * SCALE)).to(TILE).reshape([4, 1, 16, 16]))
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot), count=1)
            slot, phase = _advance(slot, phase, RING)


@gluon.jit
def _state_offsets(chain, STATE: gl.constexpr, V_FIRST: gl.constexpr):
    """Where a chain's transposed state lies in h0 and ht. int64 from the start: int32 plus a scalar keeps 64 offsets."""
    value = gl.arange(0, 128, layout=gl.SliceLayout(1, STATE))
    key = gl.arange(0, 128, layout=gl.SliceLayout(0, STATE))
    start = chain.to(gl.int64) * (128 * 128)
    if V_FIRST:
        return start + value[:, None] * 128 + key[None, :]
    else:
        return start + key[None, :] * 128 + value[:, None]


@gluon.jit
def _mma_partition(
    kq_s, kr_s, ai_s, dec_s, v_s, o_s, full, empty, v_full, v_empty, ready, spent, h0_ptr, ht_ptr, spans, H, chains, ctas,
    HAS_H0: gl.constexpr, STORE_HT: gl.constexpr, V_FIRST: gl.constexpr,
):  # fmt: skip
    """Carry every chain's transposed state."""
    K: gl.constexpr = 128
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    L32: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    L16: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    TILE: gl.constexpr = kr_s.dtype
    EXACT: gl.constexpr = kq_s.dtype == TILE
    UNSCALE: gl.constexpr = 1.0 / AI_SCALE if TILE == gl.float16 else 1.0
    zero32 = gl.full([K, 32], 0.0, gl.float32, L32)
    zero16 = gl.full([K, 16], 0.0, gl.float32, L16)
    position = gl.arange(0, 16, layout=gl.SliceLayout(0, L16))[None, :]
    slot = 0
    phase = 0
    vslot = 0
    vphase = 0
    oslot = 0
    ophase = 1
    for chain in range(gl.program_id(0), chains, ctas):
        _, tokens = _span(spans, chain, H)
        chunks = (tokens + 15) // 16
        if HAS_H0:
            S = gl.load(h0_ptr + _state_offsets(chain, STATE, V_FIRST)).to(gl.float32)
        else:
            S = gl.full([K, K], 0.0, gl.float32, STATE)
        for c in range(chunks):
            Sb = gl.convert_layout(S.to(kq_s.dtype), gl.DotOperandLayout(0, L32, 2))
            tile = slot * 4 + c % 4
            if c % 4 == 0:
                mbarrier.wait(full.index(slot), phase)
            mbarrier.wait(v_full.index(vslot), vphase)
            mbarrier.wait(spent.index(oslot), ophase)  # early: off the critical path
            vals = v_s.index(vslot).permute([1, 0]).load(L16)
            both = warpgroup_mma(Sb, kq_s.index(tile).permute([1, 0]), zero32, use_acc=False, is_async=True)
            # Rows past the end are another sequence's, or the padding's: 0 * NaN would leak them.
            vf = gl.where(position < tokens - c * 16, vals.to(gl.float32), 0.0)
            both = warpgroup_mma_wait(0, deps=[both])
            xw, oq = gl.split(gl.permute(gl.reshape(both, [K, 2, 16]), [0, 2, 1]))
            x = vf - gl.convert_layout(xw, L16)
            oq = gl.convert_layout(oq, L16)
            # Not beside the first product: ptxas would wait for that before it (C7517).
            decay = dec_s.index(tile).load(gl.SliceLayout(0, STATE))
            S = S * decay[None, :]
            squares = ai_s.index(tile)
            xa = gl.convert_layout(x.to(TILE), gl.DotOperandLayout(0, L16, 2))
            u = warpgroup_mma(xa, squares.slice(0, 16, dim=0).permute([1, 0]), zero16, use_acc=False, is_async=True)
            u = warpgroup_mma_wait(0, deps=[u])
            ut = (u * UNSCALE).to(TILE)
            us = gl.convert_layout(ut, gl.DotOperandLayout(0, STATE, 2))
            if EXACT:  # kr is kd and what kd lacks of it
                S = warpgroup_mma(us, kq_s.index(tile).slice(0, 16, dim=0), S, is_async=True)
            new_S = warpgroup_mma(us, kr_s.index(tile), S, is_async=True)
            mixed = warpgroup_mma(
                gl.convert_layout(ut, gl.DotOperandLayout(0, L16, 2)), squares.slice(16, 16, dim=0).permute([1, 0]), zero16,
                use_acc=False, is_async=True,
            )  # fmt: skip
            S, out = warpgroup_mma_wait(0, deps=[new_S, mixed])
            out = out * UNSCALE + oq
            _hand_over(out, o_s, ready, oslot, 0, K, True)
            oslot, ophase = _advance(oslot, ophase, STAGES_OUT)
            mbarrier.arrive(v_empty.index(vslot), count=1)
            vslot, vphase = _advance(vslot, vphase, STAGES_V)
            if (c % 4 == 3) | (c == chunks - 1):
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = _advance(slot, phase, RING)
        if STORE_HT:
            gl.store(ht_ptr + _state_offsets(_afresh(chain), STATE, V_FIRST), S)


@gluon.jit(do_not_specialize=["beta_stride_t", "beta_stride_h", "H", "chains", "ctas"])
def kda_fused(
    q_d, k_d, g_d, v_d, o_d, o_ptr, h0_ptr, ht_ptr, beta, A_log, dt_bias, spans, beta_stride_t, beta_stride_h,
    H, chains, ctas, bound2, scale,
    GROUP: gl.constexpr, HALF: gl.constexpr, EXACT: gl.constexpr, HAS_H0: gl.constexpr, STORE_HT: gl.constexpr,
    V_FIRST: gl.constexpr,
):  # fmt: skip
    """The whole forward of `chains` = N * H chains, K = V = 128, bf16; spans as `launch.ChunkTables`, h0 and ht as chunk_kda's.

    q_d, k_d: descriptors with boxes [16, 64] of [tokens, H / GROUP * 128]; g_d, v_d, o_d: [16, 128] of [tokens, H * 128].
    """
    K: gl.constexpr = 128
    TILE: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    KIND: gl.constexpr = TILE if EXACT else gl.bfloat16
    KQ: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, K], KIND)
    KR: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, K], TILE)
    AI: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 16], TILE)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kq_s = gl.allocate_shared_memory(KIND, [RING * 4, 32, K], KQ)
    kr_s = gl.allocate_shared_memory(TILE, [RING * 4, 16, K], KR)
    ai_s = gl.allocate_shared_memory(TILE, [RING * 4, 32, 16], AI)
    dec_s = gl.allocate_shared_memory(gl.float32, [RING * 4, K], VECTORS)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES_V, 16, K], v_d.layout)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES_OUT, 16, K], o_d.layout)
    prefix_s = gl.allocate_shared_memory(gl.float32, [4, 16, K], PREFIX_GROUP)
    raw = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES_OUT, 1], BARRIER)
    spent = gl.allocate_shared_memory(gl.int64, [STAGES_OUT, 1], BARRIER)
    for i in gl.static_range(RING):
        mbarrier.init(raw.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STAGES_V):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    for i in gl.static_range(STAGES_OUT):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(spent.index(i), count=1)
    fence_async_shared()

    # The argument tuples stand inline: a tuple that has a name turns its constexprs into tensors.
    gl.warp_specialize([
        (_mma_partition, (kq_s, kr_s, ai_s, dec_s, v_s, o_s, full, empty, v_full, v_empty, ready, spent, h0_ptr, ht_ptr,
                          spans, H, chains, ctas, HAS_H0, STORE_HT, V_FIRST)),
        (_prepare_partition, (prefix_s, kq_s, kr_s, ai_s, dec_s, raw, full, beta, A_log, dt_bias, spans, beta_stride_t,
                              beta_stride_h, H, chains, ctas, bound2, scale)),
        (_load_partition, (q_d, k_d, g_d, kq_s, kr_s, raw, empty, spans, H, chains, ctas, GROUP)),
        (_load_values_partition, (v_d, v_s, v_full, v_empty, spans, H, chains, ctas)),
        (_store_partition, (o_d, o_ptr, o_s, ready, spent, spans, H, chains, ctas)),
    ], [4, 1, 1, 1], [PREPARE_REGS, IO_REGS, IO_REGS, IO_REGS])  # fmt: skip
