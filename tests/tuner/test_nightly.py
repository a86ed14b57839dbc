"""A night: what is judged and what is done about it, how it ends, how it goes on; on SQLite and PostgreSQL."""

from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest
from night_card import NightCard
from sqlalchemy import Engine
from sqlalchemy import text

from kdatune_kernels.errors import StoreError
from kdatune_kernels.space import WHOLES
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.ncu.profiling import How
from kdatune_tuner.night_report import Report
from kdatune_tuner.night_report import shown_report
from kdatune_tuner.night_report import text_lines
from kdatune_tuner.nightly import Night
from kdatune_tuner.nightly import NightOptions
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import Result
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.promote import Policy
from kdatune_tuner.recording import SHIPPED
from kdatune_tuner.recording import Recording
from kdatune_tuner.recording import load_recording
from kdatune_tuner.store import night
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.intake import page_quarantined
from kdatune_tuner.store.intake import report_quarantine
from kdatune_tuner.store.models import RunModel
from kdatune_tuner.store.night_lock import single_flight
from kdatune_tuner.store.night_models import NightModel
from kdatune_tuner.store.records import RunState
from kdatune_tuner.store.records import at_clock
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuner

A, B = shape_of(1, 64, 8192), shape_of(1, 16, 8192)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load_recording(SHIPPED)


@pytest.fixture
def card(recording: Recording) -> NightCard:
    return NightCard(recording, 7)


@dataclass
class Nights:
    """Nights on one database, a day apart."""

    engine: Engine
    card: Backend
    budget_seconds: float = 600.0
    trials: int = 2
    how: How | None = None
    at: datetime = field(default=datetime(2026, 12, 1, 2, tzinfo=UTC))

    def now(self) -> datetime:
        self.at += timedelta(milliseconds=1)
        return self.at

    def demand(self, shape: Shape, count: int) -> None:
        with writing(self.engine) as s:
            writes.report_demand(s, self.card.gpu.name, "kda", shape, count)

    def next(self, hours: float = 24.0) -> Report:
        self.at += timedelta(hours=hours)
        options = NightOptions(
            budget_seconds=self.budget_seconds,
            search=Options(trials=self.trials, trigger=night.TRIGGER),
            how=self.how,
        )
        return Night(self.engine, self.card, options, clock=self.now).run()

    def served(self, shape: Shape) -> LaunchConfig | None:
        with reading(self.engine) as s:
            return next((c.config for c in queries.champions(s, self.card.gpu) if c.shape == shape), None)

    def runs(self) -> list[tuple[str, RunState]]:
        with reading(self.engine) as s:
            return [(row.trigger, row.state) for row in queries.page_runs(s, limit=1000)]


def kinds(report: Report) -> list[str]:
    return [finding.kind for finding in report.findings]


def states(report: Report) -> list[tuple[str, str]]:
    return [(item.kind, str(item.state)) for item in report.plan]


def test_an_empty_database_is_a_clean_night(engine: Engine, card: NightCard) -> None:
    report = Nights(engine, card).next()
    assert (report.exit_code, report.state, report.plan, report.findings) == (0, RunState.DONE, [], [])
    told = list(text_lines(report.to_json()))
    assert "nothing to do: no champion is served and no launcher missed one" in told[-1]
    assert "the first night with this build" in told[1]
    assert [point["usual_us"] for point in report.reference["points"]] == [None, None, None]


def test_a_machine_that_was_slow_in_its_first_night_blames_nobody_later(sqlite: Engine, card: NightCard) -> None:
    nights = Nights(sqlite, card)
    nights.demand(A, 5)
    card.machine = 1.08
    assert kinds(nights.next()) == ["demand_served"]
    card.machine = 1.0
    for _ in range(6):
        report = nights.next()
        assert (report.findings, report.exit_code) == ([], 0), list(text_lines(report.to_json()))
    assert states(report) == [("check", "done")]


