"""/profiles and /profiles/{gpu}/{shape}: hardware counters of the champion against another config, and the why."""

import json
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Annotated
from typing import Literal

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response
from fastapi.responses import RedirectResponse
from pydantic import StringConstraints

from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.pages import text
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import read_board
from kdatune_api.pages.filters import gpu_filter
from kdatune_api.pages.filters import select
from kdatune_api.pages.params import Blank
from kdatune_api.pages.params import OptionalGpu
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.params import shape_in_path
from kdatune_api.pages.profile_data import KeyProfiles
from kdatune_api.pages.profile_data import Subject
from kdatune_api.pages.profile_data import gather
from kdatune_api.pages.sides import STAGES
from kdatune_api.pages.state import state_of
from kdatune_api.pages.tables import Cell
from kdatune_api.pages.tables import Column
from kdatune_api.pages.tables import Command
from kdatune_api.pages.tables import QuerySource
from kdatune_api.pages.tables import Spec
from kdatune_api.pages.tables import Table
from kdatune_api.pages.tables import make_table
from kdatune_api.pages.tables import moment_cell
from kdatune_api.pages.tables import rows_table
from kdatune_api.pages.tables import shape_cell
from kdatune_api.pages.web import PageRoute
from kdatune_api.pages.web import respond
from kdatune_kernels.spec import digest
from kdatune_tuner.ncu.metrics import BY_FIELD
from kdatune_tuner.ncu.metrics import METRICS
from kdatune_tuner.ncu.metrics import STALL_FIELDS
from kdatune_tuner.ncu.metrics import Counters
from kdatune_tuner.ncu.metrics import ctas_per_sm
from kdatune_tuner.ncu.metrics import limiters
from kdatune_tuner.store.dashboard_lists import count_profiles
from kdatune_tuner.store.dashboard_lists import profile_list
from kdatune_tuner.store.records import ProfileRow

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

BARRIER = "barrier_stall_per_issue"
ISSUE_ACTIVE = "issue_active_pct"
_SPEED = (ISSUE_ACTIVE, "tensor_pipe_active_pct", "sm_active_pct", "dram_throughput_pct", "l2_throughput_pct")
_OCCUPANCY = (
    "theoretical_occupancy_pct",
    "achieved_occupancy_pct",
    "registers",
    "smem_bytes",
    "cta_threads",
    "grid_ctas",
)
EMPTY = Command(
    "No profile is stored. On a machine with a card and Nsight Compute, run:",
    ("kdatune profile --shape N=1,H=96,T=8192",),
)

