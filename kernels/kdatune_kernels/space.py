"""Legal values of K1Config and K2Config, the default, and THE one predicate `config_ok`. Stdlib only.

Rules of the limits used here (CUDA C++ Programming Guide, compute capabilities table): 64 K registers an SM handed out
in units of 256 a warp; shared memory a block may ask for is Gpu.smem_per_block_bytes.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from kdatune_kernels.spec import CHUNK_TOKENS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K1Variant
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Precision
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest

FUSED = LaunchConfig(K1Config(), K2Config(variant="fused"))
"""K1 and K2 as one kernel. It has no fields: two MMA partitions, other rings and register splits were slower or spilled."""
_FUSED_SMEM_BYTES = 226_400

MAX_SEGMENTS = 64
_SEARCHED_SEGMENTS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_SEGMENTS_PER_SM = 8

PAIRS = LaunchConfig(K1Config(), K2Config(variant="pairs"))
"""K1 and K2 with 32 tokens, two chunks, a step. It has no fields: its K1 is one kernel, its K2 `PAIRS_K2`."""
WHOLES = (FUSED, PAIRS)
"""What has no stages: launched, measured and compared whole, and tried on every shape that it may run on."""
_WHOLE_K2S = tuple(whole.k2 for whole in WHOLES)

# Legal values a field. The search walks `k1_configs` / `k2_configs`, a subset of the product of these.
K1_LEGAL: dict[str, tuple[object, ...]] = {
    "variant": ("triton", "cp_async", "tma"),
    "num_warps": (1, 2, 4, 8),
    "chunks_per_program": (1, 2, 4),
    "head_fast": (False, True),
    "maxnreg": (None, 96, 128, 168),
    "transposed_dots": (False, True),
    "fast_reciprocal": (False, True),
    "load_policy": ("default", "evict_last"),
    "gate_halves": (1, 2),
    "swizzle_bytes": (0, 64, 128),
}
K2_LEGAL: dict[str, tuple[object, ...]] = {
    "variant": ("triton", "ws", "fused", "pairs"),
    "block_v": (32, 64, 128),
    "num_warps": (4, 8),
    "stages_in": (1, 2, 3, 4, 5, 6, 7, 8),
    "stages_out": (0, 1, 2, 3, 4),
    "transposed": (False, True),
    "consumers": (1, 2),
    "load_warps": (0, 1, 2, 4),
    "store_warps": (0, 1, 2, 4),
    "maxnreg": (None, 96, 128, 168),
    "consumer_regs": (None, 152, 168, 184, 200, 216, 232, 240),
    "load_regs": (None, 24, 32, 40),
    "store_regs": (None, 24, 32, 40),
    "defer_store": (False, True),
    "decay_position": (0, 1, 2),
    "segments": tuple(range(1, MAX_SEGMENTS + 1)),
}

# Fields a variant reads; the others must stand at their defaults, so that equal launches have equal JSON.
_K1_READS = {
    "triton": {"num_warps", "chunks_per_program", "head_fast", "maxnreg"},
    "cp_async": {"head_fast", "transposed_dots", "fast_reciprocal", "load_policy"},
    "tma": {"head_fast", "transposed_dots", "fast_reciprocal", "gate_halves", "swizzle_bytes"},
}
_K2_READS = {
    "triton": {"block_v", "num_warps", "stages_in", "transposed", "segments"},
    "ws": set(K2_LEGAL) - {"variant", "transposed"},
    "fused": set(),
    "pairs": set(),
}
_K1_IDLE = {
    "triton": K1Config(),
    "cp_async": K1Config(variant="cp_async", num_warps=1),
    "tma": K1Config(variant="tma", num_warps=1),
}
_K2_IDLE = dict.fromkeys(_K2_READS, K2Config())

# The above as config_ok looks things up, since it is asked often: legal values with their type (True is no 1), and the
# fields a variant does not read.
_TYPED = {
    name: [(field, frozenset((type(v), v) for v in values)) for field, values in legal.items()]
    for name, legal in (("k1", K1_LEGAL), ("k2", K2_LEGAL))
}
_UNREAD = {
    (name, variant): [field for field in legal if field not in ("variant", *read)]
    for name, legal, reads in (("k1", K1_LEGAL, _K1_READS), ("k2", K2_LEGAL, _K2_READS))
    for variant, read in reads.items()
}


def config_ok(config: K1Config | K2Config | LaunchConfig, shape: Shape, gpu: Gpu | None) -> str | None:
    """None when the config may be launched for the shape on the card, else the reason why not.

    gpu None means Triton's interpreter on CPU tensors, where only the plain Triton variants run.
    """
    if isinstance(config, LaunchConfig):
        if config.precision not in get_args(Precision):
            return f"precision={config.precision!r} is not one of {', '.join(get_args(Precision))}"
        if config.k1 != K1Config() and config.k2 in _WHOLE_K2S:
            return f"k1 must stand at its defaults where k2.variant is {config.k2.variant}: it is not launched"
        if config.k2 == PAIRS.k2 and config.precision != PAIRS.precision:
            # bf16 tiles of 32 tokens: identical keys, T 512, o / state 1.02e-2 / 1.32e-2, of 16 tokens 7.8e-3 / 9.2e-3
            return f"k2.variant=pairs needs precision=fp16, not {config.precision}"
        return _part_ok(config.k1, shape, gpu) or _part_ok(config.k2, shape, gpu)
    if config in _WHOLE_K2S:
        return f"k2.variant={config.variant} does K1's work, too: it is launched and measured whole, not as a stage"
    return _part_ok(config, shape, gpu)


def _part_ok(config: K1Config | K2Config, shape: Shape, gpu: Gpu | None) -> str | None:
    return _values_ok(config) or _fits(config, shape, gpu)


def _values_ok(config: K1Config | K2Config) -> str | None:
    name, legal = ("k1", K1_LEGAL) if isinstance(config, K1Config) else ("k2", K2_LEGAL)
    for field, typed in _TYPED[name]:
        value = getattr(config, field)
        try:
            if (type(value), value) in typed:
                continue
        except TypeError:  # a list, say, which has no hash
            pass
        return f"{name}.{field}={value!r} is not one of {', '.join(map(str, legal[field]))}"
    return None


def _fits(config: K1Config | K2Config, shape: Shape, gpu: Gpu | None) -> str | None:
    """What `_part_ok` says of a config of legal values."""
    name = "k1" if isinstance(config, K1Config) else "k2"
    if gpu is None and config.variant != "triton":
        return f"{name}.variant={config.variant} needs a card; the interpreter runs triton only"
    if gpu is not None and config.variant != "triton" and gpu.compute_capability != "9.0":
        return f"{name}.variant={config.variant} needs compute capability 9.0, {gpu.name} has {gpu.compute_capability}"
    if config.variant != "triton" and not _hopper_reads(shape):
        return f"{name}.variant={config.variant} needs K = V = 128 and bf16, not {_sizes(shape)}"
    if gpu is not None and gpu.major < 8:
        return f"{gpu.name} has compute capability {gpu.compute_capability}; 8.0 is the least that runs these kernels"
    return _k1_ok(config, gpu) if isinstance(config, K1Config) else _k2_ok(config, shape, gpu)


def _hopper_reads(shape: Shape) -> bool:
    """Whether the Gluon kernels take the inputs: q, k, g and v as raw bf16, and K = 128, which is written in.

    Another V compiles, without spills, but has run on no card yet.
    """
    return (shape.K, shape.V, shape.dtype) == (128, 128, "bf16")


def _sizes(shape: Shape) -> str:
    return f"K={shape.K}, V={shape.V} and {shape.dtype}"


def _idle(config: K1Config | K2Config, name: str, neutral: K1Config | K2Config) -> str | None:
    for field in _UNREAD[name, config.variant]:
        if getattr(config, field) != getattr(neutral, field):
            return f"{field} is not read by variant {config.variant} and must be {getattr(neutral, field)!r}"
    return None


def _k1_ok(config: K1Config, gpu: Gpu | None) -> str | None:
    idle = _idle(config, "k1", _K1_IDLE[config.variant])
    if idle:
        return idle
    if config.maxnreg is not None and gpu is not None and config.maxnreg * 32 * config.num_warps > gpu.registers_per_sm:
        have = f"the {gpu.registers_per_sm} registers of an SM"
        return f"k1.maxnreg={config.maxnreg} x {config.num_warps} warps is more than {have}"
    return None


def _k2_ok(config: K2Config, shape: Shape, gpu: Gpu | None) -> str | None:
    idle = _idle(config, "k2", _K2_IDLE[config.variant])
    if idle:
        return idle
    if config.fused:
        if gpu is not None and gpu.smem_per_block_bytes < _FUSED_SMEM_BYTES:
            return f"k2 needs {_FUSED_SMEM_BYTES} bytes of shared memory, {gpu.name} gives a block {gpu.smem_per_block_bytes}"
        return None
    if config == PAIRS.k2:
        return _k2_ws_ok(PAIRS_K2, shape, gpu, config.step_tokens)
    if config.segments > 1:
        too_many = _segments_ok(config, shape, gpu)
        if too_many:
            return too_many
    if shape.V % config.block_v:
        return f"k2.block_v={config.block_v} does not divide V={shape.V}"
    if config.variant == "triton":
        if config.stages_in > 4 or config.stages_in < 1:
            return f"k2.stages_in={config.stages_in} is outside 1..4 for variant triton"
        if config.transposed and config.block_v == 32:
            return "k2.transposed needs block_v >= 64"
        smem = k2_smem_bytes(config, shape)
        if gpu is not None and smem > gpu.smem_per_block_bytes:
            return f"k2 needs about {smem} bytes of shared memory, {gpu.name} gives a block {gpu.smem_per_block_bytes}"
        return None
    return _k2_ws_ok(config, shape, gpu)


def _segments_ok(config: K2Config, shape: Shape, gpu: Gpu | None) -> str | None:
    if (shape.K, shape.V) != (128, 128):
        return f"k2.segments={config.segments} needs K = V = 128, not K={shape.K}, V={shape.V}"
    chunks = -(-shape.longest // CHUNK_TOKENS)
    if config.segments > chunks:
        return f"k2.segments={config.segments} is more than the {chunks} chunks of the longest sequence"
    if gpu is not None and shape.chains * config.segments > _SEGMENTS_PER_SM * gpu.sm_count:
        # each takes 160 KiB of scratch, and more than fill the card only add work
        have = f"{_SEGMENTS_PER_SM} for each of the {gpu.sm_count} SMs of {gpu.name}"
        return f"k2.segments={config.segments} of {shape.chains} chains are more than {have}"
    return None


def _k2_ws_ok(config: K2Config, shape: Shape, gpu: Gpu | None, step_tokens: int = CHUNK_TOKENS) -> str | None:
    if config.stages_in < 2:
        return "k2.stages_in must be >= 2 for variant ws: the load partition runs ahead of the MMA partition"
    if min(config.stages_out, config.load_warps, config.store_warps) < 1:
        return "k2.stages_out, load_warps and store_warps must be >= 1 for variant ws"
    if config.load_regs is None or config.store_regs is None:
        return "k2.load_regs and store_regs must be set for variant ws"
    # one warpgroup's wgmma covers 64 rows of the transposed state
    rows = 16 * config.num_warps * config.consumers
    if rows != config.block_v:
        return f"k2: {config.consumers} x {config.num_warps} MMA warps cover {rows} rows, block_v is {config.block_v}"
    if (config.consumers == 2) != (config.consumer_regs is not None):
        return "k2.consumer_regs belongs to the second MMA partition: set it exactly when consumers is 2"
    warps = k2_total_warps(config)
    if gpu is None:
        return None
    if warps > gpu.warps_per_sm:
        return f"k2 starts {warps} warps, an SM of {gpu.name} holds {gpu.warps_per_sm}"
    if config.maxnreg is not None and config.maxnreg * 32 * warps > gpu.registers_per_sm:
        return f"k2.maxnreg={config.maxnreg} x {warps} warps is more than the {gpu.registers_per_sm} registers of an SM"
    if config.consumers == 2 and config.maxnreg is None:
        return "k2.maxnreg must be set when consumers is 2: it sizes the register pool the partitions share"
    smem = k2_smem_bytes(config, shape, step_tokens)
    if smem > gpu.smem_per_block_bytes:
        return f"k2 needs {smem} bytes of shared memory, {gpu.name} gives a block {gpu.smem_per_block_bytes}"
    return None


def k2_total_warps(config: K2Config) -> int:
    """Warps a CTA really starts: the load and store warps together are padded to a warpgroup of four."""
    side = config.load_warps + config.store_warps
    return config.consumers * config.num_warps + -(-side // 4) * 4


def k2_smem_bytes(config: K2Config, shape: Shape, step_tokens: int = CHUNK_TOKENS) -> int:
    """Upper bound of one K2 CTA's shared memory: the input ring, the output ring, barriers and the dispatch state."""
    tile = (3 * step_tokens * shape.K + 2 * step_tokens**2 + step_tokens * config.block_v) * 2 + shape.K * 4
    if config.variant == "triton":
        return tile * max(0, config.stages_in - 1)
    out = step_tokens * config.block_v * 2
    # 1024: barriers, the warp-specialisation mailbox and holes left by alignment. 332 to 908 bytes more than the rings
    # were taken over 396 configs (H200, Triton 3.6.0); an upper bound, so that none is let through that cannot start
    return tile * config.stages_in + out * config.stages_out + 1024


