"""`kdatune nightly` and `kdatune nights`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Engine

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import Json
from kdatune_tuner.cards import choose_cards
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import parse_seconds
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.cli_tune import BackendName
from kdatune_tuner.cli_tune import make_options
from kdatune_tuner.cli_tune import open_backend
from kdatune_tuner.fleet import Work
from kdatune_tuner.fleet import stoppable
from kdatune_tuner.ncu.profiling import How
from kdatune_tuner.night_fleet import Fleet
from kdatune_tuner.night_report import INTERRUPTED
from kdatune_tuner.night_report import shown_report
from kdatune_tuner.night_report import text_lines
from kdatune_tuner.nightly import Night
from kdatune_tuner.nightly import NightOptions
from kdatune_tuner.objective import Backend
from kdatune_tuner.progress import Watch
from kdatune_tuner.store import night
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.night_lock import single_flight


def nightly(
    budget: Annotated[str | None, typer.Option(help="stop after this time, e.g. 90m, 2h")] = None,
    backend: Annotated[BackendName | None, typer.Option(help="default: gpu where a card is visible")] = None,
    recording: Annotated[Path | None, typer.Option(help="sweep file of the replay backend")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="configs a stage, those measured earlier included")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="of the searches")] = 0,
    workers: Annotated[
        str | None, typer.Option(help="all, or how many cards of this host the searches are spread over; default: one")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check what is served, tune what launchers missed and what is stale, and report regressions. For a scheduler.

    Exit codes: 0 clean, 3 regressions found, 1 failed, 2 wrong usage, 130 interrupted.
    """
    settings = read_settings()
    seconds = settings.nightly_budget_s if budget is None else parse_seconds(budget, "--budget")
    if recording is not None and backend is BackendName.GPU:
        raise UsageError("--recording belongs to --backend replay")
    with stoppable(), database(settings.database_url) as engine, single_flight(engine) as still_held:
        source = open_backend(backend, recording, settings)
        search = make_options(settings, "kda", trials, seed, night.TRIGGER)
        options = NightOptions(
            budget_seconds=seconds,
            search=search,
            drift_pct=settings.drift_pct,
            machine_pct=settings.machine_slower_pct,
            max_age_days=settings.max_age_days,
            how=How(ncu=settings.ncu, timeout_s=settings.profile_timeout_s, trigger=night.TRIGGER),
            settings=settings,
            fleet=None if workers is None else _fleet(workers, source, Work(source.name, recording, search, settings)),
        )
        with _closed(source), Watch() as watch:
            report = Night(engine, source, options, watch=watch, still_held=still_held).run()
    _print(report.to_json(), as_json=as_json)
    if report.exit_code == INTERRUPTED:
        err().print("kdatune: interrupted; what is finished is stored, the next night goes on from there")
    if report.error:
        err().print(f"kdatune: {report.error}", soft_wrap=True)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def nights(
    number: Annotated[
        int | None, typer.Option("--night", min=1, help="one night's report; else the newest ones")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="how many of the newest")] = 14,
    as_json: JsonOption = False,
) -> None:
    """Show stored nights: one report, or a line for each of the newest."""
    with database(read_settings().database_url) as engine:
        if number is not None:
            _print(_stored(engine, number), as_json=as_json)
            return
        with reading(engine) as s:
            rows = night.page_nights(s, limit=limit)
    reports = [shown_report(row) for row in rows]
    if as_json:
        print_json({"nights": reports})
        return
    if not reports:
        out().print("no night is stored yet; run kdatune nightly")
    for report in reports:
        out().print(next(text_lines(report)), soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command("nightly")(nightly)
    app.command("nights")(nights)


def _fleet(workers: str, source: Backend, work: Work) -> Fleet:
    """The workers: on cards of the model that the night is of. Raises UsageError and DeviceError as `choose_cards`."""
    replay = source.name == "replay"
    cards = [card for card in choose_cards(workers, replay=replay) if replay or card.name.startswith(source.gpu.name)]
    if not cards:
        raise UsageError(f"--workers {workers}: none of the visible cards is named {source.gpu.name}")
    return Fleet(cards, work)


def _stored(engine: Engine, number: int) -> Json:
    with reading(engine) as s:
        row = night.find_night(s, number)
    if row is None:
        raise KdatuneError(f"there is no night {number}; see kdatune nights")
    return shown_report(row)


def _print(report: Json, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for line in text_lines(report):
        out().print(line, soft_wrap=True, markup=False)


@contextmanager
def _closed(backend: Backend) -> Iterator[None]:
    try:
        yield
    finally:
        backend.close()
