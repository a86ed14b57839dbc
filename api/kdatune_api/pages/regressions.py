"""/trends/regressions: what became slower in the stored history, and who knows of it. One page for each finding."""

from collections.abc import Sequence
from typing import Annotated

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
from kdatune_api.pages.board import compare_path
from kdatune_api.pages.board import path_of
from kdatune_api.pages.filters import select
from kdatune_api.pages.params import Blank
from kdatune_api.pages.params import OptionalYesNo
from kdatune_api.pages.params import ViewQuery
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
from kdatune_api.problems import UNKNOWN_REGRESSION
from kdatune_api.problems import ProblemError
from kdatune_api.schemas import MAX_ID
from kdatune_api.schemas import plain_int
from kdatune_tuner.store.regressions import MAX_NOTE_CHARS
from kdatune_tuner.store.regressions import RegressionRow
from kdatune_tuner.store.regressions import RegressionState
from kdatune_tuner.store.regressions import find_regression
from kdatune_tuner.store.regressions import page_regressions

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

MAX_SHOWN = 1000
LOOK = "kdatune regressions"
STATES = tuple((state.value, state.value) for state in RegressionState)
_MARKS = {RegressionState.OPEN: "worse"}

Id = Annotated[int, BeforeValidator(plain_int), Field(ge=1, le=MAX_ID), Path(alias="id")]


class RegressionsQuery(ViewQuery):
    state: Annotated[RegressionState | None, Blank] = None
    served: OptionalYesNo = None


SPEC = Spec(
    "regressions",
    "Regressions",
    (
        Column("id", "Finding", kind="number", sortable=True),
        Column("shape", "Shape", kind="key"),
        Column("gpu", "GPU model", kind="name", sortable=True),
        Column("state", "State", sortable=True),
        Column("before_us", "Before", "µs", "number"),
        Column("now_us", "Now", "µs", "number"),
        Column(
            "change_pct", "Slower", "%", "number", sortable=True, hint="the nights after the step over those before"
        ),
        Column("began_at", "Since the night of", sortable=True),
        Column("served", "Served", hint="whether launchers are given this config"),
        Column("cause", "What changed that night", kind="prose"),
    ),
    order="-id",
    empty=Command("No config has become slower beyond the noise. Every night looks, and so does:", (LOOK,)),
)
FILTERED = Command("No finding fits these filters. Take one out, or reset them.")


@router.get("/trends/regressions")
def regressions(request: Request, query: Annotated[RegressionsQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        rows = wanted(s, query)
        is_empty = not rows and not page_regressions(s, limit=1)
    return respond(
        request,
        "regressions.html",
        query,
        here="trends",
        tables={"regressions": regression_table(rows, query, is_empty=is_empty)},
        filters=[
            select("state", "State", query.state, STATES, "not resolved"),
            select("served", "Served", query.served, (("yes", "yes"), ("no", "no")), "all"),
        ],
        min_pct=service.settings.regression_min_pct,
        min_nights=service.settings.regression_min_nights,
        days=service.settings.regression_days,
        is_empty=is_empty,
        look_command=LOOK,
    )


def wanted(s: Session, query: RegressionsQuery) -> list[RegressionRow]:
    """The findings that the filters let through, the newest first; without a filter those that are not resolved."""
    served = None if query.served is None else query.served == "yes"
    if query.state is not None:
        return page_regressions(s, state=query.state.value, served=served, newest_first=True, limit=MAX_SHOWN)
    standing = [
        row
        for state in (RegressionState.OPEN, RegressionState.ACKNOWLEDGED)
        for row in page_regressions(s, state=state.value, served=served, newest_first=True, limit=MAX_SHOWN)
    ]
    return sorted(standing, key=lambda row: -row.id)


def regression_table(rows: Sequence[RegressionRow], query: ViewQuery, *, is_empty: bool = False) -> Table:
    """Findings, each with the way to its own page."""
    spec = SPEC if is_empty or rows else Spec(SPEC.name, SPEC.title, SPEC.columns, SPEC.order, FILTERED)
    keys = {
        "id": lambda row: row.id,
        "gpu": lambda row: row.gpu_name,
        "state": lambda row: row.state.value,
        "change_pct": lambda row: row.change_pct,
        "began_at": lambda row: row.began_at,
    }
    return make_table(spec, query, ListSource(rows, lambda some: [_cells(row) for row in some], keys))


def _cells(row: RegressionRow) -> list[Cell]:
    shape_key = row.shape.key()
    href = path_of("trends", row.gpu_name, shape_key) if row.kernel == "kda" else ""
    return [
        Cell(row.id, text.integer(row.id), f"/trends/regressions/{row.id}"),
        shape_cell(shape_key, href),
        Cell(row.gpu_name),
        Cell(row.state.value, mark=_MARKS.get(row.state, "")),
        Cell(row.before_us, text.us(row.before_us)),
        Cell(row.now_us, text.us(row.now_us)),
        Cell(row.change_pct, text.number(row.change_pct), mark="worse"),
        moment_cell(row.began_at),
        Cell(row.is_served),
        Cell(row.cause),
    ]


SIDES_SPEC = Spec(
    "sides",
    "Before and after",
    (
        Column("side", "Nights"),
        Column("median_us", "Median", "µs", "number"),
        Column("measured_at", "Measured"),
        Column("measurement_id", "Measurement", kind="number"),
        Column("build_id", "Build", kind="number"),
    ),
)


@router.get("/trends/regressions/{id}")
def regression(
    request: Request, regression_id: Id, query: Annotated[ViewQuery, Query()], service: ServiceDep
) -> Response:
    with service.reading() as s:
        row = find_regression(s, regression_id)
    if row is None:
        raise ProblemError(UNKNOWN_REGRESSION, f"there is no regression {regression_id}; see /trends/regressions")
    shape_key = row.shape.key()
    is_kda = row.kernel == "kda"
    return respond(
        request,
        "regression.html",
        query,
        here="trends",
        tables={"sides": _sides(row, query)},
        row=row,
        shape_key=shape_key,
        trend_path=path_of("trends", row.gpu_name, shape_key) if is_kda else None,
        compare_path=compare_path(row.gpu_name, shape_key, f"m{row.measurement_after_id}") if is_kda else None,
        max_note_chars=MAX_NOTE_CHARS,
        command=f'kdatune regressions ack {row.id} --note "what is known"',
    )


def _sides(row: RegressionRow, query: ViewQuery) -> Table:
    sides = (
        ("up to the last fast night", row.before_us, row.last_good_at, row.measurement_before_id, row.build_before_id),
        ("from the first slow night on", row.after_us, row.began_at, row.measurement_after_id, row.build_after_id),
    )
    rows = [
        [
            Cell(side),
            Cell(median_us, text.us(median_us)),
            moment_cell(measured_at),
            Cell(measurement_id, text.integer(measurement_id)),
            Cell(build_id, text.integer(build_id)),
        ]
        for side, median_us, measured_at, measurement_id, build_id in sides
    ]
    return rows_table(SIDES_SPEC, query, rows)
