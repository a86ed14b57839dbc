"""The recorded H200 as a card that changes from night to night: a layer over the replay backend that alters its answers.

Times are the recorded ones times what the night says, with noise as it was seen on the card: about 0.5 % from run to run
(two runs of one pair differed by up to 1.9 %), 0.3 % from sample to sample. Two configs in one run share what the run has.
"""

import random
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from statistics import median

from kdatune_kernels.space import config_ok
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import StageConfig
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.recording import Recording

RUN_NOISE, SAMPLE_NOISE, ROUNDS = 0.005, 0.003, 9
CONFIGS = 14  # of a stage: those of the recorded pairs first


@dataclass
class NightCard(ReplayBackend):
    """A card in one night. slower: times of a K2 config on a shape, as a factor; wrong: K2 configs that compute wrong."""

    recording: Recording
    seed: int
    machine: float = 1.0
    driver: str = "580.159.04"
    slower: dict[tuple[Shape, K2Config], float] = field(default_factory=dict)
    wrong: set[tuple[Shape, K2Config]] = field(default_factory=set)
    broken: bool = False
    calls: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.recording)
        self._draw = random.Random(self.seed)

    @property
    def build(self) -> Build:
        return replace(self.recording.build, driver=self.driver)

    def space(self, kernel: str, shape: Shape) -> list[StageConfig]:
        """A small part of the recorded space, so that a search is short; the default of two kernels is in it."""
        default = split_default(shape, self.gpu)
        mine = default.k1 if kernel == "k1" else default.k2
        used = {i[0 if kernel == "k1" else 1] for *i, s in self.recording.pairs if s == shape}
        first = [mine, *(self.recording.checks[kernel, i].config for i in sorted(used))]
        stages = [c for c in first if config_ok(c, shape, self.gpu) is None]  # what has none is passed over
        return list(dict.fromkeys([*stages, *super().space(kernel, shape)]))[:CONFIGS]

    def measure(self, kernel: str, shape: Shape, config: StageConfig) -> Result:
        self.calls += 1
        result = super().measure(kernel, shape, config)
        return self._noisy(result, self._factor(shape, config), self._run())

    def measure_pair(self, shape: Shape, config: LaunchConfig, against: LaunchConfig | None = None) -> Result:
        self.calls += 1
        if self.broken or (shape, config.k2) in self.wrong:
            return Result(
                Outcome.INCORRECT, detail="output differs from the reference: error ratio 0.31, at most 0.005"
            )
        run, rounds = self._run(), [self._draw.gauss(1.0, SAMPLE_NOISE) for _ in range(ROUNDS)]
        plain = ReplayBackend.measure_pair(ReplayBackend(self.recording), shape, config, against)
        mine = self._noisy(plain, self._factor(shape, config.k2), run, rounds)
        if against is None or not mine.ok:
            return replace(mine, against_us=())
        theirs = self._noisy(replace(plain, samples_us=plain.against_us), self._factor(shape, against.k2), run, rounds)
        if (shape, against.k2) in self.wrong or not theirs.samples_us:
            return replace(mine, against_us=())
        return replace(mine, against_us=theirs.samples_us, paired=True)

    def true_us(self, shape: Shape, config: LaunchConfig) -> float:
        """What a pair takes on this card on a usual night, without noise."""
        recorded = ReplayBackend.measure_pair(ReplayBackend(self.recording), shape, config)
        return median(recorded.samples_us) * self._factor(shape, config.k2)

    def _factor(self, shape: Shape, config: StageConfig) -> float:
        return self.slower.get((shape, config), 1.0) if isinstance(config, K2Config) else 1.0

    def _run(self) -> float:
        return self.machine * self._draw.gauss(1.0, RUN_NOISE)

    def _noisy(self, result: Result, factor: float, run: float, rounds: list[float] | None = None) -> Result:
        if not result.ok or not result.samples_us:
            return result
        us = median(result.samples_us) * factor * run
        shared = rounds or [1.0] * ROUNDS
        return replace(result, samples_us=tuple(us * r * self._draw.gauss(1.0, SAMPLE_NOISE) for r in shared))
