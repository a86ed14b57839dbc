"""What a remote tuner posts: results, each checked as if it were made up, since for all the service knows it is."""

import math
from collections.abc import Callable
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from typing import Annotated
from typing import Any
from typing import Self

from pydantic import AwareDatetime
from pydantic import BaseModel
from pydantic import BeforeValidator
from pydantic import ConfigDict
from pydantic import Field
from pydantic import JsonValue
from pydantic import StringConstraints
from pydantic import ValidationInfo
from pydantic import WithJsonSchema
from pydantic import field_validator
from pydantic import model_validator

from kdatune_api.problems import FieldError
from kdatune_api.schemas import SHAPE_BODY_SCHEMA
from kdatune_api.schemas import GpuName
from kdatune_api.schemas import KernelName
from kdatune_api.schemas import shape_of_kernel
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import is_other
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.convert import CONFIG_TYPES
from kdatune_tuner.store.convert import is_text

MAX_RESULTS = 500
MAX_DETAIL_CHARS = 2000
MAX_AGE_DAYS = 366
CLOCK_SKEW = timedelta(minutes=5)
_MAX_BUILD_CHARS = 100
_MAX_TIME_US = 1e9


def _readable(text: str) -> str:
    if not is_text(text):
        raise ValueError("holds characters that no database keeps")
    return text


def _of(cls: type[Any]) -> Callable[[Any], Any]:
    return lambda value: from_json(cls, value, strict=False) if isinstance(value, dict) else value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


Text = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_BUILD_CHARS)]
TimeUs = Annotated[float, BeforeValidator(_number), Field(gt=0, le=_MAX_TIME_US)]
Ratio = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e6)]
Count = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Words = Annotated[str, StringConstraints(max_length=200)]
PostedConfig = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                *({"$ref": f"#/components/schemas/{cls.__name__}"} for cls in (LaunchConfig, K1Config, K2Config)),
                {"type": "object"},
            ]
        }
    ),
    Field(
        description="LaunchConfig, K1Config or K2Config, by kernel; every field present, null included; of others their own"
    ),
]


class PostedResult(BaseModel):
    """One config measured once."""

    model_config = ConfigDict(extra="forbid")

    kernel: KernelName = Field(description="k1, k2, kda, or another kernel that is installed where the service runs")
    shape: Annotated[Any, WithJsonSchema(SHAPE_BODY_SCHEMA)]
    config: PostedConfig
    outcome: Outcome
    detail: Annotated[str, StringConstraints(max_length=MAX_DETAIL_CHARS)] | None = None
    median_us: TimeUs | None = Field(default=None, description="set exactly when the outcome is ok")
    p20_us: TimeUs | None = None
    p80_us: TimeUs | None = None
    sample_count: Count | None = None
    o_error_ratio: Ratio | None = Field(default=None, description="error of o over its tolerance (1 is the limit)")
    state_error_ratio: Ratio | None = Field(default=None, description="as o_error_ratio, of the final state")
    requested_num_warps: Count | None = None
    effective_num_warps: Count | None = None
    registers: Count | None = None
    spills: Count | None = None
    smem_bytes: Count | None = None
    occupancy_pct: Annotated[float, BeforeValidator(_number), Field(ge=0, le=100)] | None = None
    sm_clock_mhz: Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e5)] | None = None
    throttle_reasons: Words | None = None
    regime: Words | None = None
    estimated: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="true when a pair's time is the sum of its parts"
    )
    measured_at: AwareDatetime = Field(description="RFC 3339; part of what makes a result the same as another")

    @field_validator("kernel")
    @classmethod
    def _is_known(cls, kernel: str) -> str:
        if is_other(kernel) and registry().get(kernel) is None:
            raise ValueError(f"{kernel} is not installed here, so what is posted about it cannot be checked")
        return kernel

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, value: Any, info: ValidationInfo) -> Any:
        return shape_of_kernel(info.data.get("kernel", "kda"), value)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        other = is_other(self.kernel)
        self.config = OtherConfig(self.config) if other else from_json(CONFIG_TYPES[self.kernel], self.config)
        times = (self.p20_us, self.median_us, self.p80_us)
        if self.outcome is Outcome.OK:
            if self.median_us is None:
                raise ValueError("outcome ok needs median_us")
            known = [time for time in times if time is not None]
            if known != sorted(known):
                raise ValueError("p20_us, median_us and p80_us must not decrease")
            if max(self.o_error_ratio or 0.0, self.state_error_ratio or 0.0) > 1.0:
                raise ValueError("outcome ok with an error over its tolerance; that is outcome incorrect")
        elif any(time is not None for time in times):
            raise ValueError(f"outcome {self.outcome} has no times; leave median_us, p20_us and p80_us out")
        age = datetime.now(UTC) - self.measured_at
        if not -CLOCK_SKEW <= age <= timedelta(days=MAX_AGE_DAYS):
            raise ValueError(f"measured_at must be within the last {MAX_AGE_DAYS} days and not in the future")
        for text in (self.detail, self.throttle_reasons, self.regime):
            if text is not None:
                _readable(text)
        return self


