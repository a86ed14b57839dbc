"""/studies and /studies/{gpu}/{shape}: what searches tried, what they found and what they cost."""

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response
from fastapi.responses import RedirectResponse
from pydantic import StringConstraints
from sqlalchemy.orm import Session

from kdatune_api.charts import MAX_TRIALS
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.pages import text
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import read_board
from kdatune_api.pages.config import tune_command
from kdatune_api.pages.filters import Filter
from kdatune_api.pages.filters import gpu_filter
from kdatune_api.pages.filters import select
from kdatune_api.pages.params import Blank
from kdatune_api.pages.params import OptionalGpu
from kdatune_api.pages.params import OptionalId
from kdatune_api.pages.params import OptionalKernel
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.params import shape_in_path
from kdatune_api.pages.state import state_of
from kdatune_api.pages.study_data import Study
from kdatune_api.pages.study_data import coverage
from kdatune_api.pages.study_data import gather
from kdatune_api.pages.study_tables import coverage_table
from kdatune_api.pages.study_tables import failures
from kdatune_api.pages.study_tables import run_cost
from kdatune_api.pages.study_tables import trial_table
from kdatune_api.pages.tables import Cell
from kdatune_api.pages.tables import Column
from kdatune_api.pages.tables import Command
from kdatune_api.pages.tables import QuerySource
from kdatune_api.pages.tables import Spec
from kdatune_api.pages.tables import Table
from kdatune_api.pages.tables import make_table
from kdatune_api.pages.tables import moment_cell
from kdatune_api.pages.tables import shape_cell
from kdatune_api.pages.web import PageRoute
from kdatune_api.pages.web import respond
from kdatune_kernels.spec import Json
from kdatune_kernels.values import is_other
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.dashboard_lists import RunFilter
from kdatune_tuner.store.dashboard_lists import best_of_runs
from kdatune_tuner.store.dashboard_lists import count_runs
from kdatune_tuner.store.dashboard_lists import runs
from kdatune_tuner.store.records import RunRow
from kdatune_tuner.store.records import RunState

router = APIRouter(route_class=PageRoute, dependencies=[Depends(strict_query)])

KERNEL_LABELS = (("k2", "K2"), ("k1", "K1"), ("kda", "pairs (K1 and K2 together)"))
TITLES = {"k1": "K1 median, µs", "k2": "K2 median, µs", "kda": "launch median, µs"}
EMPTY = Command(
    "No search is stored. Tune a shape on a machine with a card, or replay the shipped recording:",
    ("kdatune tune --shape N=1,H=96,T=8192", "kdatune tune --backend replay"),
)


class RunListQuery(ViewQuery):
    gpu: OptionalGpu = None
    kernel: OptionalKernel = None
    state: Annotated[RunState | None, Blank] = None
    trigger: Annotated[Annotated[str, StringConstraints(max_length=40, pattern=r"^[\w.:-]+$")] | None, Blank] = None


class TrialFilter(ViewQuery):
    """One filter for every table and chart of a study. build: an id, or "all"."""

    kernel: OptionalKernel = None
    build: Annotated[Annotated[str, StringConstraints(pattern=r"^(all|[1-9][0-9]{0,8})$")] | None, Blank] = None
    run: OptionalId = None
    outcome: Annotated[Outcome | None, Blank] = None

    def wanted(self) -> Json:
        """The filter under the names of study_data.gather."""
        one_build = None if self.build in (None, "all") else int(self.build or 0)
        return {
            "kernel": self.kernel,
            "build_id": one_build,
            "all_builds": self.build == "all",
            "run_id": self.run,
            "outcome": None if self.outcome is None else str(self.outcome),
        }


RUNS_SPEC = Spec(
    "runs",
    "Searches",
    (
        Column("id", "Run", kind="number", sortable=True),
        Column("shape", "Shape", kind="key"),
        Column("kernel", "Kernel"),
        Column("gpu", "GPU model", kind="name"),
        Column("trigger", "Trigger"),
        Column("sampler", "Sampler"),
        Column("trials", "Measured", kind="number"),
        Column("best_us", "Best", "µs", "number"),
        Column("failures", "Failed", kind="number"),
        Column("gpu_seconds", "GPU time", "s", "number", sortable=True),
        Column("state", "State"),
        Column("started_at", "Started", sortable=True),
    ),
    order="-id",
    empty=Command("No search fits these filters."),
)