def test_what_was_tuned_by_day_is_not_blamed_for_a_slow_first_night(sqlite: Engine, card: NightCard) -> None:
    """A night on a busy H200 said config_slower of four of six champions: all took 10 to 19 % longer, the reference, too."""
    for shape in (A, B):
        Tuner(sqlite, card, Options(trials=2, policy=Policy())).tune(shape)
    nights = Nights(sqlite, card)
    card.machine = 1.13
    report = nights.next()
    assert (report.findings, report.exit_code) == ([], 0), list(text_lines(report.to_json()))
    assert sum("nothing with this build to compare it with" in line for line in text_lines(report.to_json())) == 2
    card.machine = 1.0
    for _ in range(3):
        report = nights.next()
        assert (report.findings, report.exit_code) == ([], 0), list(text_lines(report.to_json()))
    card.slower[A, nights.served(A).k2] = 1.2
    assert "config_slower" in kinds(nights.next())


def test_a_machine_that_stays_slower_is_said_every_night_and_no_config_is_blamed(sqlite: Engine, card) -> None:
    nights = Nights(sqlite, card)
    nights.demand(A, 5)
    for _ in range(3):
        assert nights.next().exit_code == 0
    card.machine = 1.06
    for _ in range(7):
        report = nights.next()
        assert (kinds(report), report.exit_code) == (["machine_slower"], 3), list(text_lines(report.to_json()))
        assert report.reference["machine_ratio"] == pytest.approx(1.06, abs=0.015)


class Warming(NightCard):
    """Gets slower by 6 % after so many calls."""

    after: int = 10**9

    def measure_pair(self, shape: Shape, config: LaunchConfig, against: LaunchConfig | None = None) -> Result:
        self.after -= 1
        if self.after < 0:
            self.machine = 1.06
        return super().measure_pair(shape, config, against)


def test_a_machine_that_gets_slower_in_the_middle_of_a_night_is_told_from_its_configs(
    sqlite: Engine, recording
) -> None:
    card = Warming(recording, 3)
    nights = Nights(sqlite, card, trials=1)
    for shape in (A, B):
        nights.demand(shape, 5)
    for _ in range(3):
        assert nights.next().exit_code == 0
    card.after = 9 + 3  # the reference, and the first check
    report = nights.next()
    assert (kinds(report), report.exit_code) == (["machine_slower"], 3), list(text_lines(report.to_json()))
    assert report.reference["machine_ratio"] == pytest.approx(1.06, abs=0.015)


def test_a_config_that_gets_slower_step_by_step_is_found(sqlite: Engine, card: NightCard) -> None:
    """No night is 3 % slower than the one before."""
    nights = Nights(sqlite, card, trials=1)
    nights.demand(B, 5)  # of which no other config is within 8 %
    for _ in range(5):
        assert nights.next().exit_code == 0
    served = nights.served(B)
    assert served is not None
    found = []
    for number in range(1, 9):
        card.slower[B, served.k2] = 1.0 + 0.01 * number
        found.append("config_slower" in kinds(nights.next()))
    assert found[:2] == [False, False]
    assert found[-2:] == [True, True]


def test_a_slower_config_without_anything_better_stays_and_is_said_every_night(engine: Engine, card) -> None:
    nights = Nights(engine, card, trials=1)
    nights.demand(B, 5)
    nights.next()
    served = nights.served(B)
    assert served == default_config(B, card.gpu)
    card.slower[B, served.k2] = 1.06
    for _ in range(2):
        report = nights.next()
        assert (kinds(report), report.exit_code) == (["config_slower"], 3)
        assert "it stays, there is nothing else to serve" in report.findings[0].text
        assert report.findings[0].figures["ratio"] == pytest.approx(1.06, abs=0.02)
    assert nights.served(B) == served
    with reading(engine) as s:
        assert page_quarantined(s) == []


def test_a_wrong_default_gives_way_to_the_best_that_runs(engine: Engine, card: NightCard) -> None:
    nights = Nights(engine, card, trials=3)
    nights.demand(B, 5)
    nights.next()
    served = nights.served(B)
    assert served == default_config(B, card.gpu)
    card.wrong.add((B, served.k2))
    report = nights.next()
    assert kinds(report) == ["config_incorrect", "rolled_back"]
    assert report.exit_code == 3
    now = nights.served(B)
    assert now is not None
    assert now.k2 != served.k2
    with reading(engine) as s:
        (row,) = page_quarantined(s)
    assert (row.config_hash, row.reason.split(":")[0]) == (digest(served), "nightly")
    after = nights.next()
    assert (after.findings, after.exit_code) == ([], 0), "the new champion is sound"


