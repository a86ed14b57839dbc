"""From checked tensors and a LaunchConfig to the launches: chunk tables, workspace, descriptors, grids."""

import functools
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kdatune_kernels import gpu
from kdatune_kernels import prepare
from kdatune_kernels import recurrence
from kdatune_kernels.numerics import LOG2E
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import PAIRS_K2
from kdatune_kernels.spec import CHUNK_TOKENS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import Precision
from kdatune_kernels.spec import pow2_at_least

log = logging.getLogger("kdatune")

WORKSPACE_BYTES_PER_TILE = 13824
"""[kd; qd] 8192, kr 4096, [INV; M] 1024, 2^G_C 512: what K1 hands to K2 for one chunk of one head, K = 128."""


@dataclass(frozen=True)
class Problem:
    """The tensors of one call, folded to tokens x heads x size, with the token strides the kernels read.

    q, k: [tokens, H, K]; v: [tokens, HV, V]; g: [tokens, HV, K]; beta: [tokens, HV]; heads packed, last dimension
    contiguous, 16-byte aligned rows. lengths tables come from `chunk_tables`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float
    scale: float
    h0: torch.Tensor | None
    state_v_first: bool
    tables: "ChunkTables"

    @property
    def heads(self) -> int:
        return int(self.v.shape[1])


@dataclass(frozen=True)
class ChunkTables:
    """Where chunks lie. spans: [N, 4] int32 (first token, end token, first chunk, end chunk); token, length: [NC] int32.

    step: tokens of one; 32 in the tables of "pairs", whose chunks are two of 16.
    """

    spans: torch.Tensor
    token: torch.Tensor
    length: torch.Tensor
    sequences: int
    chunks: int
    step: int = CHUNK_TOKENS

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.spans, self.token, self.length


@dataclass(frozen=True)
class Workspace:
    """What K1 writes and K2 reads: KQ [tiles * 2 S, K], KG [tiles * S, K], AI [tiles * 2 S, S], DEC [tiles, K] fp32, S tokens a
    tile.

    KG and AI are fp16 or bf16; KQ, too, except in precision "fast", where it is bf16 and KG fp16. By that the kernels know
    what KG holds: kr in "fast", else what kd lacks of kr.
    """

    KQ: torch.Tensor
    KG: torch.Tensor
    AI: torch.Tensor
    DEC: torch.Tensor

    @property
    def half(self) -> bool:
        """Whether the tiles that carry the error are fp16."""
        return bool(self.KG.dtype == torch.float16)

    @property
    def exact(self) -> bool:
        """Whether KG completes kd, as everywhere but in precision "fast"."""
        return bool(self.KQ.dtype == self.KG.dtype)


def ensure_compile_cache() -> None:
    """Give Triton a temporary cache where its own cannot be written (no home, a read-only one); one warning then."""
    if os.environ.get("TRITON_CACHE_DIR"):
        return
    home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="kdatune-triton-")
        log.warning(
            "kdatune: %s cannot be written (%s); kernels are compiled anew by every process. Set TRITON_CACHE_DIR",
            home,
            error,
        )


ensure_compile_cache()


def workspace(tables: ChunkTables, heads: int, K: int, precision: Precision, device: torch.device) -> Workspace:
    """An uninitialised workspace; K1 writes every element that K2 reads."""
    tiles, S = tables.chunks * heads, tables.step
    kind = torch.bfloat16 if precision == "bf16" else torch.float16
    return Workspace(
        KQ=torch.empty(tiles * 2 * S, K, dtype=torch.bfloat16 if precision == "fast" else kind, device=device),
        KG=torch.empty(tiles * S, K, dtype=kind, device=device),
        AI=torch.empty(tiles * 2 * S, S, dtype=kind, device=device),
        DEC=torch.empty(tiles, K, dtype=torch.float32, device=device),
    )


@functools.lru_cache(maxsize=64)
def types_only(K: int, precision: Precision, device: torch.device) -> Workspace:
    """A workspace of no tile, which says of what type they are: all that the fused kernel needs of one."""
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    return workspace(ChunkTables(nothing.view(0, 4), nothing, nothing, 0, 0), 1, K, precision, device)


_DENSE_KEPT = 4096
_dense: dict[tuple[int, int, torch.device, int], ChunkTables] = {}


def dense_tables(
    sequences: int, tokens: int, device: torch.device, capturing: bool, step: int = CHUNK_TOKENS
) -> ChunkTables:
    """Chunk tables of `sequences` sequences of `tokens` tokens each, tokens > 0.

    Kept per (sequences, tokens, device, step) and never dropped, since a captured graph may read them for ever; the first 4,096
    shapes are kept. During a graph capture new tables become part of the graph and are not kept.
    """
    key = (sequences, tokens, device, step)
    tables = _dense.get(key)
    if tables is None:
        tables = _make_dense(sequences, tokens, device, step)
        if not capturing and len(_dense) < _DENSE_KEPT:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # once: another stream may be the next to read them
            _dense[key] = tables
    return tables


def _make_dense(sequences: int, tokens: int, device: torch.device, step: int) -> ChunkTables:
    each = -(-tokens // step)
    tables = _empty_tables(sequences, sequences * each, device, step)
    prepare.dense_plan_kernel[(-(-sequences * each // 256),)](
        tables.spans, tables.token, tables.length, sequences, tokens, each, BT=step, CHUNKS=256
    )
    return tables


def _empty_tables(sequences: int, chunks: int, device: torch.device, step: int) -> ChunkTables:
    # Each part begins on 16 bytes: Triton compiles a kernel once more for a pointer that does not, 1 s of a packed call.
    rest = -chunks % 4
    table = torch.empty(4 * sequences + 2 * (chunks + rest), dtype=torch.int32, device=device)
    spans, token, _, length, _ = table.split_with_sizes((4 * sequences, chunks, rest, chunks, rest))
    return ChunkTables(spans.view(sequences, 4), token, length, sequences, chunks, step)


def packed_tables(cu_seqlens: torch.Tensor, tokens: int, step: int = CHUNK_TOKENS) -> ChunkTables:
    """Chunk tables of packed sequences, laid out on the device by one small kernel: no sync, fit for graph capture.

    cu_seqlens: [N + 1] int32 or int64, contiguous. The chunk count is an upper bound: every sequence may end in a ragged chunk.
    """
    tables, lay_out = packed_call(cu_seqlens, tokens, step)
    lay_out()
    return tables


def packed_call(
    cu_seqlens: torch.Tensor, tokens: int, step: int = CHUNK_TOKENS
) -> tuple[ChunkTables, Callable[[], Any]]:
    """Chunk tables as `packed_tables`, uninitialised, and the launch that lays them out, bound."""
    N = cu_seqlens.numel() - 1
    NC = tokens // step + min(N, tokens)
    device = cu_seqlens.device
    tables = _empty_tables(N, NC, device, step)
    seqs = min(128, max(16, pow2_at_least(N)))
    return tables, functools.partial(
        prepare.plan_kernel[(-(-NC // 128),)],
        cu_seqlens, tables.spans, tables.token, tables.length, N, NC, tokens,
        BT=step, CHUNKS=128, SEQS=seqs, num_warps=8,
    )  # fmt: skip


def outcome_of(error: Exception) -> str | None:
    """The outcome an exception of a candidate stands for; None for a programming error, which must propagate."""
    name, text = type(error).__name__, str(error).lower()
    if name == "OutOfResources":
        return "resource"
    if "illegal memory access" in text or "misaligned address" in text or "illegal instruction" in text:
        return "illegal_access"
    # InterpreterError: what the interpreter makes of a kernel that does not compile
    uncompiled = ("CompilationError", "PTXASError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct")
    if name in (*uncompiled, "InterpreterError"):
        return "compile_error"
    if isinstance(error, RuntimeError | MemoryError):
        return "compile_error" if "passmanager" in text or "ptxas" in text else "launch_error"
    return None


def run_k1(problem: Problem, ws: Workspace, config: K1Config) -> Any:
    """Launch K1; returns what the launch returned (the compiled kernel on a card)."""
    return k1_call(problem, ws, config)()


def run_k2(problem: Problem, ws: Workspace, o: torch.Tensor, ht: torch.Tensor | None, config: K2Config) -> Any:
    """Launch K2 into o [tokens, HV, V] and ht (as h0, fp32) or None; returns what the launch returned."""
    return k2_call(problem, ws, o, ht, config)()


def k1_call(problem: Problem, ws: Workspace, config: K1Config) -> Callable[[], Any]:
    """K1 bound to its arguments: descriptors and grid are made once, the call launches."""
    p, tables, heads = problem, problem.tables, problem.heads
    K = p.q.shape[2]
    group = heads // p.q.shape[1]
    rest = (p.beta.stride(0), p.beta.stride(1), tables.chunks, heads, p.lower_bound, p.scale)
    strides = (p.q.stride(0), p.k.stride(0), p.g.stride(0))
    tile_out = (ws.KQ, ws.KG, ws.AI, ws.DEC)
    chunk_of = (tables.token, tables.length)
    register_cap = {} if config.maxnreg is None else {"maxnreg": config.maxnreg}
    if config.variant == "triton":
        groups = -(-tables.chunks // config.chunks_per_program)
        return functools.partial(
            prepare.prepare_kernel[(groups * heads,)],
            p.q, p.k, p.g, p.beta, p.A_log, p.dt_bias, *tile_out, *chunk_of, *strides, *rest,
            K=K, BT=CHUNK_TOKENS, GROUP=group, CHUNKS=config.chunks_per_program, HEAD_FAST=config.head_fast,
            HALF=ws.half, EXACT=ws.exact, num_warps=config.num_warps, **register_cap,
        )  # fmt: skip
    from kdatune_kernels import prepare_sm90

    shared = {
        "GROUP": group,
        "HEAD_FAST": config.head_fast,
        "TRANSPOSED": config.transposed_dots,
        "FAST_RCP": config.fast_reciprocal,
        "HALF": ws.half,
        "EXACT": ws.exact,
        "num_warps": 1,
    }
    if config.variant == "cp_async":
        return functools.partial(
            prepare_sm90.prepare_cp_async[(tables.chunks * heads,)],
            p.q, p.k, p.g, p.beta, p.A_log, p.dt_bias, *tile_out, *chunk_of, *strides, *rest,
            EVICT_LAST=config.load_policy == "evict_last", **shared,
        )  # fmt: skip
    layout = _plain_layout(config.swizzle_bytes)
    box = [CHUNK_TOKENS, K]
    descriptors = [_descriptor(x, box, layout) for x in (p.q, p.k, p.g)]
    descriptors += [_descriptor(x, box, layout) for x in (ws.KQ.view(torch.bfloat16), ws.KG.view(torch.bfloat16))]
    return functools.partial(
        prepare_sm90.prepare_tma[(tables.chunks * heads,)],
        *descriptors, p.beta, p.A_log, p.dt_bias, ws.AI, ws.DEC, *chunk_of, *rest, HALVES=config.gate_halves, **shared,
    )  # fmt: skip


def k2_call(
    problem: Problem, ws: Workspace, o: torch.Tensor, ht: torch.Tensor | None, config: K2Config
) -> Callable[[], Any]:
    """K2 bound to its arguments: descriptors and grid are made once, the call launches."""
    if config.fused:
        return fused_call(problem, ws, o, ht)
    if config == PAIRS.k2:
        prepare_them, carry = pairs_calls(problem, ws, o, ht)

        def both() -> Any:
            prepare_them()
            return carry()

        return both
    if config.segments > 1:
        from kdatune_kernels import segments

        return segments.segmented_call(problem, ws, o, ht, config)
    return chains_call(problem, ws, o, ht, config)


def chains_call(
    problem: Problem, ws: Workspace, o: torch.Tensor, ht: torch.Tensor | None, config: K2Config
) -> Callable[[], Any]:
    """K2 over the spans of problem.tables, each from its h0, in their steps; of 32 tokens with `PAIRS_K2` only.

    With config.segments = P > 1 every P spans are one sequence: only the last of them has a final state, ht [N / P, ..].
    """
    p, tables, heads = problem, problem.tables, problem.heads
    K, V, S = p.q.shape[2], p.v.shape[2], tables.step
    grid = (tables.sequences * heads * (V // config.block_v),)
    # A pointer the kernel never follows stands in for an absent state.
    h0_ptr, ht_ptr = (x if x is not None else ws.DEC for x in (p.h0, ht))
    flags = {
        "HAS_H0": p.h0 is not None,
        "STORE_HT": ht is not None,
        "V_FIRST": p.state_v_first,
        "SEGMENTED": config.segments > 1,
    }
    if config.variant == "triton":
        return functools.partial(
            recurrence.recurrence_kernel[grid],
            ws.KQ, ws.KG, ws.AI, ws.DEC, p.v, o, h0_ptr, ht_ptr, tables.spans, p.v.stride(0), tables.chunks, heads,
            config.segments, K=K, V=V, BT=CHUNK_TOKENS, BV=config.block_v, HALF=ws.half, TRANSPOSED=config.transposed,
            STAGES=config.stages_in, num_warps=config.num_warps, **flags,
        )  # fmt: skip
    from kdatune_kernels import recurrence_sm90

    descriptors = (
        described(ws.KQ, 2 * S, K),
        described(ws.KG, S, K),
        described(ws.AI, 2 * S, S),
        described_decay(ws.DEC),
        described(p.v, S, config.block_v),
        described(o, S, config.block_v),
    )
    register_cap = {} if config.maxnreg is None else {"maxnreg": config.maxnreg}
    return functools.partial(
        recurrence_sm90.recurrence_ws[grid],
        *descriptors, o, h0_ptr, ht_ptr, tables.spans, tables.chunks, heads, config.segments,
        K=K, V=V, BV=config.block_v, STAGES_IN=config.stages_in, STAGES_OUT=config.stages_out,
        CONSUMERS=config.consumers, LOAD_WARPS=config.load_warps, STORE_WARPS=config.store_warps,
        CONSUMER_REGS=config.consumer_regs, LOAD_REGS=config.load_regs, STORE_REGS=config.store_regs,
        DEFER=config.defer_store, DECAY_AT=config.decay_position, num_warps=config.num_warps, launch_pdl=config.segments > 1,
        **flags, **register_cap,
    )  # fmt: skip


def pairs_calls(
    problem: Problem, ws: Workspace, o: torch.Tensor, ht: torch.Tensor | None
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """K1 and K2 of "pairs", bound to their arguments. Tables and workspace are in its steps."""
    from kdatune_kernels import pairs_sm90

    p, tables, heads = problem, problem.tables, problem.heads
    matrices = (p.q, p.k, p.g, ws.KQ.view(torch.bfloat16), ws.KG.view(torch.bfloat16))
    k1 = functools.partial(
        pairs_sm90.prepare_pairs[(tables.chunks * heads,)],
        *(_descriptor(x, [tables.step, p.q.shape[2]], _plain_layout(0)) for x in matrices),
        p.beta, p.A_log, p.dt_bias, ws.AI, ws.DEC, tables.token, tables.length, p.beta.stride(0), p.beta.stride(1),
        tables.chunks, heads, p.lower_bound, p.scale, GROUP=heads // p.q.shape[1], num_warps=2, maxnreg=pairs_sm90.MAXNREG,
    )  # fmt: skip
    return k1, chains_call(p, ws, o, ht, PAIRS_K2)


def fused_call(problem: Problem, ws: Workspace, o: torch.Tensor, ht: torch.Tensor | None) -> Callable[[], Any]:
    """K1 and K2 in one kernel, bound to its arguments; of the workspace it needs the types only, of the tokens the spans'."""
    from kdatune_kernels import fused_sm90

    p, tables, heads = problem, problem.tables, problem.heads
    chains = tables.sequences * heads
    ctas = min(chains, _processors(o.device))
    # A pointer the kernel never follows stands in for an absent state.
    h0_ptr, ht_ptr = (x if x is not None else p.dt_bias for x in (p.h0, ht))
    aligned = p.h0 is not None and p.h0.data_ptr() % 16 == 0
    staged = p.h0 if aligned and staged_state(h0_ptr.dtype, p.state_v_first) else None
    return functools.partial(
        fused_sm90.kda_fused[(ctas,)],
        *(described(x, CHUNK_TOKENS, 64) for x in (p.q, p.k)),
        *(described(x, CHUNK_TOKENS, 128) for x in (p.g, p.v, o)),
        described(o, CHUNK_TOKENS, 128) if staged is None else described(staged.view(-1, 128), 128, 32),
        o, h0_ptr, ht_ptr, p.beta, p.A_log, p.dt_bias, tables.spans, p.beta.stride(0), p.beta.stride(1), heads, chains, ctas,
        p.lower_bound * LOG2E.value, p.scale, GROUP=heads // p.q.shape[1], HALF=ws.half, EXACT=ws.exact,
        HAS_H0=p.h0 is not None, STORE_HT=ht is not None, V_FIRST=p.state_v_first, STAGED=staged is not None, num_warps=4,
        maxnreg=fused_sm90.MAXNREG,
    )  # fmt: skip


