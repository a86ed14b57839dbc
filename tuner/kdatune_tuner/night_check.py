"""Is what is served as good as it was? A served config measured again, judged relative to the reference kernel.

A config is blamed only where its time in units of the reference has grown by more than the limit, twice in a row, with the
reference timed again in between. It gives way only to one that is faster beside it in a paired run. A wrong result is blamed
at once.
"""

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.match import Champion
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import from_json
from kdatune_tuner.ledger import Known
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.ledger import OpenRun
from kdatune_tuner.night_reference import ANCHOR_NIGHTS
from kdatune_tuner.night_reference import Reference
from kdatune_tuner.night_reference import middle
from kdatune_tuner.night_reference import noise_pct
from kdatune_tuner.night_reference import runs_of
from kdatune_tuner.night_report import percent
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import Result
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.promote import Contender
from kdatune_tuner.promote import Decision as Verdicted
from kdatune_tuner.promote import Policy
from kdatune_tuner.promote import decide
from kdatune_tuner.store import night
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.night_models import Verdict
from kdatune_tuner.store.records import SERVING_DECISIONS
from kdatune_tuner.store.records import Decision
from kdatune_tuner.store.records import MeasurementRow
from kdatune_tuner.store.records import PromotionRow
from kdatune_tuner.store.records import utc_now

AT_ONCE = (Outcome.INCORRECT, Outcome.NONDETERMINISTIC, Outcome.ILLEGAL_ACCESS)
"""Outcomes that are blamed when they come once. Others (a time-out, a died process) must come twice."""

NOISE_LIMIT = 4.0
"""A change within this many standard deviations of the nights before is noise."""

_SUBSTITUTES = 3  # measured pairs that are tried where no earlier champion and not the default runs


@dataclass(frozen=True)
class Checked:
    """What a check said. ratio: time now over time before, both on a usual machine (x, > 1 is slower)."""

    champion: Champion
    promotion: PromotionRow
    verdict: Verdict
    result: Result
    measurement_id: int
    expected_us: float | None
    machine_ratio: float
    met: "Met | None" = None

    @property
    def ratio(self) -> float | None:
        if self.result.median_us is None or self.expected_us is None:
            return None
        return self.result.median_us / self.machine_ratio / self.expected_us

    def text(self) -> str:
        """In words."""
        if self.verdict is Verdict.FAILED:
            return f"the served config ended {self.result.outcome}: {self.result.detail or 'no detail'}"
        told = f"{self.result.median_us:,.1f} us"
        if self.ratio is None:
            return f"{told}; nothing with this build to compare it with"
        machine = "" if self.machine_ratio == 1.0 else f", with the machine at {percent(self.machine_ratio)}"
        return f"{told}{machine}: {percent(self.ratio)} against {self.expected_us:,.1f} us"

    def row(self, night_id: int, ledger: Ledger) -> night.CheckRow:
        return night.CheckRow(
            night_id=night_id,
            gpu_id=ledger.gpu_id,
            build_id=ledger.build_id,
            problem_id=ledger.problem_ids["kda"],
            config_hash=digest(self.champion.config),
            against_hash=None if self.met is None else digest(self.met.config),
            outcome=str(self.result.outcome),
            measured_us=self.result.median_us,
            against_us=None if self.met is None else self.met.result.median_us,
            expected_us=self.expected_us,
            machine_ratio=self.machine_ratio,
            verdict=self.verdict,
            checked_at=utc_now(),
        )


@dataclass(frozen=True)
class Met:
    """A config that met the champion in one run, and what the policy says of the two."""

    config: LaunchConfig
    measurement_id: int
    result: Result
    decision: Verdicted

    @property
    def is_faster(self) -> bool:
        return self.decision.decision is Decision.PROMOTED and bool(self.result.against_us)

    def substitute(self) -> "Substitute":
        """What is served instead of the champion."""
        said = self.decision
        gains = (said.gain, said.gain_low, said.gain_high)
        return Substitute(self.config, self.measurement_id, self.result.median_us, said.reason, *gains)


@dataclass(frozen=True)
class Substitute:
    """What is served instead of a champion that is taken out: its measurement of tonight, and why it."""

    config: LaunchConfig
    measurement_id: int
    median_us: float | None
    reason: str
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None


