"""The snapshot document: every champion of one GPU model. What the service serves and a launcher keeps. Stdlib only.

Reading is defensive, since what comes over the wire or from a disk may be older, newer, damaged or hostile: the
document as a whole is refused with SnapshotError, a single entry is skipped and counted with its reason. Keys that a
later service may add beside the known ones are ignored at the document and entry level; inside a config, shape, GPU or
build every key must be known, because an unknown knob has an unknown meaning.
"""

import hashlib
import json
import math
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import TypeVar

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import SnapshotError
from kdatune_kernels.match import Champion
from kdatune_kernels.others import OtherChampion
from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import to_json
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_kernels.values import is_other

SCHEMA = 1
"""The document's schema. Raised when a launcher of today would misread it, not when a key is added."""

_MAX_TEXT = 500
T = TypeVar("T")


@dataclass(frozen=True)
class Skipped:
    """An entry that was passed over: its place in the document, why, and what of it could be read."""

    index: int
    key: str
    reason: str
    shape: Shape | None = None
    config: LaunchConfig | None = None


@dataclass(frozen=True)
class Snapshot:
    """Every champion of one GPU model as of one generation. `skipped` holds the entries that could not be used.

    others: the champions of other kernels. What they may launch, only these kernels can say: whoever launches asks them.
    """

    schema: int
    gpu: Gpu
    generation: int
    champions: tuple[Champion, ...] = ()
    skipped: tuple[Skipped, ...] = field(default=(), compare=False)
    others: tuple[OtherChampion, ...] = ()


def dump_snapshot(snapshot: Snapshot) -> Json:
    """The snapshot as the JSON document of schema 1. `parse_snapshot` reads it back to an equal value."""
    return {
        "schema": snapshot.schema,
        "gpu": to_json(snapshot.gpu),
        "generation": snapshot.generation,
        "others": [dump_other(champion) for champion in snapshot.others],
        "champions": [dump_champion(champion) for champion in snapshot.champions],
    }


def dump_champion(champion: Champion) -> Json:
    """One champion as its JSON entry: every field present, None included."""
    return to_json(champion)


def dump_other(champion: OtherChampion) -> Json:
    """One champion of another kernel as its JSON entry: every field present, None included."""
    return to_json(champion) | {"shape": champion.shape.json(), "config": champion.config.json()}


def parse_snapshot(data: bytes | str | Mapping[str, Any], *, pause: Callable[[], None] | None = None) -> Snapshot:
    """Read a snapshot document, given as text or as decoded JSON.

    Args:
        pause: called after every entry. A background thread gives the interpreter lock away here, so that a launch
            waits for one entry (75 us) at most and not for the whole document.

    Raises:
        SnapshotError: not JSON, not an object, another schema number, or the GPU, generation or list cannot be read. An
            entry that cannot be read, or whose config its own card refuses, is in `skipped` instead.
    """
    document = parse_json(data) if isinstance(data, bytes | str) else data
    if not isinstance(document, Mapping):
        raise SnapshotError(f"a snapshot is a JSON object, not {type(document).__name__}")
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise SnapshotError(f"snapshot schema {_brief(schema)} is not {SCHEMA}; update kdatune on the older side")
    generation = document.get("generation")
    if type(generation) is not int or generation < 0:
        raise SnapshotError(f"snapshot generation must be a whole number >= 0, not {_brief(generation)}")
    entries = document.get("champions")
    if not isinstance(entries, list):
        raise SnapshotError(f"snapshot champions must be a list, not {type(entries).__name__}")
    try:
        gpu = from_json(Gpu, document.get("gpu"))
    except KdatuneError as error:
        raise SnapshotError(f"snapshot gpu: {str(error)[:_MAX_TEXT]}") from error
    champions: list[Champion] = []
    skipped: list[Skipped] = []
    for index, entry in enumerate(entries):
        try:
            champions.append(parse_champion(entry))
        except KdatuneError as error:
            skipped.append(_skipped(index, entry, str(error)))
        if pause is not None:
            pause()
    others: list[OtherChampion] = []
    listed = document.get("others", [])  # a service of before has none
    if not isinstance(listed, list):
        raise SnapshotError(f"snapshot others must be a list, not {type(listed).__name__}")
    for index, entry in enumerate(listed, len(entries)):
        try:
            others.append(parse_other(entry))
        except KdatuneError as error:
            skipped.append(Skipped(index, _brief(entry), str(error)[:_MAX_TEXT]))
        if pause is not None:
            pause()
    return Snapshot(schema, gpu, generation, tuple(champions), tuple(skipped), tuple(others))


