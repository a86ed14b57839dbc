"""Champions x request -> exact / bucket / nearest / default. ONE piece, called by launcher and API. Stdlib only."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import fields
from operator import attrgetter
from typing import Literal

from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import GpuLevel
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import pow2_at_least

MatchKind = Literal["exact", "bucket", "nearest", "default"]

# Nearest answers reach this far in the distance of `distance` (1 = a factor of two in one dimension).
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

    @functools.cached_property
    def kept_default(self) -> bool:
        """Whether nothing beat the analytic default there."""
        return default_config(self.shape, self.gpu) == self.config


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


Ranked = tuple[int, int, float, Champion]
"""Exact, bucket or nearest (0, 1, 2); of the same card or of its silicon (0, 1); how far off; the champion."""


def find(champions: Iterable[Champion], shape: Shape, gpu: Gpu) -> Match:
    """The best answer for the shape on the card.

    Only champions of the same card or the same silicon (compute capability and SM count) are served; a config tuned for
    another SM count is not, since the wave boundary moves. A champion that config_ok refuses is passed over. Of two for
    the same key the first in the given order is taken.
    """
    level: GpuLevel = "none"
    ranked: list[Ranked] = []
    for champion in champions:
        same = gpu.sameness(champion.gpu)
        level = _closer(level, same)
        if same not in ("exact", "silicon"):
            continue
        rank, distance = rank_of(champion.shape, shape)
        if rank is not None:
            ranked.append((rank, 0 if same == "exact" else 1, distance, champion))
    return choose(ranked, level, shape, gpu)


def choose(ranked: list[Ranked], level: GpuLevel, shape: Shape, gpu: Gpu) -> Match:
    """The best of the champions that config_ok lets through, else the default.

    Args:
        level: of the nearest card that anything is tuned for.
    """
    refused = ""
    if len(ranked) > 1:
        ranked = sorted(ranked, key=lambda one: (one[:3], _order(one[3].shape)))
    for rank, _, distance, champion in ranked:
        reason = config_ok(champion.config, shape, gpu)
        if reason is None:
            return _found(rank, distance, champion, shape, gpu)
        refused = refused or f"; champion of {champion.shape.key()} refused: {reason}"
    why = {"family": "only cards of another SM count are tuned", "none": "nothing is tuned for this card"}
    reason = why.get(level, "no tuned shape is near enough") + refused
    return Match("default", level, default_config(shape, gpu), reason)


def _order(shape: Shape) -> tuple[int, ...]:
    """Settles equal distances, so that the answer does not depend on the order of the champions."""
    longest = -1 if shape.longest_tokens is None else shape.longest_tokens
    flags = (shape.varlen, shape.initial_state, shape.final_state, shape.state_v_first, shape.state_dtype == "fp32")
    return (shape.N, shape.T, shape.H, shape.HV, longest, *flags)


def _found(rank: int, distance: float, champion: Champion, shape: Shape, gpu: Gpu) -> Match:
    key = champion.shape.key()
    kinds: tuple[MatchKind, ...] = ("exact", "bucket", "nearest")
    reasons = ("tuned for this shape", f"tuned for {key}, the same bucket", f"tuned for {key}, {distance:.2f} away")
    config, reason = champion.config, reasons[rank]
    if rank and champion.kept_default:
        # The default follows the shape, a copy of another shape's default does not: H 32 T 4096 with the segments that the
        # default gives T 8192 takes 193 us on an H200, with its own default 179 us.
        config, reason = (
            default_config(shape, gpu),
            f"{reason}; nothing beat the default there, so this shape's default",
        )
    regret = 1.0 if rank == 0 else None
    return Match(kinds[rank], gpu.sameness(champion.gpu), config, reason, champion, regret)


_LEVELS: tuple[GpuLevel, ...] = ("exact", "silicon", "family", "none")


def _closer(a: GpuLevel, b: GpuLevel) -> GpuLevel:
    return a if _LEVELS.index(a) <= _LEVELS.index(b) else b


# What a bucket keeps exact: every field but N, T and longest_tokens (see Shape.bucket).
_EXACT_IN_BUCKET = tuple(f.name for f in fields(Shape) if f.name not in ("N", "T", "longest_tokens"))
_exact_in_bucket = attrgetter(*_EXACT_IN_BUCKET)


def rank_of(have: Shape, want: Shape) -> tuple[int | None, float]:
    """How a champion of one shape answers for another: 0 exact, 1 bucket, 2 nearest, None not at all; and how far off."""
    if have == want:
        return 0, 0.0
    if have.K != want.K or have.V != want.V or have.dtype != want.dtype:
        return None, math.inf
    apart = distance(have, want)
    if _same_bucket(have, want):
        if have.longest_tokens == want.longest_tokens:
            return 1, apart
        if None in (have.longest_tokens, want.longest_tokens):
            return 1, apart + 0.5
    return (2, apart) if apart <= NEAREST_BOUND else (None, apart)


def bucket_key(shape: Shape) -> tuple[object, ...]:
    """Equal for shapes of the same bucket but for longest_tokens."""
    return (pow2_at_least(shape.N), pow2_at_least(shape.T), *_exact_in_bucket(shape))


def _same_bucket(a: Shape, b: Shape) -> bool:
    """Whether the buckets are equal but for longest_tokens. Comparing two shapes is cheaper than making two buckets."""
    return (
        pow2_at_least(a.N) == pow2_at_least(b.N)
        and pow2_at_least(a.T) == pow2_at_least(b.T)
        and bool(_exact_in_bucket(a) == _exact_in_bucket(b))
    )


def distance(a: Shape, b: Shape) -> float:
    """How far apart two shapes are, in log2 steps between what the kernels feel.

    That is chains, tokens a chain and the longest chain; flags count little.
    """
    flags = (
        (a.initial_state != b.initial_state)
        + (a.final_state != b.final_state)
        + (a.state_v_first != b.state_v_first)
        + (a.state_dtype != b.state_dtype)
        + (a.varlen != b.varlen)
    )
    return (
        _steps(a.chains, b.chains)
        + 0.5 * _steps(a.T / a.N, b.T / b.N)
        + 0.5 * _steps(a.longest, b.longest)
        + 0.1 * flags
        + (0.25 if a.HV // a.H != b.HV // b.H else 0.0)
    )


def _steps(x: float, y: float) -> float:
    """How many factors of two lie between x and y."""
    return abs(math.log2(max(x, 1.0)) - math.log2(max(y, 1.0)))
