"""/configs: every champion in one list, with what it gains and how sure that is."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response
from sqlalchemy.orm import Session

from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.pages import text
from kdatune_api.pages.board import Entry
from kdatune_api.pages.board import geomean
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import read_board
from kdatune_api.pages.filters import search_filters
from kdatune_api.pages.filters import select
from kdatune_api.pages.other_kernels import others_table
from kdatune_api.pages.overview import EMPTY
from kdatune_api.pages.overview import NO_MATCH
from kdatune_api.pages.overview import STATUSES
from kdatune_api.pages.overview import OverviewQuery
from kdatune_api.pages.overview import has_status
from kdatune_api.pages.state import state_of
from kdatune_api.pages.tables import Cell
from kdatune_api.pages.tables import Column
from kdatune_api.pages.tables import ListSource
from kdatune_api.pages.tables import Spec
from kdatune_api.pages.tables import Table
from kdatune_api.pages.tables import make_table
from kdatune_api.pages.tables import moment_cell
from kdatune_api.pages.tables import shape_cell
from kdatune_api.pages.tables import time_cell
from kdatune_api.pages.web import PageRoute
from kdatune_api.pages.web import respond
from kdatune_tuner.store.dashboard import measurements_by_id
from kdatune_tuner.store.dashboard import promotions_by_id

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

SPEC = Spec(
    "configs",
    "Champions",
    (
        Column("shape", "Shape", kind="key", sortable=True),
        Column("gpu", "GPU model", kind="name", sortable=True),
        Column("state", "State", sortable=True),
        Column("measured_us", "Champion", "µs", "number", sortable=True, hint="median"),
        Column("p20_us", "p20", "µs", "number"),
        Column("p80_us", "p80", "µs", "number"),
        Column("default_us", "Default", "µs", "number", sortable=True),
        Column("speedup", "Speed-up", kind="number", sortable=True, hint="default over champion"),
        Column("gain_low", "Gain from", kind="number", hint="interval of the decision's gain over its baseline"),
        Column("gain_high", "to", kind="number"),
        Column("measured_at", "Measured", sortable=True),
        Column("generation", "Generation", kind="number", sortable=True),
        Column("stale_reason", "Why stale", kind="long"),
    ),
    order="shape",
    empty=NO_MATCH,
)


@router.get("/configs")
def configs(request: Request, query: Annotated[OverviewQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        board = read_board(s, state_of(request))
        entries = [e for e in board.chosen(query) if query.status is None or has_status(e, query.status)]
        table = champions_table(s, entries, query)
        others = others_table(s, query.gpu, query)
    return respond(
        request,
        "configs.html",
        query,
        here="configs",
        tables={"configs": table, "others": others},
        filters=[*search_filters(board, query), select("status", "Status", query.status, STATUSES, "all")],
        is_empty=not board.entries,
        empty=EMPTY,
        geomean=geomean(entries),
    )


def champions_table(s: Session, entries: Sequence[Entry], query: OverviewQuery) -> Table:
    """The list. What only the shown rows need is read for them alone."""

    def make(some: Sequence[Entry]) -> list[list[Cell]]:
        promotions = promotions_by_id(s, [e.row.promotion_id for e in some])
        measured = measurements_by_id(s, [p.measurement_id for p in promotions.values()])
        rows = []
        for e in some:
            promotion = promotions.get(e.row.promotion_id)  # None: its row is damaged
            measurement = measured.get(promotion.measurement_id or 0) if promotion else None
            gain_low, gain_high = (promotion.gain_low, promotion.gain_high) if promotion else (None, None)
            p20, p80 = (measurement.p20_us, measurement.p80_us) if measurement else (None, None)
            rows.append(
                [
                    shape_cell(e.row.shape_key, path_of("configs", e.card.name, e.row.shape_key)),
                    Cell(e.card.name),
                    _state_cell(e, is_damaged=promotion is None),
                    time_cell(e.row.measured_us, estimated=e.row.estimated),
                    Cell(p20, text.us(p20)),
                    Cell(p80, text.us(p80)),
                    Cell(e.row.default_us, text.us(e.row.default_us)),
                    Cell(e.speedup, text.speedup(e.speedup), mark=text.trend_of(e.speedup)),
                    Cell(gain_low, text.speedup(gain_low)),
                    Cell(gain_high, text.speedup(gain_high)),
                    moment_cell(e.row.measured_at),
                    Cell(e.row.generation, text.integer(e.row.generation)),
                    Cell(e.stale_reason, e.stale_reason or ""),
                ]
            )
        return rows

    keys = {
        "shape": lambda e: e.order,
        "gpu": lambda e: (e.card.name, e.order),
        "measured_us": lambda e: e.row.measured_us,
        "default_us": lambda e: e.row.default_us,
        "speedup": lambda e: e.speedup,
        "state": lambda e: (e.status, e.order),
        "measured_at": lambda e: e.row.measured_at,
        "generation": lambda e: e.row.generation,
    }
    return make_table(SPEC, query, ListSource(entries, make, keys))


def _state_cell(entry: Entry, *, is_damaged: bool) -> Cell:
    if is_damaged:
        return Cell("damaged", "", tag="damaged", title="its row cannot be read, so it is not served: see the log")
    return Cell(entry.status, "", tag="stale") if entry.status == "stale" else Cell(entry.status)
