"""`kdatune resolve`, `history`, `rollback`, `export-snapshot`, `db upgrade`."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from sqlalchemy import Engine

from kdatune_kernels import match
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import StoreError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.match import Match
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.snapshot import SCHEMA
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import dump_snapshot
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.cli_others import check_served
from kdatune_tuner.cli_others import installed
from kdatune_tuner.cli_others import resolve_kernel
from kdatune_tuner.cli_others import shape_of_kernel
from kdatune_tuner.cli_support import GpuOption
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import KernelOption
from kdatune_tuner.cli_support import OneShapeOption
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import known_gpu
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.cli_support import write_whole
from kdatune_tuner.progress import show_us
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.other_champions import other_champions
from kdatune_tuner.store.records import Decision
from kdatune_tuner.store.records import PromotionRow
from kdatune_tuner.store.records import rfc3339

_WAIT_S = 3.0


def resolve(gpu: GpuOption, shape: OneShapeOption, kernel: KernelOption = "kda", as_json: JsonOption = False) -> None:
    """Show which config a launch uses, from which layer, and why; and what the database would serve."""
    if check_served(kernel) != "kda":
        resolve_kernel(installed(kernel), gpu, shape, read_settings().database_url, as_json)
        return
    wanted = parse_shape(shape)
    url = read_settings().database_url
    with ExitStack() as stack:
        engine = _database_if_any(stack, url)
        card = known_gpu(gpu, engine)
        resolver = Resolver()
        try:
            resolver.refresh(card, timeout_seconds=_WAIT_S)
            layers = resolver.explain(wanted, card)
            used = resolver.resolve(wanted, card)
        finally:
            resolver.close()
        served = None if engine is None else _served(engine, wanted, card)
        where = "" if engine is None else engine.url.render_as_string(hide_password=True)
    document: Json = {
        "gpu": card.name,
        "shape": wanted.key(),
        "layer": used.layer,
        "generation": used.generation,
        **_match_json(used),
        "layers": [
            {"layer": layer.layer, "state": layer.state, "used": layer.used}
            | ({} if layer.match is None else _match_json(layer.match))
            for layer in layers
        ],
        "database": None if served is None else _match_json(served),
    }
    if as_json:
        print_json(document)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("", "layer", "match", "state", "why"):
        table.add_column(name)
    for layer in layers:
        found = layer.match
        table.add_row(
            "*" if layer.used else "",
            layer.layer,
            found.match if found else "-",
            layer.state,
            _why(found) if found else "-",
        )
    if served is not None:
        table.add_row("", "database", served.match, where, _why(served))
    console = out()
    console.print(table, markup=False)
    for stage in ("k1", "k2"):
        inside = stage == "k1" and used.config.k2.whole
        shown = "done by k2" if inside else canonical(getattr(used.config, stage))
        console.print(f"{stage}: {shown}", soft_wrap=True, markup=False)


def _database_if_any(stack: ExitStack, url: str) -> Engine | None:
    """The database where there is a usable one: this command must answer without it too."""
    try:
        return stack.enter_context(database(url))
    except StoreError:
        return None


def _served(engine: Engine, shape: Shape, card: Gpu) -> Match:
    with reading(engine) as s:
        return match.find(queries.champions(s), shape, card)


def _why(found: Match) -> str:
    """The reason; with the champion's time where nobody measured that end to end."""
    champion = found.champion
    if champion is None or not champion.estimated:
        return found.reason
    return f"{found.reason}; {show_us(champion.measured_us)}, estimated as the sum of its parts"


def _match_json(found: Match) -> Json:
    champion = found.champion
    return {
        "match": found.match,
        "gpu_level": found.gpu_level,
        "reason": found.reason,
        "config": to_json(found.config),
        "champion_shape": champion.shape.key() if champion else None,
        "measured_us": champion.measured_us if champion else None,
        "estimated": champion is not None and champion.estimated,
        "default_us": champion.default_us if champion else None,
        "stale_reason": found.stale_reason,
    }