def k1_configs() -> Iterator[K1Config]:
    """Every K1 config that the search considers, in a fixed order."""
    for warps, head_fast, chunks, maxnreg in itertools.product((1, 2, 4, 8), (False, True), (1, 2, 4), (None, 96, 128)):
        yield K1Config(num_warps=warps, head_fast=head_fast, chunks_per_program=chunks, maxnreg=maxnreg)
    for dots, head_fast, rcp in itertools.product((True, False), (False, True), (True, False)):
        for policy in ("default", "evict_last"):
            yield K1Config(
                variant="cp_async",
                num_warps=1,
                head_fast=head_fast,
                transposed_dots=dots,
                fast_reciprocal=rcp,
                load_policy=policy,
            )
        for halves, swizzle in itertools.product((1, 2), (0, 64, 128)):
            yield K1Config(
                variant="tma",
                num_warps=1,
                head_fast=head_fast,
                transposed_dots=dots,
                fast_reciprocal=rcp,
                gate_halves=halves,
                swizzle_bytes=swizzle,
            )


def _ws(
    tile: str, stages_in: int, stages_out: int, defer: bool, decay: int, split: tuple[int, int] | None = None
) -> K2Config:
    # 64 columns are stored by the threads themselves, which takes two warps of 40 registers, others by TMA
    by_threads = tile.startswith("64")
    load_warps, store_warps = split or ((1, 2) if by_threads else (1, 1))
    block_v, warps, consumers, maxnreg, regs = {
        "64": (64, 4, 1, None, None),
        "64r128": (64, 4, 1, 128, None),
        "128w8": (128, 8, 1, 168, None),
        "128c2": (128, 4, 2, 168, 232),
    }[tile]
    return K2Config(
        variant="ws",
        block_v=block_v,
        num_warps=warps,
        stages_in=stages_in,
        stages_out=stages_out,
        consumers=consumers,
        load_warps=load_warps,
        store_warps=store_warps,
        maxnreg=maxnreg,
        consumer_regs=regs,
        load_regs=40 if by_threads else 24,
        store_regs=40 if by_threads else 24,
        defer_store=defer,
        decay_position=decay,
    )


