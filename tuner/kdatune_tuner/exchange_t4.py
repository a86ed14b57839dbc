"""The T4 results format of the auto-tuning community (Kernel Tuner, KTT and others), version 1.0.0.

A T4 document lists configurations with how they ended and what was measured. It has no place for the card, the kernel, the
shape and the build: these are in members of our own, which the schema allows and other readers pass over ("kdatune" in
the metadata, "kdatune" in each result). Of a document without them the caller says the first three.
"""

import functools
import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema_rs

from kdatune_kernels.errors import ExchangeError
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.exchange import CONFIG_TYPES
from kdatune_tuner.exchange import UNKNOWN_BUILD
from kdatune_tuner.exchange import Told
from kdatune_tuner.exchange import Traded
from kdatune_tuner.exchange import at
from kdatune_tuner.exchange import config_of
from kdatune_tuner.exchange import flat
from kdatune_tuner.exchange import moment_of
from kdatune_tuner.exchange import refuse_illegal
from kdatune_tuner.exchange import settle
from kdatune_tuner.exchange import us_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.checks import COUNT_FIELDS

VERSION = "1.0.0"
OBJECTIVE = "median_us"
_SCHEMA = Path(__file__).parent / "schemas" / f"t4-results-{VERSION}.json"

# T4 has fewer words for how a configuration ended; our own word is among the measurements.
_INVALIDITY = {
    Outcome.OK: "correct",
    Outcome.COMPILE_ERROR: "compile",
    Outcome.RESOURCE: "compile",
    Outcome.LAUNCH_ERROR: "runtime",
    Outcome.ILLEGAL_ACCESS: "runtime",
    Outcome.ABORT: "runtime",
    Outcome.TIMEOUT: "timeout",
    Outcome.INCORRECT: "correctness",
    Outcome.NONDETERMINISTIC: "correctness",
}

_MOST = 1e300  # JSON knows integers that no float holds

_OUTCOMES = {
    "correct": Outcome.OK,
    "compile": Outcome.COMPILE_ERROR,
    "runtime": Outcome.LAUNCH_ERROR,
    "timeout": Outcome.TIMEOUT,
    "correctness": Outcome.INCORRECT,
}
# Fields of NewMeasurement that are measurements of a T4 result, by the same name, and their units.
_UNITS = {
    "median_us": "us",
    "p20_us": "us",
    "p80_us": "us",
    "sample_count": "",
    "o_error_ratio": "",
    "state_error_ratio": "",
    "requested_num_warps": "",
    "effective_num_warps": "",
    "registers": "",
    "spills": "",
    "smem_bytes": "B",
    "occupancy_pct": "%",
    "sm_clock_mhz": "MHz",
    "throttle_reasons": "",
    "regime": "",
    "detail": "",
}


_TYPES: dict[str, type] = dict.fromkeys(COUNT_FIELDS, int) | dict.fromkeys(
    ("throttle_reasons", "regime", "detail"), str
)


def dump(rows: Iterable[Traded], kernel: str, gpu: Gpu) -> Json:
    """The T4 document of measurements of one kernel on one card."""
    builds: list[Build] = []
    results = []
    for row in rows:
        if row.build not in builds:
            builds.append(row.build)
        results.append(_dump_result(row, builds.index(row.build)))
    ours = {"kernel": kernel, "gpu": to_json(gpu), "builds": [to_json(build) for build in builds]}
    return {"schema_version": VERSION, "metadata": {"timeunit": "microseconds", "kdatune": ours}, "results": results}


def _dump_result(row: Traded, build: int) -> Json:
    values = dict(row.values)
    measured_at: datetime = values.pop("measured_at")
    estimated = values.pop("estimated", False)
    return {
        "timestamp": measured_at.isoformat(),
        "configuration": flat(row.config),
        "objectives": [OBJECTIVE],
        "times": {"runtimes": []},
        "invalidity": _INVALIDITY[row.outcome],
        "correctness": 1 if row.outcome.ok else 0,
        "measurements": [
            {"name": name, "value": value, "unit": _UNITS[name]} for name, value in values.items() if value is not None
        ],
        "kdatune": {"shape": row.shape.key(), "build": build, "outcome": row.outcome.value, "estimated": estimated},
    }


def load(document: Any, told: Told) -> tuple[list[Traded], int]:
    """The measurements of a T4 document, and how many configurations it lists that were never run ("constraints").

    Args:
        told: the card, the kernel and the shape, where the document is not one of ours.

    Raises:
        ExchangeError: it is no T4 document, does not say what it is of, or one of its results cannot be: an illegal
            config, a unit that is none of time, a time that is not a number, a correct result without one.
    """
    _check_schema(document)
    version = document.get("schema_version", VERSION)
    if version.partition(".")[0] != VERSION.partition(".")[0]:
        raise ExchangeError(f"the document is of T4 schema {version}; {VERSION} is read")
    metadata = document.get("metadata", {})
    ours = metadata.get("kdatune") if isinstance(metadata, dict) else None
    timeunit = metadata.get("timeunit", "") if isinstance(metadata, dict) else ""
    gpu, kernel, builds = _about(ours, told)
    found, never_run = [], 0
    for i, result in enumerate(document.get("results", [])):
        if result["invalidity"] == "constraints":
            never_run += 1
            continue
        try:
            found.append(_load_result(result, kernel, gpu, told, builds, str(timeunit)))
        except KdatuneError as error:
            raise at(f"result {i}", error) from error
    return found, never_run


