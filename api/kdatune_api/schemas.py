"""What goes over the wire, as pydantic models. Every numeric key carries its unit; counts and ratios say so.

The values of kdatune_kernels.spec are used as they are: what is served is their JSON, field for field, None included.
"""

from functools import cached_property
from functools import partial
from typing import Annotated
from typing import Any
from typing import Generic
from typing import Literal
from typing import Self
from typing import TypeVar
from typing import get_type_hints

from pydantic import AfterValidator
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

from kdatune_kernels.errors import ShapeError
from kdatune_kernels.match import MatchKind
from kdatune_kernels.spec import MAX_DIMENSION
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Dtype
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import GpuLevel
from kdatune_kernels.spec import Kernel
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import StateDtype
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_field
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.tunable import parse_shape_of
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import KERNEL_NAME
from kdatune_kernels.values import MAX_KEY_CHARS
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_kernels.values import is_other
from kdatune_tuner.store.convert import is_text
from kdatune_tuner.store.writes import MAX_DEMAND_COUNT

SHAPE_BODY_SCHEMA = {"anyOf": [{"$ref": "#/components/schemas/Shape"}, {"type": "object"}]}
_MISSING = object()
MAX_GPU_NAME_CHARS = 200
MAX_ID = (1 << 31) - 1
MAX_DEMAND_ITEMS = 1000
_SHAPE_HINTS = get_type_hints(Shape)


def _printable(value: str) -> str:
    if not value.isprintable() or not is_text(value):
        raise ValueError("holds characters that cannot be printed")
    return value


def _shape_field(name: str, value: Any) -> Any:
    """A query value as a field of a Shape: read as in a shape key, so that 1_0, 8.0 or yes mean nothing here either."""
    return parse_field(name, value, _SHAPE_HINTS[name]) if isinstance(value, str) else value


def _shape_key(value: str) -> str:
    """A shape key in its one canonical spelling."""
    return parse_shape(value).key()


def shape_body(value: Any) -> Any:
    """A Shape from its JSON, with the defaults of a shape key: only N, H and T must be there."""
    if not isinstance(value, dict):
        return value
    missing = [name for name in ("N", "H", "T") if name not in value]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    return from_json(Shape, {"HV": value["H"], **value}, strict=False)


def shape_of_kernel(kernel: str, value: Any) -> Any:
    """The shape of a body: of KDA's kernels as `shape_body`, of another by that kernel where it is installed."""
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004 - pydantic reads a ValueError
    if not is_other(kernel):
        return shape_body(value)
    installed = registry().get(kernel)
    return OtherShape(value) if installed is None else installed.shape(value)


def shape_key_of_kernel(kernel: str, text: str) -> Shape | OtherShape:
    """A shape key of any kernel. Raises ShapeError, which is a ValueError."""
    return parse_shape_of(kernel, text) if is_other(kernel) else parse_shape(text)


def _served(value: str) -> str:
    if value in ("k1", "k2"):
        raise ValueError(f"{value} is a stage of kda, which is launched and served as a whole")
    return value


def _given(value: Any) -> Any:
    if value is _MISSING:
        raise ValueError("is missing; a shape is N, H and T, or shape=, which every kernel has")
    return value


def _field(name: str) -> BeforeValidator:
    return BeforeValidator(lambda value: _shape_field(name, _given(value)))


_AT_LEAST_ONE = Field(ge=1, le=MAX_DIMENSION)


_MAX_DIGITS = 12


def plain_int(value: Any) -> Any:
    """A query value that is digits and nothing else. Of itself pydantic reads 1_0 and 8.0 as numbers, too."""
    if isinstance(value, str) and not (value.isascii() and value.isdigit()):
        raise ValueError(f"must be a whole number, not {value[:40]!r}")
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise ValueError(f"is out of range: a number of {len(value)} digits")
    return value


KernelName = Annotated[str, StringConstraints(pattern=f"^{KERNEL_NAME}$")]
ShapeText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_KEY_CHARS)]
ShapeJson = Annotated[
    dict[str, JsonValue],
    WithJsonSchema({"anyOf": [{"$ref": "#/components/schemas/Shape"}, {"type": "object"}]}),
    Field(description="of kda a Shape; of another kernel its own fields"),
]
GpuName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GPU_NAME_CHARS), AfterValidator(_printable)]
ShapeKey = Annotated[str, StringConstraints(min_length=1, max_length=400), AfterValidator(_shape_key)]
SmCount = Annotated[int, Field(ge=1, le=4096), BeforeValidator(plain_int)]
ComputeCapability = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]$")]


