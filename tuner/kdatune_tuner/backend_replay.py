"""The replay backend: the same loop over a recorded sweep, without a card."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from kdatune_kernels.errors import RecordingError
from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_tuner.objective import AnyShape
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import StageConfig
from kdatune_tuner.objective import sum_of_parts
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.recording import SHIPPED
from kdatune_tuner.recording import Check
from kdatune_tuner.recording import Recording
from kdatune_tuner.recording import Timing
from kdatune_tuner.recording import load_recording


class ReplayBackend:
    """Answers from a recording, instantly and always alike. Raises RecordingError for a shape it does not hold."""

    name = "replay"

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.regime = recording.regime

    @classmethod
    def open(cls, path: Path | None = None) -> "ReplayBackend":
        """Read a sweep file, by default the shipped one. Raises RecordingError when it cannot be read."""
        return cls(load_recording(path or SHIPPED))

    @property
    def gpu(self) -> Gpu:
        return self.recording.gpu

    @property
    def build(self) -> Build:
        return self.recording.build

    def default_shapes(self) -> list[Shape]:
        """Every shape of the recording."""
        return list(self.recording.shapes)

    def space(self, kernel: str, shape: Shape) -> list[StageConfig]:
        """Configs whose fate on the shape is recorded and that config_ok lets through."""
        self._require(shape)
        configs = [check.config for check in self.recording.checks.values() if check.kernel == kernel]
        return [c for c in configs if self.measurable(kernel, shape, c) and config_ok(c, shape, self.gpu) is None]

    def measurable(self, kernel: str, shape: Shape, config: StageConfig | LaunchConfig) -> bool:
        """Whether the config's fate on the shape is recorded."""
        if isinstance(config, LaunchConfig):
            if config.k2.whole:
                return self._whole(shape, config) is not None
            return self.measurable("k1", shape, config.k1) and self.measurable("k2", shape, config.k2)
        i = self.recording.index.get(config, -1)
        check = self.recording.checks.get((kernel, i))
        return check is not None and (check.outcome is not Outcome.OK or (kernel, i, shape) in self.recording.timings)

    def measure(self, kernel: str, shape: Shape, config: StageConfig) -> Result:
        self._require(shape)
        i = self.recording.index.get(config)
        check = None if i is None else self.recording.checks.get((kernel, i))
        if i is None or check is None:
            raise RecordingError(f"{self.recording.path}: {kernel} config {config} is not recorded")
        result = _checked(check)
        if not result.ok:
            return result
        timing = self.recording.timings.get((kernel, i, shape))
        if timing is None:
            raise RecordingError(f"{self.recording.path}: {kernel} config {i} is not timed on {shape.key()}")
        return _timed(result, timing)

    def measure_pair(self, shape: Shape, config: LaunchConfig, against: LaunchConfig | None = None) -> Result:
        """The recorded pair. Where either side was not recorded together, both are sums of their parts: like with like.

        What is measured whole has no parts. Beside it a sum of parts stays one, and what comes of the two is estimated.
        """
        self._require(shape)
        mine = self._pair(shape, config)
        if against is None:
            return mine
        theirs = self._pair(shape, against)
        if mine.estimated != theirs.estimated:
            if config.k2.whole or against.k2.whole:
                mine = replace(mine, estimated=True)
            else:
                mine, theirs = self._parts(shape, config), self._parts(shape, against)
        return replace(mine, against_us=theirs.samples_us)

    def _pair(self, shape: Shape, config: LaunchConfig) -> Result:
        if config.k2.whole:
            lacks = f"{config.k2.variant} is not recorded on {shape.key()} in {self.recording.path.name}"
            return self._whole(shape, config) or Result(Outcome.LAUNCH_ERROR, detail=lacks)
        together = self._together(shape, config)
        parts = self._parts(shape, config)
        if together is None or not parts.ok:
            return parts
        return _timed(replace(parts, detail=None, estimated=False, samples_us=()), together)

    def _whole(self, shape: Shape, config: LaunchConfig) -> Result | None:
        """What became of a config without stages, which is recorded whole or not at all."""
        check = self.recording.checks.get(("k2", self.recording.index.get(config.k2, -1)))
        if check is None or not check.outcome.ok:
            return None if check is None else _checked(check)
        together = self._together(shape, config)
        return None if together is None else _timed(_checked(check), together)

    def _together(self, shape: Shape, config: LaunchConfig) -> Timing | None:
        index = self.recording.index
        return self.recording.pairs.get((index.get(config.k1, -1), index.get(config.k2, -1), shape))

    def _parts(self, shape: Shape, config: LaunchConfig) -> Result:
        return sum_of_parts(self.measure("k1", shape, config.k1), self.measure("k2", shape, config.k2))

    def close(self) -> None:
        """Nothing is held."""

    def _require(self, shape: Shape) -> None:
        require_recorded(shape, self.recording.shapes, self.recording.path)


def require_recorded(shape: AnyShape, recorded: Collection[AnyShape], path: Path) -> None:
    """Raise RecordingError for a shape that the recording does not hold, with those it does."""
    if shape not in recorded:
        known = "; ".join(s.key() for s in recorded)
        raise RecordingError(f"{shape.key()} is not in {path}; recorded: {known}")


def _checked(check: Check) -> Result:
    return Result(
        outcome=check.outcome,
        detail=check.detail,
        o_error_ratio=check.o_error_ratio,
        state_error_ratio=check.state_error_ratio,
        effective_num_warps=check.effective_num_warps,
        registers=check.registers,
        spills=check.spills,
        smem_bytes=check.smem_bytes,
    )


def _timed(result: Result, timing: Timing) -> Result:
    if timing.outcome is not Outcome.OK:
        return replace(result, outcome=timing.outcome, detail=timing.detail)
    return replace(result, samples_us=timing.samples_us)
