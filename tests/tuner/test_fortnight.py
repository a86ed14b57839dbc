"""A simulated fortnight on recorded data: what befalls a card and its configs, and what each night's report says of it."""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest
from night_card import NightCard
from sqlalchemy import Engine

from kdatune_kernels.space import default_config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.night_report import Report
from kdatune_tuner.night_report import text_lines
from kdatune_tuner.nightly import Night
from kdatune_tuner.nightly import NightOptions
from kdatune_tuner.promote import Policy
from kdatune_tuner.recording import SHIPPED
from kdatune_tuner.recording import Recording
from kdatune_tuner.recording import load_recording
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import night
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.intake import page_quarantined
from kdatune_tuner.store.records import Decision
from kdatune_tuner.store.records import RunState
from kdatune_tuner.tune import Options

A, B, C = shape_of(1, 64, 8192), shape_of(1, 16, 8192), shape_of(1, 32, 8192)
SLOWER, WRONG, MACHINE = "config_slower", "config_incorrect", "machine_slower"
SERVED, CHANGED, BACK, NEW = "demand_served", "environment_changed", "rolled_back", "promoted"
NEW_DRIVER = "590.48.01"


@dataclass
class Fortnight:
    """The card, the launchers and the clock of a fortnight."""

    engine: Engine
    recording: Recording
    seed: int
    card: NightCard = field(init=False)
    reports: dict[int, Report] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.card = NightCard(self.recording, self.seed)
        self._at = datetime(2026, 12, 1, 2, tzinfo=UTC)

    def now(self) -> datetime:
        self._at += timedelta(milliseconds=1)
        return self._at

    def demand(self, shape: Shape, count: int) -> None:
        with writing(self.engine) as s:
            writes.report_demand(s, self.card.gpu.name, "kda", shape, count)

    def night(self, number: int) -> Report:
        self._at = datetime(2026, 12, 1, 2, tzinfo=UTC) + timedelta(days=number)
        options = NightOptions(
            budget_seconds=600.0,
            search=Options(trials=14, policy=Policy(), trigger=night.TRIGGER),
            settings=Settings(_env_file=None),
        )
        report = self.reports[number] = Night(self.engine, self.card, options, clock=self.now).run()
        return report

    def k2(self, shape: Shape, number: int) -> K2Config:
        config = self.card.space("k2", shape)[number]
        assert isinstance(config, K2Config)
        return config

    def served(self, shape: Shape) -> LaunchConfig:
        with reading(self.engine) as s:
            return next(c.config for c in queries.champions(s, self.card.gpu) if c.shape == shape)


def before_each(f: Fortnight) -> dict[int, Callable[[], None]]:
    """What happens before a night begins."""

    def demand_appears() -> None:
        f.demand(A, 400)
        f.demand(B, 30)

    def new_driver() -> None:
        f.card.driver = NEW_DRIVER
        f.card.slower |= {(A, f.k2(A, 1)): 0.89, (B, f.k2(B, 3)): 0.95}

    def one_degrades() -> None:
        f.card.slower[A, f.k2(A, 1)] *= 1.05

    return {
        1: demand_appears,
        3: lambda: f.demand(C, 5),
        5: new_driver,
        7: lambda: setattr(f.card, "machine", 1.08),
        8: lambda: setattr(f.card, "machine", 1.0),
        9: one_degrades,
        11: lambda: f.card.wrong.add((B, f.k2(B, 3))),
    }


EXPECTED = {
    1: (0, {(SERVED, A), (SERVED, B)}),
    3: (0, {(SERVED, C)}),
    5: (0, {(CHANGED, None), (NEW, A), (NEW, B)}),
    7: (3, {(MACHINE, None)}),
    9: (3, {(SLOWER, A), (BACK, A)}),
    11: (3, {(WRONG, B), (BACK, B)}),
}


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load_recording(SHIPPED)