class PostedResults(BaseModel):
    """Results of one card and one build."""

    model_config = ConfigDict(extra="forbid")

    gpu: Annotated[Gpu, BeforeValidator(_of(Gpu))]
    build: Annotated[Build, BeforeValidator(_of(Build))]
    results: list[PostedResult] = Field(min_length=1, max_length=MAX_RESULTS)


class ResultsStored(BaseModel):
    """What became of posted results."""

    stored_count: int = Field(description="results that are new")
    known_count: int = Field(description="results that were posted before; nothing is added for them")
    measurement_ids: list[int] = Field(description="of every result, in the order of the request")


class RollbackRequest(BaseModel):
    """Why what is served is taken back."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, StringConstraints(min_length=1, max_length=500, strip_whitespace=True)]

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        _readable(self.reason)
        return self


class RolledBack(BaseModel):
    """What is served now."""

    generation: int
    config: LaunchConfig | dict[str, JsonValue] | None = Field(description="null: the default config")


def gpu_errors(gpu: Gpu, stored: Gpu | None) -> list[FieldError]:
    """What of a posted card cannot be true: its limits follow from its compute capability, and a name is one card."""
    try:
        _check_name(gpu.name)
    except ValueError as error:
        return [FieldError(pointer="/gpu/name", detail=str(error))]
    driver_says = gpu_of(gpu.name, gpu.compute_capability, gpu.sm_count, gpu.memory_bytes, gpu.l2_bytes)
    errors = [
        FieldError(
            pointer=f"/gpu/{name}",
            detail=f"is {getattr(gpu, name)}; a card of compute capability {gpu.compute_capability} has "
            f"{getattr(driver_says, name)}",
        )
        for name in ("smem_per_block_bytes", "registers_per_sm", "warps_per_sm", "mig_profile")
        if getattr(gpu, name) != getattr(driver_says, name)
    ]
    known = KNOWN_GPUS.get(gpu.name) or stored
    errors += [
        FieldError(pointer=f"/gpu/{name}", detail=f"is {getattr(gpu, name)}; {gpu.name} has {getattr(known, name)}")
        for name in ("compute_capability", "sm_count")
        if known is not None and getattr(gpu, name) != getattr(known, name)
    ]
    return errors


def build_errors(build: Build) -> list[FieldError]:
    """What of a posted build no build has."""
    return [
        FieldError(pointer=f"/build/{name}", detail=f"must be 1 to {_MAX_BUILD_CHARS} printable characters")
        for name in Build.__dataclass_fields__
        if not (0 < len(value := getattr(build, name)) <= _MAX_BUILD_CHARS and value.isprintable() and is_text(value))
    ]


def _check_name(name: str) -> None:
    from pydantic import TypeAdapter
    from pydantic import ValidationError

    try:
        TypeAdapter(GpuName).validate_python(name)
    except ValidationError as error:
        raise ValueError(str(error.errors()[0]["msg"])) from error
