"""/trends: median per night and key, what changed when, and what became slower."""

from collections.abc import Sequence
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from typing import Annotated
from typing import Literal
from urllib.parse import urlencode

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response
from fastapi.responses import RedirectResponse
from sqlalchemy.orm import Session

from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.pages import text
from kdatune_api.pages.board import Card
from kdatune_api.pages.board import Entry
from kdatune_api.pages.board import compare_path
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import read_board
from kdatune_api.pages.config import tune_command
from kdatune_api.pages.filters import search_filters
from kdatune_api.pages.filters import select
from kdatune_api.pages.overview import EMPTY
from kdatune_api.pages.overview import NO_MATCH
from kdatune_api.pages.params import Blank
from kdatune_api.pages.params import SearchQuery
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.params import shape_in_path
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
from kdatune_api.pages.trend_data import Builds
from kdatune_api.pages.trend_data import Night
from kdatune_api.pages.trend_data import by_key
from kdatune_api.pages.trend_data import nights
from kdatune_api.pages.web import PageRoute
from kdatune_api.pages.web import respond
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.store.dashboard import find_problem
from kdatune_tuner.store.dashboard_lists import changes
from kdatune_tuner.store.dashboard_lists import timings
from kdatune_tuner.store.regressions import RegressionRow
from kdatune_tuner.store.regressions import RegressionState
from kdatune_tuner.store.regressions import page_regressions

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

DAYS = (("14", "14 days"), ("30", "30 days"), ("90", "90 days"))
_TUNE_AGAIN = Command("A night is added by every tuning run of the day:", ("kdatune tune",))


class TrendQuery(ViewQuery):
    days: Annotated[Literal["14", "30", "90"] | None, Blank] = None


LIST_SPEC = Spec(
    "trends",
    "Keys",
    (
        Column("shape", "Shape", kind="key", sortable=True),
        Column("gpu", "GPU model", kind="name", sortable=True),
        Column("median_us", "Last night", "µs", "number", sortable=True, hint="median of what is served"),
        Column("ratio", "Over the night before", kind="number", hint="1 is equal, above 1 is slower"),
        Column("regression", "Open regression"),
        Column("nights", "Nights", kind="number"),
        Column("course", "Course"),
        Column("last_at", "Last measured", sortable=True),
    ),
    order="shape",
    empty=NO_MATCH,
)


