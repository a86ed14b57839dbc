"""The reference kernel of a card: fixed configs on fixed shapes, timed first in every night.

What it takes tonight over what it usually takes is how the machine is: clocks, cooling, power, neighbours. A served config is
judged relative to it. "Usually" is the median of the first nights of a build, not of the last ones: a machine that becomes
slower step by step is told from day one.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Engine

from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import Result
from kdatune_tuner.store import night
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import utc_now

SHAPES = (shape_of(1, 96, 8192), shape_of(1, 8, 8192), shape_of(1, 64, 1024))
"""Many chains, few chains, and a short call. The config is the analytic default of each, never what is served."""

ANCHOR_NIGHTS = 5
"""Nights of a build whose median is what the reference, or a served config, usually takes."""

LOOKS = 3
"""Runs of a check, of the reference and of a served config alike: the median run counts (0.5 % between two runs)."""

_TELLING = 8  # values from which a spread is reckoned
_MAD_TO_SD = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class Point:
    """One shape of the reference tonight. usual_us: None in the first night of a build."""

    shape: Shape
    config: LaunchConfig
    result: Result
    usual_us: float | None

    @property
    def ratio(self) -> float | None:
        """Tonight over usually (x, > 1 is slower)."""
        if not self.result.ok or self.result.median_us is None or self.usual_us is None:
            return None
        return self.result.median_us / self.usual_us

    def to_json(self) -> Json:
        return {
            "shape": self.shape.key(),
            "config": digest(self.config),
            "outcome": str(self.result.outcome),
            "detail": self.result.detail,
            "median_us": self.result.median_us,
            "usual_us": self.usual_us,
            "ratio": self.ratio,
        }


class Reference:
    """The reference kernel of a backend's card and build, in one night.

    Raises:
        KdatuneError: the card or the database refuses (from `measure`).
    """

    def __init__(self, engine: Engine, backend: Backend, night_id: int, gpu_id: int, build_id: int) -> None:
        self._engine = engine
        self._backend = backend
        self._night_id = night_id
        self._gpu_id = gpu_id
        self._build_id = build_id
        self._configs: list[tuple[Shape, LaunchConfig]] = []
        self.points: list[Point] = []

    def measure(self) -> None:
        """Time every point now and store it."""
        self._configs = _points_of(self._backend)
        measured = [(shape, config, self._runs(shape, config)) for shape, config in self._configs]
        with writing(self._engine) as s:
            for shape, config, results in measured:
                for result in results:
                    night.add_reference(s, self._row(shape, config, result))
        usual = self._usual(self._by_night())
        self.points = [
            Point(shape, config, middle(results), usual.get(shape.key())) for shape, config, results in measured
        ]

    @property
    def runs(self) -> bool:
        """Whether any point runs. Where none of several does, it is not the configs that are at fault."""
        return not self.points or any(point.result.ok for point in self.points)

    @property
    def ratio(self) -> float | None:
        """How slow the machine is now (x, > 1 is slower): the median of the points, so that one of them may be odd."""
        ratios = [point.ratio for point in self.points if point.ratio is not None]
        return statistics.median(ratios) if ratios else None

    @property
    def reason(self) -> str | None:
        """Why there is no ratio, or None."""
        if not self._configs:
            return "no shape that can be measured here is a reference; times are taken as they are"
        if self.ratio is None and self.runs:
            return "the first night with this build: tonight's times are the usual ones from now on"
        return None

    @property
    def now(self) -> float:
        """What a time measured now is divided by to have it on a usual machine."""
        return self.ratio or self.ratios().get(self._night_id, 1.0)

    def ratios(self) -> dict[int, float]:
        """How slow the machine was in every night with this build, by night id, all against what is usual tonight."""
        by_night = self._by_night()
        usual = by_night.get(self._night_id, {}) | self._usual(by_night)
        found = {}
        for night_id, times in by_night.items():
            ratios = [us / usual[key] for key, us in times.items() if key in usual]
            if ratios:
                found[night_id] = statistics.median(ratios)
        return found

    def noise_pct(self) -> float:
        """How much the ratio differs from night to night: one standard deviation, 0 where too few nights tell."""
        ratios = [ratio for night_id, ratio in self.ratios().items() if night_id != self._night_id]
        return noise_pct(ratios)

    def usual_elsewhere(self) -> dict[str, float]:
        """What the points took in the newest night of another build, by shape key."""
        with reading(self._engine) as s:
            rows = night.reference_history(s, self._gpu_id, self._backend.name)
        found = {}
        for row in rows:
            if row.build_id != self._build_id and row.median_us is not None:
                found[row.shape_key] = row.median_us
        return found

    def to_json(self) -> Json:
        return {
            "machine_ratio": self.ratio,
            "reason": self.reason,
            "points": [point.to_json() for point in self.points],
        }

    def _runs(self, shape: Shape, config: LaunchConfig) -> list[Result]:
        return runs_of(lambda: self._backend.measure_pair(shape, config))

    def _usual(self, by_night: dict[int, dict[str, float]]) -> dict[str, float]:
        return _anchored({n: times for n, times in by_night.items() if n != self._night_id})

    def _by_night(self) -> dict[int, dict[str, float]]:
        """What each point took in each night with this build, oldest first: the median where it was timed several times."""
        with reading(self._engine) as s:
            rows = night.reference_history(s, self._gpu_id, self._backend.name, self._build_id)
        wanted = {(shape.key(), digest(config)) for shape, config in self._configs}
        times: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            if row.median_us is not None and (row.shape_key, row.config_hash) in wanted:
                times[row.night_id][row.shape_key].append(row.median_us)
        return {n: {key: statistics.median(all_us) for key, all_us in by.items()} for n, by in times.items()}

    def _row(self, shape: Shape, config: LaunchConfig, result: Result) -> night.ReferenceRow:
        return night.ReferenceRow(
            night_id=self._night_id,
            gpu_id=self._gpu_id,
            build_id=self._build_id,
            backend=self._backend.name,
            shape_key=shape.key(),
            config_hash=digest(config),
            outcome=str(result.outcome),
            detail=result.detail,
            **result.times(),
            sm_clock_mhz=result.sm_clock_mhz,
            throttle_reasons=result.throttle_reasons,
            measured_at=utc_now(),
        )


def runs_of(measure: Callable[[], Result]) -> list[Result]:
    """Measure several times; the first run that fails is the last."""
    results: list[Result] = []
    while len(results) < LOOKS and (not results or results[-1].ok):
        results.append(measure())
    return results


def middle(results: Sequence[Result]) -> Result:
    """The run that failed, else the one of the median time."""
    if not results[-1].ok:
        return results[-1]
    return sorted(results, key=lambda result: result.median_us or 0.0)[len(results) // 2]


def noise_pct(values: Iterable[float]) -> float:
    """How much values differ from night to night, in per cent, as one standard deviation; 0 for fewer than eight values.

    From the median step between neighbours: a night that was odd, or a change that stays, does not make the next one pass.
    """
    values = list(values)
    if len(values) < _TELLING:
        return 0.0
    steps = [abs(after / before - 1.0) for before, after in itertools.pairwise(values)]
    return 100.0 * _MAD_TO_SD * statistics.median(steps) / math.sqrt(2.0)


def _points_of(backend: Backend) -> list[tuple[Shape, LaunchConfig]]:
    """The fixed shapes that the backend can measure; a recording of other shapes gives its first three."""
    held = backend.default_shapes()
    wanted = [shape for shape in SHAPES if shape in held] or held
    found = [(shape, default_config(shape, backend.gpu)) for shape in wanted]
    usable = [(shape, config) for shape, config in found if backend.measurable("kda", shape, config)]
    return usable[: len(SHAPES)]


def _anchored(by_night: dict[int, dict[str, float]]) -> dict[str, float]:
    """The median of each point over its first nights."""
    times: dict[str, list[float]] = defaultdict(list)
    for one in by_night.values():
        for key, us in one.items():
            if len(times[key]) < ANCHOR_NIGHTS:
                times[key].append(us)
    return {key: statistics.median(all_us) for key, all_us in times.items()}
