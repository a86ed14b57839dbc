"""/nights: every nightly run and its report: how the machine was, what was found, what was planned and done."""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from typing import Any

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Path
from fastapi import Query
from fastapi import Request
from fastapi import Response
from pydantic import BeforeValidator
from pydantic import Field
from sqlalchemy.orm import Session

from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.pages import text
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import read_board
from kdatune_api.pages.filters import gpu_filter
from kdatune_api.pages.params import OptionalGpu
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.state import state_of
from kdatune_api.pages.tables import Cell
from kdatune_api.pages.tables import Column
from kdatune_api.pages.tables import Command
from kdatune_api.pages.tables import ListSource
from kdatune_api.pages.tables import Spec
from kdatune_api.pages.tables import Table
from kdatune_api.pages.tables import make_table
from kdatune_api.pages.tables import moment_cell
from kdatune_api.pages.tables import rows_table
from kdatune_api.pages.tables import shape_cell
from kdatune_api.pages.web import PageRoute
from kdatune_api.pages.web import respond
from kdatune_api.problems import UNKNOWN_NIGHT
from kdatune_api.problems import ProblemError
from kdatune_api.schemas import MAX_ID
from kdatune_api.schemas import plain_int
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.store.night import NightRow
from kdatune_tuner.store.night import find_night
from kdatune_tuner.store.night import page_nights

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

MAX_SHOWN = 1000
EMPTY = Command(
    "No night was run yet. Run one, by hand or by a timer (docs/operate.md):",
    ("kdatune nightly --budget 2h", "kdatune nightly --backend replay --budget 10m"),
)
EXITS = {0: "clean", 1: "failed", 3: "regressions found", 130: "interrupted"}
_MARKS = {1: "worse", 3: "worse", 0: "better"}
_FORMAT = 1
_LARGEST = 1e300  # what a damaged report may hold beyond it is no figure; JSON knows NaN and integers of any length

Id = Annotated[int, BeforeValidator(plain_int), Field(ge=1, le=MAX_ID), Path(alias="id")]


class NightsQuery(ViewQuery):
    gpu: OptionalGpu = None


@dataclass(frozen=True)
class Report:
    """A night's report, read with care: what is not there, or not of the expected kind, is empty."""

    data: Mapping[str, Any]

    @property
    def is_known(self) -> bool:
        """Whether this code knows the report's form."""
        return self.data.get("format") == _FORMAT

    def items(self, *names: str) -> list[Mapping[str, Any]]:
        """A list of objects by its path of names."""
        value: Any = self.data
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []

    def text(self, *names: str) -> str:
        """A text by its path of names."""
        value: Any = self.data
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return "" if value is None else str(value)

    @property
    def regression_count(self) -> int:
        return sum(1 for one in self.items("findings") if one.get("regression") is True)

    @property
    def spent_seconds(self) -> float | None:
        return _number(self.data.get("spent_seconds"))


SPEC = Spec(
    "nights",
    "Nights",
    (
        Column("night", "Night", kind="number", sortable=True),
        Column("started_at", "Started", sortable=True),
        Column("gpu", "GPU model", kind="name", sortable=True),
        Column("backend", "Backend"),
        Column("state", "State", sortable=True),
        Column("result", "Result", sortable=True),
        Column("machine_ratio", "Machine", kind="number", hint="reference kernel over its usual time; 1 is as usual"),
        Column("findings", "Findings", kind="number"),
        Column("regressions", "Regressions", kind="number"),
        Column("spent_seconds", "Spent", "s", "number"),
        Column("host", "Host", kind="name"),
    ),
    order="-night",
    empty=Command("No night of this card is stored."),
)


