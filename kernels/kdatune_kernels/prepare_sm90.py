"""K1, the chunk preparation, in Gluon for Hopper: one warp a tile, cp.async or TMA.

What is behind the layouts (H200, Triton 3.6.0): q and k are read in mma operand order, the key axis permuted alike for A
and B, so that no dot moves a register; g is read with all 16 rows in one lane, so that the prefix sum is plain FMAs; row
norms are the diagonal of q q^T; exp, rcp and rsqrt are single instructions. 28.0 M instructions of the plain kernel become
13.9 M, 63 us become 45 us at N 1 H 96 T 1024. cp.async wins below about 16,384 tiles, TMA above.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6.0 spells these with longer names; the newer ones came with 3.7.
copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

LOG2E = gl.constexpr(1.4426950408889634)
EPS = gl.constexpr(1e-6)
AI_SCALE = gl.constexpr(16384.0)

# 16 x 32 tiles in mma operand order: four quad lanes of eight contiguous keys, rows r and r + 8 in one lane.
OPERAND = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [], [], [16, 32]
    )
)
ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
MMA_A = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 8))
MMA_B = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 8))
# A lane of the accumulator holds two neighbouring columns: as a k_width 2 operand of a tf32 dot it stays where it is.
TF32_A = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
TF32_B = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))
SQUARE = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0]))
PREFIX_SHARED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 2, [1, 0]))
VECTOR_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
COPY_SHARED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [1, 0]))


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _rsqrt(x):
    return gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _widen(x):
    """bf16 -> fp32, two a register: one shift, one and."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 lo, hi; shl.b32 lo, $2, 16; and.b32 hi, $2, 0xffff0000; mov.b32 $0, lo; mov.b32 $1, hi; }",
        "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _last(a, b):
    return b


@gluon.jit
def _sigmoid2(x):
    """1 / (1 + 2^x)."""
    return _reciprocal(1.0 + _exp2(x))


@gluon.jit
def _dot_t32(a, bt, acc):
    """acc + a @ bt^T of fp32 tiles in the accumulator layout, on the tf32 tensor cores."""
    return mma_v2(
        gl.convert_layout(a, TF32_A), gl.convert_layout(bt.permute([1, 0]), TF32_B), acc, input_precision="tf32"
    )


@gluon.jit
def _unit_lower_inverse(L, LT, row, col):
    """(I + L)^-1 by 2x2 block recursion X <- X - X N X. L and its transpose are both carried, so no dot transposes."""
    apart = row ^ col
    below = row > col
    eye = gl.where(apart == 0, 1.0, 0.0)
    X = gl.where((apart == 1) & below, -L, eye)
    XT = gl.where((apart == 1) & (col > row), -LT, eye)
    zero = gl.full([16, 16], 0.0, gl.float32, ACC)
    for level in gl.static_range(1, 4):
        N = gl.where(((apart >> level) == 1) & below, -L, 0.0)
        YT = _dot_t32(XT, N, zero)
        grown = _dot_t32(X, YT, X)
        if level < 3:
            XT = _dot_t32(YT, X, XT)
        X = grown
    return X


@gluon.jit
def _row_norms(qs, ks):
    """sum of squares of every row of q and k, on the tensor cores, in the row slice of OPERAND."""
    zero = gl.full([16, 16], 0.0, gl.float32, ACC)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, ACC))[:, None]
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, ACC))[None, :]
    kk = zero
    qq = zero
    for x in gl.static_range(4):
        kx = ks.slice(32 * x, 32, dim=1).load(OPERAND)
        qx = qs.slice(32 * x, 32, dim=1).load(OPERAND)
        kk = mma_v2(gl.convert_layout(kx, MMA_A, assert_trivial=True),
                    gl.convert_layout(kx.permute([1, 0]), MMA_B, assert_trivial=True), kk)  # fmt: skip
        qq = mma_v2(gl.convert_layout(qx, MMA_A, assert_trivial=True),
                    gl.convert_layout(qx.permute([1, 0]), MMA_B, assert_trivial=True), qq)  # fmt: skip
    k2 = gl.convert_layout(gl.sum(gl.where(row == col, kk, 0.0), 1), gl.SliceLayout(1, OPERAND))
    q2 = gl.convert_layout(gl.sum(gl.where(row == col, qq, 0.0), 1), gl.SliceLayout(1, OPERAND))
    return q2, k2


