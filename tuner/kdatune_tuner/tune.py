"""Tuning one shape: K1 and K2 each on its own time, then the finalists as pairs end to end, then the promotion."""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from kdatune_kernels.match import Champion
from kdatune_kernels.others import OtherChampion
from kdatune_kernels.space import WHOLES
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json
from kdatune_kernels.values import OtherConfig
from kdatune_tuner.duel import Duel
from kdatune_tuner.duel import Promotion
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.ledger import OpenRun
from kdatune_tuner.neighbours import nearest_configs
from kdatune_tuner.neighbours import nearest_regret
from kdatune_tuner.neighbours import stored_guess
from kdatune_tuner.objective import AnyConfig
from kdatune_tuner.objective import AnyShape
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import SearchConfig
from kdatune_tuner.objective import WholeConfig
from kdatune_tuner.objective import stage_of
from kdatune_tuner.progress import Watch
from kdatune_tuner.promote import Policy
from kdatune_tuner.search import Budget
from kdatune_tuner.search import Search
from kdatune_tuner.search import run_search
from kdatune_tuner.search import sampler_for
from kdatune_tuner.surrogate import Vector

KERNELS = ("k1", "k2", "kda")
# Of the time a shape has, the part after which a stage's search stops; the rest is for the pairs.
_SHARE = {"k1": 0.35, "k2": 0.85}
_AGAIN = "measured again, since it led by far: the slower time"


@dataclass(frozen=True)
class Options:
    """How a shape is tuned.

    kernel: "k1" or "k2" searches one stage; "kda" searches both and decides what is served, as another kernel does.
    trials: distinct configs a stage, those measured earlier included.
    gpu_seconds: time on the card a shape; None: no limit.
    least_gain_pct: see search.Budget.
    """

    kernel: str = "kda"
    trials: int = 200
    gpu_seconds: float | None = None
    least_gain_pct: float = 0.02
    seed: int = 0
    finalists: int = 3
    policy: Policy = field(default_factory=Policy)
    trigger: str = "tune"
    optuna_storage: str | None = None


@dataclass
class Tuned:
    """What came of tuning a shape; filled as it goes, so that an interrupted one can be shown too.

    run_id: the last run that was opened for it.
    """

    shape: AnyShape
    kernel: str
    gpu: str
    backend: str
    state: str = "interrupted"
    stages: dict[str, Search] = field(default_factory=dict)
    pairs: dict[WholeConfig, Result] = field(default_factory=dict)
    pairs_measured: int = 0
    best: AnyConfig | None = None
    best_us: float | None = None
    default_us: float | None = None
    estimated: bool = False
    promotion: Promotion | None = None
    served: WholeConfig | None = None
    run_id: int | None = None
    seconds: float = 0.0

    @property
    def speedup(self) -> float | None:
        """Default over best (x, > 1 is faster)."""
        return self.default_us / self.best_us if self.default_us and self.best_us else None

    @property
    def measured(self) -> int:
        """Trials measured by this call, as against resumed."""
        return sum(s.measured for s in self.stages.values()) + self.pairs_measured

    @property
    def trials(self) -> int:
        return sum(len(s.results) for s in self.stages.values()) + len(self.pairs)

    def outcomes(self) -> dict[str, int]:
        counts: Counter[str] = Counter(str(r.outcome) for r in self.pairs.values())
        for search in self.stages.values():
            counts.update(search.outcomes())
        return dict(sorted(counts.items()))

    def to_json(self) -> Json:
        """The document that `kdatune tune --json` prints for a shape."""
        return {
            "shape": self.shape.key(),
            "kernel": self.kernel,
            "gpu": self.gpu,
            "backend": self.backend,
            "state": self.state,
            "trials": self.trials,
            "measured": self.measured,
            "resumed": self.trials - self.measured,
            "outcomes": self.outcomes(),
            "best_config": None if self.best is None else to_json(self.best),
            "best_us": self.best_us,
            "default_us": self.default_us,
            "speedup": self.speedup,
            "estimated": self.estimated,
            "seconds": round(self.seconds, 3),
            "promotion": None if self.promotion is None else self.promotion.to_json(),
            "served_config": None if self.served is None else to_json(self.served),
            "stages": {name: _stage_json(search) for name, search in self.stages.items()},
        }


def _stage_json(search: Search) -> Json:
    ranked = search.ranked()
    return {
        "sampler": search.sampler,
        "trials": len(search.results),
        "measured": search.measured,
        "best_config": to_json(ranked[0][0]) if ranked else None,
        "best_us": ranked[0][1].median_us if ranked else None,
    }