def test_a_wrong_config_without_any_that_runs_is_said_every_night(sqlite: Engine, card: NightCard) -> None:
    nights = Nights(sqlite, card, trials=1)
    nights.demand(B, 5)
    nights.next()
    card.wrong |= {(B, k2) for k2 in (default_config(B, card.gpu).k2, *(whole.k2 for whole in WHOLES))}
    for _ in range(2):
        report = nights.next()
        assert (kinds(report), report.exit_code) == (["config_incorrect"], 3)
        assert "nothing else that is known runs, so it is served still" in report.findings[0].text


class Failing(NightCard):
    """Fails whole launches on a shape as it is told, one outcome a call."""

    def fail(self, shape: Shape, *outcomes: Outcome) -> None:
        self.fates = {shape: list(outcomes)}  # one a call, then all is well again

    def measure_pair(self, shape: Shape, config: LaunchConfig, against: LaunchConfig | None = None) -> Result:
        fate = getattr(self, "fates", {}).get(shape)
        if fate:
            outcome = fate.pop(0)
            if outcome is not Outcome.OK:
                return Result(outcome, detail=f"told to end {outcome}")
        return super().measure_pair(shape, config, against)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Outcome.TIMEOUT], []),
        ([Outcome.TIMEOUT, Outcome.ABORT], ["config_failed"]),
        ([Outcome.NONDETERMINISTIC], ["config_incorrect"]),
    ],
)
def test_a_wrong_result_counts_at_once_another_failure_when_it_comes_twice(
    sqlite: Engine, recording: Recording, outcomes: list[Outcome], expected: list[str]
) -> None:
    card = Failing(recording, 3)
    nights = Nights(sqlite, card, trials=1)
    nights.demand(A, 5)
    nights.next()
    card.fail(A, *outcomes, *[Outcome.LAUNCH_ERROR] * 4 if expected else [])
    report = nights.next()
    assert kinds(report) == expected
    assert report.exit_code == (3 if expected else 0)


def test_a_card_on_which_the_reference_does_not_run_fails_the_night(engine: Engine, card: NightCard) -> None:
    nights = Nights(engine, card)
    nights.demand(A, 5)
    nights.next()
    card.broken = True
    report = nights.next()
    assert (report.exit_code, report.state) == (1, RunState.FAILED)
    assert str(report.error).startswith("the reference kernel runs on none of its shapes here")
    assert set(kinds(report)) == {"reference_failed"}
    assert nights.served(A) is not None
    card.broken = False
    report = nights.next()
    assert (report.exit_code, report.resumed_nights) == (3, [2]), "what the failed night found is not lost"


def test_one_point_of_the_reference_that_fails_is_a_finding(sqlite: Engine, recording: Recording) -> None:
    card = Failing(recording, 3)
    card.fail(shape_of(1, 8, 8192), Outcome.INCORRECT)
    report = Nights(sqlite, card).next()
    assert (kinds(report), report.exit_code) == (["reference_failed"], 3)
    assert report.findings[0].shape == "N=1,H=8,T=8192"


def test_a_budget_that_is_too_short_leaves_the_rest_to_the_next_night(engine: Engine, card: NightCard) -> None:
    nights = Nights(engine, card, budget_seconds=1e-6)
    nights.demand(A, 50)
    nights.demand(B, 5)
    report = nights.next()
    assert states(report) == [("search", "left"), ("search", "left")]
    assert (report.exit_code, nights.served(A)) == (0, None)
    nights.budget_seconds = 600.0
    report = nights.next()
    assert [(item.kind, str(item.state), item.shape) for item in report.plan] == [
        ("search", "done", A),
        ("search", "done", B),
    ]
    assert report.resumed_nights == [], "that night came to its end"


