"""What is refused before it reaches the database, alike on SQLite and PostgreSQL."""

import json
import math
from collections.abc import Mapping
from typing import Any

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.values import KERNEL_NAME
from kdatune_kernels.values import OtherShape
from kdatune_kernels.values import is_other
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.convert import CONFIG_TYPES
from kdatune_tuner.store.convert import is_text
from kdatune_tuner.store.records import NewMeasurement
from kdatune_tuner.store.records import NewProfile

KERNELS = tuple(CONFIG_TYPES)
STAGES = ("k1", "k2")
COUNT_FIELDS = ("sample_count", "requested_num_warps", "effective_num_warps", "registers", "spills", "smem_bytes")


def check_measurement(new: NewMeasurement) -> None:
    """Raises StoreError for a measurement that makes no sense, naming its config."""
    check_kernel(new.kernel)
    check_config(new.config_json, new.config_hash)
    if new.outcome not in {outcome.value for outcome in Outcome}:
        raise StoreError(f"unknown outcome {new.outcome!r}; use one of {', '.join(Outcome)}")
    for name in ("median_us", "p20_us", "p80_us"):
        value = getattr(new, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise StoreError(f"{name}={value} of config {new.config_hash} is not a time")
    if new.outcome == Outcome.OK and new.median_us is None:
        raise StoreError(f"config {new.config_hash} is ok but has no median_us")
    for name in COUNT_FIELDS:
        value = getattr(new, name)
        if value is not None and not 0 <= value < 1 << 31:
            raise StoreError(f"{name}={value} of config {new.config_hash} is out of range")


def check_profile(new: NewProfile) -> None:
    """Raises StoreError for a profile that holds neither or both of counters and reason, or a malformed counter."""
    if new.stage not in STAGES:
        raise StoreError(f"unknown stage {new.stage!r}; use one of {', '.join(STAGES)}")
    if (new.counters is None) == (new.unavailable_reason is None):
        raise StoreError("a profile holds either counters or the reason why there are none")
    for name, counter in (new.counters or {}).items():
        value = counter.get("value")
        if set(counter) != {"value", "unit"} or not isinstance(value, int | float) or not math.isfinite(value):
            raise StoreError(f'counter {name} must be {{"value": number, "unit": text}}, not {counter!r}')


def check_kernel(kernel: str) -> None:
    if kernel not in KERNELS and not is_other(kernel):
        raise StoreError(
            f"unknown kernel {kernel!r}; use one of {', '.join(KERNELS)}, or the name of another ({KERNEL_NAME})"
        )


def check_shape(kernel: str, shape: Shape | OtherShape) -> None:
    """Raises StoreError for an unknown kernel, or a shape that is not of this kind of kernel."""
    check_kernel(kernel)
    if isinstance(shape, OtherShape) is not is_other(kernel):
        raise StoreError(f"{shape.key()} is no shape of kernel {kernel}")


def check_texts(what: str, columns: Mapping[str, Any]) -> None:
    for name, value in columns.items():
        if isinstance(value, str) and not is_text(value):
            raise StoreError(f"{what}: {name}={value!r} holds characters that no database keeps")


def check_config(config_json: str, config_hash: str) -> None:
    try:
        config = json.loads(config_json)
    except json.JSONDecodeError as error:
        raise StoreError(f"config {config_hash} is not JSON: {error}") from error
    if canonical(config) != config_json:
        raise StoreError(f"config {config_hash} is not in canonical form: {config_json[:200]}")
    if digest(config) != config_hash:
        raise StoreError(f"config hash {config_hash} is of another config; {digest(config)} is that of {config_json}")


def plain(value: Any) -> Any:
    """The value as both databases keep it alike: no NaN or infinity, no str subclass, no text that none can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return str(value) if is_text(value) else value.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
    return value
