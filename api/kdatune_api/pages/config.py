"""/configs/{gpu}/{shape}: the champion of one key beside the default and what was served before, and why."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Annotated

from anyio.from_thread import run as run_in_loop
from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response
from fastapi.responses import RedirectResponse
from sqlalchemy.orm import Session

from kdatune_api.deps import Service
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.pages import text
from kdatune_api.pages.board import Board
from kdatune_api.pages.board import Card
from kdatune_api.pages.board import Entry
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import read_board
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.params import shape_in_path
from kdatune_api.pages.sides import NUMBERS
from kdatune_api.pages.sides import KeyFacts
from kdatune_api.pages.sides import Side
from kdatune_api.pages.sides import field_rows
from kdatune_api.pages.sides import provenance_rows
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
from kdatune_api.pages.web import PageRoute
from kdatune_api.pages.web import respond
from kdatune_kernels.match import Match
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.store.records import PromotionRow

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

_ROLLBACK_PATH = "/v1/promotions/{id}/rollback"


@dataclass(frozen=True)
class KeyPage:
    """What the page shows. sides: default, previous (where there is one), champion."""

    board: Board
    card: Card
    shape: Shape
    entry: Entry | None
    sides: tuple[Side, ...]
    decisions: Sequence[PromotionRow]

    @property
    def champion(self) -> Side:
        return self.sides[-1]


@router.get("/configs/{gpu:path}/{shape}", response_model=None)
def config(
    request: Request, gpu: str, shape: str, query: Annotated[ViewQuery, Query()], service: ServiceDep
) -> Response:
    wanted = shape_in_path(shape)
    if wanted.key() != shape:
        return RedirectResponse(path_of("configs", gpu, wanted.key()), status_code=308)
    with service.reading() as s:
        found = gather(s, state_of(request), gpu, wanted)
    resolved = None
    if found.entry is None or found.entry.row.config_hash is None:
        resolved = run_in_loop(_resolve, service, wanted, found.card.gpu)
    tables = (numbers(found, query), config_fields(found, query), provenance(found, query), decisions(found, query))
    return respond(
        request,
        "config.html",
        query,
        here="configs",
        tables={table.name: table for table in tables},
        key=found,
        resolved=resolved,
        resolved_json="" if resolved is None else json.dumps(to_json(resolved.config), indent=2, sort_keys=True),
        tune_command=tune_command(wanted),
        can_roll_back=_takes_rollbacks(request),
        rollback_command=f'kdatune rollback --gpu "{found.card.name}" --shape {wanted.key()}',
    )


def gather(s: Session, state: PagesState, gpu: str, shape: Shape) -> KeyPage:
    """Everything the page shows, from the store.

    Raises:
        ProblemError: nothing is stored about the GPU model.
    """
    board = read_board(s, state)
    card = board.card(gpu)
    facts = KeyFacts(s, card, shape)
    sides = [facts.default()]
    previous = facts.previous()
    if previous.config is not None:
        sides.append(previous)
    sides.append(facts.champion())
    return KeyPage(board, card, shape, board.get(card, shape.key()), tuple(sides), facts.decisions())


def tune_command(shape: Shape) -> str:
    """The command that tunes a shape."""
    return f"kdatune tune --shape {shape.key()}"


async def _resolve(service: Service, shape: Shape, gpu: Gpu) -> Match:
    """What a launcher gets for a key without a champion of its own."""
    index = await service.champions.current()
    return index.view(gpu).find(shape)


def _takes_rollbacks(request: Request) -> bool:
    return _ROLLBACK_PATH in request.app.openapi()["paths"]


def _side_columns(sides: Sequence[Side]) -> list[Column]:
    return [Column(side.label.replace(" ", "_"), side.label.capitalize(), kind="number") for side in sides]


def numbers(found: KeyPage, query: ViewQuery) -> Table:
    """Every number of the sides, and the champion against the default."""
    default, champion = found.sides[0], found.champion
    columns = [Column("number", "Number"), Column("unit", "Unit"), *_side_columns(found.sides)]
    columns.append(Column("ratio", "Champion over default", kind="number", hint="1 is equal"))
    rows = []
    for one in NUMBERS:
        values = [one.of(side) for side in found.sides]
        if all(value is None for value in values):
            continue
        rows.append(
            [
                Cell(one.label),
                Cell(one.unit),
                *(Cell(value, one.show(value)) for value in values),
                ratio_cell(one.of(champion), one.of(default), one.lower_is_better),
            ]
        )
    return rows_table(Spec("numbers", "Champion beside the default", tuple(columns), page_rows=100), query, rows)


def ratio_cell(value: float | None, other: float | None, lower_is_better: bool | None) -> Cell:
    """A value over another one, and what that means."""
    if value is None or other is None or not other:
        return Cell(None)
    ratio = value / other
    mark = "" if lower_is_better is None else text.trend_of(1 / ratio if ratio and lower_is_better else ratio)
    return Cell(ratio, f"{ratio:.3f}", mark=mark, note=text.signed_pct(ratio) if ratio != 1 else "")


def config_fields(found: KeyPage, query: ViewQuery) -> Table:
    """Every field of the configs; those that differ are marked."""
    columns = (Column("field", "Field", kind="code"), *(c for c in _code_columns(found.sides)))
    rows = [
        [Cell(name), *(Cell(text.word(value), mark="differs" if differs else "") for value in values)]
        for name, values, differs in field_rows(found.sides)
    ]
    rows.sort(key=lambda row: row[1].mark != "differs")
    return rows_table(Spec("fields", "Config", columns, page_rows=100), query, rows)


def _code_columns(sides: Sequence[Side]) -> list[Column]:
    return [Column(side.label.replace(" ", "_"), side.label.capitalize(), kind="code") for side in sides]


def provenance(found: KeyPage, query: ViewQuery) -> Table:
    """What the sides were measured with."""
    columns = (Column("what", "What", kind="code"), *_code_columns(found.sides))
    rows = [
        [Cell(name), *(replace(c, mark="differs" if differs else "") for c in cells)]
        for name, cells, differs in provenance_rows(found.sides)
    ]
    return rows_table(Spec("provenance", "Measured with", columns, page_rows=100), query, rows)


HISTORY_SPEC = Spec(
    "history",
    "Decisions",
    (
        Column("generation", "Generation", kind="number", sortable=True),
        Column("decided_at", "Decided", sortable=True),
        Column("decision", "Decision", sortable=True),
        Column("measured_us", "Challenger", "µs", "number", sortable=True),
        Column("default_us", "Default", "µs", "number"),
        Column("gain", "Gain", kind="number", sortable=True, hint="over the baseline"),
        Column("gain_low", "from", kind="number"),
        Column("gain_high", "to", kind="number"),
        Column("reason", "Reason", kind="prose"),
        Column("config_hash", "Config", kind="code"),
    ),
    order="-generation",
    empty=Command("No decision was taken about this key."),
    page_rows=20,
)


def decisions(found: KeyPage, query: ViewQuery) -> Table:
    """The history of the key: what was served, what was refused, and why."""

    def make(some: Sequence[PromotionRow]) -> list[list[Cell]]:
        return [
            [
                Cell(p.generation, text.integer(p.generation)),
                moment_cell(p.decided_at),
                Cell(str(p.decision)),
                Cell(p.measured_us, text.us(p.measured_us)),
                Cell(p.default_us, text.us(p.default_us)),
                Cell(p.gain, text.speedup(p.gain), mark=text.trend_of(p.gain)),
                Cell(p.gain_low, text.speedup(p.gain_low)),
                Cell(p.gain_high, text.speedup(p.gain_high)),
                Cell(p.reason),
                Cell(p.config_hash, None if p.config_hash else "default"),
            ]
            for p in some
        ]

    names = ("generation", "decided_at", "decision", "measured_us", "gain")
    keys = {name: (lambda p, name=name: getattr(p, name)) for name in names}
    return make_table(HISTORY_SPEC, query, ListSource(found.decisions, make, keys))