class Interrupting(NightCard):
    """Ctrl-C, or an error, at the n-th call from now."""

    left: int | None = None
    error: BaseException = KeyboardInterrupt()

    def _count(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise self.error

    def measure(self, kernel, shape, config) -> Result:
        self._count()
        return super().measure(kernel, shape, config)

    def measure_pair(self, shape, config, against=None) -> Result:
        self._count()
        return super().measure_pair(shape, config, against)


def test_an_interrupted_night_goes_on_and_its_findings_are_not_lost(engine: Engine, recording: Recording) -> None:
    card = Interrupting(recording, 5)
    nights = Nights(engine, card, trials=4)
    nights.demand(A, 50)
    nights.next()
    served = nights.served(A)
    assert served is not None
    card.wrong.add((A, served.k2))
    nights.demand(B, 5)
    card.left = 15  # nine of the reference, the check and what serves instead; then a few of the search of B
    report = nights.next()
    assert (report.exit_code, report.state) == (130, RunState.INTERRUPTED)
    assert kinds(report) == ["config_incorrect", "rolled_back"]
    assert ("search", "left") in states(report)
    assert nights.runs()[-1] == ("nightly", RunState.INTERRUPTED)
    with reading(engine) as s:
        before = len(queries.page_measurements(s, kernel="k1", shape=B)) + len(
            queries.page_measurements(s, kernel="k2", shape=B)
        )
    assert before
    card.left = None
    report = nights.next(hours=1.0)
    assert report.exit_code == 3, "who reads only exit codes learns of it"
    assert report.resumed_nights == [2]
    assert [(f.kind, f.night) for f in report.findings[:2]] == [("config_incorrect", 2), ("rolled_back", 2)]
    assert ("search", "done") in states(report)
    with reading(engine) as s:
        rows = [row for kernel in ("k1", "k2") for row in queries.page_measurements(s, kernel=kernel, shape=B)]
    assert len({(row.kernel, row.config_hash) for row in rows}) == len(rows) == 8, "no trial was measured twice"
    assert nights.next().exit_code == 0


WHOLE = {"kind": "promoted", "regression": False, "shape": "N=1,H=64,T=8192", "text": "t", "figures": {}, "night": 1}
BROKEN = [
    {**WHOLE, "kind": ["promoted"]},
    {"unknown": 1},
    "text",
    None,
    7,
    {**WHOLE, "figures": None},
    {**WHOLE, "night": "1"},
]


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.FAILED])
@pytest.mark.parametrize(
    ("report", "carried"),
    [
        ({}, 0),
        ([], 0),
        ("text", 0),
        ({"format": 1}, 0),
        ({"format": 1, "findings": None}, 0),
        ({"format": 1, "findings": {"kind": "promoted"}}, 0),
        ({"format": 2, "findings": [WHOLE]}, 0),
        ({"format": 1, "findings": [*BROKEN, WHOLE]}, 1),
    ],
)
def test_a_damaged_report_of_an_earlier_night_stops_no_night(
    engine: Engine, card: NightCard, caplog, state: RunState, report, carried: int
) -> None:
    nights = Nights(engine, card)
    assert nights.next().exit_code == 0
    with writing(engine) as s:
        row = s.get(NightModel, 1)
        assert row is not None
        row.state, row.report = state.value, report
    now = nights.next()
    assert (now.exit_code, now.error, now.resumed_nights) == (0, None, [1])
    assert [(f.kind, f.night) for f in now.findings] == [("promoted", 1)] * carried
    assert "night 1" in caplog.text
    with reading(engine) as s:
        swept = night.find_night(s, 1)
    assert swept is not None
    told = "\n".join(text_lines(shown_report(swept)))
    assert told.startswith(f"night 1 on {card.gpu.name} (")
    assert "report is damaged" in told
    assert shown_report(swept)["state"] == ("interrupted" if state is RunState.RUNNING else "failed")