ConfigHash = Annotated[Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")] | None, Blank]


class ProfileListQuery(ViewQuery):
    gpu: OptionalGpu = None
    stage: Annotated[Literal["k1", "k2"] | None, Blank] = None


class ProfileQuery(ViewQuery):
    config: ConfigHash = None
    against: ConfigHash = None


LIST_SPEC = Spec(
    "profiles",
    "Profiles",
    (
        Column("shape", "Shape", kind="key"),
        Column("gpu", "GPU model", kind="name"),
        Column("stage", "Stage"),
        Column(ISSUE_ACTIVE, "Issue active", "%", "number", sortable=True, hint=BY_FIELD[ISSUE_ACTIVE].meaning),
        Column(BARRIER, "Barrier stall", "per issue", "number", sortable=True, hint=BY_FIELD[BARRIER].meaning),
        Column(
            "measured_us", "Launch", "µs", "number", hint="benchmark time of the whole config, never the profiler's"
        ),
        Column("config_hash", "Config", kind="code"),
        Column("ncu_version", "Nsight Compute"),
        Column("profiled_at", "Profiled", sortable=True),
        Column("unavailable", "Why none", kind="prose"),
    ),
    order="-profiled_at",
    empty=EMPTY,
)


@router.get("/profiles")
def profiles(request: Request, query: Annotated[ProfileListQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        board = read_board(s, state_of(request))
        gpu_ids = None if query.gpu is None else tuple(i for c in board.cards if c.name == query.gpu for i in c.ids)
        total = count_profiles(s, gpu_ids=gpu_ids, stage=query.stage)

        def fetch(column: str, descending: bool, offset: int, limit: int) -> Sequence[tuple[ProfileRow, float | None]]:
            return profile_list(
                s,
                gpu_ids=gpu_ids,
                stage=query.stage,
                order=column,
                descending=descending,
                offset=offset,
                limit=limit,
            )

        table = make_table(LIST_SPEC, query, QuerySource(total, fetch, _list_rows))
    stages = [("k1", "K1"), ("k2", "K2")]
    return respond(
        request,
        "profiles.html",
        query,
        here="profiles",
        tables={"profiles": table},
        filters=[gpu_filter(board, query.gpu), select("stage", "Stage", query.stage, stages, "both")],
    )


def _list_rows(some: Sequence[tuple[ProfileRow, float | None]]) -> list[list[Cell]]:
    return [
        [
            shape_cell(row.shape.key(), path_of("profiles", row.gpu_name, row.shape.key())),
            Cell(row.gpu_name),
            Cell(row.stage, row.stage.upper()),
            Cell(row.issue_active_pct, text.number(row.issue_active_pct)),
            Cell(row.barrier_stall_per_issue, text.number(row.barrier_stall_per_issue, 2)),
            Cell(measured_us, text.us(measured_us)),
            Cell(digest(json.loads(row.config_json))),
            Cell(row.ncu_version),
            moment_cell(row.profiled_at),
            Cell(row.unavailable_reason, row.unavailable_reason or ""),
        ]
        for row, measured_us in some
    ]


@router.get("/profiles/{gpu:path}/{shape}", response_model=None)
def profile(
    request: Request, gpu: str, shape: str, query: Annotated[ProfileQuery, Query()], service: ServiceDep
) -> Response:
    wanted = shape_in_path(shape)
    if wanted.key() != shape:
        return RedirectResponse(path_of("profiles", gpu, wanted.key()), status_code=308)
    with service.reading() as s:
        card = read_board(s, state_of(request)).card(gpu)
        found = gather(s, card, wanted, query.config, query.against)
    tables = (
        counter_table("stalls", "Why warps wait", found, query, stall_rows),
        counter_table("speed", "Speed of light", found, query, speed_rows),
        counter_table("occupancy", "Occupancy, waves and tail", found, query, occupancy_rows),
        all_counters(found, query),
    )
    options = [(one.config_hash, one.label) for one in found.subjects]
    filters = [select("config", "Config", found.ours.config_hash if found.ours else None, options)]
    if found.other is not None:
        filters.append(select("against", "Against", found.other.config_hash, options))
    return respond(
        request,
        "profile.html",
        query,
        here="profiles",
        tables={table.name: table for table in tables},
        found=found,
        stages=STAGES,
        filters=filters,
        profile_command=f"kdatune profile --shape {wanted.key()}",
    )


Value = Callable[[Counters], float | None]


def _subjects(found: KeyProfiles) -> list[tuple[str, Subject]]:
    """The columns of counters: each stage of ours, then of the other."""
    sides = [one for one in (found.ours, found.other) if one is not None]
    return [(stage, subject) for stage in STAGES for subject in sides if stage in subject.stages]


def _counter_columns(found: KeyProfiles) -> list[Column]:
    columns = []
    for stage, subject in _subjects(found):
        role = "ours" if subject is found.ours else "other"
        columns.append(Column(f"{stage}_{role}", f"{stage.upper()} {subject.label}", kind="number"))
    return columns


def counter_table(
    name: str, title: str, found: KeyProfiles, query: ViewQuery, make: Callable[[KeyProfiles], list[list[Cell]]]
) -> Table:
    """A table of counters: K1 and K2 side by side, ours beside the other."""
    columns = (Column("metric", "Counter", kind="prose"), Column("unit", "Unit"), *_counter_columns(found))
    return rows_table(Spec(name, title, columns, page_rows=100), query, make(found) if found.ours else [])


def stall_rows(found: KeyProfiles) -> list[list[Cell]]:
    """Every stall reason, the barrier first, then the largest of any column."""
    subjects = _subjects(found)
    largest = {f: max((s.counters(stage).get(f, 0.0) for stage, s in subjects), default=0.0) for f in STALL_FIELDS}
    top = max(largest.values(), default=0.0) or 1.0
    order = sorted(STALL_FIELDS, key=lambda f: (f != BARRIER, -largest[f]))
    return [
        [
            Cell(
                field, field.removesuffix("_stall_per_issue").replace("_", " "), note=f"waits for {STALL_FIELDS[field]}"
            ),
            Cell("warps/issue"),
            *(_barred(s.counters(stage).get(field), 100.0 / top, 2, s is found.ours) for stage, s in subjects),
        ]
        for field in order
    ]


def speed_rows(found: KeyProfiles) -> list[list[Cell]]:
    """How near each unit is to its peak."""
    subjects = _subjects(found)
    return [
        [
            Cell(field, _label(field), note=BY_FIELD[field].meaning),
            Cell("%"),
            *(_barred(s.counters(stage).get(field), 1.0, 1, s is found.ours) for stage, s in subjects),
        ]
        for field in _SPEED
    ]


def occupancy_rows(found: KeyProfiles) -> list[list[Cell]]:
    """What an SM holds, what limits it, and how the launch fills the card."""
    subjects = _subjects(found)

    def row(name: str, label: str, unit: str, value: Value) -> list[Cell]:
        cells = [value(s.counters(stage)) for stage, s in subjects]
        return [Cell(name, label), Cell(unit), *(Cell(one, text.short(one)) for one in cells)]

    rows = [row(field, _label(field), BY_FIELD[field].unit, _counter(field)) for field in _OCCUPANCY]
    rows.append(row("ctas_per_sm", "CTAs an SM holds", "CTAs/SM", ctas_per_sm))
    limits = [" and ".join(limiters(s.counters(stage))) or None for stage, s in subjects]
    rows.append([Cell("limiter", "Occupancy held by"), Cell(""), *(Cell(one) for one in limits)])
    rows.append(row("waves", "Waves", "waves", _counter("waves")))
    rows.append(row("tail_fill_pct", "Fill of the last wave", "%", lambda c: tail_fill_pct(c.get("waves"))))
    return rows


def _counter(field: str) -> Value:
    return lambda counters: counters.get(field)


def tail_fill_pct(waves: float | None) -> float | None:
    """How full the last wave is; 100 where the launch is a whole number of waves."""
    if not waves:
        return None
    part = waves - math.floor(waves)
    return 100.0 * (part or 1.0)


def all_counters(found: KeyProfiles, query: ViewQuery) -> Table:
    """Every counter with its meaning and where it comes from."""
    subjects = _subjects(found)
    columns = (
        Column("metric", "Counter", kind="code", sortable=True),
        Column("unit", "Unit"),
        *_counter_columns(found),
        Column("meaning", "Meaning", kind="prose"),
        Column("source", "Source", kind="code"),
    )
    rows = []
    for metric in METRICS if found.ours else ():
        values = [s.counters(stage).get(metric.field) for stage, s in subjects]
        numbers = [Cell(value, text.short(value)) for value in values]
        rows.append(
            [
                Cell(metric.field, text.breakable(metric.field)),
                Cell(metric.unit),
                *numbers,
                Cell(metric.meaning),
                Cell(metric.source, text.breakable(metric.source)),
            ]
        )
    return rows_table(Spec("counters", "Every counter", columns, page_rows=100), query, rows)


def _barred(value: float | None, scale: float, digits: int, is_ours: bool) -> Cell:
    bar_pct = None if value is None else value * scale
    return Cell(value, text.number(value, digits), tone="" if is_ours else "other", bar_pct=bar_pct)


def _label(field: str) -> str:
    return field.removesuffix("_pct").removesuffix("_bytes").replace("_", " ")