def staged_state(dtype: torch.dtype, v_first: bool) -> bool:
    """Whether the fused kernel reads initial states of this type and layout through shared memory, a quarter excepted."""
    return dtype == torch.float32 and v_first


def _processors(device: torch.device) -> int:
    return gpu.of(device).sm_count


def flat(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, size] with packed heads as the matrix [tokens, heads * size] that TMA sees."""
    return x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))


def described(x: torch.Tensor, *box: int) -> Any:
    """A matrix, or rows as `flat` takes them, as a TMA descriptor of boxes in the layout that wgmma reads."""
    return _descriptor(x, list(box), _tile_layout(*box, x.dtype))


def described_decay(dec: torch.Tensor) -> Any:
    """The decays of the workspace as a TMA descriptor of one row."""
    return _descriptor(dec, [1, dec.shape[1]], _decay_layout())


_checked: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}


def _descriptor(x: torch.Tensor, box: list[int], layout: Any) -> Any:
    """A TMA descriptor of a matrix. Triton checks the first of each type, box and layout; a later one differs by its matrix.

    What Triton asks of a matrix is asked here, too, and one that fails is left to Triton's own words.
    """
    rows, columns, *size = x.shape
    step, *_, unit = x.stride()
    if size:
        columns *= size[0]
    known = _checked.get((x.dtype, *box, id(layout)))
    if known is None or not rows or not columns or step % 8 or unit != 1 or x.data_ptr() % 16:
        return _checked_descriptor(flat(x) if size else x, box, layout)
    kind, fields = known
    made = object.__new__(kind)
    # Of its base, Triton reads the pointer and the type only.
    made.__dict__ = {"base": x, "shape": (rows, columns), "strides": (step, 1), **fields}
    return made


def _checked_descriptor(x: torch.Tensor, box: list[int], layout: Any) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    made = TensorDescriptor.from_tensor(x, box, layout)
    # Without the matrix, which must not outlive its call; with the layout, so that its id stays its own.
    fields = {name: value for name, value in vars(made).items() if name not in ("base", "shape", "strides")}
    _checked[(x.dtype, *box, id(layout))] = (type(made), fields)
    return made


@functools.cache
def _plain_layout(swizzle_bytes: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle_bytes, element_bitwidth=16, rank=2)


@functools.cache
def _decay_layout() -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@functools.cache
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kind = {torch.float16: gl.float16, torch.float32: gl.float32}.get(dtype, gl.bfloat16)
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
