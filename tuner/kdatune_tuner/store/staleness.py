"""Whether a champion was measured with what is in use now. A stale one is served: it is the best known, and says so."""

import functools
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace
from datetime import datetime
from datetime import timedelta

from kdatune_kernels import identity
from kdatune_kernels import space
from kdatune_kernels.match import Champion
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu


@dataclass(frozen=True)
class Installed:
    """What this installation would measure with, as far as it can tell without a card."""

    space_hash: str
    kernel_hash: str


@functools.cache
def installed() -> Installed:
    """Of this very process."""
    return Installed(space.space_hash(), identity.kernel_hash())


def marked(champions: Iterable[Champion], now: Installed | None = None, in_use: Build | None = None) -> list[Champion]:
    """The champions with `stale_reason` set on those that were measured with something else than what is in use.

    A service has no card, so what is in use on one (driver, Triton, torch) is told by the newest champion of that card.
    Kernel sources and config space are told by this installation, which is of one release with them.

    Args:
        now: what is installed; of this process if None.
        in_use: what is in use on the card of all these champions, where the caller has that card; it tells all.
    """
    champions = list(champions)
    if in_use is None:
        now = now or installed()
        newest = _newest_builds(champions)
    else:
        now = Installed(in_use.space_hash, in_use.kernel_hash)
        newest = {champion.gpu: in_use for champion in champions}
    return [
        replace(one, stale_reason=reason) if (reason := _reason(one, newest.get(one.gpu), now)) else one
        for one in champions
    ]


def _reason(champion: Champion, newest: Build | None, now: Installed) -> str | None:
    if champion.stale_reason is not None:
        return None  # the store knows better
    build = champion.build
    if build is None:
        return "what it was measured with is not known"
    if newest is not None and build != newest:
        return f"measured with {changes(build, newest)}"[:500]
    if build.kernel_hash != now.kernel_hash:
        return f"measured with kernel sources {build.kernel_hash}, those installed here are {now.kernel_hash}"
    if build.space_hash != now.space_hash:
        return "the config space has changed since it was tuned"
    return None


def changed_fields(before: Build, now: Build) -> list[str]:
    """The fields in which two builds differ."""
    return [f.name for f in fields(Build) if getattr(before, f.name) != getattr(now, f.name)]


def changes(before: Build, now: Build) -> str:
    """In words what changed between two builds."""
    names = changed_fields(before, now)
    return "; ".join(f"{name} {getattr(before, name)}, now {getattr(now, name)}" for name in names)


def is_old(champion: Champion, now: datetime, max_age_days: float) -> bool:
    """Whether a champion was measured so long ago that it is looked at again."""
    measured_at = datetime.fromisoformat(champion.measured_at) if champion.measured_at else None
    return measured_at is None or now - measured_at > timedelta(days=max_age_days)


def _newest_builds(champions: Sequence[Champion]) -> dict[Gpu, Build]:
    builds: dict[Gpu, Build] = {}
    for one in sorted(champions, key=lambda c: (c.measured_at or "", c.generation)):
        if one.build is not None:
            builds[one.gpu] = one.build
    return builds
