"""`kdatune token create / list / revoke`: who may write over the network. Works on the database, needs no server."""

import getpass
import os
from datetime import datetime
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import Json
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.store import access
from kdatune_tuner.store.access import Caller
from kdatune_tuner.store.access import Scope
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import TokenRow
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.records import utc_now

_MAX_DAYS = 3650

token = typer.Typer(help="Tokens for writing over the network.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands to `kdatune`."""
    app.add_typer(token, name="token")


@token.command("create")
def create(
    name: Annotated[str, typer.Argument(help="who will use it, e.g. nightly-h200")],
    scope: Annotated[list[str], typer.Option(help=f"what it may do, several times: {', '.join(Scope)}")],
    days: Annotated[int | None, typer.Option(min=1, max=_MAX_DAYS, help="it ends after so many days")] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="write it to a new file that only you can read, and print no token")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="do nothing where a token of this name and these scopes is in use already")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a token and print it, once: it is kept nowhere."""
    unknown = sorted(set(scope) - set(Scope))
    if unknown:
        raise UsageError(f"--scope {unknown[0]!r} is not one of {', '.join(Scope)}")
    with database(read_settings().database_url) as engine:
        now = utc_now()
        with writing(engine) as s:
            same = [row for row in access.tokens(s) if row.name == name and set(scope) <= row.scopes]
            if keep and any(row.is_active(now) for row in same):
                err().print(f"kdatune: token {name!r} is there already; nothing is made")
                return
            if out_file is not None and out_file.exists():  # asked after --keep: a step that runs again finds both
                raise UsageError(f"--out {out_file} is there already; name a new file")
            ends = None if days is None else now + timedelta(days=days)
            row, text = access.create_token(s, name, scope, person(), ends)
            if out_file is not None:
                _write_private(out_file, text)
    if as_json:
        print_json(_row_json(row, now) | ({} if out_file else {"token": text}))
        return
    typer.echo(f"token {row.prefix} is in {out_file}" if out_file else text)
    err().print(f"kdatune: token {row.prefix} of {name!r} may {' '.join(sorted(row.scopes))}; it is shown only now")


@token.command("list")
def show(as_json: JsonOption = False) -> None:
    """List every token with what it may do; none is shown itself."""
    with database(read_settings().database_url) as engine, reading(engine) as s:
        rows = access.tokens(s)
    now = utc_now()
    if as_json:
        print_json({"tokens": [_row_json(row, now) for row in rows]})
        return
    table = Table(box=None, pad_edge=False)
    for column in ("prefix", "name", "state", "scopes", "created", "ends"):
        table.add_column(column)
    for row in rows:
        ends = "never" if row.expires_at is None else rfc3339(row.expires_at)
        table.add_row(
            row.prefix, row.name, _state(row, now), " ".join(sorted(row.scopes)), rfc3339(row.created_at), ends
        )
    out().print(table, markup=False)


@token.command("revoke")
def revoke(
    prefix: Annotated[str, typer.Argument(help="the token's prefix, as `kdatune token list` shows it")],
    as_json: JsonOption = False,
) -> None:
    """End a token, for good and at once."""
    with database(read_settings().database_url) as engine, writing(engine) as s:
        row = access.revoke_token(s, prefix, person())
    if as_json:
        print_json(_row_json(row, utc_now()))
        return
    typer.echo(f"token {row.prefix} of {row.name!r} is revoked")


def person() -> Caller:
    """Who is at the command line, for the audit."""
    try:
        return Caller(f"command line, user {getpass.getuser()}")
    except (KeyError, OSError, ImportError):  # a container's user without a name
        return Caller(f"command line, user {os.getuid()}")


def _write_private(path: Path, text: str) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text + "\n")
    except OSError as error:
        raise KdatuneError(f"{path} cannot be written: {error.strerror}; no token is made") from error


def _state(row: TokenRow, now: datetime) -> str:
    if row.revoked_at is not None:
        return "revoked"
    return "in use" if row.is_active(now) else "ended"


def _row_json(row: TokenRow, now: datetime) -> Json:
    return {
        "prefix": row.prefix,
        "name": row.name,
        "state": _state(row, now),
        "scopes": sorted(row.scopes),
        "created_at": rfc3339(row.created_at),
        "expires_at": None if row.expires_at is None else rfc3339(row.expires_at),
        "revoked_at": None if row.revoked_at is None else rfc3339(row.revoked_at),
    }
