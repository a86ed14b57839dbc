"""The values everything else is about: GPU model, problem shape, launch config. Stdlib only, no torch.

All are frozen dataclasses. Each has one canonical JSON form (every field present, None included, keys sorted), and
everything that is stored, served or compared goes through it, so that two configs are equal exactly when their JSON is.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from typing import Literal
from typing import TypeVar
from typing import cast
from typing import get_args
from typing import get_type_hints

from kdatune_kernels.errors import ConfigError
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape

CHUNK_TOKENS = 16
"""Tokens of one chunk (BT). Fixed: KDA decays per channel, and 2^-G of 16 tokens at lower_bound -5 still fits fp32."""

MAX_DIMENSION = 1 << 40
"""No dimension of a shape is larger. A power of two, so that a bucket stays within it."""

Kernel = Literal["k1", "k2", "kda"]
Dtype = Literal["bf16", "fp16"]
StateDtype = Literal["fp32", "bf16"]
Precision = Literal["fp16", "fast", "bf16"]
Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """A GPU model as the tuner knows it: what it is called and what limits a launch on it."""

    name: str
    compute_capability: str
    sm_count: int
    memory_bytes: int = 0
    l2_bytes: int = 0
    smem_per_block_bytes: int = 232448
    registers_per_sm: int = 65536
    warps_per_sm: int = 64
    mig_profile: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,2}", self.compute_capability):
            raise ConfigError(f"compute_capability must read like 9.0, not {self.compute_capability!r}")
        if not 1 <= self.sm_count < 1 << 20:
            raise ConfigError(f"sm_count must be in 1..2^20, not {self.sm_count}")
        sizes = (self.memory_bytes, self.l2_bytes, self.smem_per_block_bytes, self.registers_per_sm, self.warps_per_sm)
        if min(sizes) < 0 or max(sizes) >= 1 << 60:
            raise ConfigError(f"a size of GPU {self.name!r} is outside 0..2^60")

    @property
    def major(self) -> int:
        return int(self.compute_capability.split(".")[0])

    def sameness(self, other: "Gpu") -> "GpuLevel":
        """How far a result of `other` holds here: "exact", "silicon" (cc + SM count), "family" (cc) or "none"."""
        if self.name == other.name and self.sm_count == other.sm_count and self.mig_profile == other.mig_profile:
            return "exact"
        if self.compute_capability != other.compute_capability:
            return "none"
        return "silicon" if self.sm_count == other.sm_count else "family"


GpuLevel = Literal["exact", "silicon", "family", "none"]

GIB = 1 << 30
MIB = 1 << 20

# Shared memory a block may ask for, and warps an SM holds, by compute capability (CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability").
_CC_LIMITS: dict[str, tuple[int, int]] = {
    "8.0": (166912, 64),
    "8.6": (101376, 48),
    "8.9": (101376, 48),
    "9.0": (232448, 64),
    "10.0": (232448, 64),
    "12.0": (101376, 48),
}


def gpu_of(name: str, compute_capability: str, sm_count: int, memory_bytes: int = 0, l2_bytes: int = 0) -> Gpu:
    """A Gpu from what a driver reports, with the limits of its compute capability filled in."""
    smem, warps = _CC_LIMITS.get(compute_capability, (101376, 48))
    mig = name.split(" MIG ", 1)[1] if " MIG " in name else None
    return Gpu(
        name=name,
        compute_capability=compute_capability,
        sm_count=sm_count,
        memory_bytes=memory_bytes,
        l2_bytes=l2_bytes,
        smem_per_block_bytes=smem,
        warps_per_sm=warps,
        mig_profile=mig,
    )


INTERPRETER = gpu_of("Triton interpreter", "0.0", 1)
"""What kernels of others run on where there is no card and TRITON_INTERPRET=1: a device of its own, slow, but real."""

# Cards known by the name nvidia-smi prints, so that a config can be asked for without the card at hand. SM counts and
# memory: NVIDIA data sheets; H20's 78 SMs: public device queries.
KNOWN_GPUS: dict[str, Gpu] = {
    g.name: g
    for g in (
        gpu_of("NVIDIA H200", "9.0", 132, 150_109_880_320, 60 * MIB),  # as the driver reports it
        gpu_of("NVIDIA H200 NVL", "9.0", 132, 141 * GIB, 60 * MIB),
        gpu_of("NVIDIA H100 80GB HBM3", "9.0", 132, 80 * GIB, 50 * MIB),
        gpu_of("NVIDIA H100 NVL", "9.0", 132, 94 * GIB, 60 * MIB),
        gpu_of("NVIDIA H100 PCIe", "9.0", 114, 80 * GIB, 50 * MIB),
        gpu_of("NVIDIA H800", "9.0", 132, 80 * GIB, 50 * MIB),
        gpu_of("NVIDIA H20", "9.0", 78, 96 * GIB, 60 * MIB),
        gpu_of("NVIDIA GH200 480GB", "9.0", 132, 96 * GIB, 60 * MIB),
        gpu_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "9.0", 16, 10 * GIB),
        gpu_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "9.0", 60, 40 * GIB),
        gpu_of("NVIDIA A100-SXM4-80GB", "8.0", 108, 80 * GIB, 40 * MIB),
        gpu_of("NVIDIA A100-SXM4-40GB", "8.0", 108, 40 * GIB, 40 * MIB),
        gpu_of("NVIDIA L40S", "8.9", 142, 48 * GIB, 96 * MIB),
        gpu_of("NVIDIA GeForce RTX 4090", "8.9", 128, 24 * GIB, 72 * MIB),
        gpu_of("NVIDIA B200", "10.0", 148, 180 * GIB, 126 * MIB),
    )
}


@dataclass(frozen=True)
class Shape:
    """One problem: what is exact about a request.

    N sequences of T tokens **in total** (a dense [B, T', ...] call is N = B, T = B * T'), H query/key heads, HV value
    heads, head sizes K and V. `longest_tokens` is the longest sequence (None: not known; the mean is assumed).
    State flags: `initial_state` and `final_state` say whether h0 is read and ht written.
    """

    N: int
    H: int
    T: int
    HV: int
    K: int = 128
    V: int = 128
    dtype: Dtype = "bf16"
    varlen: bool = False
    longest_tokens: int | None = None
    initial_state: bool = True
    final_state: bool = True
    state_v_first: bool = False
    state_dtype: StateDtype = "fp32"

    def __post_init__(self) -> None:
        for name in ("N", "H", "HV", "K", "V"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ShapeError(f"{name} must be a whole number >= 1, not {value!r}")
        if not isinstance(self.T, int) or isinstance(self.T, bool) or self.T < 0:
            raise ShapeError(f"T must be a whole number >= 0 (tokens in total), not {self.T!r}")
        if max(self.N, self.H, self.HV, self.K, self.V, self.T) > MAX_DIMENSION:
            name = next(n for n in ("N", "H", "HV", "K", "V", "T") if getattr(self, n) > MAX_DIMENSION)
            raise ShapeError(f"{name} must be at most 2^40, not {getattr(self, name)}")
        if self.HV % self.H:
            raise ShapeError(f"HV must be a multiple of H, not HV={self.HV} with H={self.H}")
        longest = self.longest_tokens
        if longest is not None and (type(longest) is not int or not 0 <= longest <= self.T):
            raise ShapeError(f"longest_tokens must be a whole number in 0..T ({self.T}), not {longest!r}")
        for name in ("varlen", "initial_state", "final_state", "state_v_first"):
            if not isinstance(getattr(self, name), bool):
                raise ShapeError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.dtype not in _DTYPES:
            raise ShapeError(f"dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}")
        if self.state_dtype not in _STATE_DTYPES:
            raise ShapeError(f"state_dtype must be one of {', '.join(_STATE_DTYPES)}, not {self.state_dtype!r}")

    @property
    def chains(self) -> int:
        """Independent recurrences: N * HV."""
        return self.N * self.HV

    @property
    def chunk_tiles(self) -> int:
        """K1 tiles: chunks of all sequences times HV (an upper bound for ragged sequences)."""
        chunks = -(-self.T // CHUNK_TOKENS) if not self.varlen else self.T // CHUNK_TOKENS + self.N
        return chunks * self.HV

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; the mean where it is not known."""
        return -(-self.T // self.N) if self.longest_tokens is None else self.longest_tokens

    def key(self) -> str:
        """The shape key: dimensions first, then only what differs from the defaults. `parse_shape` reads it back."""
        parts = [f"N={self.N}", f"H={self.H}", f"T={self.T}"]
        if self.HV != self.H:
            parts.append(f"HV={self.HV}")
        for name, default in _IN_KEY.items():
            value = getattr(self, name)
            if value != default:
                parts.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        return ",".join(parts)

    def bucket(self) -> "Shape":
        """The shape that stands for all shapes served alike: T and N rounded up to powers of two."""
        longest = (
            None if self.longest_tokens is None else min(pow2_at_least(self.longest_tokens), pow2_at_least(self.T))
        )
        return dataclasses.replace(self, N=pow2_at_least(self.N), T=pow2_at_least(self.T), longest_tokens=longest)


_DTYPES, _STATE_DTYPES = get_args(Dtype), get_args(StateDtype)
_IN_KEY = {field.name: field.default for field in dataclasses.fields(Shape) if field.name not in ("N", "H", "T", "HV")}


def pow2_at_least(n: int) -> int:
    """The least power of two >= n; 1 for n < 1."""
    return 1 << max(0, n - 1).bit_length()


def shape_of(N: int, H: int, T: int, HV: int | None = None, **rest: Any) -> Shape:
    """A Shape with HV defaulting to H. Raises ShapeError naming the field that cannot be read."""
    try:
        return Shape(N=N, H=H, T=T, HV=H if HV is None else HV, **rest)
    except TypeError as error:
        raise ShapeError(f"not a shape: {error}") from error


def parse_shape(text: str) -> Shape:
    """Read a shape key such as "N=1,H=96,T=8192,varlen=true".

    Raises:
        ShapeError: a part is not key=value, a key is unknown, repeated or missing, or a value is out of range.
    """
    types = _hints(Shape)
    values: Json = {}
    for part in text.split(","):
        key, sep, raw = (piece.strip() for piece in part.partition("="))
        if not sep or not key or not raw:
            raise ShapeError(f"shape part {part!r} is not key=value; write e.g. N=1,H=96,T=8192")
        if key not in types:
            raise ShapeError(f"unknown shape key {key!r}; known keys: {', '.join(types)}")
        if key in values:
            raise ShapeError(f"shape key {key!r} is given twice")
        values[key] = parse_field(key, raw, types[key])
    missing = [k for k in ("N", "H", "T") if k not in values]
    if missing:
        raise ShapeError(f"the shape lacks {', '.join(missing)}; write e.g. N=1,H=96,T=8192")
    return shape_of(**values)


_MAX_DIGITS = 15


def parse_field(key: str, raw: str, hint: Any) -> Any:
    """One textual shape value as its typed value. Raises ShapeError naming the key."""
    if hint is bool:
        if raw.lower() not in ("true", "false", "1", "0"):
            raise ShapeError(f"{key} must be true or false, not {raw!r}")
        return raw.lower() in ("true", "1")
    choices = () if hint is int else get_args(hint)
    if choices and all(isinstance(c, str) for c in choices):
        if raw not in choices:
            raise ShapeError(f"{key} must be one of {', '.join(choices)}, not {raw!r}")
        return raw
    if type(None) in choices and raw.lower() == "none":
        return None
    if not re.fullmatch(r"-?[0-9]+", raw):
        raise ShapeError(f"{key} must be a whole number, not {raw!r}")
    if len(raw) > _MAX_DIGITS:
        raise ShapeError(f"{key} must be at most 2^40, not a number of {len(raw.lstrip('-'))} digits")
    return int(raw)


K1Variant = Literal["triton", "cp_async", "tma"]
K2Variant = Literal["triton", "ws", "fused", "pairs"]
WHOLE_WORDS = {"fused": "K1 and K2 as one kernel", "pairs": "K1 and K2 with 32 tokens a step"}
"""The variants that K1 is part of, for people."""
_WHOLE_VARIANTS = tuple(WHOLE_WORDS)
LoadPolicy = Literal["default", "evict_last"]


@dataclass(frozen=True)
class K1Config:
    """How K1 (chunk preparation) is launched. Fields a variant does not use stand at their defaults.

    variant: "triton" (any sm >= 80), "cp_async" or "tma" (Gluon, sm_90, one warp a tile).
    """

    variant: K1Variant = "triton"
    num_warps: int = 2
    chunks_per_program: int = 1
    head_fast: bool = False
    maxnreg: int | None = None
    transposed_dots: bool = False
    fast_reciprocal: bool = False
    load_policy: LoadPolicy = "default"
    gate_halves: int = 1
    swizzle_bytes: int = 0


@dataclass(frozen=True)
class K2Config:
    """How K2 (the recurrence) is launched. Fields a variant does not use stand at their defaults.

    variant: "triton" (any sm >= 80) or "ws" (Gluon, sm_90, warp-specialised). For "ws", num_warps is the warps of one
    MMA partition, the partition split is (consumers x num_warps, load_warps, store_warps), and the pipeline depths are
    stages_in and stages_out; for "triton", stages_in is the loop's num_stages and stages_out is 0. segments > 1 splits each
    chain into that many segments scanned in parallel. "fused" and "pairs" (Gluon, sm_90) are whole launches, with a K1 of their
    own, and read no other field: one kernel that does the work of both, and two kernels with 32 tokens a step.
    """

    variant: K2Variant = "triton"
    block_v: int = 64
    num_warps: int = 4
    stages_in: int = 3
    stages_out: int = 0
    transposed: bool = False
    consumers: int = 1
    load_warps: int = 0
    store_warps: int = 0
    maxnreg: int | None = None
    consumer_regs: int | None = None
    load_regs: int | None = None
    store_regs: int | None = None
    defer_store: bool = False
    decay_position: int = 0
    segments: int = 1

    @property
    def whole(self) -> bool:
        """Whether K1 is part of it: it is measured, compared and served whole, and has no stages."""
        return self.variant in _WHOLE_VARIANTS

    @property
    def fused(self) -> bool:
        """Whether it is K1 and K2 as one kernel."""
        return self.variant == "fused"

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, and of a tile."""
        return 2 * CHUNK_TOKENS if self.variant == "pairs" else CHUNK_TOKENS


def is_whole(k2: object) -> bool:
    """Whether JSON says a K2Config that K1 is part of."""
    return isinstance(k2, dict) and k2.get("variant") in _WHOLE_VARIANTS


@dataclass(frozen=True)
class LaunchConfig:
    """A whole launch: K1 and K2 and the precision of the tiles that pass between them.

    k1: K1Config() where k2 has a K1 of its own, and not launched. precision: "fp16" (default: fp16 tiles, scaled; values and
    states up to 6e4), "fast" (values up to 6e4, larger errors on correlated keys) or "bf16" (any range, larger errors
    everywhere). It is not searched: it is chosen by the caller.
    """

    k1: K1Config
    k2: K2Config
    precision: Precision = "fp16"


@dataclass(frozen=True)
class Build:
    """What a measurement was made with. A difference in any field makes an entry stale."""

    kernel_hash: str
    space_hash: str
    protocol: str
    triton: str
    ptxas: str
    torch: str
    cuda: str
    driver: str


def to_json(value: Any) -> Json:
    """A frozen dataclass of this module as plain JSON data: every field present, None included.

    Shapes and configs of other kernels (values.py) are JSON objects already and come out as such.
    """
    if isinstance(value, OtherShape | OtherConfig):
        return value.json()
    # dataclasses.asdict gives the same, copies every value on the way and takes twenty times as long
    names, read = _reader(value.__class__)
    return {n: to_json(v) if hasattr(v, "__dataclass_fields__") else v for n, v in zip(names, read(value), strict=True)}


@functools.cache
def _reader(cls: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The fields of a frozen dataclass (two or more), and what reads them all."""
    names = tuple(field.name for field in dataclasses.fields(cls))
    return names, attrgetter(*names)


def canonical(value: Any) -> str:
    """The one textual form of a value: compact JSON, keys sorted."""
    if isinstance(value, OtherShape | OtherConfig):
        return value.text
    data = to_json(value) if dataclasses.is_dataclass(value) else value
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    """The first 16 hex digits of the sha256 of `canonical(value)`."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def from_json(cls: type[T], data: Any, *, strict: bool = True) -> T:
    """Read a frozen dataclass of this module from JSON data.

    Args:
        strict: every field must be there (what a service sends); else missing fields take their defaults.

    Raises:
        ConfigError: not an object, an unknown or missing field, or a value of the wrong type.
        ShapeError: a Shape whose values are out of range.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{cls.__name__} must be a JSON object, not {type(data).__name__}")
    hints = _hints(cast("Hashable", cls))
    unknown = sorted(str(k) for k in data if k not in hints)
    missing = sorted(k for k in hints if k not in data)
    if unknown:
        raise ConfigError(f"{cls.__name__} has unknown field(s): {', '.join(unknown)}")
    if missing and strict:
        raise ConfigError(f"{cls.__name__} lacks field(s): {', '.join(missing)}")
    values: Json = {}
    for name, value in data.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            values[name] = from_json(hint, value, strict=strict)  # type: ignore[arg-type]
        elif _fits(value, hint):
            values[name] = value
        else:
            raise ConfigError(f"{cls.__name__}.{name} cannot be {value!r}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{cls.__name__}: {error}") from error


@functools.cache
def _hints(cls: Any) -> Json:
    return get_type_hints(cls)


def _fits(value: Any, hint: Any) -> bool:
    choices = get_args(hint)
    if hint in (int, str, bool, float):
        return type(value) is hint or (hint is float and type(value) is int)
    if choices and not any(isinstance(c, type) for c in choices):
        return any(type(value) is type(c) and value == c for c in choices)
    return any(value is None if c is type(None) else _fits(value, c) for c in choices)