class Tuner:
    """Tunes shapes on one backend into one database. Everything is stored as it finishes; nothing is measured twice."""

    def __init__(self, engine: Engine, backend: Backend, options: Options, watch: Watch | None = None) -> None:
        self.engine = engine
        self.backend = backend
        self.options = options
        self.watch = watch or Watch(enabled=False)
        self.last: Tuned | None = None

    def tune(
        self, shape: AnyShape, seconds: float | None = None, fence: Callable[[Session], None] = lambda _: None
    ) -> Tuned:
        """Search, compare and decide for one shape.

        Args:
            seconds: after this no new trial starts, except the first of each stage.
            fence: called inside every write of a trial or a decision; what it raises ends the tuning.

        Raises:
            RecordingError: the replay backend does not hold the shape.
            StoreError: the database refuses.
            KeyboardInterrupt: passed on; what is finished is stored, and `last` holds it.
        """
        started = time.monotonic()
        tuned = self.last = Tuned(shape, self.options.kernel, self.backend.gpu.name, self.backend.name)
        try:
            kernels = ("k1", "k2") if self.options.kernel == "kda" else (self.options.kernel,)
            # before anything is written: this raises for a shape that the backend does not hold
            spaces = {kernel: self.backend.space(kernel, shape) for kernel in kernels}
            ledger = self._ledger(shape, fence)
            seeds = self._seeds(ledger, shape)
            for kernel, space in spaces.items():
                deadline = None if seconds is None else started + seconds * _SHARE.get(kernel, _SHARE["k2"])
                tuned.stages[kernel] = self._stage(ledger, kernel, space, seeds, deadline, seconds, tuned)
            if self.options.kernel not in ("k1", "k2"):
                self._pairs(ledger, tuned, seeds, None if seconds is None else started + seconds, seconds)
            else:
                self._stage_result(tuned)
            tuned.state = "done"
        finally:
            tuned.seconds = time.monotonic() - started
        return tuned

    def _ledger(self, shape: AnyShape, fence: Callable[[Session], None]) -> Ledger:
        return Ledger(self.engine, self.backend, shape, fence)

    def _champion(self, ledger: Ledger) -> Champion | OtherChampion | None:
        return ledger.champion()

    def _seeds(self, ledger: Ledger, shape: AnyShape) -> Sequence[WholeConfig]:
        """What is tried first: the default, the champion, the champions of the nearest shapes; what has stages of its own."""
        assert isinstance(shape, Shape)  # noqa: S101 - of kernel kda
        gpu = self.backend.gpu
        first = [split_default(shape, gpu), *nearest_configs(ledger.champions(), shape, gpu)]
        return [config for config in dict.fromkeys(first) if not config.k2.whole]

    def _default(self, shape: AnyShape, seeds: Sequence[WholeConfig]) -> WholeConfig:  # noqa: ARG002 - a kernel of others'
        """What runs when nothing is known."""
        return default_config(shape, self.backend.gpu)

    def _stage(
        self,
        ledger: Ledger,
        kernel: str,
        space: Sequence[SearchConfig],
        seeds: Sequence[WholeConfig],
        deadline: float | None,
        seconds: float | None,
        tuned: Tuned,
    ) -> Search:
        # a champion from outside today's space is measured all the same: it is what runs now
        stage_seeds = [
            c
            for c in (s if isinstance(s, OtherConfig) else stage_of(s, kernel) for s in seeds)
            if self.backend.measurable(kernel, tuned.shape, c)
        ]
        budget = Budget(self.options.trials, deadline, self._card_seconds(kernel, tuned), self.options.least_gain_pct)
        search = tuned.stages[kernel] = Search(kernel, sampler_for(space, budget))
        self.watch.start(kernel, tuned.shape, min(budget.trials, len(space)))
        with ledger.run(
            kernel,
            trigger=self.options.trigger,
            sampler=search.sampler,
            trials=budget.trials,
            seconds=seconds,
            seed=self.options.seed,
        ) as run:
            tuned.run_id = run.id
            run_search(
                search,
                space=space,
                seeds=stage_seeds,
                known={c: k.result for c, k in ledger.known(kernel).items() if not isinstance(c, LaunchConfig)},
                measure=self._measuring(ledger, run, kernel, search),
                # a replay repeats itself
                confirm=None if self.backend.name == "replay" else self._confirming(ledger, run, kernel, search),
                guess=self._guess(ledger, kernel, space),
                budget=budget,
                seed=self.options.seed,
                storage=self.options.optuna_storage,
                study_name=f"{kernel} {tuned.shape.key()} on {self.backend.gpu.name}, run {run.id}",
            )
        return search

    def _card_seconds(self, kernel: str, tuned: Tuned) -> float | None:
        """What a stage may use of the card: its share, and what the one before it has left."""
        if self.options.gpu_seconds is None:
            return None
        spent = sum(search.gpu_seconds for search in tuned.stages.values())
        return max(0.0, self.options.gpu_seconds * _SHARE.get(kernel, _SHARE["k2"]) - spent)

    def _guess(self, ledger: Ledger, kernel: str, space: Sequence[SearchConfig]) -> Vector | None:
        """What other shapes suggest; nothing of another kernel's, whose shapes only it can compare."""
        shape, gpu = ledger.shape, self.backend.gpu
        if not isinstance(shape, Shape) or not space:
            return None
        return stored_guess(self.engine, kernel, space, shape, gpu, ledger.gpu_id, ledger.build_id)

    def _confirming(
        self, ledger: Ledger, run: OpenRun, kernel: str, search: Search
    ) -> Callable[[SearchConfig], Result]:
        def confirm(config: SearchConfig) -> Result:
            first = search.results[config]
            again = self.backend.measure(kernel, ledger.shape, config)
            search.gpu_seconds += again.gpu_seconds
            slower = again if again.median_us is None else max(first, again, key=lambda r: r.median_us or 0.0)
            told = replace(slower, gpu_seconds=again.gpu_seconds, detail=slower.detail or _AGAIN)
            ledger.add(run, kernel, config, told)
            return told

        return confirm

    def _measuring(self, ledger: Ledger, run: OpenRun, kernel: str, search: Search) -> Callable[[SearchConfig], Result]:
        def measure(config: SearchConfig) -> Result:
            result = self.backend.measure(kernel, ledger.shape, config)
            ledger.add(run, kernel, config, result, lambda: search.finished(config, result))
            self.watch.trial(len(search.results), search.best_us(), result.median_us)
            return result

        return measure

    def _pairs(
        self,
        ledger: Ledger,
        tuned: Tuned,
        seeds: Sequence[WholeConfig],
        deadline: float | None,
        seconds: float | None,
    ) -> None:
        """Measure the finalists end to end and decide."""
        shape, count = tuned.shape, self.options.finalists
        champion = self._champion(ledger)
        default = self._default(shape, seeds)
        wanted = self._finalists(tuned, champion, default, count)
        self.watch.start("pairs", shape, len(wanted))
        with ledger.run(
            self.options.kernel,
            trigger=self.options.trigger,
            sampler="finalists",
            trials=len(wanted),
            seconds=seconds,
            seed=self.options.seed,
        ) as run:
            tuned.run_id = run.id
            duel = Duel(ledger, self.backend, self.options.policy, run, default=default, champion=champion)
            if isinstance(shape, Shape):
                neighbours = ledger.champions()
                duel.nearest_regret = lambda served: nearest_regret(
                    neighbours, shape, self.backend.gpu, tuned.stages, served, duel.results
                )
            if self.options.kernel == "kda":  # of another kernel the search has counted them
                tuned.pairs = duel.results
            for pair in wanted:
                must = pair in (default, champion.config if champion else None)
                if must or deadline is None or time.monotonic() < deadline:
                    result = duel.take(pair)
                    tuned.pairs_measured = duel.measured
                    self.watch.trial(len(duel.results), duel.best_us(), result.median_us)
            tuned.promotion = duel.decide()
            tuned.default_us = duel.default_us()
            # Where the champion stays it is the best that is known: a faster time that was no clear gain is not a result.
            kept = champion.config if champion is not None and champion.config in duel.results else None
            best = tuned.promotion.best or kept or duel.best()
            if best is not None:
                tuned.best, tuned.best_us = best, duel.results[best].median_us
                tuned.estimated = duel.results[best].estimated
            serves = tuned.promotion.decision == "promoted"
            tuned.served = tuned.promotion.config if serves else None if champion is None else champion.config

    def _finalists(
        self, tuned: Tuned, champion: Champion | OtherChampion | None, default: WholeConfig, count: int
    ) -> Sequence[WholeConfig]:
        """The default, the champion and what has no stages, then the best of both stages crossed, most promising first."""
        shape, gpu = tuned.shape, self.backend.gpu
        first = [default] if champion is None else [default, champion.config]
        first += [whole for whole in WHOLES if config_ok(whole, shape, gpu) is None]
        k1s, k2s = (tuned.stages[k].ranked()[:count] for k in ("k1", "k2"))
        crossed = sorted(
            ((c1, c2) for c1 in k1s for c2 in k2s), key=lambda p: (p[0][1].median_us or 0) + (p[1][1].median_us or 0)
        )
        pairs = [LaunchConfig(c1[0], c2[0]) for c1, c2 in crossed]  # type: ignore[arg-type]
        return [pair for pair in dict.fromkeys([*first, *pairs]) if self.backend.measurable("kda", shape, pair)]

    def _stage_result(self, tuned: Tuned) -> None:
        search = tuned.stages[tuned.kernel]
        ranked = search.ranked()
        if ranked:
            tuned.best, tuned.best_us = ranked[0][0], ranked[0][1].median_us
        default = search.results.get(stage_of(split_default(tuned.shape, self.backend.gpu), tuned.kernel))
        tuned.default_us = default.median_us if default else None