@gluon.jit
def _decayed(kf, qf, rk, rq, G, decay, FAST_RCP: gl.constexpr):
    """kd, qd, ki, kr (all fp32) of a 16 x 32 block from rows of k and q, their norms, the prefix sum and the chunk decay."""
    grown = _exp2(G)
    if FAST_RCP:
        shrunk = _reciprocal(grown)
    else:
        shrunk = _exp2(-G)
    kn = kf * rk[:, None]
    ki = kn * shrunk
    return kn * grown, qf * rq[:, None] * grown, ki, ki * decay[None, :]


@gluon.jit
def _dot_block(a, b, acc):
    """acc + a @ b^T of bf16 or fp32 blocks in OPERAND order; the tensor cores do not look at the last 13 bits of fp32.

    A k_width of 8 makes four m16n8k8 of an fp32 block; each takes two neighbouring keys of every lane, the same of a and b.
    """
    return mma_v2(
        gl.convert_layout(a, MMA_A, assert_trivial=True),
        gl.convert_layout(b.permute([1, 0]), MMA_B, assert_trivial=True), acc, input_precision="tf32",
    )  # fmt: skip


@gluon.jit
def _accumulate(kd, qd, ki, L, LT, M, TRANSPOSED: gl.constexpr):
    """L, L^T and M (or M^T if TRANSPOSED) plus one block's products; every operand already sits in its registers."""
    LT = _dot_block(ki, kd, LT)
    if TRANSPOSED:
        M = _dot_block(ki, qd, M)
    else:
        L = _dot_block(kd, ki, L)
        M = _dot_block(qd, ki, M)
    return L, LT, M


@gluon.jit
def _tiles(kd, qd, ki, kr, TILE: gl.constexpr, EXACT: gl.constexpr):
    """kd, qd and kr (if EXACT what kd lacks of it) as K2 reads them, then kd, qd and ki as operands of L's and M's products."""
    if EXACT:
        kd_tile = kd.to(TILE)
        return kd_tile, qd.to(TILE), (kr - kd_tile.to(gl.float32)).to(TILE), kd, qd, ki
    else:
        kd = kd.to(gl.bfloat16)
        qd = qd.to(gl.bfloat16)
        return kd, qd, kr.to(TILE), kd, qd, ki.to(gl.bfloat16)


@gluon.jit
def _store_squares(AI, L, LT, M, br, bc, TRANSPOSED: gl.constexpr, HALF: gl.constexpr):
    """Write [INV diag(b); M] of one tile; AI points at it."""
    TILE: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    SCALE: gl.constexpr = AI_SCALE if HALF else 1.0
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, ACC))[:, None]
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, ACC))[None, :]
    at = (
        gl.arange(0, 16, layout=gl.SliceLayout(1, SQUARE))[:, None] * 16
        + gl.arange(0, 16, layout=gl.SliceLayout(0, SQUARE))[None, :]
    )
    LT = LT * bc[None, :]
    if TRANSPOSED:
        L = gl.convert_layout(LT.permute([1, 0]), ACC)
        Mt = (gl.where(col >= row, M, 0.0) * SCALE).to(TILE).permute([1, 0])
    else:
        L = L * br[:, None]
        Mt = (gl.where(row >= col, M, 0.0) * SCALE).to(TILE)
    gl.store(AI + 256 + at, gl.convert_layout(Mt, SQUARE))
    X = _unit_lower_inverse(L, LT, row, col)
    gl.store(AI + at, gl.convert_layout((X * (bc * SCALE)[None, :]).to(TILE), SQUARE))


