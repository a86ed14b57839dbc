"""The gpu backend: a real card, reached through a child process."""

from dataclasses import fields

from kdatune_kernels.space import config_ok
from kdatune_kernels.space import legal_k1
from kdatune_kernels.space import legal_k2
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import to_json
from kdatune_tuner.objective import AnyConfig
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import StageConfig
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.recording import recorded_shapes
from kdatune_tuner.worker import Worker

_SAMPLES = 5
_COPIED = {f.name for f in fields(Result)} - {"outcome", "samples_us", "against_us", "estimated"}


class GpuBackend:
    """Measures on the card of this machine. A config that faults costs its trial and a restart of the child.

    Raises:
        DeviceError: no card, no torch (from the constructor).
    """

    name = "gpu"

    def __init__(
        self, worker: Worker | None = None, *, trial_timeout_s: float = 120.0, paired_rounds: int = 15
    ) -> None:
        self.worker = worker or Worker()
        self._timeout_s = trial_timeout_s
        self._rounds = paired_rounds
        hello = self.worker.hello()
        self.gpu = from_json(Gpu, hello["gpu"])
        self.build = from_json(Build, hello["build"])
        self.regime: str = hello["regime"]

    def default_shapes(self) -> list[Shape]:
        """The shapes that a sweep records."""
        return list(recorded_shapes())

    def space(self, kernel: str, shape: Shape) -> list[StageConfig]:
        return list(legal_k1(shape, self.gpu) if kernel == "k1" else legal_k2(shape, self.gpu))

    def measurable(self, kernel: str, shape: Shape, config: StageConfig | LaunchConfig) -> bool:  # noqa: ARG002 - one protocol
        return config_ok(config, shape, self.gpu) is None

    def measure(self, kernel: str, shape: Shape, config: StageConfig) -> Result:
        return self._measure(kernel, shape, config)

    def measure_pair(self, shape: Shape, config: LaunchConfig, against: LaunchConfig | None = None) -> Result:
        """The pair checked and timed; with `against`, then timed again in alternating rounds with it."""
        alone = self._measure("kda", shape, config)
        if against is None or not alone.ok:
            return alone
        request = {
            "op": "interleave",
            "kernel": "kda",
            "shape": shape.key(),
            "configs": [to_json(config), to_json(against)],
            "samples": self._rounds,
        }
        reply = self.worker.call(request, self._timeout_s)
        rounds = reply.pop("rounds_us", None)
        reply["gpu_seconds"] = reply["gpu_seconds"] + alone.gpu_seconds
        if rounds is None:
            return read_result(reply)
        kept = {name: getattr(alone, name) for name in ("o_error_ratio", "state_error_ratio")}
        return read_result(reply | kept | {"samples_us": rounds[0], "against_us": rounds[1], "paired": True})

    def close(self) -> None:
        self.worker.close()

    def _measure(self, kernel: str, shape: Shape, config: AnyConfig) -> Result:
        request = {
            "op": "measure",
            "kernel": kernel,
            "shape": shape.key(),
            "config": to_json(config),
            "samples": _SAMPLES,
        }
        return read_result(self.worker.call(request, self._timeout_s))


def read_result(reply: Json) -> Result:
    """An answer of the child."""
    outcome = Outcome(reply["outcome"])
    ok = outcome is Outcome.OK
    return Result(
        outcome=outcome,
        samples_us=tuple(reply.get("samples_us") or ()) if ok else (),
        against_us=tuple(reply.get("against_us") or ()) if ok else (),
        **{name: reply[name] for name in _COPIED if name in reply},
    )
