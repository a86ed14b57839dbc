"""Where measurements of a kernel of others come from: this machine's card (or Triton's interpreter), or a recorded sweep."""

from dataclasses import replace

from kdatune_kernels.errors import RecordingError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import from_json
from kdatune_kernels.tunable import Installed
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_tuner.backend_gpu import read_result
from kdatune_tuner.backend_replay import require_recorded
from kdatune_tuner.objective import Result
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.recording_others import OtherRecording
from kdatune_tuner.worker import DeviceModules
from kdatune_tuner.worker import Worker

_SAMPLES = 5


class OtherGpuBackend:
    """Measures on the card of this machine, or in the interpreter where TRITON_INTERPRET=1 says so.

    Raises:
        DeviceError: no card, no torch, or the kernel's device module cannot be imported (from the constructor).
    """

    name = "gpu"

    def __init__(
        self,
        kernel: Installed,
        worker: Worker | None = None,
        *,
        trial_timeout_s: float = 120.0,
        paired_rounds: int = 15,
    ) -> None:
        self.kernel = kernel
        self.worker = worker or Worker(DeviceModules(bench="kdatune_kernels.bench_others", kernel=kernel.name))
        self._timeout_s = trial_timeout_s
        self._rounds = paired_rounds
        hello = self.worker.hello()
        self.gpu = from_json(Gpu, hello["gpu"])
        self.build = from_json(Build, hello["build"])
        self.regime: str = hello["regime"]

    def default_shapes(self) -> list[OtherShape]:
        """None: what its shapes are is for the kernel's users to say. Raises UsageError."""
        raise UsageError(f"say which shapes of {self.kernel.name} to tune: --shape {_example(self.kernel)}")

    def space(self, kernel: str, shape: OtherShape) -> list[OtherConfig]:  # noqa: ARG002 - one protocol
        """The kernel's config space."""
        return self.kernel.configs(shape, self.gpu)

    def measurable(self, kernel: str, shape: OtherShape, config: OtherConfig) -> bool:  # noqa: ARG002 - one protocol
        return self.kernel.config_ok(config, shape, self.gpu) is None

    def measure(self, kernel: str, shape: OtherShape, config: OtherConfig) -> Result:
        """Checked and timed alone."""
        request = {"op": "measure", "config": config.json(), "samples": _SAMPLES}
        return read_result(self._call(kernel, shape, request))

    def measure_pair(self, shape: OtherShape, config: OtherConfig, against: OtherConfig | None = None) -> Result:
        """The same; with `against`, timed again in alternating rounds with it."""
        alone = self.measure(self.kernel.name, shape, config)
        if against is None or not alone.ok:
            return alone
        request: Json = {"op": "interleave", "configs": [config.json(), against.json()], "samples": self._rounds}
        reply = self._call(self.kernel.name, shape, request)
        rounds = reply.pop("rounds_us", None)
        reply["gpu_seconds"] = reply["gpu_seconds"] + alone.gpu_seconds
        if rounds is None:
            return read_result(reply)
        kept = {"o_error_ratio": alone.o_error_ratio}
        return read_result(reply | kept | {"samples_us": rounds[0], "against_us": rounds[1], "paired": True})

    def close(self) -> None:
        self.worker.close()

    def _call(self, kernel: str, shape: OtherShape, request: Json) -> Json:
        return self.worker.call(request | {"kernel": kernel, "shape": shape.key()}, self._timeout_s)


class OtherReplayBackend:
    """Answers from a recording, instantly and always alike. Raises RecordingError for a shape it does not hold.

    Raises:
        RecordingError: the recording is of another kernel (from the constructor).
    """

    name = "replay"

    def __init__(self, kernel: Installed, recording: OtherRecording) -> None:
        if recording.kernel != kernel.name:
            raise RecordingError(f"{recording.path} is of kernel {recording.kernel}, not of {kernel.name}")
        self.kernel = kernel
        self.recording = recording
        self.regime = recording.regime

    @property
    def gpu(self) -> Gpu:
        return self.recording.gpu

    @property
    def build(self) -> Build:
        return self.recording.build

    def default_shapes(self) -> list[OtherShape]:
        """Every shape of the recording."""
        return list(self.recording.shapes)

    def space(self, kernel: str, shape: OtherShape) -> list[OtherConfig]:
        """Configs whose fate on the shape is recorded and that the kernel lets through today."""
        self._require(shape)
        return [c for c in self.kernel.configs(shape, self.gpu) if self.measurable(kernel, shape, c)]

    def measurable(self, kernel: str, shape: OtherShape, config: OtherConfig) -> bool:  # noqa: ARG002 - one protocol
        """Whether the config's fate on the shape is recorded."""
        return (shape, config) in self.recording.trials

    def measure(self, kernel: str, shape: OtherShape, config: OtherConfig) -> Result:  # noqa: ARG002 - one protocol
        """The recorded fate."""
        self._require(shape)
        found = self.recording.trials.get((shape, config))
        if found is None:
            raise RecordingError(f"{self.recording.path}: config {config.text} is not recorded on {shape.key()}")
        return found

    def measure_pair(self, shape: OtherShape, config: OtherConfig, against: OtherConfig | None = None) -> Result:
        """The recorded fate; with `against`, that one's samples beside it. They were not taken in one run."""
        mine = self.measure(self.kernel.name, shape, config)
        if against is None or not mine.ok:
            return mine
        theirs = self.measure(self.kernel.name, shape, against)
        if theirs.outcome is not Outcome.OK:
            return mine
        return replace(mine, against_us=theirs.samples_us)

    def close(self) -> None:
        """Nothing is held."""

    def _require(self, shape: OtherShape) -> None:
        require_recorded(shape, self.recording.shapes, self.recording.path)


def _example(kernel: Installed) -> str:
    """A shape key that shows the fields which must be given."""
    needed = [name for name in kernel.fields if name not in kernel.defaults]
    return ",".join(f"{name}=..." for name in needed)