@gluon.jit
def _betas(beta, n, stride_t):
    """sigmoid(beta) of the chunk's rows, 0 past the end, in both slices of the accumulator; beta points at row 0."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, ACC))
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, ACC))
    br = gl.load(beta + gl.minimum(row, n - 1) * stride_t).to(gl.float32)
    bc = gl.load(beta + gl.minimum(col, n - 1) * stride_t).to(gl.float32)
    return gl.where(row < n, _sigmoid2(br * -LOG2E), 0.0), gl.where(col < n, _sigmoid2(bc * -LOG2E), 0.0)


@gluon.jit
def _place(NC, H, HEAD_FAST: gl.constexpr):
    pid = gl.program_id(0)
    if HEAD_FAST:
        h = pid % H
        c = pid // H
    else:
        h = pid // NC
        c = pid % NC
    return h, c


@gluon.jit(do_not_specialize=["beta_stride_t", "beta_stride_h", "H", "NC"])
def prepare_cp_async(
    q, k, g, beta, A_log, dt_bias, KQ, KG, AI, DEC, chunk_token, chunk_length,
    q_stride_t, k_stride_t, g_stride_t, beta_stride_t, beta_stride_h, NC, H, lower_bound, scale,
    GROUP: gl.constexpr, HEAD_FAST: gl.constexpr, TRANSPOSED: gl.constexpr, FAST_RCP: gl.constexpr,
    EVICT_LAST: gl.constexpr, HALF: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """As `prepare.prepare_kernel`, K = 128, q and k staged by cp.async. Token strides: multiples of 16 elements."""
    K: gl.constexpr = 128
    TILE: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    COLS: gl.constexpr = gl.BlockedLayout([16, 4], [1, 32], [1, 1], [1, 0])
    h, c = _place(NC, H, HEAD_FAST)
    n = gl.load(chunk_length + c)
    if n == 0:
        return
    token = gl.load(chunk_token + c).to(gl.int64)
    hq = h // GROUP
    # Rows past the end read the last valid row again and are zeroed through their row factors: whatever lies behind the
    # sequence, NaN or another sequence, is never read.
    crow = gl.arange(0, 16, layout=gl.SliceLayout(1, COLS))
    ccol = gl.arange(0, K, layout=gl.SliceLayout(0, COLS))
    at_g = g + token * g_stride_t + h * K + (gl.minimum(crow, n - 1)[:, None] * g_stride_t + ccol[None, :])
    if EVICT_LAST:
        raw_gate = gl.load(at_g, eviction_policy="evict_last")
    else:
        raw_gate = gl.load(at_g)
    wrow = gl.minimum(gl.arange(0, 16, layout=gl.SliceLayout(1, ROWS)), n - 1)[:, None]
    wcol = gl.arange(0, K, layout=gl.SliceLayout(0, ROWS))[None, :]
    ks = gl.allocate_shared_memory(gl.bfloat16, [16, K], COPY_SHARED)
    qs = gl.allocate_shared_memory(gl.bfloat16, [16, K], COPY_SHARED)
    copy_rows(ks, k + token * k_stride_t + hq * K + (wrow * k_stride_t + wcol))
    copy_rows(qs, q + token * q_stride_t + hq * K + (wrow * q_stride_t + wcol))
    async_copy.commit_group()
    gain = -_exp2(gl.load(A_log + h).to(gl.float32) * LOG2E) * LOG2E
    bias = gl.load(dt_bias + h * K + ccol).to(gl.float32) * gain
    br, bc = _betas(beta + token * beta_stride_t + h * beta_stride_h, n, beta_stride_t)
    per_row = gl.where(crow < n, lower_bound * LOG2E, 0.0)
    G = gl.associative_scan(_sigmoid2(_widen(raw_gate) * gain + bias[None, :]) * per_row[:, None], 0, _add)
    decay = _exp2(gl.reduce(G, 0, _last))
    tile = h.to(gl.int64) * NC + c
    gl.store(DEC + tile * K + ccol, decay)
    gs = gl.allocate_shared_memory(gl.float32, [16, K], PREFIX_SHARED)
    gs.store(G)
    ds = gl.allocate_shared_memory(gl.float32, [K], VECTOR_SHARED)
    ds.store(decay)
    async_copy.wait_group(0)
    barrier()
    q2, k2 = _row_norms(qs, ks)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, OPERAND))
    col = gl.arange(0, 32, layout=gl.SliceLayout(0, OPERAND))
    rk = gl.where(row < n, _rsqrt(k2 + EPS), 0.0)
    rq = gl.where(row < n, _rsqrt(q2 + EPS) * scale, 0.0)
    barrier()  # keeps the compiler from holding q and k in registers across the two passes (145 registers without it)
    at_q = KQ + tile * (32 * K) + (row[:, None] * K + col[None, :])
    at_k = KG + tile * (16 * K) + (row[:, None] * K + col[None, :])
    L = gl.full([16, 16], 0.0, gl.float32, ACC)
    LT = L
    M = L
    for x in gl.static_range(4):
        kf = _widen(ks.slice(32 * x, 32, dim=1).load(OPERAND))
        qf = _widen(qs.slice(32 * x, 32, dim=1).load(OPERAND))
        Gx = gs.slice(32 * x, 32, dim=1).load(OPERAND)
        dx = ds.slice(32 * x, 32, dim=0).load(gl.SliceLayout(0, OPERAND))
        kd, qd, ki, kr = _decayed(kf, qf, rk, rq, Gx, dx, FAST_RCP)
        kd_tile, qd_tile, kr_tile, kd, qd, ki = _tiles(kd, qd, ki, kr, TILE, EXACT)
        gl.store(at_q + 32 * x, kd_tile)
        gl.store(at_q + 32 * x + 16 * K, qd_tile)
        gl.store(at_k + 32 * x, kr_tile)
        L, LT, M = _accumulate(kd, qd, ki, L, LT, M, TRANSPOSED)
    _store_squares(AI + tile * 512, L, LT, M, br, bc, TRANSPOSED, HALF)


@gluon.jit(do_not_specialize=["beta_stride_t", "beta_stride_h", "H", "NC"])
def prepare_tma(
    q, k, g, KQ, KG, beta, A_log, dt_bias, AI, DEC, chunk_token, chunk_length,
    beta_stride_t, beta_stride_h, NC, H, lower_bound, scale,
    GROUP: gl.constexpr, HEAD_FAST: gl.constexpr, TRANSPOSED: gl.constexpr, FAST_RCP: gl.constexpr,
    HALVES: gl.constexpr, HALF: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """As `prepare.prepare_kernel`, K = 128, by TMA: q, k, g, KQ, KG are descriptors of [16, 128] boxes, bf16.

    The results are written over the inputs in shared memory. KG holds fp16 bits if HALF, KQ, too, if EXACT as well.
    """
    K: gl.constexpr = 128
    TILE: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    PART: gl.constexpr = K // HALVES
    BLOCKS: gl.constexpr = 4 // HALVES
    COLS: gl.constexpr = gl.BlockedLayout([16, 4 // HALVES], [1, 32], [1, 1], [1, 0])
    h, c = _place(NC, H, HEAD_FAST)
    n = gl.load(chunk_length + c)
    if n == 0:
        return
    token = gl.load(chunk_token + c)
    qs = gl.allocate_shared_memory(gl.bfloat16, [16, K], q.layout)
    ks = gl.allocate_shared_memory(gl.bfloat16, [16, K], q.layout)
    gs = gl.allocate_shared_memory(gl.bfloat16, [16, K], q.layout)
    prefix = gl.allocate_shared_memory(gl.float32, [16, PART], PREFIX_SHARED)
    ds = gl.allocate_shared_memory(gl.float32, [PART], VECTOR_SHARED)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, 3 * 16 * K * 2)
    tma_load(k, [token, h // GROUP * K], bar, ks)
    tma_load(q, [token, h // GROUP * K], bar, qs)
    tma_load(g, [token, h * K], bar, gs)
    tile32 = h * NC + c
    tile = tile32.to(gl.int64)
    crow = gl.arange(0, 16, layout=gl.SliceLayout(1, COLS))
    ccol = gl.arange(0, PART, layout=gl.SliceLayout(0, COLS))
    gain = -_exp2(gl.load(A_log + h).to(gl.float32) * LOG2E) * LOG2E
    per_row = gl.where(crow < n, lower_bound * LOG2E, 0.0)
    br, bc = _betas(beta + token.to(gl.int64) * beta_stride_t + h * beta_stride_h, n, beta_stride_t)
    mbarrier.wait(bar, 0)
    if n < 16:  # rows past the end belong to another sequence, or to nobody: zero them
        keep = (gl.arange(0, 16, layout=gl.SliceLayout(1, ROWS)) < n)[:, None]
        zero = gl.full([16, K], 0.0, gl.bfloat16, ROWS)
        qs.store(gl.where(keep, qs.load(ROWS), zero))
        ks.store(gl.where(keep, ks.load(ROWS), zero))
        gs.store(gl.where(keep, gs.load(ROWS), zero))
    q2, k2 = _row_norms(qs, ks)
    rk = _rsqrt(k2 + EPS)
    rq = _rsqrt(q2 + EPS) * scale
    L = gl.full([16, 16], 0.0, gl.float32, ACC)
    LT = L
    M = L
    for y in gl.static_range(HALVES):
        bias = gl.load(dt_bias + h * K + PART * y + ccol).to(gl.float32) * gain
        raw_gate = gs.slice(PART * y, PART, dim=1).load(COLS)
        G = gl.associative_scan(_sigmoid2(_widen(raw_gate) * gain + bias[None, :]) * per_row[:, None], 0, _add)
        decay = _exp2(gl.reduce(G, 0, _last))
        gl.store(DEC + tile * K + PART * y + ccol, decay)
        prefix.store(G)
        ds.store(decay)
        barrier()
        for xx in gl.static_range(BLOCKS):
            kx = ks.slice(32 * (y * BLOCKS + xx), 32, dim=1)
            qx = qs.slice(32 * (y * BLOCKS + xx), 32, dim=1)
            Gx = prefix.slice(32 * xx, 32, dim=1).load(OPERAND)
            dx = ds.slice(32 * xx, 32, dim=0).load(gl.SliceLayout(0, OPERAND))
            kd, qd, ki, kr = _decayed(_widen(kx.load(OPERAND)), _widen(qx.load(OPERAND)), rk, rq, Gx, dx, FAST_RCP)
            kd_tile, qd_tile, kr_tile, kd, qd, ki = _tiles(kd, qd, ki, kr, TILE, EXACT)
            kx.store(kd_tile.to(gl.bfloat16, bitcast=True))
            qx.store(qd_tile.to(gl.bfloat16, bitcast=True))
            gs.slice(32 * (y * BLOCKS + xx), 32, dim=1).store(kr_tile.to(gl.bfloat16, bitcast=True))
            L, LT, M = _accumulate(kd, qd, ki, L, LT, M, TRANSPOSED)
    fence_async_shared()
    tma_store(KQ, [tile32 * 32, 0], ks)
    tma_store(KQ, [tile32 * 32 + 16, 0], qs)
    tma_store(KG, [tile32 * 16, 0], gs)
    _store_squares(AI + tile * 512, L, LT, M, br, bc, TRANSPOSED, HALF)
    tma.store_wait(0)
    # Without this the allocator may hand the buffers to later scratch while the bulk stores still read them.
    qs._keep_alive()
    ks._keep_alive()
    gs._keep_alive()
