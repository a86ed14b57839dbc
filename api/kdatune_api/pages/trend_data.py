"""How the time of what is served went from night to night: points, changes, steps, regressions."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from datetime import UTC
from datetime import date
from datetime import datetime
from datetime import timedelta

from sqlalchemy.orm import Session

from kdatune_api.pages.board import Board
from kdatune_api.pages.board import Entry
from kdatune_kernels.spec import Build
from kdatune_tuner.store.dashboard_lists import Change
from kdatune_tuner.store.dashboard_lists import Timing
from kdatune_tuner.store.dashboard_lists import timings_of
from kdatune_tuner.store.queries import find_build

STEP_PCT = 2.0
"""A change of less is no step, however steady the times: medians of one config differ by about one percent a night."""

REGRESSION_DAYS = 30
_WATCHED = ("driver", "triton", "ptxas", "cuda", "torch", "kernel_hash", "protocol")


@dataclass(frozen=True)
class Night:
    """The last measurement, of one UTC day, of the config that was served at its end.

    ratio: time over that of the night before. step: "slower", "faster" or "" (within the noise).
    changes: what is not as it was the night before, for people.
    """

    day: date
    timing: Timing
    ratio: float | None = None
    step: str = ""
    changes: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        """Slower beyond the noise with the same config: a new config that is slower was promoted for a reason."""
        return self.step == "slower" and not any(change.startswith("config") for change in self.changes)


@dataclass(frozen=True)
class Regression:
    """A served config that is slower than it was. since: the night it became so; at_best_us: its time before."""

    entry: Entry
    since: date
    before_us: float
    now_us: float
    last: date
    changes: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.now_us / self.before_us


class Builds:
    """Builds by id, each read once."""

    def __init__(self, s: Session) -> None:
        self._s = s
        self._found: dict[int, Build | None] = {}

    def get(self, build_id: int) -> Build | None:
        if build_id not in self._found:
            self._found[build_id] = find_build(self._s, build_id)
        return self._found[build_id]


def nights(timings: Iterable[Timing], changes: Sequence[Change], default_hash: str, builds: Builds) -> list[Night]:
    """The nights of one key, oldest first.

    Args:
        timings: of the key, oldest first.
        changes: what was served from when on, oldest first.
        default_hash: of the config that runs where nothing, or the default, is served.
    """
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
            found.append(_night(day, mine[-1], found[-1] if found else None, builds))
    return found


def _night(day: date, timing: Timing, before: Night | None, builds: Builds) -> Night:
    if before is None:
        return Night(day, timing)
    ratio = timing.median_us / before.timing.median_us
    return Night(day, timing, ratio, step_of(before.timing, timing), tuple(_changes(before.timing, timing, builds)))


def step_of(before: Timing, now: Timing) -> str:
    """ "slower" or "faster" where the times lie apart beyond their spread and STEP_PCT, else ""."""
    ratio = now.median_us / before.median_us
    if abs(ratio - 1.0) * 100.0 < STEP_PCT:
        return ""
    if ratio > 1.0:
        return "slower" if (now.p20_us or now.median_us) > (before.p80_us or before.median_us) else ""
    return "faster" if (now.p80_us or now.median_us) < (before.p20_us or before.median_us) else ""


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


def regressions(s: Session, board: Board) -> list[Regression]:
    """Served configs that became slower and are so still, the worst first. Looks at the last REGRESSION_DAYS."""
    by_id = {(e.row.gpu_id, e.row.problem_id): e for e in board.entries}
    since = datetime.now(UTC) - timedelta(days=REGRESSION_DAYS)
    groups: dict[tuple[int, int], list[Timing]] = {}
    gpu_ids = sorted({e.row.gpu_id for e in board.entries})
    problem_ids = sorted({e.row.problem_id for e in board.entries})
    served = {(key, e.row.config_hash) for key, e in by_id.items()}
    for timing in timings_of(s, since, gpu_ids, problem_ids, {config_hash for _, config_hash in served if config_hash}):
        key = (timing.gpu_id, timing.problem_id)
        if (key, timing.config_hash) in served:
            groups.setdefault(key, []).append(timing)
    builds = Builds(s)
    found = [
        regression
        for key, timings in groups.items()
        if key in by_id and len(timings) > 1 and (regression := regression_of(by_id[key], timings, builds)) is not None
    ]
    return sorted(found, key=lambda one: -one.ratio)


def regression_of(entry: Entry, timings: Sequence[Timing], builds: Builds) -> Regression | None:
    """The last step up of one config that it has not come back from; None where there is none."""
    steady = [Change(timings[0].gpu_id, timings[0].problem_id, timings[0].config_hash, timings[0].measured_at)]
    course = nights(timings, steady, timings[0].config_hash, builds)
    last = course[-1] if course else None
    for index in range(len(course) - 1, 0, -1):
        night, before = course[index], course[index - 1]
        if night.is_regression and last is not None:
            if step_of(before.timing, last.timing) != "slower":
                return None  # it came back
            return Regression(entry, night.day, before.timing.median_us, last.timing.median_us, last.day, night.changes)
    return None


def by_key(rows: Iterable[Timing]) -> Mapping[tuple[int, int], list[Timing]]:
    """Timings by (gpu id, problem id)."""
    found: dict[tuple[int, int], list[Timing]] = {}
    for row in rows:
        found.setdefault((row.gpu_id, row.problem_id), []).append(row)
    return found
