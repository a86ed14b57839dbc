"""`kdatune export` and `kdatune import`: measurements as files that other tuners write and read."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from typing import Any

import typer

from kdatune_kernels.errors import ExchangeError
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import parse_shape
from kdatune_tuner import exchange
from kdatune_tuner import exchange_fla
from kdatune_tuner import exchange_t4
from kdatune_tuner.cli_support import GpuOption
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import ShapeOption
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import known_gpu
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.cli_support import write_whole
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.imports import put_imported
from kdatune_tuner.store.imports import traded


class Format(StrEnum):
    """A file format of others."""

    T4 = "t4"
    FLA = "fla"


class Kernel(StrEnum):
    """What was measured: a stage, or a whole launch."""

    K1 = "k1"
    K2 = "k2"
    KDA = "kda"


FormatOption = Annotated[
    Format,
    typer.Option(
        "--format", help="t4: every measurement, as Kernel Tuner writes them; fla: the served best of each shape"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("export")(export)
    app.command("import")(import_)


def export(
    form: FormatOption,
    gpu: GpuOption,
    out_file: Annotated[Path, typer.Option("--out", help="the file to write")],
    kernel: Annotated[Kernel, typer.Option(help="of which kernel; a file of fla is of kda")] = Kernel.KDA,
    shape: ShapeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write what was measured on a card as a file that other tuners read."""
    if not out_file.name or out_file.is_dir():
        raise UsageError(f"--out must name a file, not {str(out_file)!r}")
    if form is Format.FLA and kernel is not Kernel.KDA:
        raise UsageError(f"a file of fla holds what is served, which is of kda, not of {kernel.value}")
    shapes = [parse_shape(one) for one in shape or ()]
    document: Any
    with database(read_settings().database_url) as engine:
        card = known_gpu(gpu, engine)
        with reading(engine) as s:
            if form is Format.T4:
                document = exchange_t4.dump(traded(s, card, kernel.value, shapes), kernel.value, card)
                count = len(document["results"])
            else:
                served = [c for c in queries.champions(s, card) if not shapes or c.shape in shapes]
                document = exchange_fla.dump(served)
                count = len(document["autotune_entries"])
    write_whole(out_file, json.dumps(document, indent=1) + "\n")
    if as_json:
        print_json(
            {"out": str(out_file), "format": form.value, "gpu": card.name, "kernel": kernel.value, "count": count}
        )
        return
    what = "measurements" if form is Format.T4 else "champions"
    out().print(f"{out_file}: {count} {what} of {kernel.value} on {card.name}", soft_wrap=True, markup=False)


def import_(
    form: FormatOption,
    file: Annotated[Path, typer.Argument(help="the file to read")],
    gpu: Annotated[str | None, typer.Option(help="the card it was measured on, where the file does not say it")] = None,
    kernel: Annotated[Kernel | None, typer.Option(help="the kernel, where a T4 file does not say it")] = None,
    shape: Annotated[str | None, typer.Option(help="the shape, where a T4 file does not say it")] = None,
    as_json: JsonOption = False,
) -> None:
    """Store measurements from another tuner's file. Nothing of it is served; the same file again adds nothing."""
    wanted = None if shape is None else parse_shape(shape)
    document = exchange.read_document(file)
    with database(read_settings().database_url) as engine:
        card = None if gpu is None else known_gpu(gpu, engine)
        told = exchange.Told(card, None if kernel is None else kernel.value, wanted)
        never_run = 0
        try:
            if form is Format.T4:
                found, never_run = exchange_t4.load(document, told)
            else:
                found = exchange_fla.load(document, told, file.absolute().parent.name)
        except KdatuneError as error:
            raise ExchangeError(f"{file}: {error}") from error
        with writing(engine) as s:
            stored, known = put_imported(s, found, form.value)
    if as_json:
        counts = {"stored_count": stored, "known_count": known, "never_run_count": never_run}
        print_json({"file": str(file), "format": form.value, **counts})
        return
    more = f", {never_run} were never run" if never_run else ""
    out().print(
        f"{file}: {stored} measurements stored, {known} known before{more}; what is served has not changed",
        soft_wrap=True,
        markup=False,
    )
