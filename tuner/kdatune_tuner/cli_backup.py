"""`kdatune backup FILE` and `kdatune restore FILE`: of a SQLite database, while it is served."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kdatune_kernels.errors import UsageError
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.cli_token import person
from kdatune_tuner.store import backup as store
from kdatune_tuner.store.access import add_audit
from kdatune_tuner.store.address import parse_address
from kdatune_tuner.store.address import sqlite_path
from kdatune_tuner.store.engine import writing


def register(app: typer.Typer) -> None:
    """Add the commands to `kdatune`."""
    app.command("backup")(backup)
    app.command("restore")(restore)


def backup(
    file: Annotated[Path, typer.Argument(help="the file to write")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a file that is there")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the SQLite database as it is now to a file; services and searches go on meanwhile."""
    copied = store.backup(read_settings().database_url, file, overwrite=overwrite)
    if as_json:
        print_json(
            {
                "file": str(file),
                "generation": copied.generation,
                "schema": copied.schema,
                "size_bytes": copied.size_bytes,
            }
        )
        return
    typer.echo(f"{file}: generation {copied.generation}, schema {copied.schema}, {copied.size_bytes} bytes")


def restore(
    file: Annotated[Path, typer.Argument(help="a file that `kdatune backup` has written")],
    yes: Annotated[bool, typer.Option("--yes", help="do so where there is a database already")] = False,
    as_json: JsonOption = False,
) -> None:
    """Put a backup in the database's place; what was there is kept beside it. Services and searches go on meanwhile."""
    url = read_settings().database_url
    target = sqlite_path(parse_address(url))
    if target is not None and target.exists() and not yes:
        raise UsageError(f"{target} would be replaced (what it holds is kept beside it); say --yes")
    copied, before = store.restore(url, file)
    with database(url) as engine, writing(engine) as s:
        detail = {"file": str(file), "generation": copied.generation, "before": None if before is None else str(before)}
        add_audit(s, replace(person(), request_id=None), "database.restore", "the database", detail)
    if as_json:
        print_json(
            {"file": str(file), "generation": copied.generation, "kept": None if before is None else str(before)}
        )
        return
    typer.echo(f"{target} is {file} again, generation {copied.generation}")
    if before is not None:
        err().print(f"kdatune: what was there is in {before}")
