"""`kdatune doctor`: is all in place to serve, tune and profile here? Exit code 1 when something will not work."""

import dataclasses

import typer
from rich.table import Table

from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.doctor import examine


def register(app: typer.Typer) -> None:
    """Add the command to `kdatune`."""
    app.command("doctor")(doctor)


def doctor(as_json: JsonOption = False) -> None:
    """Look at database, service, card, driver, clocks and counters, and say what to do about what is wrong."""
    findings = list(examine(read_settings()))
    if as_json:
        print_json({"checks": [dataclasses.asdict(finding) for finding in findings]})
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("check", "state", "what was found, and what to do"):
            table.add_column(column)
        for finding in findings:
            table.add_row(finding.check, finding.state, finding.detail)
            if finding.remedy:
                table.add_row("", "", f"-> {finding.remedy}")
        out().print(table, markup=False)
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)