class Query(BaseModel):
    """A query string in which nothing is silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GpuFacts(Query):
    """What says which card is meant, beside its name."""

    sm_count: SmCount | None = Field(
        default=None, description="streaming multiprocessors; for a card that is not known"
    )
    compute_capability: ComputeCapability | None = Field(
        default=None, description='e.g. "9.0"; for a card that is not known'
    )


class ResolveQuery(GpuFacts):
    """One request for a launch config."""

    gpu: GpuName = Field(description="GPU model, as the driver names it")
    kernel: Annotated[KernelName, AfterValidator(_served)] = Field(
        default="kda", description="kda (K1 and K2 together), or a kernel of others"
    )
    asked_shape: Annotated[ShapeText | None, BeforeValidator(_given)] = Field(
        default=None,
        alias="shape",
        description="the shape key, e.g. rows=4096,columns=8192; of kda the parameters below may be given instead",
    )
    N: Annotated[Annotated[int, _AT_LEAST_ONE] | None, _field("N")] = Field(default=None, description="sequences")
    H: Annotated[Annotated[int, _AT_LEAST_ONE] | None, _field("H")] = Field(default=None, description="query/key heads")
    T: Annotated[Annotated[int, Field(ge=0, le=MAX_DIMENSION)] | None, _field("T")] = Field(
        default=None, description="tokens in total, over all sequences"
    )
    HV: Annotated[Annotated[int, _AT_LEAST_ONE] | None, _field("HV")] = Field(
        default=None, description="value heads; as many as H if left out"
    )
    K: Annotated[int, _AT_LEAST_ONE, _field("K")] = Field(default=128, description="key head size")
    V: Annotated[int, _AT_LEAST_ONE, _field("V")] = Field(default=128, description="value head size")
    dtype: Dtype = "bf16"
    varlen: Annotated[bool, _field("varlen")] = Field(default=False, description="sequences of different lengths")
    longest_tokens: Annotated[Annotated[int, Field(ge=0)] | None, _field("longest_tokens")] = Field(
        default=None, description="tokens of the longest sequence; the mean is assumed if left out"
    )
    initial_state: Annotated[bool, _field("initial_state")] = Field(default=True, description="h0 is read")
    final_state: Annotated[bool, _field("final_state")] = Field(default=True, description="ht is written")
    state_v_first: Annotated[bool, _field("state_v_first")] = Field(default=False, description="state is [V, K]")
    state_dtype: StateDtype = "fp32"

    @model_validator(mode="before")
    @classmethod
    def _needs(cls, values: Any) -> Any:
        """What must be there hangs on the kernel: it is marked as missing where it is, so that the error names it."""
        if not isinstance(values, dict) or "shape" in values:
            return values
        needed = ("shape",) if is_other(str(values.get("kernel", "kda"))) else ("N", "H", "T")
        return {**dict.fromkeys(needed, _MISSING), **values}

    @field_validator("asked_shape")
    @classmethod
    def _can_be_read(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None and "kernel" in info.data:
            shape_key_of_kernel(info.data["kernel"], text)
        return text

    @cached_property
    def shape(self) -> Shape | OtherShape:
        """The problem shape. Raises ShapeError, which validation has ruled out."""
        if self.asked_shape is not None:
            both = sorted(self.model_fields_set & set(_SHAPE_HINTS))
            if both:
                raise ShapeError(f"shape is given, and {', '.join(both)} beside it: give one or the other")
            return shape_key_of_kernel(self.kernel, self.asked_shape)
        values = {name: getattr(self, name) for name in _SHAPE_HINTS}
        return Shape(**values | {"HV": self.H if self.HV is None else self.HV})

    @model_validator(mode="after")
    def _is_a_shape(self) -> Self:
        _ = self.shape  # a ShapeError is a ValueError: it becomes a validation error with its message
        return self


class Provenance(BaseModel):
    """Where a config comes from: the champion's card, shape, measurement and build."""

    kernel: KernelName
    gpu: Gpu
    shape: ShapeJson
    shape_key: str
    generation: int = Field(description="number of the promotion")
    measured_at: str | None = Field(description="RFC 3339, UTC")
    build: Build | None


class Requested(BaseModel):
    """What the answer is for, as it was understood."""

    gpu: Gpu
    gpu_source: Literal["tuned", "known", "given"] = Field(
        description="tuned: in the store; known: in the list of known cards; given: from the query"
    )
    shape: ShapeJson
    shape_key: str


_ESTIMATED = "true when measured_us is the sum of its parts, not measured end to end"