PAIRS_K2 = _ws("64", 5, 2, True, 2)
"""How "pairs" launches its K2. Two chunks of o in flight: 1 % of a call at H 32 T 4,096, 0.3 to 0.7 at T 8,192 (H200)."""


def k2_configs() -> Iterator[K2Config]:
    """Every K2 config that the search considers, in a fixed order.

    What is legal beside these was searched once, on an H200: 128 columns by eight warps, two stages in, four out, and the
    decay before or beside the first product won on none of nine shapes, and without them none lost (546 configs, segments
    included, became 224).
    """
    for tile, si, so, defer in itertools.product(("64", "64r128", "128c2"), (3, 4, 5, 6), (1, 2), (False, True)):
        yield _ws(tile, si, so, defer, 2)
    # Other splits only around the depths that win: on an H200 they moved the best by 0.5 % and only at 3 or 4 stages in
    for split, si, so in itertools.product(((2, 1), (1, 1), (2, 2), (4, 1), (1, 4)), (3, 4, 5), (1, 2)):
        for tile, defer in (("64r128", True), ("128c2", True), ("128c2", False)):
            if (tile, split) != ("128c2", (1, 1)):
                yield _ws(tile, si, so, defer, 2, split)
    for block_v, transposed, stages, warps in itertools.product((32, 64, 128), (False, True), (1, 2, 3, 4), (4, 8)):
        yield K2Config(block_v=block_v, transposed=transposed, stages_in=stages, num_warps=warps)