def parse_champion(entry: Any) -> Champion:
    """Read one entry of a snapshot.

    Raises:
        SnapshotError: not an object, a kernel or value that is not understood, or a config that config_ok refuses.
        ConfigError, ShapeError: its GPU, shape, config or build cannot be read.
    """
    if not isinstance(entry, Mapping):
        raise SnapshotError(f"a champion is a JSON object, not {type(entry).__name__}")
    kernel = entry.get("kernel")
    if kernel != "kda":
        raise SnapshotError(f"kernel {_brief(kernel)} is not launched from here; only kda is")
    gpu = from_json(Gpu, entry.get("gpu"))
    shape = from_json(Shape, entry.get("shape"))
    config = from_json(LaunchConfig, entry.get("config"))
    reason = config_ok(config, shape, gpu)
    if reason:
        raise SnapshotError(f"config refused: {reason}")
    return Champion(
        gpu=gpu,
        shape=shape,
        config=config,
        **_evidence(entry),
        nearest_regret=_ratio(entry, "nearest_regret"),
        estimated=_flag(entry, "estimated"),
    )


def parse_other(entry: Any) -> OtherChampion:
    """Read one entry of another kernel. Whether its config may run is not known here.

    Raises:
        SnapshotError: not an object, or a name or value that is not understood.
        ConfigError, ShapeError: its GPU, shape, config or build cannot be read.
    """
    if not isinstance(entry, Mapping):
        raise SnapshotError(f"a champion is a JSON object, not {type(entry).__name__}")
    kernel = entry.get("kernel")
    if not isinstance(kernel, str) or not is_other(kernel):
        raise SnapshotError(f"{_brief(kernel)} is no name of another kernel")
    return OtherChampion(
        kernel=kernel,
        gpu=from_json(Gpu, entry.get("gpu")),
        shape=OtherShape(entry.get("shape")),
        config=OtherConfig(entry.get("config")),
        **_evidence(entry),
    )


def _evidence(entry: Mapping[str, Any]) -> Json:
    """What a champion of any kernel says of its measurement."""
    generation = entry.get("generation")
    if type(generation) is not int or generation < 0:
        raise SnapshotError(f"generation must be a whole number >= 0, not {_brief(generation)}")
    build = entry.get("build")
    return {
        "generation": generation,
        "measured_us": _time_us(entry, "measured_us"),
        "default_us": _time_us(entry, "default_us"),
        "build": None if build is None else from_json(Build, build),
        "measured_at": _text(entry, "measured_at"),
        "stale_reason": _text(entry, "stale_reason"),
    }


def parse_json(data: bytes | str) -> Any:
    """Decode JSON of unknown origin. Raises SnapshotError: not UTF-8, not JSON, NaN or Infinity, nested too deeply."""
    try:
        text = data.decode() if isinstance(data, bytes) else data
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"not JSON: {_brief(str(error))}") from error


def seal(document: Json, etag: str | None) -> str:
    """The text of the disk copy: the document as received, its ETag, and a sha256 over both.

    The checksum finds a torn or damaged file. It is no proof of origin: whoever can write the file can write the sum.
    """
    body = {"etag": etag, "snapshot": document}
    return canonical({**body, "sha256": _sha256(body)}) + "\n"


def unseal(text: bytes | str) -> tuple[Json, str | None]:
    """Read a disk copy back to (document, ETag). Raises SnapshotError: not a disk copy, or its checksum is wrong."""
    data = parse_json(text)
    if (
        not isinstance(data, dict)
        or set(data) != {"etag", "snapshot", "sha256"}
        or not isinstance(data["snapshot"], dict)
    ):
        raise SnapshotError("not a snapshot copy: want an object with etag, snapshot and sha256")
    etag = data["etag"]
    if etag is not None and not isinstance(etag, str):
        raise SnapshotError(f"not a snapshot copy: etag is {_brief(etag)}")
    if data["sha256"] != _sha256({"etag": etag, "snapshot": data["snapshot"]}):
        raise SnapshotError("the snapshot copy fails its checksum")
    return data["snapshot"], etag


def _sha256(value: Json) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _skipped(index: int, entry: Any, reason: str) -> Skipped:
    known = entry if isinstance(entry, Mapping) else {}
    shape = _readable(Shape, known.get("shape"))
    key = _brief(known.get("shape")) if shape is None else shape.key()
    return Skipped(index, key, reason[:_MAX_TEXT], shape, _readable(LaunchConfig, known.get("config")))


def _readable(cls: type[T], data: Any) -> T | None:
    try:
        return from_json(cls, data)
    except KdatuneError:
        return None


def _ratio(entry: Mapping[str, Any], name: str) -> float | None:
    value = entry.get(name)  # services before it was measured do not send it
    if value is None:
        return None
    if type(value) not in (int, float) or not 1 <= value < math.inf:
        raise SnapshotError(f"{name} must be a ratio >= 1 or null, not {_brief(value)}")
    return float(value)


def _flag(entry: Mapping[str, Any], name: str) -> bool:
    value = entry.get(name, False)  # services of before do not send it
    if type(value) is not bool:
        raise SnapshotError(f"{name} must be true or false, not {_brief(value)}")
    return value


def _time_us(entry: Mapping[str, Any], name: str) -> float | None:
    value = entry.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise SnapshotError(f"{name} must be a time > 0 or null, not {_brief(value)}")
    return float(value)


def _text(entry: Mapping[str, Any], name: str) -> str | None:
    value = entry.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise SnapshotError(f"{name} must be a text of at most {_MAX_TEXT} characters or null, not {_brief(value)}")
    return value
