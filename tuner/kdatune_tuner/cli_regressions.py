"""`kdatune regressions` and `kdatune regressions ack`: what became slower in the stored history, and who knows of it."""

from typing import Annotated

import typer
from rich.table import Table

from kdatune_kernels.spec import Json
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.cli_token import person
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.regressions import RegressionRow
from kdatune_tuner.store.regressions import RegressionState
from kdatune_tuner.store.regressions import acknowledge
from kdatune_tuner.store.regressions import as_json as row_json
from kdatune_tuner.store.regressions import page_regressions

_MAX_SHOWN = 1000

regressions = typer.Typer(
    help="Look for configs that became slower in the stored history, keep what is new, and list what is open.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    """Add the commands to `kdatune`."""
    app.add_typer(regressions, name="regressions")


@regressions.callback()
def show(
    context: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="list acknowledged and resolved ones too")] = False,
    as_json: JsonOption = False,
) -> None:
    """Look for configs that became slower in the stored history, keep what is new, and list what is open.

    Every night does the same at its end. Exits 0 whatever it finds.
    """
    if context.invoked_subcommand is not None:
        return
    from kdatune_tuner.regressions import look  # ruptures takes two seconds to load

    settings = read_settings()
    with database(settings.database_url) as engine:
        seen = look(engine, settings)
        with reading(engine) as s:
            state = None if every else RegressionState.OPEN.value
            rows = page_regressions(s, state=state, newest_first=True, limit=_MAX_SHOWN)
    counts: Json = {
        "opened_count": len(seen.opened),
        "resolved_count": len(seen.resolved),
        "machine_count": len(seen.machine),
        "steady_count": seen.steady_count,
        "short_count": seen.short_count,
    }
    if as_json:
        print_json({"regressions": [row_json(row) for row in rows], **counts})
        return
    if rows:
        out().print(_table(rows, every=every), markup=False)
    else:
        out().print("no regression is stored" if every else "no open regression")
    said = f"{counts['steady_count']} configs are steady; {counts['short_count']} have fewer than "
    said += f"{settings.regression_min_nights} nights, of which nothing is said"
    if seen.machine:
        said += f"; {len(seen.machine)} became slower with their machine, as the reference kernel shows"
    err().print(f"kdatune: {said}")


@regressions.command("ack")
def ack(
    regression_id: Annotated[int, typer.Argument(help="id, as `kdatune regressions` shows it", min=1)],
    note: Annotated[str | None, typer.Option(help="what is known about it, for those who look later")] = None,
    as_json: JsonOption = False,
) -> None:
    """Acknowledge a regression: it is open no longer, and nights do not fail by it. The first word about it stays."""
    with database(read_settings().database_url) as engine, writing(engine) as s:
        row, changed = acknowledge(s, regression_id, person(), note)
    if as_json:
        print_json({**row_json(row), "changed": changed})
        return
    at = "" if row.acknowledged_at is None else rfc3339(row.acknowledged_at)
    told = "is acknowledged" if changed else f"was acknowledged by {row.acknowledged_by} at {at}; nothing is changed"
    out().print(f"regression {row.id} {told}", soft_wrap=True, markup=False)


def _table(rows: list[RegressionRow], *, every: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = ("id", "state", "kernel", "shape", "GPU model", "before", "now", "slower", "since", "served", "cause")
    for name in columns if every else (name for name in columns if name != "state"):
        table.add_column(name, justify="right" if name in ("id", "before", "now", "slower") else "left")
    for row in rows:
        cells = [
            str(row.id),
            str(row.state),
            row.kernel,
            row.shape.key(),
            row.gpu_name,
            f"{row.before_us:,.1f} us",
            f"{row.now_us:,.1f} us",
            f"{row.change_pct:+.1f} %",
            rfc3339(row.began_at)[:10],
            "yes" if row.is_served else "no",
            row.cause,
        ]
        table.add_row(*(cells if every else [cells[0], *cells[2:]]))
    return table
