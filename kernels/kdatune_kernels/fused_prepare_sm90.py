"""K1 inside the fused kernel, in Gluon for Hopper: the partitions that prepare, and how a group of four chunks lies in memory.

A group is 64 tokens, [4, 16, ..], a chunk a warp. Its tiles are made in the places of its raw q, k and g. The arithmetic is
that of `prepare_sm90.prepare_tma` (transposed dots, fast reciprocal). A partition is one latency chain: what it need not do,
others do (fused_sm90), and nothing in its loop is spilled. H200, 8 x 1024 tokens, H 96: 485 us with 18 and 20 spilled accesses
a group, 430 with none; `_afresh` says how.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kdatune_kernels.prepare_sm90 import AI_SCALE
from kdatune_kernels.prepare_sm90 import EPS
from kdatune_kernels.prepare_sm90 import _add
from kdatune_kernels.prepare_sm90 import _exp2
from kdatune_kernels.prepare_sm90 import _last
from kdatune_kernels.prepare_sm90 import _reciprocal
from kdatune_kernels.prepare_sm90 import _rsqrt
from kdatune_kernels.prepare_sm90 import _sigmoid2
from kdatune_kernels.prepare_sm90 import _tiles
from kdatune_kernels.prepare_sm90 import _widen
from kdatune_kernels.prepare_sm90 import barrier

RING = gl.constexpr(3)
"""Groups in the ring: two in flight or in the making, one being eaten."""
PREPARERS = gl.constexpr(2)
PRIVATE_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))  # its name in Triton 3.6


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
SQUARE_GROUP = gl.constexpr(_grouped(_tile_bases(16, 16, 32), False, 16))
DEC_GROUP = gl.constexpr(gl.SharedLinearLayout([*([0, _key(1 << i)] for i in range(7)), [1, 0], [2, 0]], [], 128))
# The prefix sum of half the keys, fp32: blocks of 32 keys, 16-byte pieces swizzled by row.
PREFIX_HALF = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 4], [0, 2, 8], [0, 4, 16], [0, 8, 0],
         [0, 0, 32], [1, 0, 0], [2, 0, 0]], [], 128,
    )
)  # fmt: skip
BIASES = gl.constexpr(gl.SharedLinearLayout([[_key(1 << i)] for i in range(7)], [], 128))
BETAS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
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
COLS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))  # half the keys
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
def _one(memory):
    """The only element of shared memory, as a scalar."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(memory.load(ONE), 0)


@gluon.jit
def _halves(x, AXIS: gl.constexpr):
    """The first and the last eight rows (AXIS 1) or columns (AXIS 2) of [chunks, 16, ..]: a thread holds both."""
    if AXIS == 1:
        return gl.split(x.reshape([x.shape[0], 2, 8, x.shape[2]]).permute([0, 2, 3, 1]))
    else:
        return gl.split(x.reshape([x.shape[0], x.shape[1], 2, 8]).permute([0, 1, 3, 2]))


@gluon.jit
def _beside(left, right, ACC: gl.constexpr):
    both = gl.join(left, right).permute([0, 1, 3, 2]).reshape([left.shape[0], 16, 16])
    return gl.convert_layout(both, ACC, assert_trivial=True)


@gluon.jit
def _exchanged(x, ACC: gl.constexpr):
    """[chunks, 16, 8] with the last eight rows first."""
    first, last = _halves(x, 1)
    both = gl.join(last, first).permute([0, 3, 1, 2]).reshape([x.shape[0], 16, 8])
    return gl.convert_layout(both, ACC, assert_trivial=True)


@gluon.jit
def _dot_t32(a, bt, acc, upper, ACC: gl.constexpr):
    """acc + a @ bt^T of matrices that are two 8 x 8 blocks on the diagonal, kept below each other as [chunks, 16, 8], fp32 on
    the tf32 tensor cores: half the products of whole ones."""
    TF32_A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    TF32_B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    chunks: gl.constexpr = a.shape[0]
    whole = _beside(gl.where(upper, a, 0.0), gl.where(upper, 0.0, a), ACC)
    stacked = bt.reshape([chunks, 2, 8, 8]).permute([0, 1, 3, 2]).reshape([chunks, 16, 8])
    return mma_v2(
        gl.convert_layout(whole, TF32_A, assert_trivial=True), gl.convert_layout(stacked, TF32_B, assert_trivial=True), acc,
        input_precision="tf32",
    )  # fmt: skip


