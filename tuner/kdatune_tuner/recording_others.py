"""A recorded sweep of a kernel of others: the same file as recording.py's, with rows of its own kind.

Rows: one `meta` first, with the kernel's name, then `trial`: what became of a config on a shape.
"""

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from functools import cached_property
from pathlib import Path

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import RecordingError
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_kernels.values import parse_other_shape
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import Result
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.recording import SweepWriter
from kdatune_tuner.recording import meta_row
from kdatune_tuner.recording import read_meta
from kdatune_tuner.recording import read_rows
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.records import utc_now

_KEPT = ("detail", "o_error_ratio", "registers", "spills", "smem_bytes", "effective_num_warps")


@dataclass(frozen=True)
class OtherRecording:
    """A sweep in memory."""

    path: Path
    kernel: str
    gpu: Gpu
    build: Build
    regime: str
    trials: dict[tuple[OtherShape, OtherConfig], Result] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> tuple[OtherShape, ...]:
        """Shapes with at least one trial, in the order of the file."""
        return tuple(dict.fromkeys(shape for shape, _ in self.trials))


def load_other_recording(path: Path) -> OtherRecording:
    """Read a sweep of another kernel, gzipped or plain.

    Raises:
        RecordingError: the file cannot be opened, is truncated or damaged, is a sweep of kda, or holds a row that cannot be
            read. The message names the file and the row.
    """
    recording: OtherRecording | None = None
    number = 0
    for number, row in read_rows(path):
        if recording is None:
            meta = read_meta(path, row)
            kernel = row.get("kernel")
            if not isinstance(kernel, str):
                raise RecordingError(f"{path} is a sweep of kda; one of another kernel is made with --kernel")
            recording = OtherRecording(path, kernel, meta.gpu, meta.build, meta.regime)
            continue
        try:
            shape, config, result = _trial(row)
        except (KdatuneError, KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{path}: row {number} cannot be read: {error!r}") from error
        recording.trials[shape, config] = result
    if recording is None or not recording.trials:
        raise RecordingError(f"{path}: no trial in {number} rows")
    return recording


def record_other(
    path: Path, kernel: str, backend: Backend, shapes: Sequence[OtherShape], command: str, say: Callable[[str], None]
) -> int:
    """Sweep every config of the shapes into a file and give the number of trials; an earlier part is gone on with."""
    writer = SweepWriter(path)
    meta = meta_row(
        backend.gpu, backend.build, recorded_at=rfc3339(utc_now()), command=command, regime=backend.regime, spaces={}
    ) | {"kernel": kernel}
    same = ("gpu", "build", "kernel")
    if writer.rows and all(writer.rows[0].get(name) == meta[name] for name in same):
        say(f"going on with {len(writer.rows)} rows of {writer.part}")
    else:
        writer.restart()
        writer.add(meta)
    done = {(row["shape"], OtherConfig(row["config"])) for row in writer.rows[1:]}
    try:
        for number, shape in enumerate(shapes, 1):
            space = backend.space(kernel, shape)
            for config in space:
                if (shape.key(), config) not in done:
                    writer.add(_row(shape, config, backend.measure(kernel, shape, config)))
            say(f"{number}/{len(shapes)} {shape.key()}: {len(space)} configs")
    except BaseException:
        writer.close()
        raise
    writer.finish()
    return len(writer.rows) - 1


def _row(shape: OtherShape, config: OtherConfig, result: Result) -> Json:
    kept = {name: getattr(result, name) for name in _KEPT if getattr(result, name) is not None}
    samples = [round(sample, 3) for sample in result.samples_us]
    what = {"t": "trial", "shape": shape.key(), "config": config.json(), "outcome": str(result.outcome)}
    return what | kept | ({"samples_us": samples} if samples else {})


def _trial(row: Json) -> tuple[OtherShape, OtherConfig, Result]:
    if row["t"] != "trial":
        raise RecordingError(f"unknown row kind {row['t']!r}")
    outcome = Outcome(row["outcome"])
    samples = tuple(float(sample) for sample in row.get("samples_us") or ())
    if (outcome is Outcome.OK) != bool(samples) or not all(0 < sample < float("inf") for sample in samples):
        raise RecordingError(f"samples_us {samples} do not go with outcome {outcome}")
    kept: Json = {name: row.get(name) for name in _KEPT}
    return parse_other_shape(row["shape"]), OtherConfig(row["config"]), Result(outcome, samples, **kept)
