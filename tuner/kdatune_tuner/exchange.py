"""Measurements on their way from or to other tuners' files: what the formats have in common.

`Traded` is one measurement with all that its ids stand for. exchange_t4.py and exchange_fla.py write documents of them and
read them back; store/imports.py keeps what was read. Nothing here decides what is served.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from datetime import datetime
from pathlib import Path
from typing import Any

from kdatune_kernels.errors import ExchangeError
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import to_json
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.records import CLOCKS_APART
from kdatune_tuner.store.records import utc_now

MAX_FILE_BYTES = 256 << 20
US_PER_UNIT = {
    "s": 1e6, "seconds": 1e6, "ms": 1e3, "milliseconds": 1e3, "us": 1.0, "microseconds": 1.0, "ns": 1e-3, "nanoseconds": 1e-3,
}  # fmt: skip
"""What the formats call a unit of time."""

Config = K1Config | K2Config | LaunchConfig
CONFIG_TYPES: Mapping[str, type[Config]] = {"k1": K1Config, "k2": K2Config, "kda": LaunchConfig}

_UNKNOWN = "unknown"
UNKNOWN_BUILD = Build(*[_UNKNOWN] * len(Build.__dataclass_fields__))
"""Of measurements whose file does not say what they were made with: stale wherever they are used."""


@dataclass(frozen=True)
class Traded:
    """One measurement. `values` are fields of NewMeasurement beside the ids, the config and the outcome; None is left out."""

    kernel: str
    gpu: Gpu
    shape: Shape
    build: Build
    config: Config
    outcome: Outcome
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Told:
    """What the caller says of a file that does not say it itself."""

    gpu: Gpu | None = None
    kernel: str | None = None
    shape: Shape | None = None


def read_document(path: Path) -> Any:
    """The JSON of a file.

    Raises:
        ExchangeError: it cannot be opened, is larger than 256 MiB, or is not JSON (NaN and Infinity are not).
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ExchangeError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_no_doubled)
    except OSError as error:
        raise ExchangeError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ExchangeError(f"{path} is nested too deeply") from error
    except ValueError as error:
        raise ExchangeError(f"{path} is not JSON: {error}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _no_doubled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        doubled = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"the key {doubled[:60]!r} is there twice in one object")
    return found


def flat(config: Config) -> dict[str, Any]:
    """A config as one flat object: of a whole launch, the fields of its stages behind k1_ and k2_."""
    values = to_json(config)
    if not isinstance(config, LaunchConfig):
        return values
    stages = {f"{stage}_{name}": value for stage in ("k1", "k2") for name, value in values[stage].items()}
    return stages | {"precision": values["precision"]}


def config_of(kernel: str, values: Any) -> Config:
    """The config of a flat object. Fields that are not there take their defaults: another tuner lists what it searched.

    Raises:
        ConfigError: a field that the kernel's configs do not have, or a value of the wrong type.
    """
    if not isinstance(values, dict) or kernel != "kda":
        return from_json(CONFIG_TYPES[kernel], values, strict=False)
    nested: dict[str, Any] = {"k1": {}, "k2": {}}
    for name, value in values.items():
        stage, _, field = name.partition("_")
        if field and stage in ("k1", "k2"):
            nested[stage][field] = value
        else:
            nested[name] = value
    return from_json(LaunchConfig, nested, strict=False)


def refuse_illegal(one: Traded) -> None:
    """Raise ExchangeError for a config that ran, it is said, and that no launcher would run."""
    refused = config_ok(one.config, one.shape, one.gpu) if one.outcome.ok else None
    if refused is not None:
        raise ExchangeError(f"refused: {refused}")


def us_of(value: float, unit: str) -> float:
    """A time in us. Raises ExchangeError for a unit that is none of time."""
    if unit not in US_PER_UNIT:
        raise ExchangeError(f"unit {unit[:40]!r} is no unit of time; known: {', '.join(US_PER_UNIT)}")
    return value * US_PER_UNIT[unit]


def settle(name: str, said: Any, told: Any) -> Any:
    """Of what the file says and what the caller says, the one there is.

    Raises:
        ExchangeError: neither says it, or they contradict each other.
    """
    if said is None and told is None:
        raise ExchangeError(f"the file does not say its {name}; give --{name}")
    if said is not None and told is not None and said != told:
        shown = [value.key() if isinstance(value, Shape) else getattr(value, "name", value) for value in (said, told)]
        raise ExchangeError(f"the file is of {name} {shown[0]}, --{name} says {shown[1]}")
    return told if said is None else said


def at(where: str, error: KdatuneError) -> ExchangeError:
    """The error with the place in the file where it is."""
    return ExchangeError(f"{where}: {error}")


def moment_of(text: str, name: str) -> datetime:
    """A moment of a file in UTC.

    Raises ExchangeError for what is none of ISO 8601 with its zone, of no year 1 to 9999, or ahead of now.
    """
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ExchangeError(f"{name} {text[:60]!r} has no time zone")
        moment = moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ExchangeError(f"{name} {text[:60]!r} is none of ISO 8601") from error
    if moment > utc_now() + CLOCKS_APART:
        raise ExchangeError(
            f"{name} {text[:60]!r} is ahead of this machine's clock; mend the time in the file, or the clock"
        )
    return moment