@gluon.jit
def _unit_lower_inverse(L, LT, ACC: gl.constexpr):
    """`prepare_sm90._unit_lower_inverse` of [chunks, 16, 16] in the layout ACC, a chunk a warp: the two blocks of 8 x 8 on the
    diagonal first, then the one below them."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ACC)))[None, :, None]
    col = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, None, :]
    zero = gl.full([L.shape[0], 16, 8], 0.0, gl.float32, ACC)
    upper = row < 8
    left, right = _halves(L, 2)
    left = gl.convert_layout(left, ACC, assert_trivial=True)
    own = gl.where(upper, left, gl.convert_layout(right, ACC, assert_trivial=True))
    leftT, rightT = _halves(LT, 2)
    leftT = gl.convert_layout(leftT, ACC, assert_trivial=True)
    ownT = gl.where(upper, leftT, gl.convert_layout(rightT, ACC, assert_trivial=True))
    r = _afresh(row % 8)
    col = _afresh(col)
    apart = r ^ col
    eye = gl.where(apart == 0, 1.0, 0.0)
    X = gl.where((apart == 1) & (r > col), -own, eye)
    XT = gl.where((apart == 1) & (col > r), -ownT, eye)
    for level in gl.static_range(1, 3):
        N = gl.where(((apart >> level) == 1) & (r > col), -own, 0.0)
        YT = _dot_t32(XT, N, zero, upper, ACC)
        grown = _dot_t32(X, YT, X, upper, ACC)
        XT = _dot_t32(YT, X, XT, upper, ACC)
        X = grown
    YT = _dot_t32(XT, _exchanged(left, ACC), zero, upper, ACC)  # its first rows
    Z = _dot_t32(X, _exchanged(YT, ACC), zero, upper, ACC)  # its last rows
    return _beside(gl.where(upper, X, -Z), gl.where(upper, 0.0, X), ACC)


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
    """Zero the rows from `left` on, and their gates: they belong to another sequence, or to nobody."""
    chunk = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, ROWS_OF_TWO))))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, ROWS_OF_TWO))))
    keep = row[None, None, :, None] < left - chunk[:, None, None, None] * 16
    kq.store(gl.where(keep, kq.load(ROWS_OF_TWO), 0.0))
    chunk = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))
    gates.store(gl.where(row[None, :, None] < left - chunk[:, None, None] * 16, gates.load(ROWS), float("-inf")))


@gluon.jit
def _prepare_partition(
    prefix_s, kq_s, kr_s, inv_s, m_s, dec_s, bias_s, beta_s, gain_s, left_s, raw, full, bound2, scale, FIRST: gl.constexpr,
):  # fmt: skip
    """Make the tiles of every PREPARERS-th group from FIRST on, in the places of their inputs."""
    K: gl.constexpr = 128
    TILE: gl.constexpr = kr_s.dtype
    SCALE: gl.constexpr = AI_SCALE if TILE == gl.float16 else 1.0
    KIND: gl.constexpr = kq_s.dtype
    EXACT: gl.constexpr = KIND == TILE
    raw_ring = _as(kq_s, gl.bfloat16, [RING, 4, 2, 16, K], gl.constexpr(KQ_GROUP))
    kq_ring = _as(kq_s, KIND, [RING, 4, 2, 16, K], gl.constexpr(KQ_GROUP))
    gate_ring = _as(kr_s, gl.bfloat16, [RING, 4, 16, K], gl.constexpr(KR_GROUP))
    kr_ring = _as(kr_s, TILE, [RING, 4, 16, K], gl.constexpr(KR_GROUP))
    inv_ring = _as(inv_s, TILE, [RING, 4, 16, 16], gl.constexpr(SQUARE_GROUP))
    m_ring = _as(m_s, TILE, [RING, 4, 16, 16], gl.constexpr(SQUARE_GROUP))
    dec_ring = _as(dec_s, gl.float32, [RING, 4, K], gl.constexpr(DEC_GROUP))
    biases = _as(bias_s, gl.float32, [RING, K], gl.constexpr(BIASES))
    betas = _as(beta_s, gl.float32, [RING, 4, 16], gl.constexpr(BETAS))
    prefix = prefix_s.index(FIRST)
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ACC)))[None, :, None]
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, None, :]
    zero = gl.full([4, 16, 16], 0.0, gl.float32, ACC)
    slot = FIRST
    phase = 0
    # Barriers of its own: of shared ones it would leave out every second phase.
    mbarrier.wait(raw.index(FIRST * RING + slot), phase)
    left = _one(left_s.index(slot))
    while left > 0:
        gain = _one(gain_s.index(slot))
        raw_kq = raw_ring.index(slot)
        kq = kq_ring.index(slot)
        gates = gate_ring.index(slot)
        krs = kr_ring.index(slot)
        ks = raw_kq.slice(0, 1, dim=1)
        qs = raw_kq.slice(1, 1, dim=1)
        if left < 64:
            _clear_past_end(raw_kq, gates, left)
            barrier()  # here, or everybody waits for it
        rk, rq = _factors(ks, qs, row == col, zero, scale)
        LT = zero
        M = zero
        for x in gl.static_range(4):
            here = _afresh(slot)
            if x % 2 == 0:  # the next half of the keys
                bias = biases.index(slot).slice(32 * x, 64, dim=0).load(gl.SliceLayout(0, gl.SliceLayout(1, COLS)))
                raw_gate = gates.slice(32 * x, 64, dim=2).load(COLS)
                G = gl.associative_scan(_sigmoid2(_widen(raw_gate) * gain + bias[None, None, :]) * bound2, 1, _add)
                prefix.store(G)
                dec_ring.index(here).slice(32 * x, 64, dim=1).store(_exp2(gl.reduce(G, 1, _last)))
            kf = _widen(_block(ks, x))
            qf = _widen(_block(qs, x))
            grown = _exp2(prefix.slice(32 * (x % 2), 32, dim=2).load(OPERAND))
            dx = dec_ring.index(here).slice(32 * x, 32, dim=1).load(gl.SliceLayout(1, OPERAND))
            kn = kf * rk[:, :, None]
            ki = kn * _reciprocal(grown)
            kr = ki * dx[:, None, :]
            kd_tile, qd_tile, kr_tile, kd, qd, ki = _tiles(kn * grown, qf * rq[:, :, None] * grown, ki, kr, TILE, EXACT)
            kq.slice(32 * x, 32, dim=3).store(gl.join(kd_tile, qd_tile).permute([0, 3, 1, 2]))
            krs.slice(32 * x, 32, dim=2).store(kr_tile)
            LT = _dot_block(ki, kd, LT)
            M = _dot_block(ki, qd, M)
        # of a row past the end: anything, since its k, q and v are zero
        b = betas.index(slot).load(gl.SliceLayout(1, ACC))[:, None, :]
        LT = LT * b
        Mt = (gl.where(col >= row, M, 0.0) * SCALE).to(TILE).permute([0, 2, 1])
        m_ring.index(slot).store(Mt)
        X = _unit_lower_inverse(gl.convert_layout(LT.permute([0, 2, 1]), ACC), LT, ACC)
        inv_ring.index(slot).store((X * (b * SCALE)).to(TILE))
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(slot), count=1)
        slot = (slot + PREPARERS) % RING
        if slot == FIRST:  # all places of the ring, once each: PREPARERS does not divide RING
            phase ^= 1
        mbarrier.wait(raw.index(FIRST * RING + slot), phase)
        left = _one(left_s.index(slot))
