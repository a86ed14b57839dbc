"""/waves: independent chains against SMs. Where a second wave of K2 starts, and what the tuner chose on each side."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Annotated
from urllib.parse import urlencode

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
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import read_board
from kdatune_api.pages.filters import gpu_filter
from kdatune_api.pages.filters import search_filters
from kdatune_api.pages.overview import EMPTY
from kdatune_api.pages.overview import NO_MATCH
from kdatune_api.pages.params import SearchQuery
from kdatune_api.pages.profiles import tail_fill_pct
from kdatune_api.pages.state import PagesState
from kdatune_api.pages.state import state_of
from kdatune_api.pages.tables import Cell
from kdatune_api.pages.tables import Column
from kdatune_api.pages.tables import ListSource
from kdatune_api.pages.tables import Spec
from kdatune_api.pages.tables import Table
from kdatune_api.pages.tables import make_table
from kdatune_api.pages.tables import rows_table
from kdatune_api.pages.tables import shape_cell
from kdatune_api.pages.tables import time_cell
from kdatune_api.pages.web import PageRoute
from kdatune_api.pages.web import respond
from kdatune_kernels.space import PAIRS_K2
from kdatune_kernels.spec import WHOLE_WORDS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import is_whole
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.store.dashboard_lists import Resources
from kdatune_tuner.store.dashboard_lists import configs_of_promotions
from kdatune_tuner.store.dashboard_lists import stage_resources

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": registers are handed out to a warp in units
# of 256; an SM has 1 KiB of shared memory more than a block may ask for, and keeps 1 KiB a block for itself.
_REGISTER_UNIT = 256
_RESERVED_SMEM_BYTES = 1024
_EXAMPLES = 3  # champions of one K2 config that are asked for its registers before it counts as unknown


@dataclass(frozen=True)
class Choice:
    """What the tuner chose for K2, as far as waves go."""

    label: str
    config: Json
    ctas_per_sm: int | None

    def ctas_of(self, chains: int, v: int) -> int:
        """CTAs of K2 for that many chains of V columns; of the fused kernel the turns that its CTAs take."""
        if self.config.get("variant") == "fused":
            return chains
        block_v = PAIRS_K2.block_v if is_whole(self.config) else int(self.config["block_v"])
        return chains * -(-v // block_v) * int(self.config.get("segments") or 1)


@dataclass(frozen=True)
class Wave:
    """A champion with its K2 launch."""

    entry: Entry
    choice: Choice
    chains: int
    ctas: int
    waves: float | None

    @property
    def tokens_per_chain(self) -> int:
        return -(-self.entry.row.n_tokens // self.entry.row.n_sequences)


@dataclass(frozen=True)
class Waves:
    """What the page shows: the champions of one card, by chains."""

    board: Board
    card: Card | None
    rows: Sequence[Wave]

    def boundaries(self) -> dict[str, int]:
        """Chains from which the K2 launches that the tuner chose need a second wave, by what they are called."""
        found: dict[str, int] = {}
        for row in self.rows:
            first = second_wave_from(row, self.card.gpu) if self.card else None
            if first is not None:
                per_chain = row.ctas // row.chains
                found[f"{text.plural(per_chain, 'CTA')} a chain: second wave from {first}"] = first
        return dict(sorted(found.items(), key=lambda item: item[1])[:4])


def second_wave_from(row: Wave, gpu: Gpu) -> int | None:
    """The least number of chains that this K2 launch does not take in one wave; None where its CTAs/SM are not known."""
    if row.choice.ctas_per_sm is None:
        return None
    return gpu.sm_count * row.choice.ctas_per_sm // (row.ctas // row.chains) + 1


@router.get("/waves")
def waves(request: Request, query: Annotated[SearchQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        found = gather(s, state_of(request), query)
    tables = [choices_table(found, query), champions_table(found, query)]
    given = query.model_dump(include={"q", "dtype", "varlen"}, exclude_none=True)
    filters = search_filters(found.board, query)
    filters[0] = gpu_filter(found.board, found.card.name if found.card else None, any_label="")
    return respond(
        request,
        "waves.html",
        query,
        here="waves",
        tables={table.name: table for table in tables},
        found=found,
        filters=filters,
        chart_query=urlencode({"gpu": found.card.name, **given}) if found.card else "",
        empty=EMPTY,
    )


def gather(s: Session, state: PagesState, query: SearchQuery) -> Waves:
    """The champions of the card that the query names, else of the one with most champions, by chains."""
    board = read_board(s, state)
    counts: dict[Card, int] = {}
    for entry in board.entries:
        counts[entry.card] = counts.get(entry.card, 0) + 1
    card = board.card(query.gpu) if query.gpu else max(counts, key=lambda one: counts[one], default=None)
    if card is None:
        return Waves(board, None, ())
    chosen = board.chosen(query.model_copy(update={"gpu": card.name}))
    entries = [e for e in chosen if e.card == card and e.row.config_hash is not None]
    choices = _choices(s, card, entries)
    rows = []
    for entry in entries:
        choice = choices.get(entry.row.config_hash or "")
        if choice is None:
            continue
        chains = entry.row.n_sequences * entry.row.n_value_heads
        ctas = choice.ctas_of(chains, _columns(entry.row.shape_key))
        per_wave = card.gpu.sm_count * (choice.ctas_per_sm or 0)
        rows.append(Wave(entry, choice, chains, ctas, ctas / per_wave if per_wave else None))
    return Waves(board, card, sorted(rows, key=lambda row: (row.chains, row.entry.order)))


def _columns(shape_key: str) -> int:
    """V of a shape key."""
    return next((int(part[2:]) for part in shape_key.split(",") if part.startswith("V=")), 128)


def _choices(s: Session, card: Card, entries: Sequence[Entry]) -> dict[str, Choice]:
    """The K2 choice of each distinct launch config, with the CTAs an SM holds of it."""
    of_hash: dict[str, list[Entry]] = {}
    for entry in entries:
        of_hash.setdefault(entry.row.config_hash or "", []).append(entry)
    texts = configs_of_promotions(s, [some[0].row.promotion_id for some in of_hash.values()])
    k2s = {one: k2 for one, t in texts.items() if isinstance(k2 := json.loads(t).get("k2"), dict) and "block_v" in k2}
    # registers and shared memory follow from the config, hardly from the shape: some shapes stand for all
    shapes = {digest(parse_shape(e.row.shape_key)) for some in of_hash.values() for e in some[:_EXAMPLES]}
    hashes = {digest(k2) for k2 in k2s.values()}
    found: dict[str, Resources] = {}
    for some_shapes in _parts(sorted(shapes)):
        for one in stage_resources(s, "k2", card.ids, some_shapes, sorted(hashes)):
            found[one.config_hash] = one
    choices = {}
    for config_hash, k2 in k2s.items():
        held = found.get(digest(k2))
        per_sm = None if held is None else ctas_per_sm(held, card.gpu)
        # what has no stages was not measured as one; a CTA of either takes more than half of an SM's shared memory
        choices[config_hash] = Choice(choice_label(k2), k2, 1 if is_whole(k2) else per_sm)
    return choices


def _parts(values: Sequence[str], size: int = 400) -> list[Sequence[str]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def choice_label(k2: Json) -> str:
    """A K2 config in a few words: what decides its CTAs."""
    if is_whole(k2):
        turns = ", chain after chain" if k2["variant"] == "fused" else f", {PAIRS_K2.block_v} columns"
        return WHOLE_WORDS[k2["variant"]] + turns
    split = f"{k2.get('consumers', 1)}x{k2.get('num_warps')} MMA warps"
    segments = int(k2.get("segments") or 1)
    return f"{k2.get('variant')}, {k2['block_v']} columns, {split}" + (f", {segments} segments" if segments > 1 else "")


def ctas_per_sm(held: Resources, gpu: Gpu) -> int | None:
    """CTAs an SM holds at once, by warps, registers and shared memory; None where one of them is not known."""
    warps = held.effective_num_warps
    if not warps or held.registers is None or held.smem_bytes is None:
        return None
    registers = -(-held.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT * warps
    smem = held.smem_bytes + _RESERVED_SMEM_BYTES
    by_registers = gpu.registers_per_sm // registers if registers else gpu.warps_per_sm
    by_smem = (gpu.smem_per_block_bytes + _RESERVED_SMEM_BYTES) // smem
    return max(1, min(gpu.warps_per_sm // warps, by_registers, by_smem))


def choices_table(found: Waves, query: SearchQuery) -> Table:
    """Each K2 launch that the tuner chose: its second wave, and how many champions stand on each side."""
    columns = (
        Column("choice", "K2 launch", kind="name"),
        Column("ctas_per_chain", "CTAs a chain", kind="number"),
        Column("ctas_per_sm", "CTAs an SM", kind="number"),
        Column("second_wave_from_chains", "Second wave from", "chains", "number", sortable=True),
        Column("one_wave_count", "Champions in one wave", kind="number", sortable=True),
        Column("more_waves_count", "In more waves", kind="number", sortable=True),
        Column("speedup", "Speed-up", "geomean", "number"),
    )
    groups: dict[tuple[str, int, int | None], list[Wave]] = {}
    for row in found.rows:
        groups.setdefault((row.choice.label, row.ctas // row.chains, row.choice.ctas_per_sm), []).append(row)
    cells = []
    for (label, per_chain, per_sm), some in groups.items():
        first = second_wave_from(some[0], found.card.gpu) if found.card else None
        within = None if first is None else sum(1 for row in some if row.chains < first)
        speedups = [row.entry.speedup for row in some if row.entry.speedup is not None]
        mean = geometric_mean(speedups) if speedups else None
        cells.append(
            [
                Cell(label),
                Cell(per_chain),
                Cell(per_sm),
                Cell(first, text.integer(first)),
                Cell(within, text.integer(within)),
                Cell(
                    None if within is None else len(some) - within,
                    None if within is None else text.integer(len(some) - within),
                ),
                Cell(mean, text.speedup(mean), mark=text.trend_of(mean)),
            ]
        )
    cells.sort(key=lambda row: (row[3].value is None, row[3].value, row[0].value))
    return rows_table(Spec("choices", "What the tuner chose", columns, empty=NO_MATCH), query, cells)


def champions_table(found: Waves, query: SearchQuery) -> Table:
    """Every champion of the card by chains, with its waves."""
    columns = (
        Column("shape", "Shape", kind="key", sortable=True),
        Column("chains", "Chains", "N*HV", "number", sortable=True),
        Column("chains_per_sm", "Chains an SM", kind="number"),
        Column("choice", "K2 launch", kind="name", sortable=True),
        Column("ctas", "CTAs", kind="number", sortable=True),
        Column("waves", "Waves", kind="number", sortable=True),
        Column("tail_fill_pct", "Fill of the last", "%", "number", sortable=True),
        Column("measured_us", "Champion", "µs", "number", sortable=True),
        Column("speedup", "Speed-up", kind="number", sortable=True),
    )

    def make(some: Sequence[Wave]) -> list[list[Cell]]:
        return [_wave_cells(row, found.card.gpu) for row in some] if found.card else []

    keys = {
        "shape": lambda row: row.entry.order,
        "chains": lambda row: (row.chains, row.entry.order),
        "choice": lambda row: (row.choice.label, row.chains),
        "ctas": lambda row: row.ctas,
        "waves": lambda row: row.waves,
        "tail_fill_pct": lambda row: tail_fill_pct(row.waves),
        "measured_us": lambda row: row.entry.row.measured_us,
        "speedup": lambda row: row.entry.speedup,
    }
    spec = Spec("waves", "Champions by chains", columns, "chains", NO_MATCH)
    return make_table(spec, query, ListSource(found.rows, make, keys))


def _wave_cells(row: Wave, gpu: Gpu) -> list[Cell]:
    entry = row.entry
    tail = tail_fill_pct(row.waves)
    needed = None if row.waves is None else math.ceil(row.waves)
    note = "" if needed is None else "one wave" if needed == 1 else f"{needed} waves"
    return [
        shape_cell(entry.row.shape_key, path_of("configs", entry.card.name, entry.row.shape_key)),
        Cell(row.chains, text.integer(row.chains)),
        Cell(row.chains / gpu.sm_count, text.number(row.chains / gpu.sm_count, 2)),
        Cell(row.choice.label),
        Cell(row.ctas, text.integer(row.ctas)),
        Cell(row.waves, text.number(row.waves, 2), note=note),
        Cell(tail, text.number(tail, 0), bar_pct=tail),
        time_cell(entry.row.measured_us, estimated=entry.row.estimated),
        Cell(entry.speedup, text.speedup(entry.speedup), mark=text.trend_of(entry.speedup)),
    ]
