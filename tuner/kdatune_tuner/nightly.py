"""One night: the reference kernel, what changed, checks of what is served, searches, counters; within a time budget.

Everything that is finished is stored at once, and a finding is stored in the transaction of what it leads to. So a night that
is cut short loses at most the piece that it was in: the next one plans from what is stored, and carries its findings over.
"""

import platform
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace
from datetime import datetime
from datetime import timedelta

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import StoreError
from kdatune_kernels.match import Champion
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Shape
from kdatune_tuner import night_findings
from kdatune_tuner import night_fleet
from kdatune_tuner import night_profiles
from kdatune_tuner.duel import Duel
from kdatune_tuner.duel import Promotion
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.ledger import OpenRun
from kdatune_tuner.ledger import uninterrupted
from kdatune_tuner.ncu.profiling import How
from kdatune_tuner.night_act import after_failed
from kdatune_tuner.night_act import after_slower
from kdatune_tuner.night_check import NOISE_LIMIT
from kdatune_tuner.night_check import Checked
from kdatune_tuner.night_check import Checker
from kdatune_tuner.night_plan import CONFIRM
from kdatune_tuner.night_plan import ENDED_WITHIN
from kdatune_tuner.night_plan import SEARCH
from kdatune_tuner.night_plan import Facts
from kdatune_tuner.night_plan import Planner
from kdatune_tuner.night_plan import ordered
from kdatune_tuner.night_reference import Reference
from kdatune_tuner.night_report import FAILED
from kdatune_tuner.night_report import INTERRUPTED
from kdatune_tuner.night_report import Finding
from kdatune_tuner.night_report import Item
from kdatune_tuner.night_report import ItemState
from kdatune_tuner.night_report import Kind
from kdatune_tuner.night_report import Report
from kdatune_tuner.night_report import findings_of
from kdatune_tuner.night_report import show_time
from kdatune_tuner.objective import Backend
from kdatune_tuner.progress import Watch
from kdatune_tuner.promote import Decision
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import night
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.damaged import noting
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.intake import page_quarantined
from kdatune_tuner.store.night_models import Verdict
from kdatune_tuner.store.records import Decision as Said
from kdatune_tuner.store.records import RunState
from kdatune_tuner.store.records import at_clock
from kdatune_tuner.store.records import utc_now
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuner
from kdatune_tuner.worker import DeviceError

_SILENT = timedelta(hours=1)  # a run that measured nothing for so long is dead: a trial is killed after minutes
_LEAST_SEARCH = 0.25  # of its estimate; with less time left a search is not begun
_SEARCH_ROOM = 2.0  # times its estimate is what one search may take, so that it does not eat the night


@dataclass(frozen=True)
class NightOptions:
    """How a night is run.

    search: options of its searches. how: of its profiles, None where none are wanted. settings: of the look at the stored
    history, None where none is wanted. fleet: workers that do the searches, None: this process does them.
    """

    budget_seconds: float
    search: Options
    drift_pct: float = 3.0
    machine_pct: float = 3.0
    max_age_days: float = 30.0
    how: How | None = None
    settings: Settings | None = None
    fleet: night_fleet.Fleet | None = None


