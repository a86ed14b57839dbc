"""What a trial yields, and the interface every backend measures through. No torch, no store."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import Protocol

from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import from_json
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import is_other
from kdatune_tuner.outcome import Outcome

StageConfig = K1Config | K2Config
SearchConfig = K1Config | K2Config | OtherConfig
"""What a search proposes: a stage of KDA's, or the whole config of another kernel."""
WholeConfig = LaunchConfig | OtherConfig
"""What is launched and served."""
AnyConfig = K1Config | K2Config | LaunchConfig | OtherConfig
AnyShape = Any
"""Shape, or the OtherShape of another kernel: a backend takes the shapes and configs of its kernel."""
CONFIG_TYPES: dict[str, type[K1Config] | type[K2Config] | type[LaunchConfig]] = {
    "k1": K1Config,
    "k2": K2Config,
    "kda": LaunchConfig,
}


def quantile(samples: Iterable[float], q: float) -> float:
    """The q-quantile of at least one sample, by linear interpolation between order statistics."""
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Result:
    """One config measured on one shape, or how it failed.

    samples_us: in the order taken, or sorted; empty unless the outcome is ok.
    against_us: samples of the config it was measured against.
    paired: sample i of `samples_us` and sample i of `against_us` are of the same round.
    estimated: the time of a pair is the sum of its parts, the two were not run together.
    """

    outcome: Outcome
    samples_us: tuple[float, ...] = ()
    detail: str | None = None
    o_error_ratio: float | None = None
    state_error_ratio: float | None = None
    effective_num_warps: int | None = None
    registers: int | None = None
    spills: int | None = None
    smem_bytes: int | None = None
    occupancy_pct: float | None = None
    sm_clock_mhz: float | None = None
    throttle_reasons: str | None = None
    gpu_seconds: float = 0.0
    estimated: bool = False
    against_us: tuple[float, ...] = ()
    paired: bool = False

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def median_us(self) -> float | None:
        return statistics.median(self.samples_us) if self.samples_us else None

    def times(self) -> dict[str, Any]:
        """What a stored row says of its time; nothing of one that failed."""
        samples = self.samples_us if self.ok else ()
        return {
            "median_us": self.median_us if samples else None,
            "p20_us": quantile(samples, 0.2) if samples else None,
            "p80_us": quantile(samples, 0.8) if samples else None,
            "sample_count": len(samples) or None,
        }


class Backend(Protocol):
    """Where measurements come from: a real card, or a recorded sweep.

    A config that fails is a Result with its outcome; only programming errors and KdatuneErrors about the whole
    (no card, a shape that is not recorded) are raised.
    """

    name: str
    regime: str

    @property
    def gpu(self) -> Gpu: ...

    @property
    def build(self) -> Build: ...

    def default_shapes(self) -> list[Any]:
        """Shapes to tune where none are asked for."""

    def space(self, kernel: str, shape: AnyShape) -> list[Any]:
        """Configs that can be measured for the shape, in a fixed order. `kernel` is "k1", "k2" or another kernel."""

    def measurable(self, kernel: str, shape: AnyShape, config: Any) -> bool:
        """Whether `measure` can be asked for a config, also for one outside the space (a champion of an older space).

        For kernel "kda" the config is a whole launch, and it is `measure_pair` that can be asked.
        """

    def measure(self, kernel: str, shape: AnyShape, config: Any) -> Result:
        """One stage on its own time, or another kernel."""

    def measure_pair(self, shape: AnyShape, config: Any, against: Any = None) -> Result:
        """K1 and K2 end to end, or another kernel; with `against`, both measured alike and in the same run (`against_us`)."""

    def close(self) -> None:
        """Give back the card."""


def stage_of(config: LaunchConfig, kernel: str) -> StageConfig:
    return config.k1 if kernel == "k1" else config.k2


def read_config(kernel: str, data: Json) -> AnyConfig:
    """A stored config document of a kernel. Raises ConfigError when it cannot be read."""
    if is_other(kernel):
        return OtherConfig(data)
    return from_json(CONFIG_TYPES[kernel], data)


def sum_of_parts(k1: Result, k2: Result) -> Result:
    """The pair's result from its stages measured alone: estimated, at the slower quantile of both."""
    for part in (k1, k2):
        if not part.ok:
            return replace(part, estimated=True)
    rounds = zip(sorted(k1.samples_us), sorted(k2.samples_us), strict=False)
    ratios = [r for r in (k1.o_error_ratio, k2.o_error_ratio) if r is not None]
    states = [r for r in (k1.state_error_ratio, k2.state_error_ratio) if r is not None]
    return Result(
        outcome=Outcome.OK,
        samples_us=tuple(a + b for a, b in rounds),
        detail="sum of K1 and K2 measured alone",
        o_error_ratio=max(ratios, default=None),
        state_error_ratio=max(states, default=None),
        estimated=True,
    )
