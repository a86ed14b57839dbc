"""`kdatune bench`: ours, the default and every importable peer side by side on this machine's card, in one run."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from kdatune_kernels import gpu
from kdatune_kernels.errors import UsageError
from kdatune_kernels.shape_sets import OURS
from kdatune_kernels.shape_sets import PEER_NAMES
from kdatune_kernels.shape_sets import SHAPE_SETS
from kdatune_kernels.shape_sets import peers_of
from kdatune_kernels.shape_sets import shapes_of
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import ShapeOption
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.worker import DeviceError

_LABELS = {**{name: name for name in OURS}, "flash_kda": "FlashKDA", "fla": "fla"}


def register(app: typer.Typer) -> None:
    """Add the command to `kdatune`."""
    app.command("bench")(bench)


def bench(
    set_name: Annotated[
        str | None, typer.Option("--set", help=f"a set of shapes: {', '.join(SHAPE_SETS)} (headline, unless --shape)")
    ] = None,
    shape: ShapeOption = None,
    peers: Annotated[str, typer.Option(help="whom to compare with; what is not installed is left out")] = ",".join(
        PEER_NAMES
    ),
    as_json: JsonOption = False,
) -> None:
    """Time whole chunk_kda calls: the config that is resolved, the default, the resolved one in precision fast, and each peer,
    interleaved in one run.

    Errors are ratios to an fp64 recurrence on the same inputs. Needs a card.
    """
    names = peers_of(peers)
    shapes = _wanted(set_name, shape or ())
    _need_a_card()
    import torch

    from kdatune_kernels import compare

    progress = err()

    def say(row: Json) -> None:
        progress.print(f"{row['shape']}: {_cell(row, 'ours')} us", soft_wrap=True)

    try:
        document = compare.run(shapes, names, say)
    except torch.cuda.OutOfMemoryError as error:
        raise DeviceError(f"a shape does not fit the free device memory: {error}") from error
    if as_json:
        print_json(document)
    else:
        _print(document, names)


def _wanted(set_name: str | None, keys: Sequence[str]) -> list[Shape]:
    """The shapes to time. Raises UsageError for one that has nothing to time, or that is no dense batch."""
    shapes = list(shapes_of(set_name or (None if keys else "headline"), keys))
    for shape in shapes:
        if shape.T == 0:
            raise UsageError(f"{shape.key()} has no tokens: there is nothing to time")
        if not shape.varlen and shape.T % shape.N:
            raise UsageError(f"{shape.key()}: T={shape.T} is not {shape.N} equal sequences; add varlen=true")
    return shapes


def _need_a_card() -> None:
    try:
        gpu.current()
    except UsageError as error:
        raise DeviceError(f"kdatune bench times on a card: {error}") from error


def _print(document: Json, peers: Sequence[str]) -> None:
    rows = document["rows"]
    systems = [*OURS, *peers]
    table = Table(box=None, pad_edge=False)
    table.add_column("shape", overflow="fold")
    for name in systems:
        table.add_column(f"{_LABELS[name]} us", justify="right")
    for name in peers:
        table.add_column(f"x {_LABELS[name]}", justify="right")
    for name in systems:
        table.add_column(f"{_LABELS[name]} o / state", justify="right")
    for row in rows:
        speedups = (f"{x:.2f}x" if (x := row.get(f"speedup_vs_{name}")) else "-" for name in peers)
        errors = (_errors(row, name) for name in systems)
        table.add_row(row["shape"], *(_cell(row, name) for name in systems), *speedups, *errors)
    console = out()
    console.print(table, markup=False)
    console.print("o / state: error ratios to the fp64 recurrence, times 1e-3", markup=False)
    for name in peers:
        if f"geomean_vs_{name}" in document:
            geomean, least = document[f"geomean_vs_{name}"], document[f"least_vs_{name}"]
            console.print(f"over {_LABELS[name]}: geomean {geomean:.2f}x, least {least:.2f}x", markup=False)
            geomean, least = document[f"fast_geomean_vs_{name}"], document[f"fast_least_vs_{name}"]
            console.print(f"in precision fast: geomean {geomean:.2f}x, least {least:.2f}x", markup=False)
    for name, reason in _reasons(rows).items():
        console.print(f"{_LABELS[name]} is left out: {reason}", soft_wrap=True, markup=False)


def _cell(row: Json, name: str) -> str:
    value = row[f"{name}_us"]
    return "-" if value is None else f"{value:.1f}"


def _errors(row: Json, name: str) -> str:
    o, state = row[f"{name}_o_error_ratio"], row[f"{name}_state_error_ratio"]
    return "-" if o is None else f"{o * 1e3:.2f} / {state * 1e3:.2f}"


def _reasons(rows: Sequence[Json]) -> dict[str, str]:
    """Why a peer is missing, by peer; of several shapes the first reason."""
    found: dict[str, str] = {}
    for row in rows:
        for name, reason in row["unavailable"].items():
            found.setdefault(name, f"{row['shape']}: {reason}" if not reason.startswith("not installed") else reason)
    return found
