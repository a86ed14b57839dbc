"""What a search knows and learns, in the store: one shape's runs, measurements and decisions, each written at once."""

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from datetime import datetime
from types import FrameType

import optuna
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.match import Champion
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.values import OtherConfig
from kdatune_tuner.objective import AnyConfig
from kdatune_tuner.objective import AnyShape
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import WholeConfig
from kdatune_tuner.objective import read_config
from kdatune_tuner.promote import Decision
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import Decision as Verdict
from kdatune_tuner.store.records import MeasurementRow
from kdatune_tuner.store.records import NewMeasurement
from kdatune_tuner.store.records import PromotionRow
from kdatune_tuner.store.records import RunState


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is left: a trial that is finished is also stored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def later(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    before = signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


@dataclass
class OpenRun:
    """A run that is going on, and what it has measured."""

    id: int
    outcomes: Counter[str] = field(default_factory=Counter)
    gpu_seconds: float = 0.0


@dataclass(frozen=True)
class Known:
    """A stored measurement: its result, its id, and when it was taken."""

    result: Result
    measurement_id: int
    measured_at: datetime


class Ledger:
    """The store as one search of one shape sees it.

    Args:
        fence: called inside every write of a trial or a decision; what it raises, the write is undone by.
        kernel: what is served in the end: kda, whose stages are searched alone, or another kernel.

    Raises:
        StoreError: the database refuses (from every method).
    """

    def __init__(
        self,
        engine: Engine,
        backend: Backend,
        shape: AnyShape,
        fence: Callable[[Session], None] = lambda _: None,
        kernel: str = "kda",
    ) -> None:
        self.engine = engine
        self.backend = backend
        self.shape = shape
        self.kernel = kernel
        self._fence = fence
        kernels = ("k1", "k2", "kda") if kernel == "kda" else (kernel,)
        with writing(engine) as s:
            self.gpu_id = writes.put_gpu(s, backend.gpu)
            self.build_id = writes.put_build(s, backend.build)
            self.problem_ids = {kernel: writes.put_problem(s, kernel, shape) for kernel in kernels}

    def known(self, kernel: str) -> dict[AnyConfig, Known]:
        """What is measured already with this card, shape and build."""
        with reading(self.engine) as s:
            rows = queries.measured(s, kernel, self.gpu_id, self.problem_ids[kernel], self.build_id)
        found: dict[AnyConfig, Known] = {}
        for row in rows.values():
            try:
                found[read_config(kernel, json.loads(row.config_json))] = Known(
                    _result_of(row), row.id, row.measured_at
                )
            except KdatuneError:
                continue  # of an older vocabulary: it cannot be proposed again, nor can it be told
        return found

    def champions(self) -> list[Champion]:
        """What is served now, of every GPU model (match.find picks by sameness)."""
        with reading(self.engine) as s:
            return queries.champions(s)

    def champion(self) -> Champion | None:
        """What is served now for exactly this card and shape."""
        with reading(self.engine) as s:
            return next((c for c in queries.champions(s, self.backend.gpu) if c.shape == self.shape), None)

    def decisions(self) -> list[PromotionRow]:
        """Decisions about the key, newest first."""
        with reading(self.engine) as s:
            rows = queries.page_promotions(
                s, gpu_name=self.backend.gpu.name, kernel=self.kernel, shape=self.shape, limit=1000, newest_first=True
            )
        return [row for row in rows if row.gpu_id == self.gpu_id]

    def start(
        self, kernel: str, *, trigger: str, sampler: str, trials: int | None, seconds: float | None, seed: int | None
    ) -> OpenRun:
        """Open a run."""
        with writing(self.engine) as s:
            run_id = writes.start_run(
                s,
                trigger=trigger,
                kernel=kernel,
                gpu_id=self.gpu_id,
                problem_id=self.problem_ids[kernel],
                backend=self.backend.name,
                sampler=sampler,
                budget_trials=trials,
                budget_seconds=seconds,
                seed=seed,
                optuna_version=optuna.__version__,
            )
        return OpenRun(run_id)

    @contextmanager
    def run(
        self, kernel: str, *, trigger: str, sampler: str, trials: int | None, seconds: float | None, seed: int | None
    ) -> Iterator[OpenRun]:
        """A run that is closed however the block ends: done, interrupted or failed."""
        run = self.start(kernel, trigger=trigger, sampler=sampler, trials=trials, seconds=seconds, seed=seed)
        state = RunState.FAILED
        try:
            yield run
            state = RunState.DONE
        except KeyboardInterrupt:
            state = RunState.INTERRUPTED
            raise
        finally:
            with uninterrupted(), writing(self.engine) as s:
                writes.finish_run(
                    s, run.id, outcome_counts=dict(run.outcomes), gpu_seconds=run.gpu_seconds, state=state
                )

    def add(
        self,
        run: OpenRun,
        kernel: str,
        config: AnyConfig,
        result: Result,
        then: Callable[[], None] = lambda: None,
    ) -> Known:
        """Store a finished trial, and note it by `then`. Ctrl-C waits for both."""
        measurement = self._measurement(run, kernel, config, result)
        with uninterrupted(), writing(self.engine) as s:
            self._fence(s)
            measurement_id = writes.add_measurement(s, measurement)
            run.outcomes[str(result.outcome)] += 1
            run.gpu_seconds += result.gpu_seconds
            then()
        return Known(result, measurement_id, measurement.measured_at)

    def decide(
        self,
        decision: Decision,
        measurement_id: int,
        baseline_measurement_id: int | None,
        default_us: float | None,
        nearest_regret: float | None = None,
    ) -> int:
        """Store a decision about what is served and return its generation."""
        with uninterrupted(), writing(self.engine) as s:
            self._fence(s)
            return writes.promote(
                s,
                kernel=self.kernel,
                gpu_id=self.gpu_id,
                problem_id=self.problem_ids[self.kernel],
                measurement_id=measurement_id,
                baseline_measurement_id=baseline_measurement_id,
                default_us=default_us,
                gain=decision.gain,
                gain_low=decision.gain_low,
                gain_high=decision.gain_high,
                decision=decision.decision,
                reason=decision.reason,
                nearest_regret=nearest_regret,
            )

    def rolled_back(self, known: Iterable[AnyConfig]) -> set[AnyConfig]:
        """Those of the configs that somebody rolled back: they are not put forward again."""
        decisions = self.decisions()
        undone = {d.baseline_measurement_id for d in decisions if d.decision is Verdict.ROLLBACK}
        hashes = {d.config_hash for d in decisions if d.measurement_id in undone}
        return {config for config in known if digest(config) in hashes}

    def undecided(self, known: Mapping[WholeConfig, Known]) -> bool:
        """Whether pairs were measured after the last decision: an earlier run was cut short between the two."""
        decisions = self.decisions()
        return not decisions or any(k.measured_at > decisions[0].decided_at for k in known.values())

    def _measurement(self, run: OpenRun, kernel: str, config: AnyConfig, result: Result) -> NewMeasurement:
        return NewMeasurement(
            run_id=run.id,
            kernel=kernel,
            gpu_id=self.gpu_id,
            problem_id=self.problem_ids[kernel],
            build_id=self.build_id,
            config_json=canonical(config),
            config_hash=digest(config),
            outcome=result.outcome,
            detail=result.detail,
            **result.times(),
            o_error_ratio=result.o_error_ratio,
            state_error_ratio=result.state_error_ratio,
            requested_num_warps=_num_warps(config),
            effective_num_warps=result.effective_num_warps,
            registers=result.registers,
            spills=result.spills,
            smem_bytes=result.smem_bytes,
            occupancy_pct=result.occupancy_pct,
            sm_clock_mhz=result.sm_clock_mhz,
            throttle_reasons=result.throttle_reasons,
            regime=self.backend.regime,
            estimated=result.estimated,
        )


def _num_warps(config: AnyConfig) -> int | None:
    """The warps that a config asks for; a whole launch of KDA asks twice, another kernel may not say it so."""
    if isinstance(config, OtherConfig):
        warps = config.get("num_warps")
        return warps if type(warps) is int and 0 <= warps < 1 << 31 else None
    return None if isinstance(config, LaunchConfig) else config.num_warps


def _result_of(row: MeasurementRow) -> Result:
    """A stored measurement as a result. Five samples that have its p20, median and p80."""
    samples: tuple[float, ...] = ()
    if row.median_us is not None:
        low, high = row.p20_us or row.median_us, row.p80_us or row.median_us
        samples = (low, low, row.median_us, high, high)
    return Result(
        outcome=row.outcome,
        samples_us=samples,
        detail=row.detail,
        o_error_ratio=row.o_error_ratio,
        state_error_ratio=row.state_error_ratio,
        effective_num_warps=row.effective_num_warps,
        registers=row.registers,
        spills=row.spills,
        smem_bytes=row.smem_bytes,
        occupancy_pct=row.occupancy_pct,
        sm_clock_mhz=row.sm_clock_mhz,
        throttle_reasons=row.throttle_reasons,
        estimated=row.estimated,
    )