def segmented_k2_configs() -> Iterator[K2Config]:
    """Every K2 config by segments that the search considers, in a fixed order: few base configs, which hardly matter."""
    for segments in _SEARCHED_SEGMENTS:
        for tile, stages_in in (("64", 4), ("64r128", 4), ("128c2", 5)):
            yield replace(_ws(tile, stages_in, 1, True, 2), segments=segments)
        for block_v in (32, 64):
            yield K2Config(block_v=block_v, segments=segments)


def legal_k1(shape: Shape, gpu: Gpu | None) -> list[K1Config]:
    """The K1 search space of a shape on a card: what config_ok lets through."""
    return [c for c in k1_configs() if config_ok(c, shape, gpu) is None]


def legal_k2(shape: Shape, gpu: Gpu | None) -> list[K2Config]:
    """The K2 search space of a shape on a card: what config_ok lets through.

    Segments are considered for few chains only, at most two to an SM and none under four chunks: on an H200 no other won.
    """
    configs = list(k2_configs())
    if gpu is not None and shape.chains * 2 <= gpu.sm_count:
        configs += [
            c
            for c in segmented_k2_configs()
            if shape.chains * c.segments <= 2 * gpu.sm_count and 4 * CHUNK_TOKENS * c.segments <= shape.longest
        ]
    return [c for c in configs if config_ok(c, shape, gpu) is None]


