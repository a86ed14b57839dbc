"""The tables of a study: trials, how they ended, what the runs cost, and how much of the space they cover."""

import json
from collections.abc import Sequence
from urllib.parse import urlencode

from sqlalchemy.orm import Session

from kdatune_api.charts import varying
from kdatune_api.pages import text
from kdatune_api.pages.board import compare_path
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.sides import flat
from kdatune_api.pages.study_data import Coverage
from kdatune_api.pages.study_data import Study
from kdatune_api.pages.tables import Cell
from kdatune_api.pages.tables import Column
from kdatune_api.pages.tables import Command
from kdatune_api.pages.tables import ListSource
from kdatune_api.pages.tables import Spec
from kdatune_api.pages.tables import Table
from kdatune_api.pages.tables import make_table
from kdatune_api.pages.tables import moment_cell
from kdatune_api.pages.tables import rows_table
from kdatune_tuner.store.dashboard import Trial
from kdatune_tuner.store.dashboard_lists import best_of_runs


def trial_table(found: Study, query: ViewQuery) -> Table:
    """Every trial, with the fields of the config that vary."""
    configs = {t.config_hash: flat(json.loads(t.config_json)) for t in found.trials}
    names = varying(list(configs.values()))
    columns = (
        Column("id", "Measurement", kind="number", sortable=True),
        Column("median_us", "Median", "µs", "number", sortable=True),
        Column("p20_us", "p20", "µs", "number"),
        Column("p80_us", "p80", "µs", "number"),
        Column("outcome", "Outcome", sortable=True),
        *(Column(_column(name), name.replace("_", " "), kind="code", sortable=True) for name in names),
        Column("registers", "Registers", kind="number", sortable=True),
        Column("spills", "Spills", kind="number", sortable=True),
        Column("smem_bytes", "Shared memory", "bytes", "number", sortable=True),
        Column("effective_num_warps", "Warps started", kind="number", sortable=True),
        Column("measured_at", "Measured", sortable=True),
        Column("detail", "Detail", kind="prose"),
    )
    spec = Spec("trials", "Trials", columns, "median_us", Command("No trial fits these filters."), page_rows=25)
    best_id = found.best.id if found.best else None

    def compare(trial: Trial) -> str:
        """Only whole launches stand beside the champion."""
        return compare_path(found.card.name, found.shape.key(), f"m{trial.id}") if found.kernel == "kda" else ""

    def make(some: Sequence[Trial]) -> list[list[Cell]]:
        return [
            [
                Cell(t.id, text.integer(t.id), compare(t), tag="best" if t.id == best_id else ""),
                Cell(t.median_us, text.us(t.median_us)),
                Cell(t.p20_us, text.us(t.p20_us)),
                Cell(t.p80_us, text.us(t.p80_us)),
                Cell(t.outcome),
                *(Cell(text.word(configs[t.config_hash].get(name))) for name in names),
                Cell(t.registers, text.integer(t.registers)),
                Cell(t.spills, text.integer(t.spills)),
                Cell(t.smem_bytes, text.integer(t.smem_bytes)),
                Cell(t.effective_num_warps, text.integer(t.effective_num_warps)),
                moment_cell(t.measured_at),
                Cell(t.detail, t.detail or ""),
            ]
            for t in some
        ]

    plain = ("id", "median_us", "outcome", "registers", "spills", "smem_bytes", "effective_num_warps", "measured_at")
    keys = {name: (lambda t, name=name: getattr(t, name)) for name in plain}
    keys |= {_column(name): (lambda t, name=name: _rank(configs[t.config_hash].get(name))) for name in names}
    return make_table(spec, query, ListSource(found.trials, make, keys))


def _column(field: str) -> str:
    return field.lower().replace(".", "_")


def _rank(value: object) -> tuple[str, object]:
    return type(value).__name__, value if value is not None else 0


def failures(found: Study, query: ViewQuery) -> Table:
    """How the trials ended."""
    columns = (
        Column("outcome", "Outcome"),
        Column("trials", "Trials", kind="number"),
        Column("share_pct", "Share", "%", "number"),
        Column("detail", "For example", kind="prose"),
    )
    spec = Spec("outcomes", "Outcomes", columns, empty=Command("No trial fits these filters."))
    total = len(found.trials) or 1
    rows = [
        [
            Cell(outcome),
            Cell(count, text.integer(count)),
            Cell(100.0 * count / total, text.number(100.0 * count / total), bar_pct=100.0 * count / total),
            Cell(said),
        ]
        for outcome, count, said in found.outcomes()
    ]
    return rows_table(spec, query, rows)


def run_cost(s: Session, found: Study, query: ViewQuery) -> Table:
    """What the searches of the study cost."""
    best = best_of_runs(s, [run.id for run in found.runs])
    columns = (
        Column("run", "Run", kind="number"),
        Column("trigger", "Trigger"),
        Column("sampler", "Sampler"),
        Column("budget_trials", "Budget", "trials", "number"),
        Column("trials", "Measured", kind="number"),
        Column("best_us", "Best", "µs", "number"),
        Column("gpu_seconds", "GPU time", "s", "number", sortable=True),
        Column("state", "State"),
        Column("started_at", "Started", sortable=True),
    )
    rows = []
    for run in found.runs:
        count, best_us = best.get(run.id, (0, None))
        rows.append(
            [
                Cell(run.id, text.integer(run.id), f"?{urlencode({'kernel': run.kernel, 'run': run.id})}"),
                Cell(run.trigger),
                Cell(run.sampler),
                Cell(run.budget_trials, text.integer(run.budget_trials)),
                Cell(count, text.integer(count)),
                Cell(best_us, text.us(best_us)),
                Cell(run.gpu_seconds, text.number(run.gpu_seconds)),
                Cell(str(run.state)),
                moment_cell(run.started_at),
            ]
        )
    return rows_table(Spec("cost", "Runs and their cost", columns, page_rows=20), query, rows)


def coverage_table(cover: Coverage, query: ViewQuery) -> Table:
    """What part of the space was tried, by the value of each field, and what the best with it took."""
    columns = (
        Column("field", "Field", kind="code", sortable=True),
        Column("value", "Value", kind="code"),
        Column("legal", "Legal configs", kind="number"),
        Column("tried", "Tried", kind="number", sortable=True),
        Column("share_pct", "Share of legal", "%", "number"),
        Column("best_us", "Best with it", "µs", "number", sortable=True),
    )
    rows = []
    for name, value, legal, tried, best_us in cover.fields:
        share = min(100.0, 100.0 * tried / legal) if legal else None
        rows.append(
            [
                Cell(name),
                Cell(text.word(value)),
                Cell(legal, text.integer(legal)),
                Cell(tried, text.integer(tried)),
                Cell(share, text.number(share, 0), bar_pct=share),
                Cell(best_us, text.us(best_us)),
            ]
        )
    return rows_table(Spec("coverage", "Coverage of the config space", columns, page_rows=100), query, rows)
