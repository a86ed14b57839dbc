"""Champions x request -> exact / bucket / nearest / default. ONE piece, called by launcher and API alike. Stdlib only."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace
from typing import Literal

from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import GpuLevel
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape

MatchKind = Literal["exact", "bucket", "nearest", "default"]

# Nearest answers reach this far in the distance of `_distance` (1 = a factor of two in one dimension).
NEAREST_BOUND = 2.0


@dataclass(frozen=True)
class Champion:
    """The served best of one (kernel, GPU model, problem shape), with where it comes from."""

    gpu: Gpu
    shape: Shape
    config: LaunchConfig
    generation: int
    measured_us: float | None
    default_us: float | None
    build: Build | None = None
    measured_at: str | None = None
    stale_reason: str | None = None
    kernel: str = "kda"


@dataclass(frozen=True)
class Match:
    """The answer to a request: a config that passes config_ok, and how it was found."""

    match: MatchKind
    gpu_level: GpuLevel
    config: LaunchConfig
    reason: str
    champion: Champion | None = None
    expected_regret: float | None = None

    @property
    def stale_reason(self) -> str | None:
        return self.champion.stale_reason if self.champion else None


def find(champions: Iterable[Champion], shape: Shape, gpu: Gpu) -> Match:
    """The best answer for the shape on the card.

    Only champions of the same card or the same silicon (compute capability and SM count) are served; a config tuned for
    another SM count is not, since the wave boundary moves. A champion that config_ok refuses is passed over.
    """
    level: GpuLevel = "none"
    found: list[tuple[int, int, float, Champion]] = []
    refused = ""
    for champion in champions:
        same = gpu.sameness(champion.gpu)
        level = _closer(level, same)
        if same not in ("exact", "silicon"):
            continue
        rank, distance = _rank(champion.shape, shape)
        if rank is None:
            continue
        reason = config_ok(champion.config, shape, gpu)
        if reason:
            refused = f"; champion of {champion.shape.key()} refused: {reason}"
            continue
        found.append((rank, 0 if same == "exact" else 1, distance, champion))
    if not found:
        why = {"family": "only cards of another SM count are tuned", "none": "nothing is tuned for this card"}
        reason = why.get(level, "no tuned shape is near enough") + refused
        return Match("default", level, default_config(shape, gpu), reason)
    rank, _, distance, champion = min(found, key=lambda f: (f[:3], f[3].shape.key()))
    kind: MatchKind = ("exact", "bucket", "nearest")[rank]  # type: ignore[assignment]
    reason = {
        "exact": "tuned for this shape",
        "bucket": f"tuned for {champion.shape.key()}, the same bucket",
        "nearest": f"tuned for {champion.shape.key()}, {distance:.2f} away",
    }[kind]
    regret = 1.0 if kind == "exact" else None
    return Match(kind, gpu.sameness(champion.gpu), champion.config, reason, champion, regret)


_LEVELS: tuple[GpuLevel, ...] = ("exact", "silicon", "family", "none")


def _closer(a: GpuLevel, b: GpuLevel) -> GpuLevel:
    return a if _LEVELS.index(a) <= _LEVELS.index(b) else b


def _rank(have: Shape, want: Shape) -> tuple[int | None, float]:
    if have == want:
        return 0, 0.0
    if (have.K, have.V, have.dtype) != (want.K, want.V, want.dtype):
        return None, math.inf
    same_bucket = _comparable(have).bucket() == _comparable(want).bucket()
    distance = _distance(have, want)
    if same_bucket and have.longest_tokens == want.longest_tokens:
        return 1, distance
    if same_bucket and None in (have.longest_tokens, want.longest_tokens):
        return 1, distance + 0.5
    return (2, distance) if distance <= NEAREST_BOUND else (None, distance)


def _comparable(shape: Shape) -> Shape:
    return replace(shape, longest_tokens=None)


def _distance(a: Shape, b: Shape) -> float:
    """log2 steps between what the kernels feel: chains, tokens a chain, the longest chain, tokens in all; flags little."""

    def step(x: float, y: float) -> float:
        return abs(math.log2(max(x, 1.0) / max(y, 1.0)))

    flags = sum(
        getattr(a, f) != getattr(b, f)
        for f in ("initial_state", "final_state", "state_v_first", "state_dtype", "varlen")
    )
    return (
        step(a.chains, b.chains)
        + 0.5 * step(a.T / a.N, b.T / b.N)
        + 0.5 * step(a.longest, b.longest)
        + 0.1 * flags
        + (0.25 if a.HV // a.H != b.HV // b.H else 0.0)
    )
