"""K2, the recurrence over chunks, in Gluon for Hopper: warp-specialised, the state in registers.

The transposed state S^T [BV, K] stays in fp32 registers from first chunk to last; its bf16 register copy is the A operand
of wgmma, and every B operand is a tile that TMA put into shared memory. A chunk is

    [xw | oq] = S^T [kd | qd]^T          m64 n32 k128
    u^T  = (v^T - xw) (INV b)^T          m64 n16 k16
    S^T  = S^T 2^G_C + u^T kr            m64 n128 k16
    o^T  = oq + u^T M^T                  m64 n16 k16

Partitions: one or two of MMA, one that loads, one that stores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from kdatune_kernels.prepare_sm90 import AI_SCALE
from kdatune_kernels.prepare_sm90 import tma_load
from kdatune_kernels.prepare_sm90 import tma_store


@gluon.jit
def let_next_start():
    """The next launch, if it asked for that, may be scheduled now; what it reads it still has to wait for."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_previous():
    """Wait until the launch before has ended and its writes are visible; nothing to do if it had to end anyway."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _advance(slot, phase, DEPTH: gl.constexpr):
    slot += 1
    if slot == DEPTH:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _load_partition(
    kq_d, kr_d, ai_d, dec_d, v_d, kq_s, kr_s, ai_s, dec_s, v_s, full, empty, tile0, chunks, token0, column,
    TILE_BYTES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = v_s.shape[1]
    slot = 0
    phase = 1
    for c in range(chunks):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, TILE_BYTES)
        tile = tile0 + c
        tma_load(kq_d, [tile * (2 * TOKENS), 0], bar, kq_s.index(slot))
        tma_load(dec_d, [tile, 0], bar, dec_s.index(slot))
        tma_load(v_d, [token0 + c * TOKENS, column], bar, v_s.index(slot))
        tma_load(ai_d, [tile * (2 * TOKENS), 0], bar, ai_s.index(slot))
        tma_load(kr_d, [tile * TOKENS, 0], bar, kr_s.index(slot))
        slot, phase = _advance(slot, phase, STAGES)


@gluon.jit
def _send(
    o_d, o_ptr, o_s, ready, spent, chunks, whole, tokens, token0, column, o_stride_t,
    BV: gl.constexpr, STAGES: gl.constexpr, PENDING: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 0
    oldest = 0
    for c in range(whole):
        mbarrier.wait(ready.index(slot), phase)
        tma_store(o_d, [token0 + c * 16, column], o_s.index(slot))
        tma.store_wait(PENDING)
        freed = c >= PENDING
        mbarrier.arrive(spent.index(oldest), count=1, pred=freed)
        if freed:
            oldest += 1
            if oldest == STAGES:
                oldest = 0
        slot, phase = _advance(slot, phase, STAGES)
    if whole < chunks:  # the ragged last chunk: rows past the end belong to another sequence
        mbarrier.wait(ready.index(slot), phase)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [WARPS, 1], [1, 0])
        out = o_s.index(slot).load(LAYOUT)
        row = whole * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
        col = gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
        at = o_ptr + (token0 + row).to(gl.int64)[:, None] * o_stride_t + (column + col)[None, :]
        gl.store(at, out, mask=(row < tokens)[:, None] & (col < BV)[None, :])
    tma.store_wait(0)


@gluon.jit
def _copy(
    o_ptr, o_s, ready, spent, chunks, tokens, token0, column, o_stride_t,
    BV: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Copy the output ring to global memory, 16 bytes a thread.

    Not by TMA: that reads through the async proxy, for which every thread that writes the ring would need a fence, and a slot
    is free once it is in registers, not once it has been written. H200, K2 alone at T 8192: H 64 225 -> 214 us, H 32
    226 -> 196; with 128 columns (H 96) 2 to 5 % slower in whole calls, so there TMA stores.
    """
    TOKENS: gl.constexpr = o_s.shape[1]
    # eight rows at a time, the fewest that the swizzle lets through: the partition has few registers
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
    slot = 0
    phase = 0
    to = o_ptr + token0.to(gl.int64) * o_stride_t + column
    at = row[:, None] * o_stride_t + col[None, :]
    left = (tokens - row)[:, None]  # rows past the end belong to another sequence
    for _ in range(chunks):
        mbarrier.wait(ready.index(slot), phase)
        for part in gl.static_range(TOKENS // 8):
            out = o_s.index(slot).slice(part * 8, 8, dim=0).load(LAYOUT)
            if part == TOKENS // 8 - 1:
                mbarrier.arrive(spent.index(slot), count=1)
            gl.store(to + part * 8 * o_stride_t + at, out, mask=(col >= 0)[None, :] & (left > part * 8))
        left -= TOKENS
        to += TOKENS * o_stride_t
        slot, phase = _advance(slot, phase, STAGES)


@gluon.jit
def _store_partition(
    o_d, o_ptr, o_s, ready, spent, chunks, whole, tokens, token0, column, o_stride_t,
    BV: gl.constexpr, STAGES: gl.constexpr, PENDING: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    if BV == 64:
        _copy(o_ptr, o_s, ready, spent, chunks, tokens, token0, column, o_stride_t, BV, STAGES, WARPS)
    else:
        _send(
            o_d, o_ptr, o_s, ready, spent, chunks, whole, tokens, token0, column, o_stride_t, BV, STAGES, PENDING, WARPS
        )


@gluon.jit
def _hand_over(out, o_s, ready, slot, FIRST: gl.constexpr, ROWS: gl.constexpr, BY_TMA: gl.constexpr):
    """Put one chunk's o^T rows into the output ring; the caller has waited for the slot."""
    o_s.index(slot).slice(FIRST, ROWS, dim=1).permute([1, 0]).store(out.to(gl.bfloat16))
    if BY_TMA:
        fence_async_shared()
    mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def _mma_partition(
    kq_s, kr_s, ai_s, dec_s, v_s, full, empty, o_s, ready, spent, h0_ptr, ht_ptr, chunks, tokens, state0, value0, ends,
    K: gl.constexpr, V: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, STAGES_IN: gl.constexpr,
    STAGES_OUT: gl.constexpr, HAS_H0: gl.constexpr, STORE_HT: gl.constexpr, V_FIRST: gl.constexpr,
    DEFER: gl.constexpr, DECAY_AT: gl.constexpr, SEGMENTED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Carry ROWS rows of the CTA's state tile, from row FIRST on."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    TOKENS: gl.constexpr = v_s.shape[1]
    L32: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * TOKENS, 16])
    L16: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    TILE: gl.constexpr = kr_s.dtype
    UNSCALE: gl.constexpr = 1.0 / AI_SCALE if TILE == gl.float16 else 1.0
    EXACT: gl.constexpr = kq_s.dtype == TILE
    BY_TMA: gl.constexpr = v_s.shape[2] != 64  # as recurrence_ws
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STATE))
    key = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
    if V_FIRST:
        at = state0 + (value0 + FIRST + row)[:, None] * K + key[None, :]
    else:
        at = state0 + key[None, :] * V + (value0 + FIRST + row)[:, None]
    if HAS_H0:
        S = gl.load(h0_ptr + at).to(gl.float32)
    else:
        S = gl.full([ROWS, K], 0.0, gl.float32, STATE)
    zero32 = gl.full([ROWS, 2 * TOKENS], 0.0, gl.float32, L32)
    zero16 = gl.full([ROWS, TOKENS], 0.0, gl.float32, L16)
    position = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, L16))[None, :]
    out = zero16
    slot = 0
    phase = 0
    oslot = 0
    ophase = 1
    for c in range(chunks):
        Sb = gl.convert_layout(S.to(kq_s.dtype), gl.DotOperandLayout(0, L32, 2))
        mbarrier.wait(full.index(slot), phase)
        if not DEFER:
            mbarrier.wait(spent.index(oslot), ophase)  # early: off the critical path
        vals = v_s.index(slot).slice(FIRST, ROWS, dim=1).permute([1, 0]).load(L16)
        decay = dec_s.index(slot).reshape([K]).load(gl.SliceLayout(0, STATE))
        if DECAY_AT == 0:
            S = S * decay[None, :]
        both = warpgroup_mma(Sb, kq_s.index(slot).permute([1, 0]), zero32, use_acc=False, is_async=True)
        # Beside the first wgmma: the decay, the value fragment, the previous chunk's output.
        if DECAY_AT == 1:
            S = S * decay[None, :]
        # Rows past the end are another sequence's, or the padding's: 0 * NaN would leak them.
        vf = gl.where(position < tokens - c * TOKENS, vals.to(gl.float32), 0.0)
        if DEFER:
            if c > 0:
                mbarrier.wait(spent.index(oslot), ophase)
                _hand_over(out, o_s, ready, oslot, FIRST, ROWS, BY_TMA)
                oslot, ophase = _advance(oslot, ophase, STAGES_OUT)
        both = warpgroup_mma_wait(0, deps=[both])
        xw, oq = gl.split(gl.permute(gl.reshape(both, [ROWS, 2, TOKENS]), [0, 2, 1]))
        x = vf - gl.convert_layout(xw, L16)
        oq = gl.convert_layout(oq, L16)
        if DECAY_AT == 2:
            S = S * decay[None, :]
        squares = ai_s.index(slot)
        xa = gl.convert_layout(x.to(TILE), gl.DotOperandLayout(0, L16, 2))
        u = warpgroup_mma(xa, squares.slice(0, TOKENS, dim=0).permute([1, 0]), zero16, use_acc=False, is_async=True)
        u = warpgroup_mma_wait(0, deps=[u])
        ut = (u * UNSCALE).to(TILE)
        us = gl.convert_layout(ut, gl.DotOperandLayout(0, STATE, 2))
        if (
            EXACT
        ):  # kr is kd and what kd lacks of it: a kr that is rounded as a whole lets the state drift in slow channels
            S = warpgroup_mma(us, kq_s.index(slot).slice(0, TOKENS, dim=0), S, is_async=True)
        new_S = warpgroup_mma(us, kr_s.index(slot), S, is_async=True)
        # A separate accumulator plus an add: accumulating onto half of the n32 one makes ptxas serialise every wgmma (C7511).
        mixed = warpgroup_mma(
            gl.convert_layout(ut, gl.DotOperandLayout(0, L16, 2)), squares.slice(TOKENS, TOKENS, dim=0).permute([1, 0]), zero16,
            use_acc=False, is_async=True,
        )  # fmt: skip
        S, out = warpgroup_mma_wait(0, deps=[new_S, mixed])
        out = out * UNSCALE + oq
        if not DEFER:
            _hand_over(out, o_s, ready, oslot, FIRST, ROWS, BY_TMA)
            oslot, ophase = _advance(oslot, ophase, STAGES_OUT)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = _advance(slot, phase, STAGES_IN)
    if DEFER:
        if chunks > 0:
            mbarrier.wait(spent.index(oslot), ophase)
            _hand_over(out, o_s, ready, oslot, FIRST, ROWS, BY_TMA)
    if STORE_HT:
        if SEGMENTED:
            if ends:
                gl.store(ht_ptr + at, S)
        else:
            gl.store(ht_ptr + at, S)


