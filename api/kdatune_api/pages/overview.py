"""/: speed-up of champion over default for every shape and GPU model, and what needs attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from typing import Literal

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response
from sqlalchemy.orm import Session

from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.pages import text
from kdatune_api.pages.board import Board
from kdatune_api.pages.board import Card
from kdatune_api.pages.board import Entry
from kdatune_api.pages.board import geomean
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import read_board
from kdatune_api.pages.filters import Filter
from kdatune_api.pages.filters import search_filters
from kdatune_api.pages.filters import select
from kdatune_api.pages.params import Blank
from kdatune_api.pages.params import SearchQuery
from kdatune_api.pages.state import PagesState
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
from kdatune_api.pages.tables import time_cell
from kdatune_api.pages.web import PageRoute
from kdatune_api.pages.web import respond
from kdatune_tuner.store.dashboard import Wanted
from kdatune_tuner.store.dashboard import wanted_keys
from kdatune_tuner.store.night import NightRow
from kdatune_tuner.store.night import page_nights
from kdatune_tuner.store.regressions import RegressionState
from kdatune_tuner.store.regressions import count_regressions

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

WORST = 5
DEMAND_ROWS = 10
MAX_CARD_COLUMNS = 8
_TONES = ((1.20, "f3"), (1.05, "f2"), (1.0 + text.SAME_BELOW, "f1"), (1.0 - text.SAME_BELOW, "same"), (0.95, "s1"))

Status = Literal["stale", "slower", "default", "unknown"]
STATUSES = (
    ("stale", "stale"),
    ("slower", "slower than the default"),
    ("unknown", "default not measured"),
    ("default", "rolled back to the default"),
)
EMPTY = Command(
    "Nothing is tuned yet. Tune a shape on a machine with a card, or look at the shipped recording:",
    ("kdatune tune --shape N=1,H=96,T=8192", "kdatune tune --backend replay"),
)
NO_MATCH = Command("No key fits these filters. Take one out, or reset them.")


class OverviewQuery(SearchQuery):
    status: Annotated[Status | None, Blank] = None


@dataclass(frozen=True)
class Overview:
    """What the page shows. cards: the columns of the heat-map; more_cards: those that do not fit.

    demand: what launchers missed and is not served yet, most wanted first. nightly: the last night. regression_count: open
    findings.
    """

    board: Board
    entries: Sequence[Entry]
    cards: tuple[Card, ...]
    more_cards: tuple[Card, ...]
    demand: Sequence[Wanted]
    nightly: NightRow | None
    regression_count: int
    filters: Sequence[Filter]

    @property
    def geomean(self) -> tuple[float | None, int]:
        return geomean(self.entries)

    @property
    def stale_count(self) -> int:
        return sum(1 for entry in self.entries if entry.stale_reason)

    @property
    def untuned_count(self) -> int:
        """Pairs of a shape and a card of the heat-map that nothing is served for."""
        shapes = {entry.row.shape_key for entry in self.entries}
        return len(shapes) * (len(self.cards) + len(self.more_cards)) - len(self.entries)


@router.get("/")
def overview(request: Request, query: Annotated[OverviewQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        found = gather(s, state_of(request), query)
    tables = (heat_map(found, query), worst(found, query), wanted(found, query))
    return respond(
        request,
        "overview.html",
        query,
        here="overview",
        tables={table.name: table for table in tables},
        overview=found,
        filters=found.filters,
        empty=EMPTY,
    )


def gather(s: Session, state: PagesState, query: OverviewQuery) -> Overview:
    """Everything the page shows, from the store."""
    board = read_board(s, state)
    entries = [entry for entry in board.chosen(query) if query.status is None or has_status(entry, query.status)]
    used = {entry.card for entry in entries}
    cards = [card for card in board.cards if card in used]
    demand = [one for one in wanted_keys(s, query.gpu) if not board.serves(one.gpu_name, one.shape_key)]
    filters = [*search_filters(board, query), select("status", "Status", query.status, STATUSES, "all")]
    return Overview(
        board,
        entries,
        tuple(cards[:MAX_CARD_COLUMNS]),
        tuple(cards[MAX_CARD_COLUMNS:]),
        demand,
        next(iter(page_nights(s, limit=1)), None),
        count_regressions(s, RegressionState.OPEN),
        filters,
    )


def has_status(entry: Entry, status: Status) -> bool:
    """Whether the status filter lets the entry through."""
    speedup = entry.speedup
    return {
        "stale": entry.stale_reason is not None,
        "slower": speedup is not None and speedup < 1.0 - text.SAME_BELOW,
        "unknown": entry.row.config_hash is not None and speedup is None,
        "default": entry.row.config_hash is None,
    }[status]


def heat_map(found: Overview, query: OverviewQuery) -> Table:
    """One row a shape, one column a GPU model; each cell a number with its arrow, and a word where it is stale."""
    columns = [Column("shape", "Shape", kind="key", sortable=True)]
    columns += [
        Column(_column_key(number), card.name, kind="number", sortable=True, hint=f"{card.gpu.sm_count} SMs")
        for number, card in enumerate(found.cards)
    ]
    shapes: dict[str, dict[Card, Entry]] = {}
    for entry in found.entries:
        shapes.setdefault(entry.row.shape_key, {})[entry.card] = entry
    records = list(shapes.items())
    keys = {
        _column_key(number): (lambda record, card=card: _speedup(record[1].get(card)))
        for number, card in enumerate(found.cards)
    }
    spec = Spec("heatmap", "Speed-up of the champion over the default", tuple(columns), empty=NO_MATCH)
    return make_table(
        spec,
        query,
        ListSource(
            records,
            lambda some: [_heat_row(key, by_card, found.cards) for key, by_card in some],
            keys | {"shape": lambda record: next(iter(record[1].values())).order},
        ),
    )


def _column_key(number: int) -> str:
    return f"gpu_{number + 1}_speedup"


def _speedup(entry: Entry | None) -> float | None:
    return None if entry is None else entry.speedup


def _heat_row(shape_key: str, by_card: dict[Card, Entry], cards: Sequence[Card]) -> list[Cell]:
    cells = [shape_cell(shape_key)]
    for card in cards:
        entry = by_card.get(card)
        if entry is None:
            cells.append(Cell(None, text.NONE, tone="none", title="untuned"))
            continue
        cells.append(heat_cell(entry))
    return cells


def heat_cell(entry: Entry) -> Cell:
    """One cell of the heat-map."""
    ratio = entry.speedup
    href = path_of("configs", entry.card.name, entry.row.shape_key)
    stale = entry.stale_reason or ""
    tag = "stale" if stale else ""
    if entry.row.config_hash is None:
        return Cell(None, "default", href, tone="none", title="rolled back: the default config is served")
    note = f"{text.us(entry.row.measured_us)} µs"
    if ratio is None:
        return Cell(
            None, "tuned", href, note=note, tone="unknown", tag=tag, title=stale or "the default was not measured"
        )
    title = stale or ("the time is estimated as the sum of its parts" if entry.row.estimated else "")
    return Cell(ratio, text.speedup(ratio), href, text.trend_of(ratio), note, tone_of(ratio), tag, title)


def tone_of(ratio: float) -> str:
    """The shade of a speed-up."""
    return next((tone for limit, tone in _TONES if ratio >= limit), "s2")


WORST_SPEC = Spec(
    "worst",
    f"Worst {WORST}",
    (
        Column("shape", "Shape", kind="key"),
        Column("gpu", "GPU model", kind="name"),
        Column("speedup", "Speed-up", kind="number"),
        Column("measured_us", "Champion", "µs", "number"),
        Column("default_us", "Default", "µs", "number"),
    ),
    empty=Command("No speed-up is known: the default of no key was measured."),
)


def worst(found: Overview, query: OverviewQuery) -> Table:
    """The keys whose champion gains least."""
    known = sorted((e for e in found.entries if e.speedup is not None), key=lambda e: e.speedup or 0.0)
    rows = [
        [
            shape_cell(e.row.shape_key, path_of("configs", e.card.name, e.row.shape_key)),
            Cell(e.card.name),
            Cell(e.speedup, text.speedup(e.speedup), mark=text.trend_of(e.speedup)),
            time_cell(e.row.measured_us, estimated=e.row.estimated),
            Cell(e.row.default_us, text.us(e.row.default_us)),
        ]
        for e in known[:WORST]
    ]
    return rows_table(WORST_SPEC, query, rows)


DEMAND_SPEC = Spec(
    "demand",
    "Demand not yet served",
    (
        Column("shape", "Shape", kind="key"),
        Column("gpu", "GPU model", kind="name"),
        Column("miss_count", "Misses", kind="number", sortable=True),
        Column("last_seen_at", "Last seen", sortable=True),
    ),
    order="-miss_count",
    empty=Command("Every key that launchers asked for has a champion."),
)


def wanted(found: Overview, query: OverviewQuery) -> Table:
    """What launchers missed most."""
    rows = [
        [
            shape_cell(w.shape_key),
            Cell(w.gpu_name),
            Cell(w.miss_count, text.integer(w.miss_count)),
            moment_cell(w.last_seen_at),
        ]
        for w in found.demand[:DEMAND_ROWS]
    ]
    return rows_table(DEMAND_SPEC, query, rows)
