"""A recorded sweep of a real card: gzipped JSON lines, one row an event. What the replay backend reads.

Rows: one `meta` first (card, build, date, command: the provenance), then `check` (a config compiled and verified, or how
it failed), `time` (a config on a shape) and `pair` (K1 and K2 end to end on a shape). What has no
stages (`space.WHOLES`) is a `check` of K2 and a `pair` with K1Config(), which it does not launch, and has no `time`.
"""

import gzip
import json
import zlib
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import RecordingError
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.outcome import Outcome

FORMAT = 1
SHIPPED = Path(__file__).parent / "recordings" / "h200.jsonl.gz"
STAGE_CONFIGS: dict[str, type[K1Config] | type[K2Config]] = {"k1": K1Config, "k2": K2Config}
_GZIP_MAGIC = b"\x1f\x8b"


def recorded_shapes() -> tuple[Shape, ...]:
    """The nineteen shapes that a sweep times: one sequence, a skewed ragged batch, eight equal sequences."""
    dense = [shape_of(1, H, T) for T in (8192, 1024, 4096) for H in (96, 64, 8, 16, 32)]
    ragged = [shape_of(6, H, 8192, varlen=True, longest_tokens=3063) for H in (64, 96)]
    return (*dense, *ragged, *(shape_of(8, H, 8192) for H in (64, 96)))


# What a check row carries beside its config and its outcome.
CHECK_FIELDS = (
    "detail",
    "o_error_ratio",
    "state_error_ratio",
    "registers",
    "spills",
    "smem_bytes",
    "effective_num_warps",
    "compile_s",
)


@dataclass(frozen=True)
class Check:
    """One config compiled and verified on the card, or how it failed."""

    kernel: str
    config: K1Config | K2Config
    outcome: Outcome
    detail: str | None = None
    o_error_ratio: float | None = None
    state_error_ratio: float | None = None
    registers: int | None = None
    spills: int | None = None
    smem_bytes: int | None = None
    effective_num_warps: int | None = None
    compile_s: float | None = None


@dataclass(frozen=True)
class Timing:
    """Samples of one config, or of one pair, on one shape; or how it failed there."""

    outcome: Outcome
    samples_us: tuple[float, ...] = ()
    detail: str | None = None