def space_hash() -> str:
    """Identity of the search space: changes when a config is added, dropped or renamed."""
    return digest([canonical(c) for c in itertools.chain(k1_configs(), k2_configs(), segmented_k2_configs(), WHOLES)])


# cp.async wins at 4,096 and 6,144 tiles, TMA at 32,768 and 49,152 (H200); between them untested.
_TMA_FROM_TILES = 16384


def default_config(shape: Shape, gpu: Gpu | None) -> LaunchConfig:
    """The analytic default: what runs when nothing measured is known.

    Passes config_ok wherever any config of `k1_configs` x `k2_configs` does. Where none does (a card below compute
    capability 8.0, V no multiple of 32), config_ok says of the answer why.
    """
    if gpu is not None and _fills(shape, gpu) >= _FUSED_FROM and _both_fit(FUSED, shape, gpu):
        return FUSED
    if gpu is not None and _both_fit(PAIRS, shape, gpu) and _pairs_win(shape, gpu):
        return PAIRS
    return split_default(shape, gpu)


# Split over fused, whole calls on an H200, fp16 precision: 1.46 to 1.51 at 0.97 (512 to 6,144 chains), 1.19 to 1.20 at 0.73
# (96 chains, T 1,024 and 8,192), 1.06 at 0.55 (72 chains, T 8,192), 0.84 at 0.48 (64 chains). Sequences of unlike lengths:
# 1.07 at 0.68 (384 chains).
_FUSED_FROM = 0.53
_ONE_LONG = 0.72  # 64 columns won at 0.68 and lost at 0.76; between them nothing was measured