@router.get("/nights")
def nights(request: Request, query: Annotated[NightsQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        board = read_board(s, state_of(request))
        rows = page_nights(s, gpu_name=query.gpu, limit=MAX_SHOWN)
        is_empty = not rows and not page_nights(s, limit=1)
    return respond(
        request,
        "nights.html",
        query,
        here="nights",
        tables={"nights": night_table(rows, query)},
        filters=[gpu_filter(board, query.gpu)],
        is_empty=is_empty,
        empty=EMPTY,
    )


def night_table(rows: Sequence[NightRow], query: ViewQuery) -> Table:
    """The nights, the newest first."""
    keys = {
        "night": lambda row: row.id,
        "started_at": lambda row: row.started_at,
        "gpu": lambda row: row.gpu_name,
        "state": lambda row: row.state.value,
        "result": lambda row: row.exit_code,
    }
    return make_table(SPEC, query, ListSource(rows, lambda some: [_night_cells(row) for row in some], keys))


def _night_cells(row: NightRow) -> list[Cell]:
    report = Report(row.report)
    return [
        Cell(row.id, text.integer(row.id), f"/nights/{row.id}"),
        moment_cell(row.started_at),
        Cell(row.gpu_name),
        Cell(row.backend),
        Cell(row.state.value),
        result_cell(row.exit_code),
        machine_cell(row.machine_ratio),
        Cell(len(report.items("findings"))),
        Cell(report.regression_count),
        Cell(report.spent_seconds, text.number(report.spent_seconds, 0)),
        Cell(row.host),
    ]


def result_cell(exit_code: int | None) -> Cell:
    """How the process ended, in words."""
    return Cell(EXITS.get(exit_code, f"exit {exit_code}") if exit_code is not None else None, mark=_mark(exit_code))


def machine_cell(ratio: float | None) -> Cell:
    """The reference kernel over its usual time."""
    return Cell(ratio, text.signed_pct(ratio), mark=text.trend_of(1.0 / ratio) if ratio else "")


def _mark(exit_code: int | None) -> str:
    return "" if exit_code is None else _MARKS.get(exit_code, "")


@router.get("/nights/{id}")
def night(request: Request, night_id: Id, query: Annotated[ViewQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        row, before, after = _with_neighbours(s, night_id)
    report = Report(row.report)
    tables = (_findings(report, row, query), _plan(report, row, query), _reference(report, row, query))
    return respond(
        request,
        "night.html",
        query,
        here="nights",
        tables={table.name: table for table in tables},
        row=row,
        report=report,
        result=result_cell(row.exit_code).shown,
        before=before,
        after=after,
    )


def _with_neighbours(s: Session, night_id: int) -> tuple[NightRow, int | None, int | None]:
    row = find_night(s, night_id)
    if row is None:
        raise ProblemError(UNKNOWN_NIGHT, f"there is no night {night_id}; see /nights")
    before = page_nights(s, after_id=night_id, limit=1, newest_first=True)
    after = page_nights(s, after_id=night_id, limit=1, newest_first=False)
    return row, before[0].id if before else None, after[0].id if after else None


FINDINGS_SPEC = Spec(
    "findings",
    "Findings",
    (
        Column("kind", "What"),
        Column("regression", "Regression"),
        Column("shape", "Shape", kind="key"),
        Column("text", "In words", kind="prose"),
        Column("night", "Found in night", kind="number"),
    ),
    empty=Command("Nothing was found: what is served is as it was."),
)


def _findings(report: Report, row: NightRow, query: ViewQuery) -> Table:
    rows = [
        [
            Cell(str(one.get("kind", "")).replace("_", " ")),
            Cell(one.get("regression") is True, mark="worse" if one.get("regression") is True else ""),
            _shape_cell(one.get("shape"), row.gpu_name),
            Cell(str(one.get("text", ""))),
            Cell(_integer(one.get("night"))),
        ]
        for one in report.items("findings")
    ]
    return rows_table(FINDINGS_SPEC, query, rows)


PLAN_SPEC = Spec(
    "plan",
    "Plan, in the order of work",
    (
        Column("kind", "Work"),
        Column("shape", "Shape", kind="key"),
        Column("state", "State", sortable=True),
        Column("why", "Why", kind="prose"),
        Column("result", "What came of it", kind="prose"),
        Column("seconds", "Took", "s", "number", sortable=True),
        Column("estimated_seconds", "Estimated", "s", "number", sortable=True),
        Column("value", "Value", kind="number", hint="what the plan is ordered by"),
    ),
    empty=Command("Nothing was planned: the night ended before its plan was made, or had nothing to do."),
)


def _plan(report: Report, row: NightRow, query: ViewQuery) -> Table:
    rows = [
        [
            Cell(str(one.get("kind", ""))),
            _shape_cell(one.get("shape"), row.gpu_name),
            Cell(str(one.get("state", "")), mark="worse" if one.get("state") == "failed" else ""),
            Cell(str(one.get("why") or "")),
            Cell(str(one.get("result") or "")),
            _number_cell(one.get("seconds"), 1),
            _number_cell(one.get("estimated_seconds"), 1),
            _number_cell(one.get("value"), 2),
        ]
        for one in report.items("plan")
    ]
    return rows_table(PLAN_SPEC, query, rows)


REFERENCE_SPEC = Spec(
    "reference",
    "Reference kernel",
    (
        Column("shape", "Shape", kind="key"),
        Column("outcome", "Outcome"),
        Column("median_us", "Tonight", "µs", "number"),
        Column("usual_us", "Usually", "µs", "number"),
        Column("ratio", "Tonight over usual", kind="number"),
        Column("detail", "Detail", kind="prose"),
    ),
    empty=Command("The reference kernel was not measured."),
)


def _reference(report: Report, row: NightRow, query: ViewQuery) -> Table:
    rows = [
        [
            _shape_cell(one.get("shape"), row.gpu_name),
            Cell(str(one.get("outcome", ""))),
            _number_cell(one.get("median_us"), 1),
            _number_cell(one.get("usual_us"), 1),
            machine_cell(_number(one.get("ratio"))),
            Cell(str(one.get("detail") or "")),
        ]
        for one in report.items("reference", "points")
    ]
    return rows_table(REFERENCE_SPEC, query, rows)


def _shape_cell(key: Any, gpu_name: str) -> Cell:
    """A shape, with the way to its config where it is one of kernel kda."""
    if not isinstance(key, str) or not key:
        return Cell(None)
    try:
        return shape_cell(key, path_of("configs", gpu_name, parse_shape(key).key()))
    except ShapeError:
        return shape_cell(key)


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _LARGEST:
        return None
    return float(value)


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST else None


def _number_cell(value: Any, digits: int) -> Cell:
    number = _number(value)
    return Cell(number, text.number(number, digits))
