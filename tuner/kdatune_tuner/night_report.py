"""The report of a night: what was planned and done, what was found, and the exit code. Its JSON is that of store/night.py."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from datetime import datetime
from enum import StrEnum

from pydantic import TypeAdapter
from pydantic import ValidationError

from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.store.night import NightRow
from kdatune_tuner.store.records import RunState
from kdatune_tuner.store.records import rfc3339

FORMAT = 1
CLEAN, FAILED, REGRESSIONS, INTERRUPTED = 0, 1, 3, 130


logger = logging.getLogger(__name__)


class ItemState(StrEnum):
    """What became of a piece of the plan. LEFT: the budget did not reach it. SKIPPED: it cannot or need not be done."""

    PLANNED = "planned"
    DONE = "done"
    FAILED = "failed"
    LEFT = "left"
    SKIPPED = "skipped"


class Kind(StrEnum):
    """What a finding is."""

    MACHINE_SLOWER = "machine_slower"
    REFERENCE_FAILED = "reference_failed"
    ENVIRONMENT_CHANGED = "environment_changed"
    CONFIG_SLOWER = "config_slower"
    CONFIG_INCORRECT = "config_incorrect"
    CONFIG_FAILED = "config_failed"
    ROLLED_BACK = "rolled_back"
    DEMAND_SERVED = "demand_served"
    PROMOTED = "promoted"
    STEP = "step"
    DAMAGED_ROWS = "damaged_rows"


@dataclass
class Item:
    """A piece of the plan. value is in points, see night_plan.py; count is how often launchers asked for the shape."""

    kind: str
    shape: Shape | None
    why: str
    value: float
    estimated_seconds: float
    count: int = 0
    state: ItemState = ItemState.PLANNED
    seconds: float | None = None
    result: str | None = None

    def to_json(self) -> Json:
        return {
            "kind": self.kind,
            "shape": None if self.shape is None else self.shape.key(),
            "why": self.why,
            "value": round(self.value, 3),
            "estimated_seconds": round(self.estimated_seconds, 3),
            "state": str(self.state),
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "result": self.result,
        }


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know. figures: numbers by name with their unit; night: of the night that found it."""

    kind: str
    text: str
    regression: bool = False
    shape: str | None = None
    figures: Json = field(default_factory=dict)
    night: int | None = None

    def to_json(self) -> Json:
        return to_json(self)


_STORED = TypeAdapter(Finding)


@dataclass
class Report:
    """A night as it is stored and shown; filled as the night goes."""

    gpu: str
    backend: str
    host: str
    build: Build
    started_at: datetime
    budget_seconds: float
    night: int = 0
    state: RunState = RunState.RUNNING
    exit_code: int | None = None
    finished_at: datetime | None = None
    spent_seconds: float = 0.0
    resumed_nights: list[int] = field(default_factory=list)
    swept_runs: list[int] = field(default_factory=list)
    reference: Json = field(default_factory=lambda: {"machine_ratio": None, "reason": "not measured yet", "points": []})
    plan: list[Item] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None

    @property
    def regressions(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.regression]

    def code(self) -> int:
        """The exit code of a night that came to its end: regressions tell more than an item that failed."""
        if self.regressions:
            return REGRESSIONS
        return FAILED if any(item.state is ItemState.FAILED for item in self.plan) else CLEAN

    def to_json(self) -> Json:
        return {
            "format": FORMAT,
            "night": self.night,
            "state": str(self.state),
            "exit_code": self.exit_code,
            "gpu": self.gpu,
            "backend": self.backend,
            "host": self.host,
            "build": to_json(self.build),
            "started_at": rfc3339(self.started_at),
            "finished_at": None if self.finished_at is None else rfc3339(self.finished_at),
            "budget_seconds": self.budget_seconds,
            "spent_seconds": round(self.spent_seconds, 3),
            "resumed_nights": self.resumed_nights,
            "swept_runs": self.swept_runs,
            "reference": self.reference,
            "plan": [item.to_json() for item in self.plan],
            "findings": [finding.to_json() for finding in self.findings],
            "error": self.error,
        }


