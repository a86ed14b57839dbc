"""A real service over real stored data, and a headless Chromium to look at it.

The data: the tuner's replay over the shipped sweep, the counters of recorded Nsight Compute reports, and on top of them what
takes weeks to come about by itself: nights, an older build, a second card, a rollback, failures, misses.
"""

import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright
from sqlalchemy import Engine
from sqlalchemy import update

from kdatune_kernels.identity import kernel_hash
from kdatune_kernels.space import default_config
from kdatune_kernels.space import space_hash
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import shape_of
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.ncu.collect import Stage
from kdatune_tuner.ncu.metrics import stored_form
from kdatune_tuner.ncu.report import read_report
from kdatune_tuner.ncu.unavailable import unavailable
from kdatune_tuner.objective import stage_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.regressions import look
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.night import save_night
from kdatune_tuner.store.night import start_night
from kdatune_tuner.store.profiles import put_profile
from kdatune_tuner.store.records import NewMeasurement
from kdatune_tuner.store.records import NewProfile
from kdatune_tuner.store.records import RunState
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuner

H200 = KNOWN_GPUS["NVIDIA H200"]
H20 = KNOWN_GPUS["NVIDIA H20"]
LONG = shape_of(1, 96, 8192)
SHORT = shape_of(1, 96, 1024)
MORE_SHAPES = 3
BUILD = Build(kernel_hash(), space_hash(), "1", "3.6.0", "12.9.86", "2.13.0", "13.0", "580.95.05")
NIGHTS = 9
PATIENCE_SECONDS = 60.0
"""For whatever a busy machine may take its time for."""
FROM_ELSEWHERE = "<script>alert('x')</script>"
NCU = Path(__file__).parent.parent / "data" / "ncu"
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class World:
    """Writes into the store as the tuner does, but at a time of its choice."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def measure(
        self,
        gpu: Gpu,
        shape: Shape,
        config: Any,
        *,
        build: Build = BUILD,
        kernel: str = "kda",
        days_ago: float = 0.0,
        **values: Any,
    ) -> int:
        median_us = values.pop("median_us", None)
        spread = {} if median_us is None else {"p20_us": median_us * 0.996, "p80_us": median_us * 1.004}
        new: dict[str, Any] = {"run_id": None, "outcome": Outcome.OK, "median_us": median_us, "sample_count": 15}
        new |= spread | {"measured_at": datetime.now(UTC) - timedelta(days=days_ago)}
        with writing(self.engine) as s:
            ids = {
                "gpu_id": writes.put_gpu(s, gpu),
                "problem_id": writes.put_problem(s, kernel, shape),
                "build_id": writes.put_build(s, build),
            }
            row = NewMeasurement(
                kernel=kernel, config_json=canonical(config), config_hash=digest(config), **ids, **new | values
            )
            return writes.add_measurement(s, row)

    def promote(
        self,
        gpu: Gpu,
        shape: Shape,
        measurement_id: int,
        default_us: float | None,
        *,
        gain: float = 1.05,
        decision: str = "promoted",
        reason: str = "faster than the default in a paired run",
        days_ago: float = 0.0,
    ) -> int:
        with writing(self.engine) as s:
            generation = writes.promote(
                s,
                kernel="kda",
                gpu_id=writes.put_gpu(s, gpu),
                problem_id=writes.put_problem(s, "kda", shape),
                measurement_id=measurement_id,
                baseline_measurement_id=None,
                default_us=default_us,
                gain=gain,
                gain_low=gain - 0.01,
                gain_high=gain + 0.01,
                decision=decision,
                reason=reason,
            )
            decided = datetime.now(UTC) - timedelta(days=days_ago)
            row = update(PromotionModel).where(PromotionModel.generation == generation).values(decided_at=decided)
            s.execute(row)
            return generation

    def champion(self, gpu: Gpu, shape: Shape) -> LaunchConfig:
        with reading(self.engine) as s:
            return next(c.config for c in queries.champions(s, gpu) if c.shape == shape)


def fill(engine: Engine) -> None:
    """Store everything the tests look at."""
    backend = ReplayBackend.open()
    tuner = Tuner(engine, backend, Options(trials=40, trigger="tune"))
    others = [shape for shape in backend.recording.shapes if shape not in (LONG, SHORT)]
    for shape in (LONG, SHORT, *others[:MORE_SHAPES]):
        tuner.tune(shape)
    world = World(engine)
    _nights(world, backend.gpu)
    _profiles(world)
    _second_card(world)
    _stages(world)
    _failures(world, backend)
    look(engine, Settings())
    _night(engine, backend.gpu)
    with writing(engine) as s:
        run = writes.start_run(
            s,
            trigger="nightly",
            kernel="kda",
            gpu_id=writes.put_gpu(s, backend.gpu),
            problem_id=writes.put_problem(s, "kda", LONG),
            backend="replay",
            sampler="finalists",
        )
        writes.finish_run(s, run, outcome_counts={"ok": 3}, gpu_seconds=42.5, state="done")
        writes.report_demand(s, "NVIDIA H200", "kda", shape_of(4, 96, 32768), 1234)
        writes.report_demand(s, FROM_ELSEWHERE, "kda", shape_of(2, 16, 2048), 7)


def _nights(world: World, gpu: Gpu) -> None:
    """Nights of the long shape: promoted, steady, a new driver that costs 4 %, and what was promoted before."""
    default = split_default(LONG, gpu)
    # a config that nothing else here measures
    config = replace(default, k1=replace(default.k1, head_fast=True), k2=replace(default.k2, load_warps=2))
    older = replace(BUILD, driver="575.57.08")
    first = replace(config, k2=replace(config.k2, stages_in=3 if config.k2.stages_in != 3 else 4))
    earlier = world.measure(gpu, LONG, first, build=older, days_ago=NIGHTS + 3, median_us=640.0)
    world.promote(gpu, LONG, earlier, 690.0, gain=1.078, days_ago=NIGHTS + 3)
    default_id = world.measure(gpu, LONG, default, build=older, days_ago=NIGHTS, median_us=690.0, sm_clock_mhz=1980.0)
    champion_id = world.measure(
        gpu,
        LONG,
        config,
        build=older,
        days_ago=NIGHTS,
        median_us=612.0,
        o_error_ratio=0.0042,
        state_error_ratio=0.0031,
        sm_clock_mhz=1980.0,
        regime="CUDA graph, L2 cold, interleaved",
    )
    world.promote(gpu, LONG, default_id, 690.0, gain=1.0, decision="tie", reason="inside the noise", days_ago=NIGHTS)
    world.promote(gpu, LONG, champion_id, 690.0, gain=1.046, days_ago=NIGHTS)
    for night in range(NIGHTS - 1, -1, -1):
        slower = 1.04 if night < 4 else 1.0
        build = BUILD if night < 4 else older
        median_us = 612.0 * slower * (1 + 0.001 * (night % 3))
        world.measure(gpu, LONG, config, build=build, days_ago=night, median_us=median_us)


def _night(engine: Engine, gpu: Gpu) -> None:
    """A night that found the slower config, its report as a night writes it."""
    key = LONG.key()
    report = {
        "format": 1,
        "spent_seconds": 1834.2,
        "reference": {
            "machine_ratio": 1.004,
            "reason": None,
            "points": [
                {"shape": key, "outcome": "ok", "median_us": 631.0, "usual_us": 628.5, "ratio": 1.004, "detail": None}
            ],
        },
        "plan": [
            {
                "kind": "check",
                "shape": key,
                "why": "served, and checked every night",
                "value": 12.5,
                "estimated_seconds": 3.0,
                "state": "done",
                "seconds": 2.8,
                "result": "636.5 us, 612.0 before: 4.0 % slower",
            },
            {
                "kind": "profile",
                "shape": None,
                "why": "4 served configs have no counters since they were measured",
                "value": 0.0,
                "estimated_seconds": 0.0,
                "state": "skipped",
                "seconds": None,
                "result": "ERR_NVGPUCTRPERM: the driver keeps the counters to administrators",
            },
        ],
        "findings": [
            {
                "kind": "config_slower",
                "regression": True,
                "shape": key,
                "text": "the served config takes 636.5 us, 612.0 before; it stays, there is nothing else to serve",
                "figures": {},
                "night": 1,
            },
            {
                "kind": "environment_changed",
                "regression": False,
                "shape": None,
                "text": "driver 575.57.08, now 580.95.05: 3 of 4 served configs are stale by it",
                "figures": {},
                "night": 1,
            },
        ],
        "error": None,
    }
    with writing(engine) as s:
        night_id = start_night(
            s,
            gpu_id=writes.put_gpu(s, gpu),
            build_id=writes.put_build(s, BUILD),
            backend="gpu",
            host="tuner-1",
            budget_seconds=7200.0,
            report=report,
        )
        save_night(s, night_id, report=report, state=RunState.DONE, machine_ratio=1.004, exit_code=3)


def _profiles(world: World) -> None:
    """The counters of recorded reports, for the configs they were taken of."""
    index = json.loads((NCU / "h200.json").read_text())
    for name, entry in index["reports"].items():
        shape = parse_shape(entry["shape"])
        stages = read_report(lzma.decompress((NCU / f"{name}.ncu-rep.xz").read_bytes()))
        assert isinstance(stages, dict)
        measured_us: dict[str, float] = entry["measured_us"]
        ids = {}
        for label, data in entry["configs"].items():
            config = from_json(LaunchConfig, data)
            ids[label] = world.measure(H200, shape, config, median_us=measured_us[label])
            for stage in ("k1", "k2"):
                profile = stages[Stage(stage, stage_of(config, stage)).name]
                new = NewProfile(
                    measurement_id=ids[label],
                    stage=stage,
                    counters=stored_form(profile.counters),
                    issue_active_pct=profile.counters.get("issue_active_pct"),
                    barrier_stall_per_issue=profile.counters.get("barrier_stall_per_issue"),
                    ncu_version=index["ncu_version"],
                    driver=index["driver"],
                )
                with writing(world.engine) as s:
                    put_profile(s, new)
        if shape == SHORT:  # the two-warp K1 is what the published analysis looks at
            world.promote(H200, shape, ids["two-warp"], measured_us["eight-warp"], gain=1.7)


def _second_card(world: World) -> None:
    """A card with fewer SMs: faster, slower, stale, equal, and one that was rolled back to the default."""
    old = replace(BUILD, triton="3.5.1", kernel_hash="00000000deadbeef")
    for number, (shape, ratio) in enumerate(
        (
            (LONG, 1.26),
            (SHORT, 0.93),
            (shape_of(1, 64, 8192), 1.0),
            (shape_of(2, 32, 16384), 1.08),
            (shape_of(6, 64, 8192, varlen=True, longest_tokens=3063), 0.985),
        )
    ):
        config = default_config(shape, H20)
        config = replace(config, k2=replace(config.k2, stages_in=3 + number % 3))
        build = old if number == 3 else BUILD
        measured = world.measure(H20, shape, config, build=build, days_ago=1, median_us=900.0 + 10 * number)
        world.promote(H20, shape, measured, (900.0 + 10 * number) * ratio, gain=ratio, days_ago=1)
        if number == 1:
            reason = unavailable("no_permission", "ERR_NVGPUCTRPERM").text()
            with writing(world.engine) as s:
                for stage in ("k1", "k2"):
                    put_profile(s, NewProfile(measurement_id=measured, stage=stage, unavailable_reason=reason))
    shape = shape_of(1, 16, 4096)
    measured = world.measure(H20, shape, default_config(shape, H20), median_us=300.0)
    world.promote(H20, shape, measured, 300.0, gain=1.0, reason=f"by hand {FROM_ELSEWHERE}")
    with writing(world.engine) as s:
        newest = queries.page_promotions(s, gpu_name=H20.name, shape=shape, newest_first=True)[0]
        writes.rollback(s, newest.id, f"numerics differ {FROM_ELSEWHERE}")


def _stages(world: World) -> None:
    """K2 of the second card's champions, alone: what its waves follow from."""
    for shape in (LONG, SHORT, shape_of(1, 64, 8192), shape_of(2, 32, 16384)):
        k2 = world.champion(H20, shape).k2
        taken = {"registers": 168, "spills": 0, "smem_bytes": 94128, "effective_num_warps": 12}
        world.measure(H20, shape, k2, kernel="k2", median_us=400.0, requested_num_warps=4, **taken)


