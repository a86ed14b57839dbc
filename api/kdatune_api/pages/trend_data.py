"""How the time of what is served went from night to night: points, what changed, where a regression began."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from datetime import UTC
from datetime import date

from sqlalchemy.orm import Session

from kdatune_kernels.spec import Build
from kdatune_tuner.store.dashboard_lists import Change
from kdatune_tuner.store.dashboard_lists import Timing
from kdatune_tuner.store.queries import find_build
from kdatune_tuner.store.regressions import RegressionRow

_WATCHED = ("driver", "triton", "ptxas", "cuda", "torch", "kernel_hash", "protocol")


@dataclass(frozen=True)
class Night:
    """The last measurement, of one UTC day, of the config that was served at its end.

    ratio: time over that of the night before. changes: what is not as it was the night before, for people.
    finding: the regression of this config that began in this night.
    """

    day: date
    timing: Timing
    ratio: float | None = None
    changes: tuple[str, ...] = ()
    finding: RegressionRow | None = None


class Builds:
    """Builds by id, each read once."""

    def __init__(self, s: Session) -> None:
        self._s = s
        self._found: dict[int, Build | None] = {}

    def get(self, build_id: int) -> Build | None:
        if build_id not in self._found:
            self._found[build_id] = find_build(self._s, build_id)
        return self._found[build_id]


def nights(
    timings: Iterable[Timing],
    changes: Sequence[Change],
    default_hash: str,
    builds: Builds,
    findings: Iterable[RegressionRow] = (),
) -> list[Night]:
    """The nights of one key, oldest first.

    Args:
        timings: of the key, oldest first.
        changes: what was served from when on, oldest first.
        default_hash: of the config that runs where nothing, or the default, is served.
        findings: regressions of the key.
    """
    began = {(one.config_hash, one.began_at.astimezone(UTC).date()): one for one in findings}
    of_day: dict[date, list[Timing]] = {}
    for timing in timings:
        of_day.setdefault(timing.measured_at.astimezone(UTC).date(), []).append(timing)
    found: list[Night] = []
    for day in sorted(of_day):
        served = default_hash
        for change in changes:
            if change.decided_at.astimezone(UTC).date() <= day:
                served = change.config_hash or default_hash
        mine = [timing for timing in of_day[day] if timing.config_hash == served]
        if mine:
            before = found[-1] if found else None
            found.append(_night(day, mine[-1], before, builds, began.get((served, day))))
    return found


def _night(day: date, timing: Timing, before: Night | None, builds: Builds, finding: RegressionRow | None) -> Night:
    if before is None:
        return Night(day, timing, finding=finding)
    ratio = timing.median_us / before.timing.median_us
    return Night(day, timing, ratio, tuple(_changes(before.timing, timing, builds)), finding)


def _changes(before: Timing, now: Timing, builds: Builds) -> Iterable[str]:
    if before.config_hash != now.config_hash:
        yield f"config {now.config_hash[:8]} instead of {before.config_hash[:8]}"
    if before.estimated != now.estimated:
        yield "estimated, measured before" if now.estimated else "measured, estimated before"
    if before.build_id != now.build_id:
        yield from build_changes(builds.get(before.build_id), builds.get(now.build_id))


def build_changes(before: Build | None, now: Build | None) -> list[str]:
    """What differs between two builds, for people."""
    if before is None or now is None:
        return []
    names = [f.name for f in fields(Build) if f.name in _WATCHED]
    pairs = [(name, getattr(before, name), getattr(now, name)) for name in names]
    return [f"{name.replace('_', ' ')} {new[:12]} instead of {old[:12]}" for name, old, new in pairs if old != new]


def by_key(rows: Iterable[Timing]) -> Mapping[tuple[int, int], list[Timing]]:
    """Timings by (gpu id, problem id)."""
    found: dict[tuple[int, int], list[Timing]] = {}
    for row in rows:
        found.setdefault((row.gpu_id, row.problem_id), []).append(row)
    return found