@router.get("/trends")
def trends(request: Request, query: Annotated[SearchQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        board = read_board(s, state_of(request))
        entries = board.chosen(query)
        table = key_table(s, entries, query)
    return respond(
        request,
        "trends.html",
        query,
        here="trends",
        tables={"trends": table},
        filters=search_filters(board, query),
        is_empty=not board.entries,
        empty=EMPTY,
    )


def key_table(s: Session, entries: Sequence[Entry], query: SearchQuery) -> Table:
    """The keys. Their nights are read for the shown rows alone."""

    def make(some: Sequence[Entry]) -> list[list[Cell]]:
        courses = courses_of(s, some)
        found = page_regressions(s, kernel="kda", state=RegressionState.OPEN.value, limit=1000)
        is_open = {(row.gpu_id, row.problem_id): row for row in found}
        return [
            _key_cells(e, courses[e.card, e.row.shape_key], is_open.get((e.row.gpu_id, e.row.problem_id))) for e in some
        ]

    keys = {
        "shape": lambda e: e.order,
        "gpu": lambda e: (e.card.name, e.order),
        "median_us": lambda e: e.row.measured_us,
        "last_at": lambda e: e.row.measured_at,
    }
    return make_table(LIST_SPEC, query, ListSource(entries, make, keys))


def courses_of(s: Session, entries: Sequence[Entry]) -> dict[tuple[Card, str], list[Night]]:
    """The nights of some keys."""
    gpu_ids = sorted({gpu_id for e in entries for gpu_id in e.card.ids})
    problem_ids = sorted({e.row.problem_id for e in entries})
    measured = by_key(timings(s, gpu_ids, problem_ids))
    served = changes(s, gpu_ids, problem_ids)
    builds = Builds(s)
    found = {}
    for e in entries:
        mine = [t for gpu_id in e.card.ids for t in measured.get((gpu_id, e.row.problem_id), ())]
        of_key = [c for c in served if c.problem_id == e.row.problem_id and c.gpu_id in e.card.ids]
        default = digest(default_config(parse_shape(e.row.shape_key), e.card.gpu))
        found[e.card, e.row.shape_key] = nights(sorted(mine, key=lambda t: t.id), of_key, default, builds)
    return found


def _key_cells(entry: Entry, course: Sequence[Night], finding: RegressionRow | None) -> list[Cell]:
    last = course[-1] if course else None
    median_us = last.timing.median_us if last else entry.row.measured_us
    return [
        shape_cell(entry.row.shape_key, path_of("trends", entry.card.name, entry.row.shape_key)),
        Cell(entry.card.name),
        Cell(median_us, text.us(median_us)),
        ratio_cell(last.ratio if last else None),
        finding_cell(finding),
        Cell(len(course)),
        Cell("", spark=tuple(night.timing.median_us for night in course[-30:])),
        moment_cell(last.timing.measured_at if last else entry.row.measured_at),
    ]


def finding_cell(finding: RegressionRow | None) -> Cell:
    """A regression, with the way to its page; nothing where there is none."""
    if finding is None:
        return Cell(None, "")
    return Cell(finding.id, f"{finding.change_pct:+.1f} %", f"/trends/regressions/{finding.id}", "worse")


def ratio_cell(ratio: float | None) -> Cell:
    """A time over an earlier one."""
    return Cell(ratio, text.signed_pct(ratio), mark=text.trend_of(1 / ratio) if ratio else "")


@router.get("/trends/{gpu:path}/{shape}", response_model=None)
def trend(
    request: Request, gpu: str, shape: str, query: Annotated[TrendQuery, Query()], service: ServiceDep
) -> Response:
    wanted = shape_in_path(shape)
    if wanted.key() != shape:
        return RedirectResponse(path_of("trends", gpu, wanted.key()), status_code=308)
    with service.reading() as s:
        card = read_board(s, state_of(request)).card(gpu)
        course = course_of(s, card, wanted, query.days)
    return respond(
        request,
        "trend.html",
        query,
        here="trends",
        tables={"nights": night_table(card, wanted, course, query)},
        card=card,
        shape=wanted,
        course=course,
        filters=[select("days", "Time", query.days, DAYS, "all")],
        chart_query=urlencode(
            {"gpu": card.name, "shape": wanted.key(), **({"days": query.days} if query.days else {})}
        ),
        tune_command=tune_command(wanted),
    )


def course_of(s: Session, card: Card, shape: Shape, days: str | None) -> list[Night]:
    """The nights of one key, of the last days where asked for."""
    problem_id = find_problem(s, "kda", shape)
    if problem_id is None:
        return []
    found = nights(
        timings(s, card.ids, [problem_id]),
        changes(s, card.ids, [problem_id]),
        digest(default_config(shape, card.gpu)),
        Builds(s),
        page_regressions(s, gpu_name=card.name, kernel="kda", shape=shape, limit=1000),
    )
    if days is None:
        return found
    first = (datetime.now(UTC) - timedelta(days=int(days))).date()
    return [night for night in found if night.day >= first]


NIGHTS_SPEC = Spec(
    "nights",
    "Nights",
    (
        Column("night", "Night", kind="name", sortable=True),
        Column("median_us", "Median", "µs", "number", sortable=True),
        Column("p20_us", "p20", "µs", "number"),
        Column("p80_us", "p80", "µs", "number"),
        Column("ratio", "Over the night before", kind="number", sortable=True),
        Column("regression", "Regression", hint="that began in this night"),
        Column("changes", "What changed", kind="prose"),
        Column("config_hash", "Config", kind="code"),
        Column("measurement_id", "Measurement", kind="number"),
    ),
    order="-night",
    empty=_TUNE_AGAIN,
)


def night_table(card: Card, shape: Shape, course: Sequence[Night], query: ViewQuery) -> Table:
    """The nights, the newest first."""
    rows = [
        [
            Cell(night.day.isoformat()),
            Cell(
                night.timing.median_us,
                text.us(night.timing.median_us),
                note="estimated" if night.timing.estimated else "",
            ),
            Cell(night.timing.p20_us, text.us(night.timing.p20_us)),
            Cell(night.timing.p80_us, text.us(night.timing.p80_us)),
            ratio_cell(night.ratio),
            finding_cell(night.finding),
            Cell("; ".join(night.changes)),
            Cell(night.timing.config_hash),
            Cell(
                night.timing.id,
                text.integer(night.timing.id),
                compare_path(card.name, shape.key(), f"m{night.timing.id}"),
            ),
        ]
        for night in course
    ]
    return rows_table(NIGHTS_SPEC, query, rows)