def history(
    gpu: GpuOption,
    shape: OneShapeOption,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="newest decisions shown")] = 20,
    kernel: KernelOption = "kda",
    as_json: JsonOption = False,
) -> None:
    """Show the decisions about what is served for a shape, newest first."""
    wanted = shape_of_kernel(check_served(kernel), shape)
    with database(read_settings().database_url) as engine:
        card = known_gpu(gpu, engine)
        with reading(engine) as s:
            rows = queries.page_promotions(
                s, gpu_name=card.name, kernel=kernel, shape=wanted, limit=limit, newest_first=True
            )
    if as_json:
        print_json({"gpu": card.name, "shape": wanted.key(), "decisions": [_promotion_json(row) for row in rows]})
        return
    table = Table(box=None, pad_edge=False)
    for name in ("id", "generation", "decided", "decision", "measured", "default", "reason"):
        table.add_column(name, justify="right" if name in ("id", "generation", "measured", "default") else "left")
    for row in rows:
        table.add_row(
            str(row.id),
            str(row.generation),
            rfc3339(row.decided_at),
            str(row.decision),
            show_us(row.measured_us),
            show_us(row.default_us),
            row.reason,
        )
    out().print(table, markup=False)


def _promotion_json(row: PromotionRow) -> Json:
    names = ("id", "generation", "measured_us", "default_us", "gain", "gain_low", "gain_high", "reason")
    return {
        **{name: getattr(row, name) for name in names},
        "decision": str(row.decision),
        "decided_at": rfc3339(row.decided_at),
        "config": None if row.config_json is None else json.loads(row.config_json),
    }


def rollback(
    gpu: GpuOption,
    shape: OneShapeOption,
    reason: Annotated[str, typer.Option(help="why, for the history")] = "rolled back by hand",
    kernel: KernelOption = "kda",
    as_json: JsonOption = False,
) -> None:
    """Undo what is served for a shape: what was served before it is served again."""
    wanted = shape_of_kernel(check_served(kernel), shape)
    with database(read_settings().database_url) as engine:
        card = known_gpu(gpu, engine)
        with writing(engine) as s:
            rows = queries.page_promotions(
                s, gpu_name=card.name, kernel=kernel, shape=wanted, limit=1000, newest_first=True
            )
            now = next((row for row in rows if row.decision in (Decision.PROMOTED, Decision.ROLLBACK)), None)
            if now is None or now.config_json is None:
                raise KdatuneError(f"nothing is served for {wanted.key()} on {card.name}: there is nothing to undo")
            generation = writes.rollback(s, now.id, reason)
            served = queries.served(s, kernel, now.gpu_id, now.problem_id)
    before = None if served is None or served.config_json is None else json.loads(served.config_json)
    if as_json:
        print_json({"gpu": card.name, "shape": wanted.key(), "generation": generation, "config": before})
        return
    told = "the default config" if before is None else canonical(before)
    out().print(f"generation {generation} serves {told}", soft_wrap=True, markup=False)


def export_snapshot(
    gpu: GpuOption,
    out_file: Annotated[Path, typer.Option("--out", help="the snapshot file")],
) -> None:
    """Write the champions of exactly this GPU model as one snapshot document.

    The service serves it those of other models of the same silicon as well; they go into files of their own.
    """
    if not out_file.name or out_file.is_dir():
        raise UsageError(f"--out must name a file, not {str(out_file)!r}")
    with database(read_settings().database_url) as engine:
        card = known_gpu(gpu, engine)
        with reading(engine) as s:
            champions = queries.champions(s, card)
            others = sorted(other_champions(s, card), key=lambda c: (c.kernel, c.shape.key()))
            generation = queries.generation(s)
    # by shape: a file under version control then changes only where something did
    champions = sorted((replace(c, stale_reason=None) for c in champions), key=lambda c: c.shape.key())
    document = dump_snapshot(Snapshot(SCHEMA, card, generation, tuple(champions), others=tuple(others)))
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    write_whole(out_file, text)
    out().print(
        f"{out_file}: {len(champions) + len(others)} champions of {card.name}, generation {generation}", soft_wrap=True
    )


def db_upgrade() -> None:
    """Bring the database to the newest schema, making it where there is none."""
    url = read_settings().database_url
    upgrade(url)
    engine = open_engine(url)
    where = engine.url.render_as_string(hide_password=True)
    engine.dispose()
    out().print(f"{where} is up to date", soft_wrap=True, markup=False)