def findings_of(row: NightRow) -> list[Finding]:
    """The findings of a stored night, to be carried over; the log names what is damaged or of another form."""
    if row.report.get("format") != FORMAT or not isinstance(row.report.get("findings"), list):
        logger.warning(
            "the report of night %d is damaged or of another kdatune; its findings are not carried over", row.id
        )
        return []
    found = []
    for number, value in enumerate(row.report["findings"]):
        try:
            found.append(_STORED.validate_json(json.dumps(value), strict=True))
        except ValidationError as error:
            logger.warning(
                "finding %d of night %d is damaged (%s); passed over", number, row.id, error.errors()[0]["msg"]
            )
    return found


def shown_report(row: NightRow) -> Json:
    """A stored night's report as it can be shown: of one that is damaged, what its row says."""
    spent_seconds = 0.0 if row.finished_at is None else (row.finished_at - row.started_at).total_seconds()
    try:
        list(text_lines(row.report))
    except (AttributeError, KeyError, TypeError, ValueError):
        return {
            "format": FORMAT,
            "night": row.id,
            "state": str(row.state),
            "exit_code": row.exit_code,
            "gpu": row.gpu_name,
            "backend": row.backend,
            "host": row.host,
            "build": None,
            "started_at": rfc3339(row.started_at),
            "finished_at": None if row.finished_at is None else rfc3339(row.finished_at),
            "budget_seconds": row.budget_seconds,
            "spent_seconds": spent_seconds,
            "resumed_nights": [],
            "swept_runs": [],
            "reference": {"machine_ratio": row.machine_ratio, "reason": "not known", "points": []},
            "plan": [],
            "findings": [],
            "error": "the stored report is damaged; this is what the database says of the night apart from it",
        }
    return row.report


def text_lines(report: Json) -> Iterator[str]:
    """A stored report for people."""
    yield (
        f"night {report['night']} on {report['gpu']} ({report['backend']}, {report['host']}), {report['started_at']}: "
        f"{_outcome(report)}; {report['spent_seconds']:.0f} s of {report['budget_seconds']:.0f} s"
    )
    yield f"  reference: {_reference(report['reference'])}"
    if report["resumed_nights"]:
        yield f"  goes on from night(s) {', '.join(map(str, report['resumed_nights']))}, cut short"
    if report["swept_runs"]:
        yield f"  {len(report['swept_runs'])} run(s) that a killed process left running are typed interrupted"
    for finding in sorted(report["findings"], key=lambda f: not f["regression"]):
        mark = "REGRESSION" if finding["regression"] else "note"
        earlier = "" if finding["night"] in (None, report["night"]) else f" (found in night {finding['night']})"
        where = "" if finding["shape"] is None else f" {finding['shape']}"
        yield f"  {mark} {finding['kind']}{where}: {finding['text']}{earlier}"
    if report["error"]:
        yield f"  ERROR: {report['error']}"
    states = Counter(item["state"] for item in report["plan"])
    told = ", ".join(f"{states[state]} {state}" for state in ItemState if states[state])
    yield f"  plan: {told or 'nothing to do: no champion is served and no launcher missed one'}"
    for item in report["plan"]:
        took = "" if item["seconds"] is None else f" ({item['seconds']:.1f} s)"
        yield f"    {item['state']} {item['kind']} {item['shape'] or ''}{took}: {item['result'] or item['why']}"


def _outcome(report: Json) -> str:
    if report["build"] is None:
        return f"{report['state']}, but its report is damaged"
    count = sum(1 for finding in report["findings"] if finding["regression"])
    told = "clean" if not count else f"{count} regression{'s' if count > 1 else ''}"
    return told if report["state"] == "done" else f"{report['state']}, {told} so far"


def _reference(reference: Json) -> str:
    ratio = reference["machine_ratio"]
    points = "; ".join(
        f"{point['shape']} {show_time(point['median_us'])}, usually {show_time(point['usual_us'])}"
        if point["outcome"] == "ok"
        else f"{point['shape']} ended {point['outcome']}"
        for point in reference["points"]
    )
    head = reference["reason"] if ratio is None else f"the machine is at {percent(ratio)} of its usual time"
    return f"{head} ({points})" if points else str(head)


def percent(ratio: float) -> str:
    """A ratio of times as a change, e.g. "+8.0 %"."""
    return f"{100.0 * (ratio - 1.0):+.1f} %"


def show_time(time_us: float | None) -> str:
    """A time for people."""
    return "not known" if time_us is None else f"{time_us:,.1f} us"
