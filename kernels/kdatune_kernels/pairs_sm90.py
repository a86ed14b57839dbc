"""K1 for 32 tokens a step of K2, in Gluon for Hopper: two warps a tile, a chunk of 16 tokens each.

With G1, G2 the prefix sums inside each chunk and C1, C2 their totals (log2), the tile's rows relative to its start are kd1,
qd1, kd2 2^C1, qd2 2^C1, relative to its end kr1 2^C2, kr2, and its decay is 2^(C1 + C2). Between the chunks stand

    L21 = diag(b2) kd2 kr1^T      M21 = qd2 kr1^T      INV21 = -INV2 L21 INV1

so no exponent is positive but those of ki inside 16 tokens, as in `prepare`. The operands of L21 and M21 are fp16: what is
small in them stays small, while under 2^115 of ki it would not; those of INV21 are rounded to tf32, where others are cut,
since what it loses comes on top of what INV1 and INV2 lost.

One program over [2, 16, 128], the chunk axis over the warps as in fused_sm90: each warp does what it does in
`prepare_sm90.prepare_tma`. Between them pass the decays of both chunks, kr of the first (fp16, 1 KiB a block of 32 keys) and at
the end INV of the first. Both warps multiply by these, the second for L21, M21 and INV21, the first for nothing: it would wait.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma

from kdatune_kernels.fused_prepare_sm90 import _as
from kdatune_kernels.fused_prepare_sm90 import _unit_lower_inverse
from kdatune_kernels.prepare_sm90 import AI_SCALE
from kdatune_kernels.prepare_sm90 import EPS
from kdatune_kernels.prepare_sm90 import LOG2E
from kdatune_kernels.prepare_sm90 import _add
from kdatune_kernels.prepare_sm90 import _exp2
from kdatune_kernels.prepare_sm90 import _last
from kdatune_kernels.prepare_sm90 import _reciprocal
from kdatune_kernels.prepare_sm90 import _rsqrt
from kdatune_kernels.prepare_sm90 import _sigmoid2
from kdatune_kernels.prepare_sm90 import _widen
from kdatune_kernels.prepare_sm90 import barrier
from kdatune_kernels.prepare_sm90 import tma_load
from kdatune_kernels.prepare_sm90 import tma_store

MAXNREG = 144
"""Registers a thread: seven CTAs, fourteen warps, an SM, as their shared memory allows. ptxas left alone takes 162."""

# The layouts of prepare_sm90 with the chunk of the pair in front, one a warp.
OPERAND = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0]], [], [2, 16, 32],
    )
)  # fmt: skip
ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 1, 1], [1, 16, 8]))
MMA_A = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 8))
MMA_B = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 8))
TF32_A = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
TF32_B = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 2))
COLS = gl.constexpr(gl.BlockedLayout([1, 16, 1], [1, 1, 32], [2, 1, 1], [2, 1, 0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 16, 2], [2, 1, 1], [2, 1, 0]))
ROWS_OF_32 = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 8, 4], [2, 1, 1], [2, 1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [1, 2], [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))  # how a TMA box without swizzle lies
PREFIX = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 2, [2, 1, 0]))
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _dot_t32(a, bt, acc):
    """`prepare_sm90._dot_t32` of two; in these layouts its operands stay where they are."""
    return mma_v2(
        gl.convert_layout(a, TF32_A, assert_trivial=True),
        gl.convert_layout(bt.permute([0, 2, 1]), TF32_B, assert_trivial=True), acc, input_precision="tf32",
    )  # fmt: skip


@gluon.jit
def _dot_block(a, b, acc):
    """`prepare_sm90._dot_block` of two: acc + a @ b^T of fp16 or fp32 blocks in OPERAND order."""
    return mma_v2(
        gl.convert_layout(a, MMA_A, assert_trivial=True),
        gl.convert_layout(b.permute([0, 2, 1]), MMA_B, assert_trivial=True), acc, input_precision="tf32",
    )  # fmt: skip


@gluon.jit
def _factors(ks, qs, diagonal, zero, scale):
    """1 / norm of every row of k, and of q times scale, in the row slice of OPERAND; the squares by the tensor cores."""
    kk = zero
    qq = zero
    for x in gl.static_range(4):
        kx = ks.slice(32 * x, 32, dim=2).load(OPERAND)
        qx = qs.slice(32 * x, 32, dim=2).load(OPERAND)
        kk = _dot_block(kx, kx, kk)
        qq = _dot_block(qx, qx, qq)
    k2 = gl.convert_layout(gl.sum(gl.where(diagonal, kk, 0.0), 2), gl.SliceLayout(2, OPERAND))
    q2 = gl.convert_layout(gl.sum(gl.where(diagonal, qq, 0.0), 2), gl.SliceLayout(2, OPERAND))
    return _rsqrt(k2 + EPS), _rsqrt(q2 + EPS) * scale


@gluon.jit
def _near(x):
    """fp32 that the tensor cores cut to what x rounds to. cvt.rna.tf32 would take three instructions."""
    return gl.inline_asm_elementwise("add.u32 $0, $1, 0x1000;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _clear_past_end(tile, left, to: gl.constexpr):
    chunk = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :, None]
    tile.store(gl.where(16 * chunk + row < left, tile.load(ROWS), to))


@gluon.jit
def _keys(box, x):
    """Keys 32 x to 32 x + 31 of both chunks of a box [32, 128], x not known to the compiler, so that the blocks are a loop.

    A slice that begins at a variable is not to be had: an index is, of pieces of 32 elements, and what begins there.
    """
    piece = _as(box, gl.bfloat16, [128, 32], LINES).index(x)
    return _as(piece, gl.bfloat16, [2, 16, 128], PLAIN).slice(0, 32, dim=2)


@gluon.jit
def _store_rows(to, left, right):
    """Store the rows of [left | right], both [2, 16, 16] and of one layout, into a matrix of 32 columns."""
    x = gl.convert_layout(gl.join(left, right).permute([0, 1, 3, 2]).reshape([2, 16, 32]), ROWS_OF_32)
    chunk = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS_OF_32)))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS_OF_32)))[None, :, None]
    col = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROWS_OF_32)))[None, None, :]
    gl.store(to + (512 * chunk + 32 * row + col), x)


@gluon.jit(do_not_specialize=["beta_stride_t", "beta_stride_h", "H", "NC"])
def prepare_pairs(
    q, k, g, KQ, KG, beta, A_log, dt_bias, AI, DEC, chunk_token, chunk_length,
    beta_stride_t, beta_stride_h, NC, H, lower_bound, scale, GROUP: gl.constexpr,
):  # fmt: skip
    """As `prepare_sm90.prepare_tma` with EXACT and fp16 tiles, K = 128, of steps of up to 32 tokens.

    q, k, g, KQ, KG: descriptors of [32, 128] boxes, bf16 or bits of fp16; KQ [tiles * 64, K], KG [tiles * 32, K],
    AI [tiles * 64, 32], DEC [tiles, K].
    """
    K: gl.constexpr = 128
    h = gl.program_id(0) // NC
    c = gl.program_id(0) % NC
    n = gl.load(chunk_length + c)
    if n == 0:
        return
    token = gl.load(chunk_token + c)
    q_box = gl.allocate_shared_memory(gl.bfloat16, [32, K], q.layout)
    k_box = gl.allocate_shared_memory(gl.bfloat16, [32, K], q.layout)
    g_box = gl.allocate_shared_memory(gl.bfloat16, [32, K], q.layout)
    # 32 keys at a time: so seven of these CTAs fit an SM, fourteen chunks
    prefix = gl.allocate_shared_memory(gl.float32, [2, 16, 32], PREFIX)
    between = gl.allocate_shared_memory(gl.float16, [2, 16, 32], PLAIN)
    decays = gl.allocate_shared_memory(gl.float32, [2, K], VECTORS)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    barrier()  # before the other warp waits for it
    mbarrier.expect(bar, 3 * 32 * K * 2)
    tma_load(k, [token, h // GROUP * K], bar, k_box)
    tma_load(q, [token, h // GROUP * K], bar, q_box)
    tma_load(g, [token, h * K], bar, g_box)
    qs = _as(q_box, gl.bfloat16, [2, 16, K], PLAIN)
    ks = _as(k_box, gl.bfloat16, [2, 16, K], PLAIN)
    gs = _as(g_box, gl.bfloat16, [2, 16, K], PLAIN)
    tile32 = h * NC + c
    tile = tile32.to(gl.int64)
    key = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, COLS)))
    chunk = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, ACC)))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ACC)))[None, :, None]
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, None, :]
    first = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(1, OPERAND)))[:, None] == 0
    zero = gl.full([2, 16, 16], 0.0, gl.float32, ACC)
    gain = -_exp2(gl.load(A_log + h).to(gl.float32) * LOG2E) * LOG2E
    gain = gl.minimum(gain, -1e-37)  # not 0, which -inf would make NaN of
    bound2 = lower_bound * LOG2E
    at_bias = dt_bias + h * K + key
    raw_bias = gl.load(at_bias)
    at_beta = beta + token.to(gl.int64) * beta_stride_t + h * beta_stride_h
    raw_beta = gl.load(at_beta + gl.minimum(16 * chunk + col, n - 1) * beta_stride_t)
    first_beta = gl.load(at_beta + gl.minimum(col, n - 1) * beta_stride_t)
    mbarrier.wait(bar, 0)
    if n < 32:  # rows past the end belong to another sequence, or to nobody: zero them
        _clear_past_end(qs, n, 0.0)
        _clear_past_end(ks, n, 0.0)
        _clear_past_end(gs, n, float("-inf"))
    rk, rq = _factors(ks, qs, row == col, zero, scale)
    barrier()  # one here for what is read above and written below, and none for it in every pass of the loop
    LT = zero
    MT = zero
    LT21 = zero
    MT21 = zero
    for x in range(4):
        kx = _keys(k_box, x)
        qx = _keys(q_box, x)
        gx = _keys(g_box, x)
        here = _as(_as(decays, gl.float32, [8, 32], LINES).index(x), gl.float32, [2, K], VECTORS).slice(0, 32, dim=1)
        bias = raw_bias.to(gl.float32) * gain
        raw_bias = gl.load(at_bias + gl.minimum(32 * x + 32, 96))
        # all 16 rows of a key in one lane: the prefix sum is plain FMAs
        gate = _sigmoid2(_widen(gx.load(COLS)) * gain + bias[None, None, :])
        raw_k = kx.load(OPERAND)  # here, so that the barrier below stands between it and what is stored over it
        raw_q = qx.load(OPERAND)
        G = gl.associative_scan(gate * bound2, 1, _add)
        prefix.store(G)
        here.store(_exp2(gl.reduce(G, 1, _last)))
        barrier()
        grown = _exp2(prefix.load(OPERAND))
        own = here.load(gl.SliceLayout(1, OPERAND))
        d1 = here.slice(0, 1, dim=0).load(gl.SliceLayout(1, OPERAND))
        d2 = here.slice(1, 1, dim=0).load(gl.SliceLayout(1, OPERAND))
        before = gl.where(first, 1.0, d1)
        after = gl.where(first, d2, 1.0)
        kn = _widen(raw_k) * rk[:, :, None]
        kd = kn * grown
        qd = _widen(raw_q) * rq[:, :, None] * grown
        ki = kn * _reciprocal(grown)
        kr = ki * own[:, None, :]
        between.store(kr.to(gl.float16))
        kd_tile = (kd * before[:, None, :]).to(gl.float16)
        kx.store(kd_tile.to(gl.bfloat16, bitcast=True))
        qx.store((qd * before[:, None, :]).to(gl.float16).to(gl.bfloat16, bitcast=True))
        gx.store((kr * after[:, None, :] - kd_tile.to(gl.float32)).to(gl.float16).to(gl.bfloat16, bitcast=True))
        LT = _dot_block(ki, kd, LT)
        MT = _dot_block(ki, qd, MT)
        barrier()
        kr1 = between.slice(0, 1, dim=0).load(OPERAND)
        kr1, kd = gl.broadcast(kr1, kd.to(gl.float16))
        LT21 = _dot_block(kr1, kd, LT21)
        MT21 = _dot_block(kr1, qd.to(gl.float16), MT21)
    fence_async_shared()
    barrier()
    tma_store(KQ, [tile32 * 64, 0], k_box)
    tma_store(KQ, [tile32 * 64 + 32, 0], q_box)
    tma_store(KG, [tile32 * 32, 0], g_box)
    at_key = gl.arange(0, K, layout=gl.SliceLayout(0, LINE))[None, :]
    both = decays.slice(0, 1, dim=0).load(LINE) * decays.slice(1, 1, dim=0).load(LINE)
    gl.store(DEC + tile * K + at_key, both)
    AI += tile * 2048
    second = chunk == 1
    MT = gl.where(col >= row, MT, 0.0)
    left = (gl.where(second, MT21, MT) * AI_SCALE).to(gl.float16).permute([0, 2, 1])
    right = (gl.where(second, MT, 0.0) * AI_SCALE).to(gl.float16).permute([0, 2, 1])
    _store_rows(AI + 1024, left, right)
    b = gl.where(16 * chunk + col < n, _sigmoid2(raw_beta.to(gl.float32) * -LOG2E), 0.0)
    LT = LT * b
    X = _unit_lower_inverse(gl.convert_layout(LT.permute([0, 2, 1]), ACC), LT, ACC)
    # INV21, by both warps, of which the second has its operands: -(X2 diag(b2)) L21 X1
    inverses = gl.allocate_shared_memory(gl.float32, [2, 16, 16], PLAIN)
    inverses.store(X)
    Y = _dot_t32(_near(X * b), _near(LT21), zero)
    barrier()
    Y, X1T = gl.broadcast(Y, inverses.slice(0, 1, dim=0).permute([0, 2, 1]).load(ACC))
    X21 = _dot_t32(_near(Y), _near(X1T), zero)
    b1 = _sigmoid2(first_beta.to(gl.float32) * -LOG2E)  # of a row past the end: anything, since its L21 is zero
    X = X * (b * AI_SCALE)
    left = gl.where(second, X21 * (b1 * -AI_SCALE), X)
    _store_rows(AI, left.to(gl.float16), gl.where(second, X, 0.0).to(gl.float16))
    tma.store_wait(0)
    # Without this the allocator may hand the buffers to later scratch while the bulk stores still read them.
    q_box._keep_alive()
    k_box._keep_alive()
    g_box._keep_alive()