@pytest.mark.parametrize("text_of_report", ["{", "null", "[" * 100_000])
def test_a_report_that_is_no_json_stops_no_night(sqlite: Engine, card: NightCard, text_of_report: str) -> None:
    nights = Nights(sqlite, card)
    nights.next()
    with sqlite.begin() as connection:
        connection.execute(text("UPDATE night SET state = 'running', report = :report"), {"report": text_of_report})
    assert nights.next().exit_code == 0
    with sqlite.begin() as connection:
        kept = connection.scalar(text("SELECT report FROM night WHERE id = 1"))
    assert kept == text_of_report, "what is left of it stays"


@pytest.mark.parametrize("counts", [[1], "text", {"ok": "x"}, {"ok": -5}, {"ok": None}])
def test_a_run_whose_counts_are_damaged_stops_no_night(engine: Engine, card: NightCard, counts) -> None:
    nights = Nights(engine, card)
    nights.demand(A, 5)
    nights.next()
    with reading(engine) as s:
        gpu_id = queries.page_runs(s)[0].gpu_id
        before = night.seconds_per_trial(s, gpu_id, card.name)
    with writing(engine) as s:
        run = s.get(RunModel, queries.page_runs(s)[0].id)
        assert run is not None
        ids = {"kernel": run.kernel, "gpu_id": gpu_id, "problem_id": run.problem_id}
        added = writes.start_run(s, trigger="tune", backend=card.name, sampler="x", **ids)
        damaged = s.get(RunModel, added)
        assert damaged is not None
        damaged.outcome_counts, damaged.gpu_seconds, damaged.state = counts, 1e9, RunState.DONE.value
    with reading(engine) as s:
        assert night.seconds_per_trial(s, gpu_id, card.name) == before
    assert nights.next().exit_code == 0


def test_a_mistake_of_ours_fails_the_night_and_is_not_swallowed(sqlite: Engine, recording: Recording) -> None:
    card = Interrupting(recording, 5)
    card.error, card.left = ZeroDivisionError("a mistake"), 12
    nights = Nights(sqlite, card)
    nights.demand(A, 5)
    with pytest.raises(ZeroDivisionError):
        nights.next()
    with reading(sqlite) as s:
        (row,) = night.page_nights(s)
    assert (row.state, row.exit_code, row.report["error"]) == (RunState.FAILED, 1, "ZeroDivisionError: a mistake")


def test_what_killed_processes_left_running_is_swept(engine: Engine, card: NightCard) -> None:
    nights = Nights(engine, card)
    nights.demand(A, 5)
    nights.next()
    with reading(engine) as s:
        run = queries.page_runs(s)[0]
        row = night.page_nights(s)[0]
    ids = {"kernel": "kda", "gpu_id": run.gpu_id, "problem_id": run.problem_id, "backend": "replay", "sampler": "x"}
    with at_clock(nights.now), writing(engine) as s:
        mine = writes.start_run(s, trigger="nightly", **ids)
        alive = writes.start_run(s, trigger="tune", **ids)
        killed = night.start_night(
            s,
            gpu_id=row.gpu_id,
            build_id=row.build_id,
            backend="replay",
            host="h",
            budget_seconds=1.0,
            report=row.report,
        )
    nights.at -= timedelta(hours=3)
    with at_clock(nights.now), writing(engine) as s:
        dead = writes.start_run(s, trigger="tune", **ids)
    nights.at += timedelta(days=3)
    with at_clock(nights.now), writing(engine) as s:
        ahead = writes.start_run(s, trigger="tune", **ids)  # by a clock that was wrong
    nights.at -= timedelta(days=3) - timedelta(hours=3)
    report = nights.next(hours=0.1)
    assert (report.swept_runs, report.resumed_nights) == ([mine, dead, ahead], [killed])
    with reading(engine) as s:
        states = {r.id: (r.state, r.outcome_counts) for r in queries.page_runs(s, limit=1000)}
        swept = night.find_night(s, killed)
    assert states[mine] == states[dead] == states[ahead] == (RunState.INTERRUPTED, {})
    assert states[alive][0] is RunState.RUNNING, "it may be at work in another process"
    assert swept is not None
    assert (swept.state, swept.exit_code, swept.report["state"]) == (RunState.INTERRUPTED, None, "interrupted")