def _fills(shape: Shape, gpu: Gpu) -> float:
    """The part of the SMs' time that the fused kernel uses, which gives every SM whole chains, one after another."""
    waves = -(-shape.chains // gpu.sm_count)
    if shape.varlen:
        mean_tokens = shape.HV * shape.T / gpu.sm_count
        # how long the longest is, a launch with its offsets on the device does not know: twice the mean, then
        longest = min(shape.T, 2 * shape.longest) if shape.longest_tokens is None else shape.longest
        # an SM takes at most `waves` chains, none longer than the longest: of like lengths that is what dense ones take
        return max(mean_tokens / (mean_tokens + 0.6 * max(longest, 1)), mean_tokens / max(waves * longest, 1))
    return shape.chains / (waves * gpu.sm_count)


# Split over pairs, whole calls on an H200, fp16 precision, one sequence: at T 8192 1.04 with H 64, 1.08 with H 48, 1.11 with
# H 32; at T 4096 1.01 with H 64, 1.08 with H 32; at T 2048 0.99 with H 64. What K2 gains (a step of 32 tokens takes 0.66 to
# 0.71 us, two of 16 0.82 to 0.84) goes by the longest chain, what K1 loses by all tokens, and of unlike lengths these are
# fewer.
_PAIRS_FROM_TOKENS = 4096


def _pairs_win(shape: Shape, gpu: Gpu) -> bool:
    """Whether a chain's two blocks of 64 rows have an SM each, chains are long, and cutting them gains less."""
    one_wave = shape.chains * 2 <= gpu.sm_count
    return one_wave and shape.longest >= _PAIRS_FROM_TOKENS and default_segments(shape, gpu) == 1


def _both_fit(config: LaunchConfig, shape: Shape, gpu: Gpu | None) -> bool:
    """Whether config_ok lets one of ours through, whose values are legal: they are two thirds of its time."""
    return _fits(config.k1, shape, gpu) is None and _fits(config.k2, shape, gpu) is None


def split_default(shape: Shape, gpu: Gpu | None) -> LaunchConfig:
    """The analytic default of K1 and K2 as two stages."""
    wanted = _preferred(shape, gpu)
    if _both_fit(wanted, shape, gpu):
        return wanted
    # A V that 64 does not divide, or key heads too large for the depth that is best with K = 128.
    k1 = K1Config()
    fallbacks = (K2Config(block_v=v, stages_in=stages) for stages in (3, 2, 1) for v in (64, 32))
    return next((c for k2 in fallbacks if config_ok(c := LaunchConfig(k1, k2), shape, gpu) is None), wanted)


def _preferred(shape: Shape, gpu: Gpu | None) -> LaunchConfig:
    if gpu is None or gpu.compute_capability != "9.0" or not _hopper_reads(shape):
        # 32 columns a program keep an SM busy when chains are few (H200, plain Triton: 365 against 457 us at 8 chains)
        few = gpu is not None and shape.chains * 4 <= 2 * gpu.sm_count
        # 64 columns spill 432 bytes a thread on sm_80 and 368 on sm_89 (offline, Triton 3.6.0); 32 columns none
        spills = gpu is not None and gpu.major == 8
        return LaunchConfig(
            K1Config(), K2Config(block_v=32 if (few or spills) and shape.V % 32 == 0 else 64, stages_in=3)
        )
    segments = default_segments(shape, gpu)
    # Two 64-row CTAs a chain while all fit one wave, and where one long sequence decides (H200, K2 alone: H 64 T 8192 215 us,
    # six sequences 240 against 251, but 386 against 312 at H 96); else 128 rows by two MMA partitions (H 96 T 8192: 315).
    # A segment is as good as a chain.
    one_wave = shape.chains * segments * 2 <= gpu.sm_count
    unlike = shape.varlen and shape.longest * shape.N > shape.T and shape.chains > gpu.sm_count
    one_long = unlike and segments == 1 and _fills(shape, gpu) < _ONE_LONG
    tile = "64" if one_wave or one_long else "128c2"
    return _hopper("tma" if shape.chunk_tiles >= _TMA_FROM_TILES else "cp_async", tile, segments)


@functools.cache
def _hopper(variant: K1Variant, tile: str, segments: int) -> LaunchConfig:
    """The default on Hopper; kept, since making a config of 26 fields takes longer than the rest of `default_config`."""
    k1 = K1Config(variant=variant, num_warps=1, transposed_dots=True, fast_reciprocal=True)
    if segments > 1:
        return LaunchConfig(k1, replace(_ws(tile, 5 if tile == "128c2" else 4, 1, True, 2), segments=segments))
    # two load warps: 3 to 6 % of K2 with 128 columns at H 96; six tiles in: 1 to 3 % with 64 (H200, nineteen shapes)
    return LaunchConfig(k1, _ws(tile, 5, 1, True, 2, (2, 1)) if tile == "128c2" else _ws(tile, 6, 1, True, 2))


# us on an H200: what a pass takes besides its steps; a chunk of pass A (256 rows an SM), of pass C and of the serial K2 with
# 64 and with 128 rows an SM; a segment of pass B. Of the recorded shapes the pick is within 4 % of the best timed.
_PASS_US = {"serial": 4.0, "A": 3.6, "B": 2.4, "C": 3.5}
_A_CHUNK_US, _CHUNK_64_US, _CHUNK_128_US, _B_SEGMENT_US = 0.87, 0.4, 0.58, 2.3
_B_CTAS_PER_CHAIN = 8
# A CTA costs about eight chunks of its own, which counts for sequences much shorter than the longest.
_CTA_CHUNKS = 8
_LATE_START = 0.3


def default_segments(shape: Shape, gpu: Gpu) -> int:
    """How many segments the Hopper kernels should cut each chain into: 1 unless that clearly gains."""
    if shape.chains * 2 > gpu.sm_count or (shape.K, shape.V) != (128, 128):
        return 1
    # what a model promises for sequences of unlike lengths is worth less
    serial_us = _segmented_us(shape, gpu, 1) * (0.8 if shape.varlen else 0.85)
    fit = min(MAX_SEGMENTS, 2 * gpu.sm_count // shape.chains, shape.longest // (4 * CHUNK_TOKENS))
    times = {segments: _segmented_us(shape, gpu, segments) for segments in _SEARCHED_SEGMENTS if segments <= fit}
    best = min(times, key=times.__getitem__, default=1)
    return best if best > 1 and times[best] < serial_us else 1


def _segmented_us(shape: Shape, gpu: Gpu, segments: int) -> float:
    """K2's time by the constants above."""
    chunks = shape.longest / CHUNK_TOKENS
    if segments == 1:
        return _PASS_US["serial"] + _CHUNK_64_US * chunks
    mean = shape.T / shape.N / CHUNK_TOKENS
    each = math.ceil(chunks / segments)
    # what a mean sequence's segment costs of the longest one's
    share = (mean / segments + _CTA_CHUNKS) / (chunks / segments + _CTA_CHUNKS)

    def waves(ctas: int) -> float:
        if not shape.varlen:
            return math.ceil(ctas / gpu.sm_count)
        # in a second wave the longest sequence may have to wait for short ones
        return max(1.0, ctas * share / gpu.sm_count) + (_LATE_START if ctas > gpu.sm_count else 0.0)

    a = _PASS_US["A"] + _A_CHUNK_US * each * waves((segments - 1) * shape.chains)
    b = _PASS_US["B"] + _B_SEGMENT_US * (segments - 1)
    one_wave = 2 * segments * shape.chains <= gpu.sm_count
    c = _PASS_US["C"] + each * (_CHUNK_64_US if one_wave else _CHUNK_128_US * waves(segments * shape.chains))
    return a + b * math.ceil(shape.chains * _B_CTAS_PER_CHAIN / gpu.sm_count) + c