class Resolved(BaseModel):
    """A launch config for one card and shape, and why it is this one."""

    config: LaunchConfig | dict[str, JsonValue] = Field(
        description="of kda a LaunchConfig; of another kernel its own fields"
    )
    match: MatchKind
    gpu_level: GpuLevel = Field(description="how far the tuned card is the same as the one asked for")
    reason: str
    expected_regret: float | None = Field(
        description="expected time over that of a config tuned for the shape (x, >= 1): 1 for an exact answer, else what "
        "nearest answers were measured to cost near by; null: not known, as of a default"
    )
    generation: int = Field(description="the store's generation that the answer is of")
    measured_us: float | None = Field(description="the config's time on the shape in provenance; see estimated")
    estimated: bool = Field(description=_ESTIMATED)
    default_us: float | None = Field(
        description="the default config's time on the shape in provenance, as the decision had it; of a pair that was not "
        "measured end to end the sum of its parts"
    )
    provenance: Provenance | None = Field(description="null when the default config is answered")
    stale: bool
    stale_reason: str | None
    requested: Requested


class SnapshotChampion(BaseModel):
    """One champion of a snapshot."""

    kernel: Kernel
    gpu: Gpu
    shape: Shape
    config: LaunchConfig
    generation: int
    measured_us: float | None
    default_us: float | None
    build: Build | None
    measured_at: str | None
    stale_reason: str | None
    nearest_regret: float | None = Field(
        description="what the nearest answer would have cost for this shape (time over this config's, x); null: not known"
    )
    estimated: bool = Field(description=_ESTIMATED)


class OtherSnapshotChampion(BaseModel):
    """One champion of another kernel. What its config means, only that kernel knows."""

    kernel: KernelName
    gpu: Gpu
    shape: dict[str, JsonValue]
    config: dict[str, JsonValue]
    generation: int
    measured_us: float | None
    default_us: float | None
    build: Build | None
    measured_at: str | None
    stale_reason: str | None


class SnapshotDocument(BaseModel):
    """Every champion that may be served to one GPU model, schema 1."""

    snapshot_schema: Literal[1] = Field(alias="schema")
    gpu: Gpu
    generation: int
    others: list[OtherSnapshotChampion] = Field(description="champions of other kernels than kda")
    champions: list[SnapshotChampion]


class Quarantined(BaseModel):
    """A served config that a launcher refused, or that failed when it was launched."""

    model_config = ConfigDict(extra="forbid")

    config: Annotated[
        Any,
        BeforeValidator(partial(from_json, LaunchConfig)),
        # by name: a type that is read and sent is described twice, and what refers to it by name would find neither
        WithJsonSchema({"anyOf": [{"$ref": "#/components/schemas/LaunchConfig"}]}),
    ]
    reason: Annotated[str, StringConstraints(max_length=2000)]


class OtherQuarantined(BaseModel):
    """The same of a kernel of others."""

    model_config = ConfigDict(extra="forbid")

    config: Annotated[Any, BeforeValidator(OtherConfig), WithJsonSchema({"type": "object"})]
    reason: Annotated[str, StringConstraints(max_length=2000)]


class DemandItem(BaseModel):
    """Launches of a key that has no champion of its own, or whose champion was refused."""

    model_config = ConfigDict(extra="forbid")

    gpu: GpuName
    kernel: KernelName = "kda"
    shape: Annotated[Any, WithJsonSchema(SHAPE_BODY_SCHEMA)]
    count: int = Field(
        default=1,
        ge=1,
        le=(1 << 53) - 1,
        strict=True,
        description=f"launches; of one report at most {MAX_DEMAND_COUNT} are counted for a key",
    )
    quarantined: Quarantined | OtherQuarantined | None = Field(
        default=None, description="set when a served config could not be used"
    )

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, value: Any, info: ValidationInfo) -> Any:
        return shape_of_kernel(info.data.get("kernel", "kda"), value)

    @field_validator("quarantined", mode="before")
    @classmethod
    def _is_of_the_kernel(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        kind = OtherQuarantined if is_other(info.data.get("kernel", "kda")) else Quarantined
        return kind.model_validate(value)


class DemandReport(BaseModel):
    """A batch of misses."""

    model_config = ConfigDict(extra="forbid")

    items: list[DemandItem] = Field(min_length=1, max_length=MAX_DEMAND_ITEMS)


class DemandStored(BaseModel):
    """What became of a batch of misses."""

    item_count: int = Field(description="items read")
    key_count: int = Field(description="different keys among them that are stored")
    quarantined_count: int = Field(description="items that name a config which could not be used")
    left_out_count: int = Field(description="new keys that are not stored: the table is full")


class Health(BaseModel):
    status: Literal["ok"]


class Ready(BaseModel):
    status: Literal["ok"]
    schema_revision: str
    generation: int


class Version(BaseModel):
    version: str
    api: Literal["v1"]
    snapshot_schema: int
    schema_revision: str = Field(description="the database schema this service works with")


Row = TypeVar("Row")


class Page(BaseModel, Generic[Row]):
    """One page of a listing, and the cursor of the next one."""

    items: list[Row]
    next_cursor: str | None = Field(description="give it as ?cursor= for the next page; null: this was the last")
