"""K1 and K2 in one kernel, in Gluon for Hopper: tiles are made beside the recurrence that eats them, in shared memory.

Persistent: one CTA an SM, every CTA takes the chains pid, pid + CTAs, ... A chain is worked off in groups of four chunks,
64 tokens. A ring of RING groups holds what the workspace of the split kernels holds; a group lives in one place, a quarter of
it a chunk:

    load      raw q, k, g by TMA into the places of qd, kd, kr, a chunk as soon as the one there is done    raw
    prepare   K1 of the four chunks, one a warp, in place; two partitions in turns (fused_prepare_sm90)     full
    mma       K2 of the four chunks, the state in registers                                                 done, a chunk each
    v, o      places of four and two chunks beside the ring, by their number in the group                   v_full

MMA says once that it is through with a chunk; those that load and store find out by themselves what is free with that. Every
group has four places and all take part, also those that the last group of a chain lacks. Between two chains the place of the
last group that was eaten is lent to the next state (`_load_state`).

Partitions: one of MMA (as recurrence_sm90, all 128 rows of a state), two that prepare, and one warp each that loads q, k and g,
loads v and stores o. The arithmetic is that of `prepare_sm90.prepare_tma` and of `recurrence_sm90.recurrence_ws`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from kdatune_kernels.fused_prepare_sm90 import PREFIX_HALF
from kdatune_kernels.fused_prepare_sm90 import PREPARERS
from kdatune_kernels.fused_prepare_sm90 import RING
from kdatune_kernels.fused_prepare_sm90 import VECTORS
from kdatune_kernels.fused_prepare_sm90 import _afresh
from kdatune_kernels.fused_prepare_sm90 import _as
from kdatune_kernels.fused_prepare_sm90 import _prepare_partition
from kdatune_kernels.prepare_sm90 import AI_SCALE
from kdatune_kernels.prepare_sm90 import LOG2E
from kdatune_kernels.prepare_sm90 import _exp2
from kdatune_kernels.prepare_sm90 import _sigmoid2
from kdatune_kernels.prepare_sm90 import barrier
from kdatune_kernels.prepare_sm90 import tma_load
from kdatune_kernels.prepare_sm90 import tma_store
from kdatune_kernels.recurrence_sm90 import _advance

MAXNREG = 128
"""Registers a thread starts with: they size the pool that the partitions share out, all 65,536."""
PREPARE_REGS, IO_REGS = gl.constexpr(120), gl.constexpr(24)
"""Registers of the first partition that prepares (the other has eight less) and of those that move; MMA has what is left, 256:
with 248 ptxas makes its wgmma wait for each other (C7512)."""


@gluon.jit
def _span(spans, chain, H):
    """First token and tokens of a chain's sequence."""
    token0 = gl.load(spans + 4 * (chain // H))
    return token0, gl.load(spans + 4 * (chain // H) + 1) - token0


@gluon.jit
def _state_quarters(kq_s, kr_s, slot, layout: gl.constexpr):
    """The place of a group as three quarters of a state, 32 keys each. There is no room for the fourth."""
    wide = _as(kq_s, gl.float32, [RING * 2, 128, 32], layout)
    narrow = _as(kr_s, gl.float32, [RING, 128, 32], layout)
    return wide.index(slot * 2), wide.index(slot * 2 + 1), narrow.index(slot)


@gluon.jit
def _load_state(h0_d, kq_s, kr_s, moved, slot, chain, turn):
    """Lend the place of a chain's last group, which has been eaten, to the state of the next chain, until MMA has read it.

    Through registers, 64 KB of a state take 8,400 cycles, in which nothing is eaten; so 32 x 256 tokens, H 64, take 347 us and
    with this 325 (H200). moved: the state is there; it has been read.
    """
    a, b, c = _state_quarters(kq_s, kr_s, slot, gl.constexpr(h0_d.layout))
    bar = moved.index(0)
    mbarrier.expect(bar, 3 * 128 * 32 * 4)
    tma_load(h0_d, [chain * 128, 0], bar, a)
    tma_load(h0_d, [chain * 128, 32], bar, b)
    tma_load(h0_d, [chain * 128, 64], bar, c)
    mbarrier.wait(moved.index(1), turn)


@gluon.jit
def _load_partition(
    q_d, k_d, g_d, h0_d, kq_s, kr_s, bias_s, beta_s, gain_s, left_s, raw, done, moved, beta, A_log, dt_bias, spans,
    beta_stride_t, beta_stride_h, H, chains, ctas, GROUP: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """Load what the tiles are made of, a chunk as soon as its place has been eaten; after the last, say that it was the last.

    What is one number a key, a token or a head is made here, where nobody waits: those that prepare are bound by latency.
    """
    KEYS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    TOKENS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # A [32, 128] tile in memory: k left, q left, k right, q right, each [16, 64].
    pieces = _as(kq_s, gl.bfloat16, [RING * 16, 16, 64], gl.constexpr(k_d.layout))
    gates = _as(kr_s, gl.bfloat16, [RING * 4, 16, 128], gl.constexpr(g_d.layout))
    key = gl.arange(0, 128, layout=KEYS)
    row = gl.arange(0, 64, layout=TOKENS)
    slot = 0
    phase = 1
    turn = 0
    begun = -1  # the chain whose first group is two before this one: its state is next
    begins = -1  # one before this one
    states = 0
    for chain in range(_afresh(gl.program_id(0)), chains, ctas):
        token0, tokens = _span(spans, chain, H)
        h = chain % H
        at = h // GROUP * 128
        gain = gl.minimum(-_exp2(gl.load(A_log + h) * LOG2E) * LOG2E, -1e-37)  # not 0, which -inf would make NaN of
        bias = gl.load(dt_bias + h * 128 + key) * gain
        betas = beta + token0.to(gl.int64) * beta_stride_t + h * beta_stride_h
        for group in range((tokens + 63) // 64):
            left = tokens - group * 64
            # rows past the end read the last valid row again
            at_beta = group * 64 + gl.minimum(row, left - 1)
            raw_beta = gl.load(betas + at_beta.to(gl.int64) * beta_stride_t).to(gl.float32)
            bar = raw.index(turn * RING + slot)
            if STAGED:
                if begun >= 0:
                    mbarrier.wait(done.index(slot * 4 + 3), phase)
                    _load_state(h0_d, kq_s, kr_s, moved, slot, begun, states)
                    states ^= 1
                begun = begins
                begins = gl.where(group == 0, chain, -1)
            for j in gl.static_range(4):
                mbarrier.wait(done.index(slot * 4 + j), phase)
                if j == 0:
                    bias_s.index(slot).store(bias)
                    beta_s.index(slot).store(_sigmoid2(raw_beta * -LOG2E))
                    gain_s.index(slot).store(gl.full([1], 0.0, gl.float32, ONE) + gain)
                    left_s.index(slot).store(gl.full([1], 0, gl.int32, ONE) + left)
                    barrier()
                    mbarrier.expect(bar, 3 * 64 * 128 * 2)
                token = token0 + group * 64 + 16 * j
                tile = slot * 4 + j
                tma_load(k_d, [token, at], bar, pieces.index(tile * 4))
                tma_load(q_d, [token, at], bar, pieces.index(tile * 4 + 1))
                tma_load(k_d, [token, at + 64], bar, pieces.index(tile * 4 + 2))
                tma_load(q_d, [token, at + 64], bar, pieces.index(tile * 4 + 3))
                tma_load(g_d, [token, h * 128], bar, gates.index(tile))
            slot, phase = _advance(slot, phase, RING)
            turn = (turn + 1) % PREPARERS
    for _ in gl.static_range(PREPARERS):
        mbarrier.wait(done.index(slot * 4 + 3), phase)
        if STAGED:
            if begun >= 0:
                _load_state(h0_d, kq_s, kr_s, moved, slot, begun, states)
                states ^= 1
            begun = begins
            begins = -1
        left_s.index(slot).store(gl.full([1], 0, gl.int32, ONE))
        barrier()
        mbarrier.arrive(raw.index(turn * RING + slot), count=1)
        slot, phase = _advance(slot, phase, RING)
        turn = (turn + 1) % PREPARERS


@gluon.jit
def _load_values_partition(v_d, v_s, v_full, done, spans, H, chains, ctas):
    """Load v, a chunk as soon as the one four before it is done. A group has four places, and all take part."""
    slot = RING - 1
    phase = 1
    for chain in range(_afresh(gl.program_id(0)), chains, ctas):
        token0, tokens = _span(spans, chain, H)
        column = chain % H * 128
        for group in range((tokens + 63) // 64):
            for j in gl.static_range(4):
                mbarrier.wait(done.index(slot * 4 + j), phase)
                token = group * 64 + 16 * j
                bar = v_full.index(j)
                if token < tokens:
                    mbarrier.expect(bar, 16 * 128 * 2)
                    tma_load(v_d, [token0 + token, column], bar, v_s.index(j))
                else:
                    mbarrier.arrive(bar, count=1)
            slot, phase = _advance(slot, phase, RING)


@gluon.jit
def _store_partition(o_d, o_ptr, o_s, v_full, done, spans, H, chains, ctas):
    """Store o. A chunk may be eaten when v has come and the o of the chunk two before it is stored: both arrive at v_full."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    slot = 0
    phase = 0
    mbarrier.arrive(v_full.index(0), count=1)
    mbarrier.arrive(v_full.index(1), count=1)
    for chain in range(_afresh(gl.program_id(0)), chains, ctas):
        token0, tokens = _span(spans, chain, H)
        column = chain % H * 128
        for group in range((tokens + 63) // 64):
            for j in gl.static_range(4):
                mbarrier.wait(done.index(slot * 4 + j), phase)
                token = group * 64 + 16 * j
                if token + 16 <= tokens:
                    tma_store(o_d, [token0 + token, column], o_s.index(j % 2))
                    tma.store_wait(0)
                elif token < tokens:  # the ragged last chunk: rows past the end belong to another sequence
                    out = o_s.index(j % 2).load(LAYOUT)
                    row = token + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
                    col = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
                    at = o_ptr + (token0 + row).to(gl.int64)[:, None] * (H * 128) + (column + col)[None, :]
                    gl.store(at, out, mask=(row < tokens)[:, None] & (col < 128)[None, :])
                    barrier()  # every lane has read the slot before it is given back
                mbarrier.arrive(v_full.index((j + 2) % 4), count=1)
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
def _staged_state(h0_d, h0_ptr, kq_s, kr_s, moved, slot, chain, turn, STATE: gl.constexpr, QUARTER: gl.constexpr):
    """The state of a chain: three quarters of its keys from where `_load_state` put them, the last from memory."""
    value = gl.arange(0, 128, layout=gl.SliceLayout(1, QUARTER))
    key = gl.arange(0, 32, layout=gl.SliceLayout(0, QUARTER))
    d = gl.load(h0_ptr + chain.to(gl.int64) * (128 * 128) + (value[:, None] * 128 + 96 + key[None, :]))
    mbarrier.wait(moved.index(0), turn)
    places = _state_quarters(kq_s, kr_s, slot, gl.constexpr(h0_d.layout))
    a = places[0].load(QUARTER)
    b = places[1].load(QUARTER)
    c = places[2].load(QUARTER)
    mbarrier.arrive(moved.index(1), count=1)
    ab = gl.join(a, b).permute([0, 2, 1]).reshape([128, 64])
    cd = gl.join(c, d).permute([0, 2, 1]).reshape([128, 64])
    return gl.convert_layout(gl.join(ab, cd).permute([0, 2, 1]).reshape([128, 128]), STATE, assert_trivial=True)


@gluon.jit
def _mma_partition(
    h0_d, kq_s, kr_s, inv_s, m_s, dec_s, v_s, o_s, full, v_full, done, moved, h0_ptr, ht_ptr, spans, H, chains, ctas,
    STAGED: gl.constexpr, HAS_H0: gl.constexpr, STORE_HT: gl.constexpr, V_FIRST: gl.constexpr,
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
    turn = 0
    states = 0
    for chain in range(_afresh(gl.program_id(0)), chains, ctas):
        _, tokens = _span(spans, chain, H)
        chunks = (tokens + 15) // 16
        if STAGED:
            if tokens > 0:
                S = _staged_state(h0_d, h0_ptr, kq_s, kr_s, moved, (slot + RING - 1) % RING, chain, states, STATE, L32)
                states ^= 1
            else:
                S = gl.load(h0_ptr + _state_offsets(chain, STATE, V_FIRST))
        elif HAS_H0:
            S = gl.load(h0_ptr + _state_offsets(chain, STATE, V_FIRST)).to(gl.float32)
        else:
            S = gl.full([K, K], 0.0, gl.float32, STATE)
        for c in range(chunks):
            Sb = gl.convert_layout(S.to(kq_s.dtype), gl.DotOperandLayout(0, L32, 2))
            j = c % 4
            if j == 0:
                if c > 0:
                    slot, phase = _advance(slot, phase, RING)
                    turn ^= 1
                mbarrier.wait(full.index(slot), phase)
            tile = slot * 4 + j
            mbarrier.wait(v_full.index(j), turn)  # v is there, and a place for o
            vals = v_s.index(j).permute([1, 0]).load(L16)
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
            xa = gl.convert_layout(x.to(TILE), gl.DotOperandLayout(0, L16, 2))
            u = warpgroup_mma(xa, inv_s.index(tile).permute([1, 0]), zero16, use_acc=False, is_async=True)
            u = warpgroup_mma_wait(0, deps=[u])
            ut = (u * UNSCALE).to(TILE)
            us = gl.convert_layout(ut, gl.DotOperandLayout(0, STATE, 2))
            if EXACT:  # kr is kd and what kd lacks of it
                S = warpgroup_mma(us, kq_s.index(tile).slice(0, 16, dim=0), S, is_async=True)
            new_S = warpgroup_mma(us, kr_s.index(tile), S, is_async=True)
            mixed = warpgroup_mma(
                gl.convert_layout(ut, gl.DotOperandLayout(0, L16, 2)), m_s.index(tile).permute([1, 0]), zero16,
                use_acc=False, is_async=True,
            )  # fmt: skip
            S, out = warpgroup_mma_wait(0, deps=[new_S, mixed])
            out = out * UNSCALE + oq
            o_s.index(j % 2).permute([1, 0]).store(out.to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(done.index(tile), count=1)
        if chunks > 0:
            for rest in range((chunks - 1) % 4 + 1, 4):  # the chunks that the last group lacks
                mbarrier.wait(v_full.index(rest), turn)
                mbarrier.arrive(done.index(slot * 4 + rest), count=1)
            slot, phase = _advance(slot, phase, RING)
            turn ^= 1
        if STORE_HT:
            gl.store(ht_ptr + _state_offsets(_afresh(chain), STATE, V_FIRST), S)


@gluon.jit(do_not_specialize=["beta_stride_t", "beta_stride_h", "H", "chains", "ctas"])
def kda_fused(
    q_d, k_d, g_d, v_d, o_d, h0_d, o_ptr, h0_ptr, ht_ptr, beta, A_log, dt_bias, spans, beta_stride_t, beta_stride_h,
    H, chains, ctas, bound2, scale,
    GROUP: gl.constexpr, HALF: gl.constexpr, EXACT: gl.constexpr, HAS_H0: gl.constexpr, STORE_HT: gl.constexpr,
    V_FIRST: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """The whole forward of `chains` = N * H chains, K = V = 128, bf16; spans as `launch.ChunkTables`, h0 and ht as chunk_kda's.

    q_d, k_d: descriptors with boxes [16, 64] of [tokens, H / GROUP * 128]; g_d, v_d, o_d: [16, 128] of [tokens, H * 128].
    h0_d: if STAGED, which needs fp32 states, value first, boxes [128, 32] of h0 as [chains * 128, 128]; else any.
    """
    K: gl.constexpr = 128
    TILE: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    KIND: gl.constexpr = TILE if EXACT else gl.bfloat16
    KQ: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, K], KIND)
    KR: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, K], TILE)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 16], TILE)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kq_s = gl.allocate_shared_memory(KIND, [RING * 4, 32, K], KQ)
    kr_s = gl.allocate_shared_memory(TILE, [RING * 4, 16, K], KR)
    inv_s = gl.allocate_shared_memory(TILE, [RING * 4, 16, 16], SQUARE)
    m_s = gl.allocate_shared_memory(TILE, [RING * 4, 16, 16], SQUARE)
    dec_s = gl.allocate_shared_memory(gl.float32, [RING * 4, K], VECTORS)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [4, 16, K], v_d.layout)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [2, 16, K], o_d.layout)
    prefix_s = gl.allocate_shared_memory(gl.float32, [PREPARERS, 4, 16, K // 2], PREFIX_HALF)
    bias_s = gl.allocate_shared_memory(gl.float32, [RING, K], VECTORS)
    beta_s = gl.allocate_shared_memory(gl.float32, [RING, 64], VECTORS)
    gain_s = gl.allocate_shared_memory(gl.float32, [RING, 1], VECTORS)
    left_s = gl.allocate_shared_memory(gl.int32, [RING, 1], VECTORS)
    raw = gl.allocate_shared_memory(gl.int64, [PREPARERS * RING, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [RING * 4, 1], BARRIER)
    moved = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(moved.index(i), count=1)
    for i in gl.static_range(PREPARERS * RING):
        mbarrier.init(raw.index(i), count=1)
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(v_full.index(i), count=2)  # v has come; the place for o is free
    for i in gl.static_range(RING * 4):
        mbarrier.init(done.index(i), count=1)
    fence_async_shared()

    # The argument tuples stand inline: a tuple that has a name turns its constexprs into tensors.
    gl.warp_specialize([
        (_mma_partition, (h0_d, kq_s, kr_s, inv_s, m_s, dec_s, v_s, o_s, full, v_full, done, moved, h0_ptr, ht_ptr,
                          spans, H, chains, ctas, STAGED, HAS_H0, STORE_HT, V_FIRST)),
        (_prepare_partition, (prefix_s, kq_s, kr_s, inv_s, m_s, dec_s, bias_s, beta_s, gain_s, left_s, raw, full,
                              bound2, scale, 0)),
        (_prepare_partition, (prefix_s, kq_s, kr_s, inv_s, m_s, dec_s, bias_s, beta_s, gain_s, left_s, raw, full,
                              bound2, scale, 1)),
        (_load_partition, (q_d, k_d, g_d, h0_d, kq_s, kr_s, bias_s, beta_s, gain_s, left_s, raw, done, moved, beta, A_log,
                           dt_bias, spans, beta_stride_t, beta_stride_h, H, chains, ctas, GROUP, STAGED)),
        (_load_values_partition, (v_d, v_s, v_full, done, spans, H, chains, ctas)),
        (_store_partition, (o_d, o_ptr, o_s, v_full, done, spans, H, chains, ctas)),
    ], [4, 4, 1, 1, 1], [PREPARE_REGS, PREPARE_REGS - 8, IO_REGS, IO_REGS, IO_REGS])  # fmt: skip