@gluon.jit(do_not_specialize=["H", "NC", "segments"])
def recurrence_ws(
    kq_d, kr_d, ai_d, dec_d, v_d, o_d, o_ptr, h0_ptr, ht_ptr, spans, NC, H, segments,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES_IN: gl.constexpr, STAGES_OUT: gl.constexpr,
    CONSUMERS: gl.constexpr, LOAD_WARPS: gl.constexpr, STORE_WARPS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr, STORE_REGS: gl.constexpr, DEFER: gl.constexpr, DECAY_AT: gl.constexpr,
    HAS_H0: gl.constexpr, STORE_HT: gl.constexpr, V_FIRST: gl.constexpr, SEGMENTED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """As `recurrence.recurrence_kernel`, the tiles, v and o by TMA; o not by TMA if BV is 64.

    kq_d .. o_d: descriptors with boxes [32, K], [16, K], [32, 16], [1, K], [16, BV], [16, BV]; of 32 tokens a step (only
    with BV 64) [64, K], [32, K], [64, 32], [1, K], [32, BV], [32, BV].
    """
    blocks: gl.constexpr = V // BV
    TOKENS: gl.constexpr = v_d.block_shape[0]
    gl.static_assert(TOKENS == 16 or BV == 64)  # _send stores 16 rows
    if SEGMENTED:  # launched ahead of the end of pass B
        wait_for_previous()
    pid = gl.program_id(0)
    chain = pid // blocks
    value0 = pid % blocks * BV
    n = chain // H
    h = chain % H
    token0 = gl.load(spans + 4 * n)
    tokens = gl.load(spans + 4 * n + 1) - token0
    first = gl.load(spans + 4 * n + 2)
    chunks = gl.load(spans + 4 * n + 3) - first
    whole = gl.minimum(tokens // TOKENS, chunks)
    tile0 = h * NC + first
    column = h * V + value0
    state0 = chain.to(gl.int64) * (K * V)
    ends = n % segments == segments - 1
    if SEGMENTED:
        ht_ptr += (n // segments - n).to(gl.int64) * H * (K * V)  # rows of ht are sequences

    kq_s = gl.allocate_shared_memory(kq_d.dtype, [STAGES_IN, 2 * TOKENS, K], kq_d.layout)
    kr_s = gl.allocate_shared_memory(kr_d.dtype, [STAGES_IN, TOKENS, K], kr_d.layout)
    ai_s = gl.allocate_shared_memory(ai_d.dtype, [STAGES_IN, 2 * TOKENS, TOKENS], ai_d.layout)
    dec_s = gl.allocate_shared_memory(gl.float32, [STAGES_IN, 1, K], dec_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES_IN, TOKENS, BV], v_d.layout)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES_OUT, TOKENS, BV], o_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES_IN, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES_IN, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES_OUT, 1], mbarrier.MBarrierLayout())
    spent = gl.allocate_shared_memory(gl.int64, [STAGES_OUT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES_IN):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES_OUT):
        mbarrier.init(ready.index(i), count=CONSUMERS)
        mbarrier.init(spent.index(i), count=1)
    fence_async_shared()

    TILE_BYTES: gl.constexpr = (3 * TOKENS * K + 2 * TOKENS * TOKENS + TOKENS * BV) * 2 + K * 4
    PENDING: gl.constexpr = STAGES_OUT // 2
    ROWS: gl.constexpr = BV // CONSUMERS
    # The argument tuples stand inline: a tuple that has a name turns its constexprs into tensors.
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_mma_partition, (kq_s, kr_s, ai_s, dec_s, v_s, full, empty, o_s, ready, spent, h0_ptr, ht_ptr, chunks, tokens,
                              state0, value0, ends, K, V, 0, ROWS, STAGES_IN, STAGES_OUT, HAS_H0, STORE_HT, V_FIRST,
                              DEFER, DECAY_AT, SEGMENTED, num_warps)),
            (_load_partition, (kq_d, kr_d, ai_d, dec_d, v_d, kq_s, kr_s, ai_s, dec_s, v_s, full, empty, tile0, chunks,
                               token0, column, TILE_BYTES, STAGES_IN)),
            (_store_partition, (o_d, o_ptr, o_s, ready, spent, chunks, whole, tokens, token0, column, H * V, BV,
                                STAGES_OUT, PENDING, STORE_WARPS)),
        ], [LOAD_WARPS, STORE_WARPS], [LOAD_REGS, STORE_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_mma_partition, (kq_s, kr_s, ai_s, dec_s, v_s, full, empty, o_s, ready, spent, h0_ptr, ht_ptr, chunks, tokens,
                              state0, value0, ends, K, V, 0, ROWS, STAGES_IN, STAGES_OUT, HAS_H0, STORE_HT, V_FIRST,
                              DEFER, DECAY_AT, SEGMENTED, num_warps)),
            (_mma_partition, (kq_s, kr_s, ai_s, dec_s, v_s, full, empty, o_s, ready, spent, h0_ptr, ht_ptr, chunks, tokens,
                              state0, value0, ends, K, V, ROWS, ROWS, STAGES_IN, STAGES_OUT, HAS_H0, STORE_HT, V_FIRST,
                              DEFER, DECAY_AT, SEGMENTED, num_warps)),
            (_load_partition, (kq_d, kr_d, ai_d, dec_d, v_d, kq_s, kr_s, ai_s, dec_s, v_s, full, empty, tile0, chunks,
                               token0, column, TILE_BYTES, STAGES_IN)),
            (_store_partition, (o_d, o_ptr, o_s, ready, spent, chunks, whole, tokens, token0, column, H * V, BV,
                                STAGES_OUT, PENDING, STORE_WARPS)),
        ], [num_warps, LOAD_WARPS, STORE_WARPS], [CONSUMER_REGS, LOAD_REGS, STORE_REGS])  # fmt: skip