class Night:
    """Runs one night on a backend. The caller holds the night's lock.

    Args:
        still_held: called before each piece of work; raises StoreError where the lock was lost.
        clock: what every row of the night is stamped by; None: the machine's clock.
    """

    def __init__(
        self,
        engine: Engine,
        backend: Backend,
        options: NightOptions,
        *,
        watch: Watch | None = None,
        still_held: Callable[[], None] = lambda: None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self.engine = engine
        self.backend = backend
        self.options = options
        self._watch = watch or Watch(enabled=False)
        self._still_held = still_held
        self._clock = clock
        self._started = time.monotonic()

    def run(self) -> Report:
        """The whole night. The report is stored, also where the night failed or was interrupted.

        A KdatuneError that ends the night, and Ctrl-C, are in the report; a mistake of ours is stored and raised.
        """
        with at_clock(self._clock), noting() as self._damaged:
            self._begin()
            try:
                self._work()
            except KeyboardInterrupt:
                self._close(RunState.INTERRUPTED, INTERRUPTED)
            except KdatuneError as error:
                self.report.error = str(error)
                self._close(RunState.FAILED, FAILED)
            except BaseException as error:
                self.report.error = f"{type(error).__name__}: {error}"
                self._close(RunState.FAILED, FAILED)
                raise
            else:
                self._close(RunState.DONE, self.report.code())
        return self.report

    def _begin(self) -> None:
        """Take over what an earlier night left, and open this one."""
        backend = self.backend
        with uninterrupted(), writing(self.engine) as s:
            gpu_id, build_id = writes.put_gpu(s, backend.gpu), writes.put_build(s, backend.build)
            _, swept = night.sweep(s, utc_now() - _SILENT)
            self._earlier = night.nights_of(s, gpu_id, backend.name)
            self.report = Report(
                gpu=backend.gpu.name,
                backend=backend.name,
                host=platform.node(),
                build=backend.build,
                started_at=utc_now(),
                budget_seconds=self.options.budget_seconds,
                swept_runs=swept,
            )
            self._carry_over()
            self.report.night = night.start_night(
                s,
                gpu_id=gpu_id,
                build_id=build_id,
                backend=backend.name,
                host=self.report.host,
                budget_seconds=self.options.budget_seconds,
                report=self.report.to_json(),
            )
            self.reference = Reference(self.engine, backend, self.report.night, gpu_id, build_id)
            self._write(s, RunState.RUNNING, None)  # once more: now it knows its number
        self._gpu_id, self._build_id = gpu_id, build_id
        self._checker = Checker(
            self.engine, backend, self.reference, self.options.search.policy, drift_pct=self.options.drift_pct
        )

    def _carry_over(self) -> None:
        """Findings of the nights since the last one that came to its end: nobody may have seen them."""
        for row in self._earlier:
            if row.state is RunState.DONE:
                break
            self.report.resumed_nights.append(row.id)
            carried = findings_of(row)
            have = {(finding.kind, finding.shape) for finding in self.report.findings}
            self.report.findings += [f for f in carried if (f.kind, f.shape) not in have]

    def _work(self) -> None:
        self._still_held()
        self._machine()
        self._environment()
        self.report.plan = self._planner().plan()
        self._save()
        self._go_through()
        if self.options.how is not None:
            self.report.plan += night_profiles.due(self.engine, self.backend, self.options.how, self._planner())
            self._go_through()
        if self.options.settings is not None:
            self._history(self.options.settings)

    def _machine(self) -> None:
        """Time the reference kernel; say so where the machine is slower than usual."""
        self.reference.measure()
        limit = 1.0 + max(self.options.machine_pct, NOISE_LIMIT * self.reference.noise_pct()) / 100.0
        if self.reference.ratio is not None and self.reference.ratio > limit:
            self.reference.measure()  # once more: a neighbour may have come and gone
        self._limit = limit
        self._note_machine()
        if not self.reference.runs:
            raise KdatuneError(
                "the reference kernel runs on none of its shapes here: the card or the default config is broken; no served "
                "config is judged or taken out tonight"
            )

    def _note_machine(self) -> None:
        """What the reference kernel says now; it is timed again in the night where a config seems slower."""
        self.report.reference = self.reference.to_json()
        for finding in night_findings.machine(self.reference, self._limit):
            self._find(finding)

    def _environment(self) -> None:
        """Say what changed since the last night, or since what is served was measured."""
        with reading(self.engine) as s:
            champions = queries.champions(s, self.backend.gpu)
            last = queries.find_build(s, self._earlier[0].build_id) if self._earlier else None
        before = last or next((c.build for c in reversed(champions) if c.build is not None), None)
        for finding in night_findings.environment(before, self.backend.build, champions, self.reference):
            self._find(finding)

    def _history(self, settings: Settings) -> None:
        """Look for steps in what is stored, tonight's times among it."""
        tonight = self.report.findings
        for finding in night_findings.history(self.engine, settings, self.backend.gpu.name, tonight):
            if finding not in tonight:
                self._find(finding)

    def _planner(self) -> Planner:
        gpu, now = self.backend.gpu, utc_now()
        with reading(self.engine) as s:
            facts = Facts(
                now=now,
                champions=queries.champions(s, gpu),
                demand=queries.demand(s, gpu.name, limit=1000),
                refused=page_quarantined(s, gpu_name=gpu.name, kernel="kda", limit=1000, newest_first=True),
                checked_at=night.last_checks(s, self._gpu_id, self._build_id),
                measured=night.measured_counts(s, self._gpu_id, self._build_id),
                ended=night.ended_searches(
                    s, self._gpu_id, self._build_id, self.backend.name, self.options.search.trials, ENDED_WITHIN
                ),
                seconds_per_trial=night.seconds_per_trial(s, self._gpu_id, self.backend.name),
                trials=self.options.search.trials,
                max_age_days=self.options.max_age_days,
            )
        return Planner(self.backend, facts)

    def _go_through(self) -> None:
        """Do what is planned while the budget lasts; what is added on the way takes its place by its value."""
        while todo := [item for item in ordered(self.report.plan) if item.state is ItemState.PLANNED]:
            item = todo[0]
            self._still_held()
            if self._left() <= (_LEAST_SEARCH * item.estimated_seconds if item.kind == SEARCH else 0.0):
                item.state, item.result = ItemState.LEFT, "the budget did not reach it"
                continue
            if item.kind == SEARCH and self.options.fleet is not None:
                self._search_together([one for one in todo if one.kind == SEARCH], self.options.fleet)
                continue
            with self._timed(item):
                self._do(item)
            self._save()

    @contextmanager
    def _timed(self, item: Item) -> Iterator[None]:
        """Note how long an item took, and an error that is of this item alone."""
        started = time.monotonic()
        try:
            yield
            item.state = ItemState.DONE
        except (DeviceError, StoreError):
            raise  # of the card or the database: it would be the same for the next item
        except KdatuneError as error:
            item.state, item.result = ItemState.FAILED, str(error)
        finally:
            item.seconds = time.monotonic() - started

    def _do(self, item: Item) -> None:
        assert item.shape is not None  # noqa: S101 - only skipped items have none
        match item.kind:
            case "check" | "confirm":
                self._check(item, item.shape)
            case "search":
                self._search(item, item.shape)
            case "profile":
                assert self.options.how is not None  # noqa: S101 - else no profile is planned
                night_profiles.take(self.engine, self.backend, item, self.options.how, self.report.plan)

    def _check(self, item: Item, shape: Shape) -> None:
        ledger = Ledger(self.engine, self.backend, shape)
        champion = ledger.champion()
        if champion is None:
            item.result = "nothing is served for it any more"
            return
        with ledger.run("kda", trigger=night.TRIGGER, sampler="check", trials=None, seconds=None, seed=None) as run:
            checked = self._checker.check(ledger, run, champion)
            self._note_machine()
            item.result = checked.text()
            if checked.verdict is Verdict.FAILED:
                instead = self._checker.substitute_for_failed(ledger, run, champion)
                self._conclude(ledger, checked, lambda s: after_failed(s, ledger, checked, instead))
            elif checked.verdict is Verdict.SLOWER:
                met = self._checker.meet(ledger, run, champion)
                checked = replace(checked, met=met[-1] if met else None)
                self._conclude(ledger, checked, lambda s: after_slower(s, ledger, checked))
            else:
                self._conclude(ledger, checked, lambda _: [])
                if item.kind == CONFIRM:
                    self._confirm(item, ledger, run, champion, checked.measurement_id)
        if checked.verdict in (Verdict.FAILED, Verdict.SLOWER):
            why = "its champion was taken out or got slower tonight"
            self.report.plan.append(self._planner().search(shape, why))

    def _confirm(self, item: Item, ledger: Ledger, run: OpenRun, champion: Champion, measurement_id: int) -> None:
        """Let a stale champion meet the default and what was served before with today's build; one of them serves it."""
        default = default_config(ledger.shape, self.backend.gpu)
        duel = Duel(ledger, self.backend, self.options.search.policy, run, default=default, champion=champion)
        for config in (champion.config, *self._checker.before(ledger, champion)):
            duel.take(config)
        promotion = duel.decide()
        now = ledger.champion()
        if now is not None and now.generation == champion.generation:
            reason = "the champion is confirmed: measured again, nothing served before is faster"
            generation = ledger.decide(
                Decision(Said.PROMOTED, 1.0, 1.0, 1.0, reason), measurement_id, None, duel.default_us()
            )
            promotion = Promotion("promoted", reason, 1.0, 1.0, 1.0, generation, champion.config)
        item.result = f"{item.result}; {promotion.decision}: {promotion.reason}"
        self._note_promotion(ledger.shape, champion, promotion.reason)

    def _search(self, item: Item, shape: Shape) -> None:
        before = Ledger(self.engine, self.backend, shape).champion()
        others = sum(1 for one in self.report.plan if one.kind == SEARCH and one.state is ItemState.PLANNED)
        seconds = min(self._left(), max(_SEARCH_ROOM * item.estimated_seconds, self._left() / max(others, 1)))
        tuned = Tuner(self.engine, self.backend, replace(self.options.search, trigger=night.TRIGGER), self._watch).tune(
            shape, seconds
        )
        said = tuned.promotion
        decided = "nothing decided" if said is None else f"{said.decision}: {said.reason}"
        unmeasured = self._planner().unmeasured(shape)
        rest = f"; cut short, up to {unmeasured} trials are left for the next night" if unmeasured else ""
        item.result = f"{tuned.measured} measured of {tuned.trials}; {decided}{rest}"
        self._note_promotion(shape, before, "" if said is None else said.reason, item.count)

    def _search_together(self, items: list[Item], fleet: night_fleet.Fleet) -> None:
        """The searches by workers, most value per second first; they share what time is left."""
        with reading(self.engine) as s:
            before = {champion.shape: champion for champion in queries.champions(s, self.backend.gpu)}
        self.backend.close()  # the workers want the card
        interrupted = night_fleet.search(self.engine, fleet, items, self._left())
        for item in items:
            if item.shape is not None:
                self._note_promotion(item.shape, before.get(item.shape), item.result or "", item.count)
        self._save()
        if interrupted:
            raise KeyboardInterrupt

    def _note_promotion(self, shape: Shape, before: Champion | None, reason: str, miss_count: int = 0) -> None:
        """A finding where another config is served now, or one for the first time."""
        with reading(self.engine) as s:
            now = next((c for c in queries.champions(s, self.backend.gpu) if c.shape == shape), None)
        if now is None or (before is not None and before.config == now.config):
            return
        figures = {"measured_us": now.measured_us, "default_us": now.default_us, "generation": now.generation}
        kind, text = Kind.PROMOTED, "another config is served now"
        if miss_count:
            kind, text = Kind.DEMAND_SERVED, f"launchers missed it {miss_count} times; a config is served now"
            figures["miss_count"] = miss_count
        text += f": {show_time(now.measured_us)}, the default {show_time(now.default_us)} ({reason})"
        self._find(Finding(str(kind), text, shape=shape.key(), figures=figures))

    def _conclude(self, ledger: Ledger, checked: Checked, act: Callable[[Session], list[Finding]]) -> None:
        """Store a check, what follows from it, and the findings: all or nothing."""
        with uninterrupted(), writing(self.engine) as s:
            night.add_check(s, checked.row(self.report.night, ledger))
            found = act(s)
            for finding in found:
                self._find(finding)
            self._write(s, RunState.RUNNING, None)

    def _find(self, finding: Finding) -> None:
        """Note a finding of tonight; one that was carried over and is found again is of tonight."""
        mine = replace(finding, night=self.report.night)
        kept = [f for f in self.report.findings if (f.kind, f.shape) != (mine.kind, mine.shape)]
        self.report.findings = [*kept, mine]

    def _left(self) -> float:
        return self.options.budget_seconds - (time.monotonic() - self._started)

    def _save(self) -> None:
        with uninterrupted(), writing(self.engine) as s:
            self._write(s, RunState.RUNNING, None)

    def _write(self, s: Session, state: RunState, exit_code: int | None) -> None:
        self.report.spent_seconds = time.monotonic() - self._started
        ratio = self.reference.ratio
        night.save_night(
            s,
            self.report.night,
            report=self.report.to_json(),
            state=state,
            machine_ratio=ratio,
            exit_code=exit_code,
        )

    def _close(self, state: RunState, exit_code: int) -> None:
        for item in self.report.plan:
            if item.state is ItemState.PLANNED:
                item.state, item.result = ItemState.LEFT, f"the night ended {state} before it"
        for finding in night_findings.damaged(self._damaged):
            self._find(finding)
        self.report.state, self.report.exit_code, self.report.finished_at = state, exit_code, utc_now()
        with uninterrupted(), writing(self.engine) as s:
            self._write(s, state, exit_code)
