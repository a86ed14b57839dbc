"""Reads a report of Nsight Compute with NVIDIA's own reader (`ncu-report`). What a report lacks is absent, never 0."""

import math
import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kdatune_tuner.ncu.metrics import METRICS
from kdatune_tuner.ncu.metrics import Counters
from kdatune_tuner.ncu.metrics import Metric
from kdatune_tuner.ncu.unavailable import Unavailable
from kdatune_tuner.ncu.unavailable import unavailable

RANGE_PREFIX = "kdatune/"  # kdatune_kernels.profile_target.RANGE_PREFIX; importing that module is not needed to read


@dataclass(frozen=True)
class StageProfile:
    """Counters of one stage: the median over its profiled launches. absent: fields the report does not hold.

    kernels: what the stage launches, in order; the counters of several are combined as the table says.
    """

    name: str
    kernels: tuple[str, ...]
    launches: int
    counters: Counters
    absent: tuple[str, ...]


def read_report(content: bytes, metrics: Sequence[Metric] = METRICS) -> dict[str, StageProfile] | Unavailable:
    """The stages of a report, by Stage.name. Launches outside of our ranges are passed over."""
    try:
        reader = _reader()
    except ImportError as error:
        return unavailable("no_reader", f"ncu-report cannot be imported: {error}")
    launches: dict[str, list[tuple[str, Counters]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kdatune-ncu-") as folder:
        path = Path(folder, "read.ncu-rep")
        path.write_bytes(content)
        context = reader.load_report(str(path))
        for i in range(context.num_ranges()):
            span = context.range_by_idx(i)
            for j in range(span.num_actions() if span is not None else 0):
                action = span.action_by_idx(j)
                name = _range_name(action)
                if name is not None:
                    launches[name].append((action.name(), _counters(action, metrics)))
    if not launches:
        return unavailable("bad_report", f"a report of {len(content)} bytes holds no launch of kdatune")
    return {name: _stage(name, found, metrics) for name, found in launches.items()}


def _reader() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # SWIG's types lack __module__
        import ncu_report
    return ncu_report  # type: ignore[no-any-return]


def _range_name(action: Any) -> str | None:
    """The label of the NVTX range a launch was made in, without the prefix."""
    state = action.nvtx_state()
    if state is None:
        return None
    for domain in state.domains():
        for name in state.domain_by_id(domain).push_pop_ranges():
            if name.startswith(RANGE_PREFIX):
                return str(name.removeprefix(RANGE_PREFIX))
    return None


def _counters(action: Any, metrics: Sequence[Metric]) -> Counters:
    found: Counters = {}
    for metric in metrics:
        value = _value(action.metric_by_name(metric.counter), metric)
        if value is not None:
            found[metric.field] = value
    return found


def _value(read: Any, metric: Metric) -> float | None:
    """A metric in our unit; None where it is missing, not a number, or in a unit that the table does not know."""
    if read is None:
        return None
    value, scale = read.value(), dict(metric.scales).get(read.unit())
    if scale is None or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value * scale


def _stage(name: str, launches: Sequence[tuple[str, Counters]], metrics: Sequence[Metric]) -> StageProfile:
    kernels = tuple(dict.fromkeys(kernel for kernel, _ in launches))
    parts = [_median([found for kernel, found in launches if kernel == one]) for one in kernels]
    counters = parts[0] if len(parts) == 1 else _combined(parts, metrics)
    absent = tuple(metric.field for metric in metrics if metric.field not in counters)
    return StageProfile(name, kernels, len(launches) // len(kernels), counters, absent)


def _median(launches: Sequence[Counters]) -> Counters:
    """The median of each counter over the launches that have it."""
    fields = dict.fromkeys(field for found in launches for field in found)
    return {field: statistics.median(found[field] for found in launches if field in found) for field in fields}


def _combined(parts: Sequence[Counters], metrics: Sequence[Metric]) -> Counters:
    """The counters of kernels that run one after another. What one of them lacks, the whole lacks."""
    weights: dict[str, list[float] | None] = {
        "time": _products(parts, "replay_cycles"),
        "active": _products(parts, "replay_cycles", "sm_active_pct"),
        "issued": _products(parts, "issued_inst"),
    }
    times = weights["time"]
    counters: Counters = {}
    for metric in metrics:
        values = [part[metric.field] for part in parts if metric.field in part]
        if len(values) < len(parts):
            continue
        if metric.combine == "sum":
            counters[metric.field] = sum(values)
        elif metric.combine == "longest":
            if times is not None:
                counters[metric.field] = values[times.index(max(times))]
        else:
            weight = weights[metric.combine]
            if weight is not None and sum(weight) > 0:
                counters[metric.field] = sum(v * w for v, w in zip(values, weight, strict=True)) / sum(weight)
    return counters


def _products(parts: Sequence[Counters], *fields: str) -> list[float] | None:
    if any(field not in part for part in parts for field in fields):
        return None
    return [math.prod(part[field] for field in fields) for part in parts]