@pytest.mark.parametrize("seed", [1])
def test_a_fortnight(engine: Engine, recording: Recording, seed: int) -> None:
    f = Fortnight(engine, recording, seed)
    f.card.slower[A, f.k2(A, 3)] = 0.92  # so that the default, 32 tokens a step, is not the first champion of A
    events = before_each(f)
    served: dict[int, dict[Shape, LaunchConfig]] = {}
    for number in range(1, 15):
        events.get(number, lambda: None)()
        report = f.night(number)
        told = "\n".join(text_lines(report.to_json()))
        code, findings = EXPECTED.get(number, (0, set()))
        expected = {(kind, None if shape is None else shape.key()) for kind, shape in findings}
        assert {(finding.kind, finding.shape) for finding in report.findings} == expected, told
        assert (report.exit_code, report.state) == (code, RunState.DONE), told
        assert [item for item in report.plan if item.state in ("failed", "left", "planned")] == [], told
        served[number] = {shape: f.served(shape) for shape in (A, B, C) if number >= 3 or shape != C}

    assert_findings_have_figures(f)
    # A: the slower one gave way to what was served before it, B: the wrong one to the default, C never changed
    assert served[1][A].k2 == f.k2(A, 3)
    assert served[5][A].k2 == served[8][A].k2 == f.k2(A, 1)
    assert served[14][A] == served[1][A]
    assert served[5][B].k2 == served[10][B].k2 == f.k2(B, 3)
    assert served[14][B] == served[1][B] == default_config(B, f.card.gpu)
    assert served[14][C] == served[3][C]
    assert served[7] == served[6] == served[8], "a slow machine changes nothing that is served"
    for shape in (A, B, C):
        assert f.card.true_us(shape, f.served(shape)) <= 1.01 * best_us(f, shape)
    assert_decisions(f, served)
    assert_stored(f)


def best_us(f: Fortnight, shape: Shape) -> float:
    """The fastest pair of the card's space that computes right, on a usual night."""
    pairs = [LaunchConfig(k1, k2) for k1 in f.card.space("k1", shape) for k2 in f.card.space("k2", shape)]
    return min(f.card.true_us(shape, pair) for pair in pairs if (shape, pair.k2) not in f.card.wrong)


def assert_findings_have_figures(f: Fortnight) -> None:
    def figures(number: int, kind: str) -> dict:
        return next(finding.figures for finding in f.reports[number].findings if finding.kind == kind)

    changed = figures(5, CHANGED)
    assert (changed["fields"], changed["stale_count"], changed["served_count"]) == (["driver"], 3, 3)
    machine = figures(7, MACHINE)
    assert machine["machine_ratio"] == pytest.approx(1.08, abs=0.02)
    slower = figures(9, SLOWER)
    assert slower["ratio"] == pytest.approx(1.05, abs=0.02)
    assert slower["machine_ratio"] == pytest.approx(1.0, abs=0.02)
    assert figures(11, WRONG)["outcome"] == "incorrect"
    assert figures(1, SERVED)["miss_count"] in (400, 30)
    order = [item.shape for item in f.reports[1].plan if item.kind == "search"]
    assert order == [A, B], "what launchers miss most comes first"
    night_7 = "\n".join(text_lines(f.reports[7].to_json()))
    assert "REGRESSION machine_slower" in night_7
    assert "usually" in night_7


def assert_decisions(f: Fortnight, served: dict[int, dict[Shape, LaunchConfig]]) -> None:
    """The history of decisions says why a config is served no more, and the quarantine holds it."""
    with reading(f.engine) as s:
        rows = queries.page_promotions(s, limit=1000)
        quarantined = page_quarantined(s)
    back = {row.shape: row for row in rows if row.decision is Decision.ROLLBACK}
    assert set(back) == {A, B}
    assert back[A].reason.startswith("nightly: the served config takes")
    assert "faster: +" in back[A].reason
    assert "ended incorrect: output differs from the reference" in back[B].reason
    assert back[A].config_hash == digest(served[14][A])
    assert {(row.shape, row.config_hash) for row in quarantined} == {
        (A, digest(served[5][A])),
        (B, digest(served[5][B])),
    }


def assert_stored(f: Fortnight) -> None:
    with reading(f.engine) as s:
        rows = night.page_nights(s, newest_first=False)
        runs = queries.page_runs(s, limit=1000)
    assert [row.report for row in rows] == [report.to_json() for report in f.reports.values()]
    assert [row.exit_code for row in rows] == [EXPECTED.get(n, (0,))[0] for n in range(1, 15)]
    assert rows[0].finished_at is not None
    assert rows[0].finished_at.date().isoformat() == "2026-12-02", "the clock that was passed in"
    assert {run.state for run in runs} == {RunState.DONE}