def _failures(world: World, backend: ReplayBackend) -> None:
    """Configs that ended otherwise than ok, in the search of the long shape."""
    with reading(world.engine) as s:
        run = queries.page_runs(s, kernel="k2", shape=LONG)[0]
        rows = queries.page_measurements(s, kernel="k2", shape=LONG, run_id=run.id, limit=1)
    base = json.loads(rows[0].config_json)
    for outcome, detail in (
        (Outcome.RESOURCE, "out of resource: shared memory, required 245760, limit 232448"),
        (Outcome.COMPILE_ERROR, "PassManager::run failed"),
        (Outcome.INCORRECT, "o_error_ratio 3.1 is over 1"),
        (Outcome.TIMEOUT, "killed after 120 s"),
    ):
        config = base | {"stages_in": 8, "stages_out": len(outcome)}
        world.measure(
            backend.gpu, LONG, config, build=backend.build, kernel="k2", run_id=run.id, outcome=outcome, detail=detail
        )


@dataclass(frozen=True)
class Site:
    """A running service."""

    url: str
    database_url: str


def _serve(database_url: str, tmp_path: Path) -> Iterator[Site]:
    environment = {**os.environ, "KDATUNE_DATABASE_URL": database_url}
    log = tmp_path / "service.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "kdatune_tuner.cli", "serve", "--port", "0"],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Site(_address(process, log), database_url)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Where the service is: it says so once it answers."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = re.search(r"kdatune serves on (http://127\.0\.0\.1:\d+) ", log.read_text())
        if found:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"the service does not start: {log.read_text()}")


