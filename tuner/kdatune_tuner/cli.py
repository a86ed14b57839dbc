"""The command line. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 regressions found, 130 interrupted.

A known error never comes with a traceback.
"""

import os
import sys
from typing import Annotated

import typer

from kdatune_kernels import __version__
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.errors import UsageError
from kdatune_tuner import cli_backup
from kdatune_tuner import cli_bench
from kdatune_tuner import cli_doctor
from kdatune_tuner import cli_evaluate
from kdatune_tuner import cli_exchange
from kdatune_tuner import cli_nightly
from kdatune_tuner import cli_profile
from kdatune_tuner import cli_regressions
from kdatune_tuner import cli_serve
from kdatune_tuner import cli_show
from kdatune_tuner import cli_token
from kdatune_tuner import cli_tune
from kdatune_tuner import cli_vacuum

app = typer.Typer(
    name="kdatune",
    help="Profiling and autotuning of GPU kernels: search launch configs, store them, serve them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # what reaches here is a mistake of ours: the plain traceback says most
    rich_markup_mode=None,
)
db = typer.Typer(help="The database.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(db, name="db")

app.command("tune")(cli_tune.tune)
app.command("record")(cli_tune.record)
app.command("up")(cli_serve.up)
app.command("serve")(cli_serve.serve)
app.command("resolve")(cli_show.resolve)
app.command("profile")(cli_profile.profile)
app.command("explain")(cli_profile.explain)
app.command("history")(cli_show.history)
app.command("rollback")(cli_show.rollback)
app.command("export-snapshot")(cli_show.export_snapshot)
db.command("upgrade")(cli_show.db_upgrade)
db.command("vacuum")(cli_vacuum.vacuum)
cli_bench.register(app)
cli_token.register(app)
cli_backup.register(app)
cli_doctor.register(app)
cli_evaluate.register(app)
cli_exchange.register(app)
cli_nightly.register(app)
cli_regressions.register(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kdatune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Profiling and autotuning of GPU kernels: search launch configs, store them, serve them."""


def main() -> None:
    """The `kdatune` command."""
    try:
        app()
    except KdatuneError as error:
        sys.stderr.write(f"kdatune: {error}\n")
        sys.exit(2 if isinstance(error, UsageError | ShapeError) else 1)
    except FileNotFoundError:
        if _has_folder():
            raise
        sys.stderr.write("kdatune: the current folder was deleted; change to one that is there\n")
        sys.exit(1)


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