@dataclass(frozen=True)
class Recording:
    """A sweep in memory. Indices `i` count per kernel."""

    path: Path
    gpu: Gpu
    build: Build
    recorded_at: str
    command: str
    regime: str
    checks: dict[tuple[str, int], Check] = field(default_factory=dict)
    timings: dict[tuple[str, int, Shape], Timing] = field(default_factory=dict)
    pairs: dict[tuple[int, int, Shape], Timing] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes with at least one timing, in the order of the file."""
        return tuple(dict.fromkeys(shape for _, _, shape in self.timings))

    @cached_property
    def index(self) -> dict[K1Config | K2Config, int]:
        """Where a config stands in the sweep."""
        return {check.config: i for (_, i), check in self.checks.items()}


def load_recording(path: Path) -> Recording:
    """Read a sweep file, gzipped or plain.

    Raises:
        RecordingError: the file cannot be opened, is truncated or damaged, has no meta row, is of another format, or
            holds a row that cannot be read. The message names the file and the row.
    """
    recording: Recording | None = None
    number = 0
    for number, row in read_rows(path):
        if recording is None:
            recording = read_meta(path, row)
            continue
        try:
            _add(recording, row)
        except (KdatuneError, KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{path}: row {number} cannot be read: {error!r}") from error
    if recording is None or not recording.timings:
        raise RecordingError(f"{path}: no timing in {number} rows; make a sweep with `kdatune record --out FILE`")
    return recording


def read_rows(path: Path) -> Iterator[tuple[int, Json]]:
    """The rows of a sweep file with their numbers. Raises RecordingError."""
    number = 0
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == _GZIP_MAGIC
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise RecordingError(f"{path}: row {number} is not a JSON object")
                yield number, row
    except FileNotFoundError as error:
        raise RecordingError(f"{path}: no such sweep file; make one with `kdatune record --out FILE`") from error
    except EOFError as error:
        raise RecordingError(f"{path}: truncated after row {number}; copy or record it again") from error
    except (OSError, zlib.error, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: unreadable after row {number}: {error}") from error
    except json.JSONDecodeError as error:
        raise RecordingError(f"{path}: row {number} is not JSON ({error}); the file is truncated or damaged") from error
    except RecursionError as error:
        raise RecordingError(f"{path}: row {number} is nested too deeply; this is not a kdatune sweep") from error


def read_meta(path: Path, row: Json) -> Recording:
    """A recording without rows from its first one. Raises RecordingError."""
    if row.get("t") != "meta":
        raise RecordingError(f"{path}: the first row is not a meta row; this is not a kdatune sweep")
    if row.get("format") != FORMAT:
        raise RecordingError(f"{path}: format {row.get('format')!r} is not {FORMAT}; record the sweep again")
    try:
        return Recording(
            path=path,
            gpu=from_json(Gpu, row["gpu"]),
            build=from_json(Build, row["build"]),
            recorded_at=str(row["recorded_at"]),
            command=str(row["command"]),
            regime=str(row["regime"]),
        )
    except (KdatuneError, KeyError) as error:
        raise RecordingError(f"{path}: the meta row cannot be read: {error!r}") from error


def _add(recording: Recording, row: Json) -> None:
    match row["t"]:
        case "check":
            recording.checks[row["kernel"], int(row["i"])] = _check(row)
        case "time":
            key = (row["kernel"], int(row["i"]))
            if key not in recording.checks:
                raise RecordingError(f"timing of {key[0]} config {key[1]}, which has no check row")
            recording.timings[*key, parse_shape(row["shape"])] = _timing(row)
        case "pair":
            recording.pairs[int(row["i1"]), int(row["i2"]), parse_shape(row["shape"])] = _timing(row)
        case other:
            raise RecordingError(f"unknown row kind {other!r}")


def _check(row: Json) -> Check:
    return Check(
        kernel=row["kernel"],
        config=from_json(STAGE_CONFIGS[row["kernel"]], row["config"], strict=False),  # a field added since: its default
        outcome=Outcome(row["outcome"]),
        **{name: row.get(name) for name in CHECK_FIELDS},
    )


def _timing(row: Json) -> Timing:
    outcome = Outcome(row.get("outcome", "ok"))
    samples = tuple(float(s) for s in row.get("samples_us") or ())
    if (outcome is Outcome.OK) != bool(samples) or not all(0 < s < float("inf") for s in samples):
        raise RecordingError(f"samples_us {samples} do not go with outcome {outcome}")
    return Timing(outcome, samples, row.get("detail"))


def meta_row(gpu: Gpu, build: Build, *, recorded_at: str, command: str, regime: str, spaces: Json) -> Json:
    """The first row of a sweep: where everything after it comes from."""
    return {
        "t": "meta",
        "format": FORMAT,
        "gpu": to_json(gpu),
        "build": to_json(build),
        "recorded_at": recorded_at,
        "command": command,
        "regime": regime,
        "kernel_spaces": spaces,
    }


class SweepWriter:
    """Writes a sweep so that a crash at any moment loses at most the row being written.

    Rows are appended to FILE.part, flushed one by one; `finish` packs them into FILE and removes the part. A part left
    by an earlier run of the same card and build is continued: `rows` holds what it has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.rows: list[Json] = list(_salvage(self.part))
        self.part.parent.mkdir(parents=True, exist_ok=True)
        # rewritten whole and swapped in, so that a row torn by a crash is not continued in the middle
        clean = self.part.with_name(self.part.name + ".new")
        self._file = clean.open("w", encoding="utf-8")
        self._write(self.rows)
        clean.replace(self.part)

    def restart(self) -> None:
        """Drop what an earlier run left: it was made with another card or build."""
        self.rows.clear()
        self._file.seek(0)
        self._file.truncate()

    def add(self, row: Json) -> None:
        self.rows.append(row)
        self._write([row])

    def _write(self, rows: Iterable[Json]) -> None:
        for row in rows:
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Leave the part file as it is: a later run goes on from there."""
        self._file.close()

    def finish(self, *, keep_part: bool = False) -> None:
        """Pack the rows into the sweep file (atomically) and remove the part, unless the sweep goes on later."""
        self._file.close()
        packed = self.path.with_name(self.path.name + ".packing")
        # mtime 0: equal rows give equal bytes
        with packed.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as out:
            for row in self.rows:
                out.write((json.dumps(row, separators=(",", ":")) + "\n").encode())
        packed.replace(self.path)
        if not keep_part:
            self.part.unlink()


def _salvage(part: Path) -> Iterator[Json]:
    """Rows of a part file up to the first one that a crash tore."""
    if not part.exists():
        return
    with part.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row: Any = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                return
            if not isinstance(row, dict):
                return
            yield row
