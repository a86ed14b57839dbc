"""`kdatune evaluate`: search efficiency and nearest-shape regret on a recorded sweep."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.evaluate import MOST_TRIALS
from kdatune_tuner.evaluate import Report
from kdatune_tuner.evaluate import evaluate as evaluate_cases
from kdatune_tuner.evaluate import recorded_cases


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("evaluate")(evaluate)


def evaluate(
    recording: Annotated[Path | None, typer.Option(help="sweep file; without it the shipped one")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="runs of each search on each shape")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Replay a recorded sweep: trials until within 2 % of the best, and what nearest-shape answers cost."""
    backend = ReplayBackend.open(recording)
    reports = evaluate_cases(recorded_cases(backend), backend.gpu, seeds, say=err().print)
    if as_json:
        print_json({report.kernel: report.to_json() for report in reports})
        return
    sweep = backend.recording
    out().print(f"{sweep.path.name}, recorded on {sweep.gpu.name} at {sweep.recorded_at}", markup=False)
    show(reports)


def show(reports: list[Report]) -> None:
    """The reports as two tables, for people."""
    table = Table(box=None, pad_edge=False, title="trials to within 2 % of the best", title_justify="left")
    for name in ("space", "search", "median", "p90"):
        table.add_column(name, justify="left" if name in ("space", "search") else "right", no_wrap=True)
    for r in reports:
        table.add_row(r.kernel, "ours, cold", _trials(r.cold_median), _trials(r.cold_p90))
        table.add_row(r.kernel, "ours, with neighbours", _trials(r.neighbours_median), _trials(r.neighbours_p90))
        table.add_row(r.kernel, "plain TPE", _trials(r.tpe_median), _trials(r.tpe_p90))
        table.add_row(r.kernel, "random", _trials(r.random_median), "")
    out().print(table)
    for r in reports:
        if r.regret_geomean is None or r.regret_worst is None:
            cost = "what nearest answers cost is not known: the recording holds none of them"
        else:
            cost = f"the nearest answer costs {r.regret_geomean:.4f}x on geomean, {r.regret_worst:.4f}x at worst"
        out().print(f"{r.kernel}: {r.shapes} shapes, {r.seeds} seeds; {cost}, each shape hidden in turn", markup=False)


def _trials(count: float) -> str:
    return f"> {MOST_TRIALS}" if count > MOST_TRIALS else f"{count:g}"