@pytest.fixture(scope="session")
def filled_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a database with everything in it."""
    url = f"sqlite:///{tmp_path_factory.mktemp('filled') / 'kdatune.db'}"
    upgrade(url)
    engine = open_engine(url)
    fill(engine)
    engine.dispose()
    return url


@pytest.fixture(scope="session")
def site(filled_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service over real data."""
    yield from _serve(filled_database, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def empty_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service over an empty database."""
    folder = tmp_path_factory.mktemp("empty")
    url = f"sqlite:///{folder / 'kdatune.db'}"
    upgrade(url)
    yield from _serve(url, folder)


def find_chromium() -> str | None:
    """The Chromium to use: KDATUNE_CHROMIUM, else the first on the PATH."""
    named = os.environ.get("KDATUNE_CHROMIUM")
    if named:
        return named
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")  # not longer: its event loop would stay in the way of the tests that run their own
def chromium() -> Iterator[Any]:
    """A headless Chromium; without one the tests are skipped, loudly."""
    program = find_chromium()
    if program is None:
        pytest.skip(
            "NO CHROMIUM: the dashboard is not looked at. `apt-get install chromium`, or name one with KDATUNE_CHROMIUM"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=list(CHROMIUM_FLAGS), timeout=1e3 * PATIENCE_SECONDS
        )
        yield browser
        browser.close()


class Watched:
    """A browser page that remembers what must not happen: console errors, exceptions, requests off the host."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.wrong: list[str] = []
        self.expected: list[str] = []
        page.on("console", lambda m: m.type in ("error", "warning") and self.wrong.append(f"console: {m.text}"))
        page.on("pageerror", lambda e: self.wrong.append(f"exception: {e}"))
        page.on("dialog", lambda d: (self.wrong.append(f"dialog: {d.message}"), d.dismiss()))
        page.on("request", lambda r: self._leaves(r.url) and self.wrong.append(f"off the host: {r.url}"))

    def expect_status(self, status: int) -> None:
        """Chromium reports the statuses of errors on the console, at a moment of its choice: this one is no fault."""
        self.expected.append(f"status of {status}")

    @property
    def faults(self) -> list[str]:
        """What has gone wrong and was not expected."""
        return [one for one in self.wrong if not any(text in one for text in self.expected)]

    def _leaves(self, address: str) -> bool:
        return not address.startswith((f"{self.url}/", "data:", "about:"))

    def open(self, path: str) -> Any:
        """Go to a path, wait until its charts are drawn, and give the page."""
        self.page.goto(self.url + path)
        self.settle()
        return self.page

    def settle(self) -> None:
        """Wait until nothing is loaded, put in its place or drawn any more."""
        waiting = "[data-chart]:not([data-drawn]), [data-regressions]"
        waiting += ", .htmx-request, .htmx-swapping, .htmx-settling, .htmx-added"
        self.until(f"document.querySelectorAll('{waiting}').length === 0")

    def until(self, expression: str) -> None:
        """Wait until an expression holds. (wait_for_function evaluates in the page, which our policy forbids.)"""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            try:
                if self.page.evaluate(expression):
                    return
            except PlaywrightError as error:
                if "context was destroyed" not in str(error):  # the page was left meanwhile
                    raise
            self.page.wait_for_timeout(30)
        raise AssertionError(f"never became true: {expression}")

    def rows(self, table: str) -> list[list[str]]:
        """The texts of a table's body, cell by cell."""
        found: list[list[str]] = self.page.eval_on_selector_all(
            f"section[aria-labelledby=h-{table}] tbody tr",
            "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.replace(/\\s+/g, ' ').trim()))",
        )
        return found


Open = Callable[..., Watched]


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Makes browser pages; when the test is over, nothing may have gone wrong on any of them."""
    made: list[tuple[Any, Watched]] = []

    def make(site: Site, *, width: int = 1280, **options: Any) -> Watched:
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(1e3 * PATIENCE_SECONDS)
        watched = Watched(context.new_page(), site.url)
        made.append((context, watched))
        return watched

    yield make
    wrong = [one for _, watched in made for one in watched.faults]
    for context, _ in made:
        context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def stored(filled_database: str) -> Iterator[World]:
    """The filled database, to know what the pages should say."""
    engine = open_engine(filled_database)
    yield World(engine)
    engine.dispose()


@pytest.fixture
def own_site(filled_database: str, tmp_path: Path) -> Iterator[Site]:
    """A service over a copy of the data, to change it."""
    shutil.copy(filled_database.removeprefix("sqlite:///"), tmp_path / "own.db")
    yield from _serve(f"sqlite:///{tmp_path / 'own.db'}", tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/browser" in item.path.as_posix():
            item.add_marker(pytest.mark.browser)