def test_two_nights_at_once_are_refused(engine: Engine, database_url: str) -> None:
    other = open_engine(database_url)
    with single_flight(engine) as still_held:
        still_held()
        with pytest.raises(StoreError, match="another nightly run is at work"), single_flight(other):
            pass
    with single_flight(other):
        pass
    other.dispose()


def test_a_database_by_another_name_is_the_same_database(sqlite: Engine, tmp_path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "kdatune.db")
    other = open_engine(f"sqlite:///{tmp_path / 'link.db'}")
    with single_flight(sqlite), pytest.raises(StoreError, match="another nightly run"), single_flight(other):
        pass
    other.dispose()


def test_a_second_run_in_the_same_night_repeats_nothing(engine: Engine, card: NightCard) -> None:
    nights = Nights(engine, card)
    nights.demand(A, 5)
    nights.next()
    assert states(nights.next()) == [("check", "done")]
    calls = card.calls
    again = nights.next(hours=2)
    assert states(again) == [("check", "skipped")]
    assert again.plan[0].result == "checked at 2026-12-03T02:00:00Z already"
    assert card.calls - calls == 9, "the reference alone"


def test_a_clock_that_was_ahead_keeps_no_config_from_being_checked(sqlite: Engine, card: NightCard) -> None:
    nights = Nights(sqlite, card)
    nights.demand(A, 5)
    nights.next()
    nights.next(hours=24.0 * 365)
    report = nights.next(hours=-24.0 * 364)
    assert ("check", "done") in states(report)
    assert ("check", "skipped") in states(nights.next(hours=0.1))


def test_what_launchers_refuse_is_looked_at_first(sqlite: Engine, card: NightCard) -> None:
    nights = Nights(sqlite, card)
    for shape in (B, A):
        nights.demand(shape, 5)
    nights.next()
    served = nights.served(A)
    assert served is not None
    with at_clock(lambda: nights.at + timedelta(hours=2)), writing(sqlite) as s:
        report_quarantine(s, card.gpu.name, "kda", A, served, "launch failed: out of resources")
    report = nights.next()
    assert [item.shape for item in report.plan] == [A, B]
    assert report.plan[0].why == "launchers refused it 1 times: launch failed: out of resources"
    assert nights.next().plan[0].why == "what is served is checked every night", "it was looked at"


def test_an_old_champion_is_confirmed_with_a_new_measurement(sqlite: Engine, card: NightCard) -> None:
    nights = Nights(sqlite, card, trials=1)
    nights.demand(A, 5)
    nights.next()
    report = nights.next(hours=31 * 24)
    assert [(item.kind, item.why.split(",")[0]) for item in report.plan] == [
        ("confirm", "measured 2026-12-02T02:00:00Z")
    ]
    assert (report.findings, report.exit_code) == ([], 0)
    with reading(sqlite) as s:
        (champion,) = queries.champions(s)
    assert champion.measured_at == "2027-01-02T02:00:00Z"
    assert states(nights.next()) == [("check", "done")]


def test_a_champion_that_this_backend_cannot_measure_is_left_alone(sqlite: Engine, card: NightCard, make_sweep) -> None:
    nights = Nights(sqlite, card)
    nights.demand(A, 5)
    nights.next()
    nights.card = make_sweep([100.0], [200.0], {(0, 0): 300.0}, build=card.build, shape=shape_of(1, 96, 8192))
    report = nights.next()
    assert states(report) == [("check", "skipped")]
    assert report.plan[0].result == "the served config cannot be measured here"
    assert report.exit_code == 0


def test_counters_that_cannot_be_had_are_skipped_with_the_reason(sqlite: Engine, card: NightCard) -> None:
    nights = Nights(sqlite, card, how=How())
    nights.demand(A, 5)
    report = nights.next()
    assert states(report) == [("search", "done"), ("profile", "skipped")]
    assert report.plan[-1].result == "the replay backend has no card to profile"
    assert report.exit_code == 0