@router.get("/studies")
def studies(request: Request, query: Annotated[RunListQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        board = read_board(s, state_of(request))
        gpu_ids = None if query.gpu is None else tuple(i for c in board.cards if c.name == query.gpu for i in c.ids)
        wanted = RunFilter(gpu_ids, query.kernel, query.state, query.trigger)
        table = run_table(s, wanted, query)
        is_empty = table.total == 0 and count_runs(s, RunFilter()) == 0
    states = [(str(state), str(state)) for state in RunState]
    return respond(
        request,
        "studies.html",
        query,
        here="studies",
        tables={"runs": table},
        filters=[
            gpu_filter(board, query.gpu),
            select("kernel", "Kernel", query.kernel, KERNEL_LABELS, "all"),
            select("state", "State", query.state, states, "all"),
            Filter("trigger", "Trigger", "search", query.trigger or "", hint="tune, nightly, up"),
        ],
        is_empty=is_empty,
        empty=EMPTY,
    )


def run_table(s: Session, wanted: RunFilter, query: ViewQuery) -> Table:
    """The list of searches, with what each found."""

    def fetch(column: str, descending: bool, offset: int, limit: int) -> Sequence[RunRow]:
        return runs(s, wanted, order=column, descending=descending, offset=offset, limit=limit)

    def make(some: Sequence[RunRow]) -> list[list[Cell]]:
        found = best_of_runs(s, [run.id for run in some])
        return [_run_cells(run, *found.get(run.id, (0, None))) for run in some]

    return make_table(RUNS_SPEC, query, QuerySource(count_runs(s, wanted), fetch, make))


def _run_cells(run: RunRow, kept: int, best_us: float | None) -> list[Cell]:
    """kept: how many of its measurements are still stored (retention thins old ones); best_us: of these."""
    key = run.shape.key()
    measured = kept if run.outcome_counts is None else max(kept, sum(run.outcome_counts.values()))
    failed = sum(n for outcome, n in (run.outcome_counts or {}).items() if outcome != Outcome.OK)
    path = path_of("studies", run.gpu_name, key)
    other = is_other(run.kernel)  # the page of a study knows KDA's configs only
    return [
        Cell(
            run.id, text.integer(run.id), "" if other else f"{path}?{urlencode({'kernel': run.kernel, 'run': run.id})}"
        ),
        shape_cell(key, "" if other else f"{path}?kernel={run.kernel}"),
        Cell(run.kernel, "pairs" if run.kernel == "kda" else run.kernel if other else run.kernel.upper()),
        Cell(run.gpu_name),
        Cell(run.trigger),
        Cell(run.sampler),
        Cell(measured, text.integer(measured), note=f"{text.integer(kept)} kept" if kept < measured else ""),
        Cell(best_us, text.us(best_us)),
        Cell(failed, text.integer(failed)),
        Cell(run.gpu_seconds, text.number(run.gpu_seconds)),
        Cell(str(run.state)),
        moment_cell(run.started_at),
    ]


@router.get("/studies/{gpu:path}/{shape}", response_model=None)
def study(
    request: Request, gpu: str, shape: str, query: Annotated[TrialFilter, Query()], service: ServiceDep
) -> Response:
    wanted = shape_in_path(shape)
    if wanted.key() != shape:
        return RedirectResponse(path_of("studies", gpu, wanted.key()), status_code=308)
    with service.reading() as s:
        card = read_board(s, state_of(request)).card(gpu)
        found = gather(s, card, wanted, **query.wanted())
        cost = run_cost(s, found, query)
    cover = coverage(found)
    tables = [trial_table(found, query), failures(found, query), cost]
    if cover is not None:
        tables.append(coverage_table(cover, query))
    given = {"gpu": card.name, "shape": wanted.key(), "kernel": found.kernel, "build": query.build, "run": query.run}
    given["outcome"] = query.outcome
    return respond(
        request,
        "study.html",
        query,
        here="studies",
        tables={table.name: table for table in tables},
        study=found,
        coverage=cover,
        filters=_filters(found, query),
        chart_query=urlencode({name: str(value) for name, value in given.items() if value is not None}),
        title=TITLES[found.kernel],
        max_trials=MAX_TRIALS,
        tune_command=tune_command(wanted),
    )


def _filters(found: Study, query: TrialFilter) -> list[Filter]:
    builds = [(str(one.id), one.label) for one in found.builds]
    chosen = "all" if query.build == "all" else found.build_id
    runs_of = [(str(run.id), f"{run.id}: {run.trigger}, {run.sampler}") for run in found.runs]
    outcomes = [(str(outcome), str(outcome)) for outcome in Outcome]
    kernels = [(name, label) for name, label in KERNEL_LABELS if name in found.kernels or name == found.kernel]
    return [
        select("kernel", "Kernel", found.kernel, kernels),
        select(
            "build",
            "Build",
            "all" if query.run is not None and chosen is None else chosen,
            [*builds, ("all", "all builds")],
        ),
        select("run", "Run", query.run, runs_of, "all"),
        select("outcome", "Outcome", query.outcome, outcomes, "all"),
    ]