class Checker:
    """Checks champions of one backend in one night.

    Args:
        drift_pct: a served config slower than before by more than this has got slower.

    Raises:
        KdatuneError: the card or the database refuses (from every method).
    """

    def __init__(
        self, engine: Engine, backend: Backend, reference: Reference, policy: Policy, *, drift_pct: float
    ) -> None:
        self._engine = engine
        self._backend = backend
        self._reference = reference
        self._policy = policy
        self._drift_pct = drift_pct

    def check(self, ledger: Ledger, run: OpenRun, champion: Champion) -> Checked:
        """Measure the champion again, alone as the reference is, and judge."""
        promotion, measured = self._promotion(champion)
        result, known = self._measure(ledger, run, champion)
        if not result.ok and result.outcome not in AT_ONCE:
            self._backend.close()  # a new child: the old one would give the answer that it has
            result, known = self._measure(ledger, run, champion)
        expected_us, noise = self._expected(ledger, champion, measured, estimated=result.estimated)
        limit_pct = max(self._drift_pct, NOISE_LIMIT * noise)
        verdict = Verdict.OK
        if self._is_slower(result, expected_us, limit_pct):
            # the machine may have changed since the night began: both again
            self._reference.measure()
            result, known = self._measure(ledger, run, champion)
            if self._is_slower(result, expected_us, limit_pct):
                verdict = Verdict.SLOWER
        if not result.ok:
            verdict, expected_us = Verdict.FAILED, None
        elif expected_us is None:
            verdict = Verdict.UNJUDGED
        return Checked(champion, promotion, verdict, result, known.measurement_id, expected_us, self._reference.now)

    def before(self, ledger: Ledger, champion: Champion) -> list[LaunchConfig]:
        """Configs that were served before this one, newest first, then the defaults; none that somebody took back."""
        shape, gpu = champion.shape, self._backend.gpu
        rows = [row for row in ledger.decisions() if row.decision in SERVING_DECISIONS]
        served = [config for row in rows if (config := _config_of(row)) is not None]
        found = dict.fromkeys([*served, default_config(shape, gpu), split_default(shape, gpu)])
        found.pop(champion.config, None)
        taken_back = ledger.rolled_back(found)
        return [c for c in found if c not in taken_back and config_ok(c, shape, gpu) is None and self._can(shape, c)]

    def substitute_for_failed(self, ledger: Ledger, run: OpenRun, champion: Champion) -> Substitute | None:
        """The first that runs now: what was served before, the default, the fastest pairs that are known."""
        known = {c: k for c, k in ledger.known("kda").items() if isinstance(c, LaunchConfig) and k.result.ok}
        taken_back = ledger.rolled_back(known)
        ranked = sorted(
            (c for c in known if c != champion.config and c not in taken_back),
            key=lambda c: known[c].result.median_us or 0.0,
        )
        for config in dict.fromkeys([*self.before(ledger, champion), *ranked[:_SUBSTITUTES]]):
            result = self._backend.measure_pair(ledger.shape, config)
            stored = ledger.add(run, "kda", config, result)
            if result.ok:
                return Substitute(config, stored.measurement_id, result.median_us, "it runs and is correct tonight")
        return None

    def meet(self, ledger: Ledger, run: OpenRun, champion: Champion) -> list[Met]:
        """Bring what was served before, and the default, before the champion: each pair in one interleaved run.

        Ends with the first that the policy finds faster.
        """
        found = []
        for config in self.before(ledger, champion):
            result = self._backend.measure_pair(ledger.shape, config, champion.config)
            stored = ledger.add(run, "kda", config, result)
            rounds = 0 if result.paired else None
            mine = Contender(digest(config), result.outcome, result.samples_us, result.estimated, rounds)
            theirs = Contender(digest(champion.config), Outcome.OK, result.against_us, result.estimated, rounds)
            decision = decide(mine, theirs if result.against_us else None, None, self._policy)
            found.append(Met(config, stored.measurement_id, result, decision))
            if found[-1].is_faster:
                break
        return found

    def _measure(self, ledger: Ledger, run: OpenRun, champion: Champion) -> tuple[Result, Known]:
        results = runs_of(lambda: self._backend.measure_pair(ledger.shape, champion.config))
        stored = [ledger.add(run, "kda", champion.config, result) for result in results]
        result = middle(results)
        return result, stored[results.index(result)]

    def _is_slower(self, result: Result, expected_us: float | None, limit_pct: float) -> bool:
        if result.median_us is None or expected_us is None:
            return False
        return result.median_us / self._reference.now > expected_us * (1.0 + limit_pct / 100.0)

    def _expected(
        self, ledger: Ledger, champion: Champion, measured: MeasurementRow | None, *, estimated: bool
    ) -> tuple[float | None, float]:
        """What the config takes on a usual machine with this build, from its first nights, and the noise of all (%)."""
        ratios = self._reference.ratios()
        with reading(self._engine) as s:
            problem_id, mine = ledger.problem_ids["kda"], digest(champion.config)
            history = night.check_history(s, ledger.gpu_id, ledger.build_id, problem_id, mine)
            nights = night.nights_of(s, ledger.gpu_id, self._backend.name)
        past = [
            row.measured_us / ratios.get(row.night_id, 1.0)
            for row in history
            if row.measured_us is not None and row.verdict in (Verdict.OK, Verdict.UNJUDGED)
        ]
        if (
            champion.build == self._backend.build
            and measured is not None
            and measured.median_us is not None
            and measured.estimated == estimated
        ):
            in_night = _night_of(measured.measured_at, nights)
            if in_night is not None:
                past.insert(0, measured.median_us / ratios.get(in_night, 1.0))
            elif not past and self._reference.ratio is not None:
                # By day nobody looked how the machine was: better than nothing, but not in the first night, which does not
                # know how it is either. One on a busy H200 blamed four configs that took 10 to 19 % longer, as all did.
                past = [measured.median_us]
        return (statistics.median(past[:ANCHOR_NIGHTS]) if past else None), noise_pct(past)

    def _promotion(self, champion: Champion) -> tuple[PromotionRow, MeasurementRow | None]:
        with reading(self._engine) as s:
            promotion = night.promotion_of(s, champion.generation)
            return promotion, queries.find_measurement(s, promotion.measurement_id or 0)

    def _can(self, shape: object, config: LaunchConfig) -> bool:
        return self._backend.measurable("kda", shape, config)


def _config_of(row: PromotionRow) -> LaunchConfig | None:
    """The config of a decision; None where it has none, or one of an older vocabulary."""
    try:
        return None if row.config_json is None else from_json(LaunchConfig, json.loads(row.config_json))
    except KdatuneError:
        return None


def _night_of(moment: datetime, nights: Iterable[night.NightRow]) -> int | None:
    """The night in which something was measured, None for a moment outside all."""
    for one in nights:
        if one.started_at <= moment and (one.finished_at is None or moment <= one.finished_at):
            return one.id
    return None
