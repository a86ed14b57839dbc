"""Whether a champion was measured with what is in use now. A stale one is served: it is the best known, and says so."""

import functools
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import fields
from dataclasses import replace

from kdatune_kernels import space
from kdatune_kernels.match import Champion
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu


def marked(champions: Iterable[Champion], space_hash: str | None = None) -> list[Champion]:
    """The champions with `stale_reason` set on those whose build is not the newest known for their card.

    A service has no card, so what is in use on one is told by the newest champion of that card: a driver or a Triton
    that it was measured with is there now. The config space is told by this code.

    Args:
        space_hash: identity of the config space in use; that of this code if None.
    """
    space_hash = space_hash or _space_hash()
    champions = list(champions)
    newest = _newest_builds(champions)
    return [
        replace(one, stale_reason=reason) if (reason := _reason(one, newest.get(one.gpu), space_hash)) else one
        for one in champions
    ]


def _reason(champion: Champion, newest: Build | None, space_hash: str) -> str | None:
    if champion.stale_reason is not None:
        return None  # the store knows better
    build = champion.build
    if build is None:
        return "what it was measured with is not known"
    if newest is not None and build != newest:
        changed = [f.name for f in fields(Build) if getattr(build, f.name) != getattr(newest, f.name)]
        texts = [f"{name} {getattr(build, name)}, now {getattr(newest, name)}" for name in changed]
        return f"measured with {'; '.join(texts)}"[:500]
    if build.space_hash != space_hash:
        return "the config space has changed since it was tuned"
    return None


def _newest_builds(champions: Sequence[Champion]) -> dict[Gpu, Build]:
    builds: dict[Gpu, Build] = {}
    for one in sorted(champions, key=lambda c: (c.measured_at or "", c.generation)):
        if one.build is not None:
            builds[one.gpu] = one.build
    return builds


@functools.cache
def _space_hash() -> str:
    return space.space_hash()