def test_a_night_on_the_gpu_backend_goes_the_same_way(engine: Engine, fake_device, monkeypatch) -> None:
    """The real backend with its child process; the card behind it is a fake one."""
    monkeypatch.setenv("PATH", "/nonexistent")  # no ncu
    backend = fake_device.backend()
    default = default_config(A, backend.gpu)
    fake_device.fate(default.k2, us=400.0)
    nights = Nights(engine, backend, trials=3, how=How(ncu="/nonexistent/ncu"))
    nights.demand(A, 5)
    report = nights.next()
    told = list(text_lines(report.to_json()))
    assert (kinds(report), report.exit_code) == (["demand_served"], 0), told
    assert states(report) == [("search", "done"), ("profile", "skipped")]
    assert str(report.plan[-1].result).startswith("ncu_not_found: ")
    report = nights.next()
    assert [state for state in states(report) if state[0] == "check"] == [("check", "done")]
    assert report.exit_code == 0
    served = nights.served(A)
    assert served is not None
    assert served.k2 != default.k2
    fake_device.fate(served.k2, check="incorrect")
    backend.close()  # every night has its own child process
    report = nights.next()
    assert kinds(report) == ["config_incorrect", "rolled_back"]
    assert report.exit_code == 3
    assert nights.served(A) == default
    backend.close()


def test_a_search_that_its_time_cut_short_is_owed_one_that_ended_by_itself_is_not(
    engine: Engine, card: NightCard
) -> None:
    nights = Nights(engine, card, trials=14)
    nights.demand(A, 5)
    nights.next()
    with reading(engine) as s:
        run = next(run for run in queries.page_runs(s) if run.kernel == "k2")
        row = night.page_nights(s)[0]
    shares = {"k1": 0.35, "k2": 0.5}

    def ended(trials: int = 14, build_id: int = row.build_id) -> set[tuple[str, str]]:
        with reading(engine) as s:
            return night.ended_searches(s, row.gpu_id, build_id, "replay", trials, shares)

    assert ended() == {("k1", A.key()), ("k2", A.key())}
    assert ended(trials=15) == set(), "more is wanted than it was to do"
    newer = replace(card.build, driver="590.1")
    with at_clock(nights.now), writing(engine) as s:
        assert ended(build_id=writes.put_build(s, newer)) == set(), "it was with another build"
        model = s.get(RunModel, run.id)
        assert model is not None
        model.finished_at = model.started_at + timedelta(seconds=0.6 * (run.budget_seconds or 0.0))
    assert ended() == {("k1", A.key())}, "it may have been its time that ended it"


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("reference_time", "median_us"),
        ("champion_check", "measured_us"),
        ("promotion", "default_us"),
        ("night", "budget_seconds"),
        ("run", "budget_trials"),
        ("run", "gpu_seconds"),
        ("demand", "count"),
        ("quarantine", "count"),
    ],
)
def test_a_number_that_was_overwritten_stops_no_night_and_is_named(
    sqlite: Engine, card: NightCard, table: str, column: str
) -> None:
    nights = Nights(sqlite, card)
    nights.demand(A, 5)
    nights.demand(B, 5)
    assert nights.next().exit_code == 0
    with writing(sqlite) as s:
        config = default_config(B, card.gpu)
        report_quarantine(s, card.gpu.name, "kda", B, config, "does not launch")
    assert nights.next().exit_code == 0
    with sqlite.begin() as connection:
        connection.execute(text("PRAGMA ignore_check_constraints = ON"))
        which = "WHERE kernel IN ('k1', 'k2')" if column == "budget_trials" else ""
        newest = connection.scalar(text(f"SELECT max(id) FROM {table} {which}"))
        connection.execute(text(f"UPDATE {table} SET {column} = 'abc' WHERE id = {newest}"))
        connection.execute(text("PRAGMA ignore_check_constraints = OFF"))
    report = nights.next()
    assert (report.exit_code, report.error, report.state) == (0, None, RunState.DONE)
    (told,) = [finding.text for finding in report.findings if finding.kind == "damaged_rows"]
    assert f"{table} {newest} is damaged ({column} is no number: 'abc')" in told
