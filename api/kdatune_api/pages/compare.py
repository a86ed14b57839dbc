"""/compare: two configs, two GPU models or two dates, every number with its difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from datetime import UTC
from datetime import date
from datetime import datetime
from datetime import time
from statistics import geometric_mean
from typing import Annotated
from typing import Any

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response
from pydantic import StringConstraints
from sqlalchemy.orm import Session

from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.pages import text
from kdatune_api.pages.board import Board
from kdatune_api.pages.board import Entry
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import read_board
from kdatune_api.pages.config import ratio_cell
from kdatune_api.pages.filters import Filter
from kdatune_api.pages.filters import select
from kdatune_api.pages.overview import EMPTY
from kdatune_api.pages.params import Blank
from kdatune_api.pages.params import OptionalDay
from kdatune_api.pages.params import OptionalGpu
from kdatune_api.pages.params import OptionalShape
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.profile_data import gather as gather_profiles
from kdatune_api.pages.sides import NUMBERS
from kdatune_api.pages.sides import STAGES
from kdatune_api.pages.sides import KeyFacts
from kdatune_api.pages.sides import Side
from kdatune_api.pages.sides import field_rows
from kdatune_api.pages.sides import provenance_rows
from kdatune_api.pages.state import state_of
from kdatune_api.pages.tables import Cell
from kdatune_api.pages.tables import Column
from kdatune_api.pages.tables import Command
from kdatune_api.pages.tables import ListSource
from kdatune_api.pages.tables import Spec
from kdatune_api.pages.tables import Table
from kdatune_api.pages.tables import make_table
from kdatune_api.pages.tables import rows_table
from kdatune_api.pages.tables import shape_cell
from kdatune_api.pages.tables import time_cell
from kdatune_api.pages.web import PageRoute
from kdatune_api.pages.web import respond
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.ncu.metrics import METRICS
from kdatune_tuner.ncu.metrics import Counters

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

As = Annotated[
    Annotated[str, StringConstraints(pattern=r"^(champion|default|previous|m[1-9][0-9]{0,8})$")] | None, Blank
]
_MAX_SUGGESTIONS = 50
_ROLES = (("champion", "champion"), ("default", "default"), ("previous", "previous"))


class CompareQuery(ViewQuery):
    """Two sides. as_: champion, default, previous, or m and the id of a measurement. on_: as of the end of that day.

    What is left out of side B is as in side A; without a shape, every shape of two GPU models is compared.
    """

    gpu_a: OptionalGpu = None
    shape_a: OptionalShape = None
    as_a: As = None
    on_a: OptionalDay = None
    gpu_b: OptionalGpu = None
    shape_b: OptionalShape = None
    as_b: As = None
    on_b: OptionalDay = None


@dataclass(frozen=True)
class Pair:
    """Both sides, and the counters of their stages where they are profiled."""

    a: Side
    b: Side
    counters: dict[str, tuple[Counters, Counters]]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.a, self.b


@router.get("/compare")
def compare(request: Request, query: Annotated[CompareQuery, Query()], service: ServiceDep) -> Response:
    tables: list[Table] = []
    pair = None
    mean, count = None, 0
    with service.reading() as s:
        board = read_board(s, state_of(request))
        gpu_a = query.gpu_a or (board.cards[0].name if board.cards else None)
        shape_a = query.shape_a or query.shape_b
        if gpu_a is not None and shape_a is not None:
            pair = gather(s, board, query, gpu_a, shape_a)
            tables = [numbers(pair, query), fields_table(pair, query), provenance(pair, query)]
            if pair.counters:
                tables.append(counters_table(pair, query))
        elif gpu_a is not None and query.gpu_b is not None:
            both = common(board, gpu_a, query.gpu_b)
            tables = [cards_table(both, gpu_a, query.gpu_b, query)]
            ratios = [r for a, b in both if (r := _ratio(a, b)) is not None]
            mean, count = (geometric_mean(ratios) if ratios else None), len(ratios)
    return respond(
        request,
        "compare.html",
        query,
        here="compare",
        tables={table.name: table for table in tables},
        pair=pair,
        gpu_a=gpu_a,
        geomean=(mean, count),
        filters=_filters(board, query, gpu_a),
        is_empty=not board.entries,
        empty=EMPTY,
    )


def gather(s: Session, board: Board, query: CompareQuery, gpu_a: str, shape_a: str) -> Pair:
    """Both sides of the query.

    Raises:
        ProblemError: nothing is stored about a GPU model.
    """
    one = _side(s, board, gpu_a, shape_a, query.as_a or "champion", query.on_a)
    as_b = query.as_b or "champion"
    other = _side(s, board, query.gpu_b or gpu_a, query.shape_b or shape_a, as_b, query.on_b)
    return Pair(one, other, _counters(s, one, other))


def _side(s: Session, board: Board, gpu: str, shape_key: str, role: str, day: date | None) -> Side:
    facts = KeyFacts(s, board.card(gpu), parse_shape(shape_key))
    until = None if day is None else datetime.combine(day, time.max, UTC)
    if role == "default":
        return facts.default(until)
    if role == "previous":
        return facts.previous()
    if role == "champion":
        return facts.champion(until)
    return facts.measured(int(role[1:]))


def _counters(s: Session, a: Side, b: Side) -> dict[str, tuple[Counters, Counters]]:
    found: dict[str, tuple[Counters, Counters]] = {}
    of_side: list[dict[str, Counters]] = []
    for side in (a, b):
        wanted = "" if side.config is None else digest(side.config)
        profiles = gather_profiles(s, side.card, side.shape, wanted, None)
        subject = next((one for one in profiles.subjects if one.config_hash == wanted), None)
        of_side.append({} if subject is None else {stage: subject.counters(stage) for stage in STAGES})
    for stage in STAGES:
        pair = of_side[0].get(stage, {}), of_side[1].get(stage, {})
        if any(pair):
            found[stage] = pair
    return found


def _filters(board: Board, query: CompareQuery, gpu_a: str | None) -> list[Filter]:
    names = [(name, name) for name in sorted({card.name for card in board.cards})]
    shapes = tuple(dict.fromkeys(e.row.shape_key for e in board.entries))[:_MAX_SUGGESTIONS]
    out = []
    for side in ("a", "b"):
        title = side.upper()
        role = getattr(query, f"as_{side}")
        roles = [*_ROLES, *([(role, f"measurement {role[1:]}")] if role and role.startswith("m") else [])]
        gpu = getattr(query, f"gpu_{side}") or (gpu_a if side == "a" else None)
        same = "" if side == "a" else "as A"
        day = getattr(query, f"on_{side}")
        out += [
            select(f"gpu_{side}", f"{title}: GPU model", gpu, names, same),
            Filter(
                f"shape_{side}",
                f"{title}: shape",
                "search",
                getattr(query, f"shape_{side}") or "",
                hint="all shapes" if side == "a" else "as A",
                suggestions=shapes,
            ),
            select(f"as_{side}", f"{title}: config", role or "champion", roles),
            Filter(f"on_{side}", f"{title}: as of", "date", "" if day is None else day.isoformat()),
        ]
    return out


_SIDES = (Column("a", "A", kind="number"), Column("b", "B", kind="number"))
_CODE_SIDES = (Column("a", "A", kind="code"), Column("b", "B", kind="code"))


def numbers(pair: Pair, query: ViewQuery) -> Table:
    """Every number of both sides with its difference."""
    rows = []
    for one in NUMBERS:
        a, b = (one.of(side) for side in pair.sides)
        if a is not None or b is not None:
            cells = [Cell(a, one.show(a)), Cell(b, one.show(b))]
            rows.append([Cell(one.label), Cell(one.unit), *cells, *difference(a, b, one.show, one.lower_is_better)])
    return rows_table(_difference_spec("numbers", "Numbers"), query, rows)


def counters_table(pair: Pair, query: ViewQuery) -> Table:
    """Every hardware counter of both sides with its difference."""
    rows = []
    for stage, (a, b) in pair.counters.items():
        for metric in METRICS:
            if metric.field in a or metric.field in b:
                x, y = a.get(metric.field), b.get(metric.field)
                name = f"{stage.upper()} {metric.field.replace('_', ' ')}"
                cells = [Cell(x, text.short(x)), Cell(y, text.short(y))]
                rows.append([Cell(name), Cell(metric.unit), *cells, *difference(x, y, text.short, None)])
    return rows_table(_difference_spec("counters", "Hardware counters"), query, rows)


def _difference_spec(name: str, title: str) -> Spec:
    columns = (
        Column("number", "Number"),
        Column("unit", "Unit"),
        *_SIDES,
        Column("difference", "B minus A", kind="number"),
        Column("ratio", "B over A", kind="number"),
    )
    return Spec(name, title, columns, empty=Command("Neither side was measured."), page_rows=200)


def difference(a: float | None, b: float | None, show: Any, lower_is_better: bool | None) -> list[Cell]:
    """How B differs from A: as a number and as a ratio."""
    if a is None or b is None:
        return [Cell(None), Cell(None)]
    delta = b - a
    return [Cell(delta, f"{'+' if delta > 0 else ''}{show(delta)}"), ratio_cell(b, a, lower_is_better)]


def fields_table(pair: Pair, query: ViewQuery) -> Table:
    """Every field of both configs; those that differ come first."""
    rows = [
        [Cell(name), *(Cell(text.word(value), mark="differs" if differs else "") for value in values)]
        for name, values, differs in sorted(field_rows(pair.sides), key=lambda row: not row[2])
    ]
    columns = (Column("field", "Field", kind="code"), *_CODE_SIDES)
    return rows_table(Spec("fields", "Config", columns, page_rows=100), query, rows)


def provenance(pair: Pair, query: ViewQuery) -> Table:
    """What both were measured with."""
    rows = [
        [Cell(name), *(replace(c, mark="differs" if differs else "") for c in cells)]
        for name, cells, differs in provenance_rows(pair.sides)
    ]
    columns = (Column("what", "What", kind="code"), *_CODE_SIDES)
    return rows_table(Spec("provenance", "Measured with", columns, page_rows=100), query, rows)


def common(board: Board, gpu_a: str, gpu_b: str) -> list[tuple[Entry, Entry]]:
    """The champions of every shape that both cards have."""
    a, b = board.card(gpu_a), board.card(gpu_b)
    of_a = [entry for entry in board.entries if entry.card == a]
    return [(entry, other) for entry in of_a if (other := board.get(b, entry.row.shape_key)) is not None]


def _ratio(a: Entry, b: Entry) -> float | None:
    return b.row.measured_us / a.row.measured_us if a.row.measured_us and b.row.measured_us else None


def cards_table(both: Sequence[tuple[Entry, Entry]], gpu_a: str, gpu_b: str, query: ViewQuery) -> Table:
    """Two GPU models, shape by shape."""
    columns = (
        Column("shape", "Shape", kind="key", sortable=True),
        Column("a_us", f"A: {gpu_a}", "µs", "number", sortable=True),
        Column("b_us", f"B: {gpu_b}", "µs", "number", sortable=True),
        Column("ratio", "B over A", kind="number", sortable=True),
        Column("a_speedup", "A speed-up", kind="number", sortable=True),
        Column("b_speedup", "B speed-up", kind="number", sortable=True),
        Column("same_config", "Same config", sortable=True),
    )

    def make(some: Sequence[tuple[Entry, Entry]]) -> list[list[Cell]]:
        return [
            [
                shape_cell(a.row.shape_key, path_of("configs", a.card.name, a.row.shape_key)),
                time_cell(a.row.measured_us, estimated=a.row.estimated),
                time_cell(b.row.measured_us, estimated=b.row.estimated),
                ratio_cell(b.row.measured_us, a.row.measured_us, True),
                Cell(a.speedup, text.speedup(a.speedup)),
                Cell(b.speedup, text.speedup(b.speedup)),
                Cell(a.row.config_hash == b.row.config_hash),
            ]
            for a, b in some
        ]

    keys = {
        "shape": lambda pair: pair[0].order,
        "a_us": lambda pair: pair[0].row.measured_us,
        "b_us": lambda pair: pair[1].row.measured_us,
        "ratio": lambda pair: _ratio(*pair),
        "a_speedup": lambda pair: pair[0].speedup,
        "b_speedup": lambda pair: pair[1].speedup,
        "same_config": lambda pair: pair[0].row.config_hash == pair[1].row.config_hash,
    }
    spec = Spec("shapes", "Shapes that both have", columns, "shape", Command("The two have no tuned shape in common."))
    return make_table(spec, query, ListSource(both, make, keys))
