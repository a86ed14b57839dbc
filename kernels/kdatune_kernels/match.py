"""Champions x request -> exact / bucket / nearest / default. ONE piece, called by launcher and API. Stdlib only."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace
from operator import attrgetter
from typing import Literal

from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import GpuLevel
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import pow2_at_least

MatchKind = Literal["exact", "bucket", "nearest", "default"]

# Nearest answers reach this far in the distance of `distance` (1 = a factor of two in one dimension).
NEAREST_BOUND = 2.0

# What a nearest answer is expected to cost (time over the best, x) where nobody has measured it near by: over the shapes of
# two H200 sweeps, each hidden in turn, it was 1.008 and 1.011 on geomean (docs/measured-facts.md).
NEAREST_REGRET = 1.01


# A nearest answer expected to cost more than this is none, where it is not known what the default costs there. The default
# of K2 was 1.065 off at worst, of the pair 1.011 (the shipped sweep).
REGRET_BOUND = 1.05

# A request's default is asked for at every answer, a champion's at every answer that it is a candidate for: up to 250 us.
_default_of = functools.lru_cache(maxsize=1 << 14)(default_config)
split_of = functools.lru_cache(maxsize=1 << 14)(split_default)


@dataclass(frozen=True)
class Champion:
    """The served best of one (kernel, GPU model, problem shape), with where it comes from.

    nearest_regret: what the nearest answer would have cost for this very shape when it was decided about (time over that of
        this config, x): the answer from the other champions, measured here. None: nothing near was tuned then.
    estimated: measured_us is the sum of its parts, K1 and K2 each alone, not measured end to end.
    """

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
    nearest_regret: float | None = None
    estimated: bool = False

    @functools.cached_property
    def default(self) -> LaunchConfig:
        """The analytic default for its shape."""
        return _default_of(self.shape, self.gpu)

    @functools.cached_property
    def split_default(self) -> LaunchConfig:
        """That of K1 and K2 as two stages."""
        return split_of(self.shape, self.gpu)

    @property
    def default_regret(self) -> float | None:
        """What the default costs there (time over the best, x), as far as it was measured."""
        return self.default_us / self.measured_us if self.default_us and self.measured_us else None


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
        if rank == 0:
            answer, regret, reason = champion.config, 1.0, None
        else:
            answer = _carried_over(champion, split_of(shape, gpu))
            regret = NEAREST_REGRET if champion.nearest_regret is None else champion.nearest_regret
            reason = _too_far(champion, answer, shape, _default_of(shape, gpu), split_of(shape, gpu))
        reason = reason or config_ok(answer, shape, gpu)
        if reason is None:
            return Match(
                _KINDS[rank],
                gpu.sameness(champion.gpu),
                answer,
                _reason(rank, distance, champion, answer),
                champion,
                regret,
            )
        refused = refused or f"; champion of {champion.shape.key()} refused: {reason}"
    why = {"family": "only cards of another SM count are tuned", "none": "nothing is tuned for this card"}
    reason = why.get(level, "no tuned shape is near enough") + refused
    return Match("default", level, default_config(shape, gpu), reason)


def _order(shape: Shape) -> tuple[int, ...]:
    """Settles equal distances, so that the answer does not depend on the order of the champions."""
    longest = -1 if shape.longest_tokens is None else shape.longest_tokens
    flags = (shape.varlen, shape.initial_state, shape.final_state, shape.state_v_first, shape.state_dtype == "fp32")
    return (shape.N, shape.T, shape.H, shape.HV, longest, *flags)


_KINDS: tuple[MatchKind, ...] = ("exact", "bucket", "nearest")


def _carried_over(champion: Champion, default: LaunchConfig) -> LaunchConfig:
    """The champion's config for another shape, each stage for itself; what has no stages stays whole.

    The default follows the shape, a copy of another shape's default does not: H 32 T 4096 with the segments that the default
    gives T 8192 takes 193 us on an H200, with its own default 179 us. So a stage in which nothing beat the default answers
    with the default of the request; and so does K1 where the request's default is another one (a TMA winner of T 8192 is
    10 to 15 % slower at T 1024).

    Args:
        default: of the request, as two stages.
    """
    k1, k2, before = champion.config.k1, champion.config.k2, champion.split_default
    if k2.whole:
        return champion.config
    if k1 == before.k1 or before.k1 != default.k1:
        k1 = default.k1
    if k2 == before.k2:
        k2 = default.k2
    return replace(champion.config, k1=k1, k2=k2)


def _too_far(
    champion: Champion, answer: LaunchConfig, shape: Shape, default: LaunchConfig, split: LaunchConfig
) -> str | None:
    """Why the default is the better answer although the champion is near; None where it is not."""
    # Across the boundary of a wave a K2 winner is 1.30x off on an H200 (H 64 and H 96 T 8192), with the segments of
    # twice as many chains 1.20x and 1.27x; K1 and K2 as one kernel take 1/1.46 of two at 768 chains and 1/0.84 at 64. What beat
    # stages where they are the default has not met pairs, and pairs gain 1.09x at T 8192 and nothing at T 2048.
    if champion.default.k2 != default.k2 or (not answer.k2.whole and champion.split_default.k2 != split.k2):
        return "it runs in other waves, segments or steps"
    if answer.k2.whole and answer != default:
        # it won where the default is another one, at one fill of the SMs and one length: at T 1024 pairs gain 1.09x at H 8
        if shape.chains != champion.shape.chains:
            return "it was measured whole, for another number of chains"
        longest, known = shape.longest, champion.shape.longest
        if longest > 2 * known or known > 2 * longest:
            return "it was measured whole, for sequences of another length"
    regret, bound = champion.nearest_regret, champion.default_regret
    if regret is None or answer == default:
        return None
    if regret > (REGRET_BOUND if bound is None else bound):
        default_cost = f"at most {REGRET_BOUND}x is allowed" if bound is None else f"the default {bound:.3f}x"
        return f"the nearest answer cost {regret:.3f}x there, {default_cost}"
    return None


def _reason(rank: int, distance: float, champion: Champion, answer: LaunchConfig) -> str:
    key = champion.shape.key()
    told = ("tuned for this shape", f"tuned for {key}, the same bucket", f"tuned for {key}, {distance:.2f} away")[rank]
    stages = [name for name in ("k1", "k2") if getattr(answer, name) != getattr(champion.config, name)]
    if stages:
        return f"{told}; {' and '.join(stages)} by this shape's default of two stages"
    return told


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


TOKEN_WEIGHT = 0.2
"""Of a factor of two in the mean tokens of a chain, and of one in the longest chain; 1 is a factor of two in chains. K2's
leave-one-out regret over the two sweeps was 1.005 and 1.004 with 0.2, 1.007 and 1.009 with 0.5."""


def distance(a: Shape, b: Shape) -> float:
    """How far apart two shapes are, in log2 steps between what the kernels feel.

    That is chains, tokens a chain and the longest chain; flags count little. Tokens count less than chains: what is best for
    a step of a chain is best for the next one, too.
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
        + TOKEN_WEIGHT * _steps(a.T / a.N, b.T / b.N)
        + TOKEN_WEIGHT * _steps(a.longest, b.longest)
        + 0.1 * flags
        + (0.25 if a.HV // a.H != b.HV // b.H else 0.0)
    )


def _steps(x: float, y: float) -> float:
    """How many factors of two lie between x and y."""
    return abs(math.log2(max(x, 1.0)) - math.log2(max(y, 1.0)))
