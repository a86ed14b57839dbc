"""The pairs of one shape: measured once each, then the best of them against the champion, then the decision."""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace

from kdatune_kernels.match import Champion
from kdatune_kernels.others import OtherChampion
from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import digest
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OtherConfig
from kdatune_tuner.ledger import Known
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.ledger import OpenRun
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import WholeConfig
from kdatune_tuner.promote import Contender
from kdatune_tuner.promote import Decision
from kdatune_tuner.promote import Policy
from kdatune_tuner.promote import decide
from kdatune_tuner.search import SUSPICIOUS_LEAD
from kdatune_tuner.store.records import Decision as Verdict


@dataclass(frozen=True)
class Promotion:
    """What came of a shape's pairs.

    decision: a Verdict, or "kept" where there was nothing to decide.
    config: what the decision is about. best: the fastest pair; after a paired run the faster of the two that met.
    """

    decision: str
    reason: str
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    generation: int | None = None
    config: WholeConfig | None = None
    best: WholeConfig | None = None

    def to_json(self) -> Json:
        names = ("decision", "reason", "gain", "gain_low", "gain_high", "generation")
        return {name: getattr(self, name) for name in names}


class Duel:
    """Pairs of one shape and what is decided about them.

    Args:
        default: the config that runs when nothing is known.
        champion: what is served now for exactly this card and shape.
    """

    def __init__(
        self,
        ledger: Ledger,
        backend: Backend,
        policy: Policy,
        run: OpenRun,
        *,
        default: WholeConfig,
        champion: Champion | OtherChampion | None,
    ) -> None:
        self._ledger = ledger
        self._backend = backend
        self._policy = policy
        self._run = run
        self._default = default
        self._champion = champion
        self._known: dict[WholeConfig, Known] = {
            config: known
            for config, known in ledger.known(ledger.kernel).items()
            if isinstance(config, LaunchConfig | OtherConfig)
        }
        self._banned = ledger.rolled_back(self._known)
        self.results: dict[WholeConfig, Result] = {}
        self.measured = 0
        self.nearest_regret: Callable[[LaunchConfig], float | None] = lambda _: None
        """What the nearest answer would cost beside a config; stored with a decision about it."""

    def take(self, pair: WholeConfig) -> Result:
        """The pair's result: the stored one, else measured and stored now."""
        if pair not in self._known:
            result = self._backend.measure_pair(self._ledger.shape, pair)
            self._keep(pair, result)
            self.measured += 1
        self.results[pair] = self._known[pair].result
        return self.results[pair]

    def best_us(self) -> float | None:
        best = self.best()
        return None if best is None else self.results[best].median_us

    def best(self) -> WholeConfig | None:
        """The fastest pair that runs and that nobody rolled back."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def default_us(self) -> float | None:
        default = self.results.get(self._default)
        return default.median_us if default else None

    def decide(self) -> Promotion:
        """Bring the best before the champion (without one: before the default) and store what comes of it."""
        champion = self._champion
        if not self._ranked():
            return Promotion("kept", "no pair runs: nothing can be promoted")
        if not self.measured and not self._ledger.undecided(self._known):
            return Promotion("kept", "no new pair was measured since the last decision")
        if champion is not None and champion.config not in self.results:
            if self._may_run(champion.config):
                return Promotion("kept", "the champion is not recorded here, so nothing can be compared with it")
            self._champion = None  # no launcher takes it any more
        self._confirm()
        incumbent = self._incumbent()
        whole = isinstance(incumbent, LaunchConfig) and incumbent.k2.whole
        met = self.results.get(incumbent) if whole or self._champion is not None else None
        measured = met is not None and not met.estimated
        for challenger in self._ranked():
            if challenger == incumbent:
                return self._stays(challenger)
            if measured and self.results[challenger].estimated:
                continue  # a sum of parts never replaces what was measured end to end; what has no stages has no parts to sum
            promotion = self._meet(challenger, incumbent)
            if promotion is not None:
                return promotion
        return Promotion("kept", "no challenger ran again beside the champion")

    def _confirm(self) -> None:
        """A best that leads by far is measured again, once, and goes by the slower time: one timing may have gone wrong."""
        confirmed: set[WholeConfig] = set()
        while len(ranked := self._ranked()) > 1 and ranked[0] not in confirmed:
            first, second = (self.results[pair] for pair in ranked[:2])
            if (second.median_us or 0.0) <= SUSPICIOUS_LEAD * (first.median_us or 0.0):
                return
            again = self._backend.measure_pair(self._ledger.shape, ranked[0])
            confirmed.add(ranked[0])
            slower = again if again.median_us is None else max(again, first, key=lambda r: r.median_us or 0.0)
            self._keep(ranked[0], replace(slower, gpu_seconds=again.gpu_seconds))

    def _may_run(self, config: WholeConfig) -> bool:
        """Whether a launcher would still take it."""
        shape, gpu = self._ledger.shape, self._backend.gpu
        if isinstance(config, LaunchConfig):
            return config_ok(config, shape, gpu) is None
        return registry().require(self._ledger.kernel).config_ok(config, shape, gpu) is None

    def _incumbent(self) -> WholeConfig:
        """What the challengers meet: the champion where it still runs, else the default."""
        champion = self._champion
        return champion.config if champion is not None and self.results[champion.config].ok else self._default

    def _stays(self, pair: WholeConfig) -> Promotion:
        """The incumbent is the best there is."""
        champion = self._champion
        if champion is None or champion.config != pair:
            mine = self._contender(pair)
            return self._store(decide(mine, self._served(), mine, self._policy), pair, None)
        if champion.build == self._backend.build:
            pairs = [p for p in self._ranked() if self.results[p].estimated <= self.results[pair].estimated]
            return Promotion("kept", f"the champion is the fastest of {len(pairs)} pairs")
        return self._store(
            Decision(Verdict.PROMOTED, 1.0, 1.0, 1.0, "the champion is confirmed with today's build"), pair, None
        )

    def _meet(self, challenger: WholeConfig, incumbent: WholeConfig) -> Promotion | None:
        """Measure the two together and decide; None where the challenger did not run again (stored as rejected)."""
        first, second = self._contender(challenger), self._contender_or_none(incumbent)
        stands = second is not None and second.runs
        if stands:
            first, second = self._together(challenger, incumbent)
        served = self._champion is not None and self._champion.config == incumbent
        champion = second if served else self._served()
        default = second if incumbent == self._default else self._contender_or_none(self._default)
        decision = decide(first, champion, default, self._policy)
        promotion = self._store(decision, challenger, incumbent if stands else None)
        if not self.results[challenger].ok:
            return None
        stale = self._champion is not None and self._champion.build != self._backend.build
        if decision.decision is not Verdict.PROMOTED and stands and (not served or stale):
            # no clear gain over the default: the default becomes the champion; over a stale champion: it is no longer stale
            return self._stays(incumbent)
        return promotion

    def _together(self, challenger: WholeConfig, incumbent: WholeConfig) -> tuple[Contender, Contender]:
        """Both measured in one run and stored. What was measured end to end is not given up for a sum of parts."""
        before = (self._contender(challenger), self._contender(incumbent))
        run = self._backend.measure_pair(self._ledger.shape, challenger, incumbent)
        rounds = 0 if run.paired else None
        theirs = replace(self.results[incumbent], samples_us=run.against_us, paired=run.paired, gpu_seconds=0.0)
        if not run.estimated or not run.ok or before[0].estimated:
            self._keep(challenger, run)
        if run.ok and (not run.estimated or before[1].estimated):
            self._keep(incumbent, replace(theirs, estimated=run.estimated))
        first, second = before if run.estimated else [replace(one, estimated=False) for one in before]
        first = replace(first, outcome=run.outcome, samples_us=run.samples_us, rounds=rounds)
        return first, replace(second, samples_us=run.against_us, rounds=rounds) if run.ok else before[1]

    def _store(self, decision: Decision, pair: WholeConfig, baseline: WholeConfig | None) -> Promotion:
        baseline_id = None if baseline is None else self._known[baseline].measurement_id
        regret = self.nearest_regret(pair) if isinstance(pair, LaunchConfig) else None
        generation = self._ledger.decide(
            decision, self._known[pair].measurement_id, baseline_id, self.default_us(), regret
        )
        gains = (decision.gain, decision.gain_low, decision.gain_high)
        met = [p for p in (pair, baseline) if p is not None and self.results[p].ok]
        best = min(met, key=lambda p: self.results[p].median_us or 0.0, default=None)
        return Promotion(str(decision.decision), decision.reason, *gains, generation, pair, best)

    def _keep(self, pair: WholeConfig, result: Result) -> None:
        """Store a measurement of a pair, unless it is the one that is stored already (a replay repeats itself)."""
        before = self._known.get(pair)
        if before is not None and not result.paired and _alike(before.result, result):
            self._known[pair] = replace(before, result=result)
        else:
            self._known[pair] = self._ledger.add(self._run, self._ledger.kernel, pair, result)
        if pair in self.results:
            self.results[pair] = result

    def _served(self) -> Contender | None:
        return None if self._champion is None else self._contender(self._champion.config)

    def _contender_or_none(self, pair: WholeConfig) -> Contender | None:
        return self._contender(pair) if pair in self.results else None

    def _contender(self, pair: WholeConfig) -> Contender:
        result = self.results[pair]
        return Contender(digest(pair), result.outcome, result.samples_us, result.estimated)

    def _ranked(self) -> list[WholeConfig]:
        ok = {p: r.median_us for p, r in self.results.items() if r.median_us is not None and p not in self._banned}
        return sorted(ok, key=lambda p: ok[p] or 0.0)


def _alike(a: Result, b: Result) -> bool:
    return (a.outcome, a.median_us, a.estimated) == (b.outcome, b.median_us, b.estimated)
