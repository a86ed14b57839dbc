"""The rows of the listings, as they go over the wire: the store's records with their configs as JSON objects."""

import dataclasses
import functools
import json
from datetime import datetime
from typing import Any
from typing import Literal

from pydantic import BaseModel
from pydantic import Field
from pydantic import JsonValue

from kdatune_api.schemas import KernelName
from kdatune_api.schemas import ShapeJson
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json
from kdatune_kernels.values import OtherShape
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.records import Decision
from kdatune_tuner.store.records import RunState
from kdatune_tuner.store.records import rfc3339

ConfigJson = dict[str, JsonValue]
_CONFIG = (
    "K1Config, K2Config or LaunchConfig as JSON, by kernel; every field present, null included; of others their own"
)
_TIME = "RFC 3339, UTC"


class KeyRow(BaseModel):
    """What a row is about."""

    id: int
    kernel: KernelName
    gpu_name: str
    shape: ShapeJson
    shape_key: str


class MeasurementOut(KeyRow):
    """One config measured once."""

    run_id: int | None
    gpu_id: int
    problem_id: int
    build_id: int
    config: ConfigJson = Field(description=_CONFIG)
    config_hash: str
    outcome: Outcome
    detail: str | None
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    sample_count: int | None
    o_error_ratio: float | None = Field(description="error of o over its tolerance (1 is the limit)")
    state_error_ratio: float | None = Field(description="error of ht over its tolerance (1 is the limit)")
    requested_num_warps: int | None
    effective_num_warps: int | None
    registers: int | None = Field(description="registers of a thread")
    spills: int | None = Field(description="spills of a thread, as the compiler counts them")
    smem_bytes: int | None
    occupancy_pct: float | None
    sm_clock_mhz: float | None
    throttle_reasons: str | None
    regime: str | None = Field(description="L2-cold or L2-hot, and how it was timed")
    estimated: bool = Field(description="true when a pair's time is the sum of its parts")
    measured_at: str = Field(description=_TIME)


class PromotionOut(KeyRow):
    """One decision about what is served."""

    gpu_id: int
    problem_id: int
    measurement_id: int | None
    baseline_measurement_id: int | None
    config: ConfigJson | None = Field(description=f"{_CONFIG}; null: back to the default config")
    config_hash: str | None
    measured_us: float | None
    default_us: float | None
    gain: float | None = Field(description="speed-up over the baseline (x, > 1 is faster)")
    gain_low: float | None = Field(description="low end of the gain's interval (x)")
    gain_high: float | None = Field(description="high end of the gain's interval (x)")
    decision: Decision
    reason: str
    generation: int
    decided_at: str = Field(description=_TIME)


class RunOut(KeyRow):
    """One search."""

    trigger: str
    gpu_id: int
    problem_id: int
    backend: str
    sampler: str
    budget_trials: int | None
    budget_seconds: float | None
    seed: int | None
    optuna_version: str | None
    state: RunState
    outcome_counts: dict[str, int] | None = Field(description="measurements by outcome; null while it runs")
    gpu_seconds: float | None
    started_at: str = Field(description=_TIME)
    finished_at: str | None = Field(description=_TIME)


class ProfileOut(KeyRow):
    """Hardware counters of one stage of a measured config, or why there are none."""

    measurement_id: int
    config: ConfigJson = Field(description=_CONFIG)
    stage: Literal["k1", "k2"]
    counters: dict[str, JsonValue] | None = Field(
        description='{name: {"value": number, "unit": text}}; what was not measured is not there. Names that begin with '
        "replay_ are times under the profiler, never benchmark times"
    )
    issue_active_pct: float | None
    barrier_stall_per_issue: float | None = Field(description="warps stalled at a barrier per issued instruction")
    ncu_version: str | None
    driver: str | None = Field(description="NVIDIA driver the profile was taken under")
    report_file: str | None = Field(
        description="kept .ncu-rep report, at /v1/profiles/{id}/report; null: none was kept"
    )
    unavailable_reason: str | None = Field(description="why there are no counters, and what to do about it")
    profiled_at: str = Field(description=_TIME)


class QuarantinedOut(KeyRow):
    """A served config that launchers could not use. Only launchers say so: it is looked at, nothing follows of itself."""

    config: ConfigJson = Field(description=_CONFIG)
    config_hash: str
    reason: str = Field(description="what the last launcher said")
    count: int = Field(description="times that it was reported")
    first_seen_at: str = Field(description=_TIME)
    last_seen_at: str = Field(description=_TIME)


class GpuOut(BaseModel):
    """A GPU model that is in the store."""

    id: int
    gpu: Gpu
    first_seen_at: str = Field(description=_TIME)


@functools.lru_cache(maxsize=1024)
def _shape_json(shape: Shape | OtherShape) -> Json:
    """Rows of a page are of few shapes. The dict is shared: it is only ever copied from and written out."""
    return {"shape": to_json(shape), "shape_key": shape.key()}


def row_json(record: Any) -> Json:
    """A record of the store as JSON data for one of the models above."""
    out: Json = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name == "config_json":
            out["config"] = None if value is None else json.loads(value)
        elif isinstance(value, Shape | OtherShape):
            out |= _shape_json(value)
        elif isinstance(value, Gpu):
            out[field.name] = to_json(value)
        else:
            out[field.name] = rfc3339(value) if isinstance(value, datetime) else value
    return out