def _about(ours: Any, told: Told) -> tuple[Gpu, str, list[Build]]:
    if ours is None:
        return settle("gpu", None, told.gpu), settle("kernel", None, told.kernel), []
    try:
        kernel, gpu = ours["kernel"], from_json(Gpu, ours["gpu"])
        builds = [from_json(Build, build) for build in ours["builds"]]
    except (KeyError, TypeError) as error:
        raise ExchangeError(f"metadata.kdatune cannot be read: {error}") from error
    except KdatuneError as error:
        raise at("metadata.kdatune", error) from error
    if kernel not in CONFIG_TYPES:
        raise ExchangeError(f"the file is of kernel {str(kernel)[:80]!r}; {', '.join(CONFIG_TYPES)} are read")
    return settle("gpu", gpu, told.gpu), settle("kernel", kernel, told.kernel), builds


def _load_result(result: Json, kernel: str, gpu: Gpu, told: Told, builds: list[Build], timeunit: str) -> Traded:
    ours = result.get("kdatune")
    ours = ours if isinstance(ours, dict) else {}
    said = parse_shape(ours["shape"]) if isinstance(ours.get("shape"), str) else None
    outcome = _outcome(result, ours)
    values = _values(result, timeunit)
    if outcome.ok:
        if values.get("median_us") is None:
            raise ExchangeError(f"it is correct but has no time: no number named {_objective(result)!r} is measured")
        if not result["correctness"] > 0:
            raise ExchangeError("its invalidity says correct, its correctness is 0")
    else:
        values = {name: value for name, value in values.items() if name not in ("median_us", "p20_us", "p80_us")}
    one = Traded(
        kernel=kernel,
        gpu=gpu,
        shape=settle("shape", said, told.shape),
        build=_build(ours.get("build"), builds),
        config=config_of(kernel, result["configuration"]),
        outcome=outcome,
        values=values | {"estimated": ours.get("estimated") is True},
    )
    refuse_illegal(one)
    return one


def _outcome(result: Json, ours: Json) -> Outcome:
    said = _OUTCOMES[result["invalidity"]]
    own = ours.get("outcome")
    if own is None:
        return said
    if own not in set(Outcome) or _INVALIDITY[Outcome(own)] != result["invalidity"]:
        raise ExchangeError(f"outcome {str(own)[:40]!r} is not what invalidity {result['invalidity']!r} says")
    return Outcome(own)


def _build(index: Any, builds: list[Build]) -> Build:
    if index is None:
        return UNKNOWN_BUILD
    if type(index) is not int or not 0 <= index < len(builds):
        raise ExchangeError(f"build {str(index)[:40]} is none of metadata.kdatune.builds")
    return builds[index]


def _objective(result: Json) -> str:
    objectives = result.get("objectives") or ["time"]
    return str(objectives[0])


def _values(result: Json, timeunit: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for one in result.get("measurements", []):
        name, value = one.get("name"), one.get("value")
        if name in _UNITS and value != "":  # which Kernel Tuner writes where nothing was measured
            is_huge = isinstance(value, int | float) and not abs(value) < _MOST
            if not isinstance(value, _TYPES.get(name, float | int)) or is_huge:
                raise ExchangeError(f"{name} cannot be {str(value)[:40]!r}")
            if one.get("unit", "") != _UNITS[name]:
                raise ExchangeError(f"{name} is in {one.get('unit')!r}, not in {_UNITS[name]!r}")
            values[name] = value
        elif name == _objective(result) and isinstance(value, int | float):
            if not 0 < value < _MOST:
                raise ExchangeError(f"{name}={str(value)[:40]} is not a time")
            values["median_us"] = us_of(value, one.get("unit") or timeunit)
    if "timestamp" in result:
        values["measured_at"] = moment_of(result["timestamp"], "timestamp")
    return values


def _check_schema(document: Any) -> None:
    if not isinstance(document, dict) or "results" not in document:
        raise ExchangeError("it is no T4 document: an object with `results` is wanted")
    error = next(iter(_validator().iter_errors(document)), None)
    if error is not None:
        where = "/".join(map(str, error.instance_path))
        raise ExchangeError(f"it is no T4 document: {where or 'the whole'}: {str(error.message)[:200]}")


@functools.cache
def _validator() -> Any:
    return jsonschema_rs.validator_for(json.loads(_SCHEMA.read_text(encoding="utf-8")))
