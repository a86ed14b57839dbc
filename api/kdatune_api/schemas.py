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
from pydantic import StringConstraints
from pydantic import model_validator

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
from kdatune_tuner.store.convert import is_text
from kdatune_tuner.store.writes import MAX_DEMAND_COUNT

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


def _launch_config_body(value: Any) -> Any:
    return from_json(LaunchConfig, value) if isinstance(value, dict) else value


def _field(name: str) -> BeforeValidator:
    return BeforeValidator(partial(_shape_field, name))


_AT_LEAST_ONE = Field(ge=1, le=MAX_DIMENSION)


def plain_int(value: Any) -> Any:
    """A query value that is digits and nothing else. Of itself pydantic reads 1_0 and 8.0 as numbers, too."""
    if isinstance(value, str) and not (value.isascii() and value.isdigit() and len(value) <= 12):
        raise ValueError(f"must be a whole number, not {value[:40]!r}")
    return value


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
    kernel: Literal["kda"] = Field(default="kda", description="kda: K1 and K2 together")
    N: Annotated[int, _AT_LEAST_ONE, _field("N")] = Field(description="sequences")
    H: Annotated[int, _AT_LEAST_ONE, _field("H")] = Field(description="query/key heads")
    T: Annotated[int, Field(ge=0, le=MAX_DIMENSION), _field("T")] = Field(
        description="tokens in total, over all sequences"
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

    @cached_property
    def shape(self) -> Shape:
        """The problem shape. Raises ShapeError, which validation has ruled out."""
        values = {name: getattr(self, name) for name in _SHAPE_HINTS}
        return Shape(**values | {"HV": self.H if self.HV is None else self.HV})

    @model_validator(mode="after")
    def _is_a_shape(self) -> Self:
        _ = self.shape  # a ShapeError is a ValueError: it becomes a validation error with its message
        return self


class Provenance(BaseModel):
    """Where a config comes from: the champion's card, shape, measurement and build."""

    kernel: Kernel
    gpu: Gpu
    shape: Shape
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
    shape: Shape
    shape_key: str


class Resolved(BaseModel):
    """A launch config for one card and shape, and why it is this one."""

    config: LaunchConfig
    match: MatchKind
    gpu_level: GpuLevel = Field(description="how far the tuned card is the same as the one asked for")
    reason: str
    expected_regret: float | None = Field(
        description="expected time over the best possible time (x, >= 1); null: not known"
    )
    generation: int = Field(description="the store's generation that the answer is of")
    measured_us: float | None = Field(description="measured for the shape in provenance")
    default_us: float | None = Field(description="the default config's time, measured for the shape in provenance")
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


class SnapshotDocument(BaseModel):
    """Every champion that may be served to one GPU model, schema 1."""

    snapshot_schema: Literal[1] = Field(alias="schema")
    gpu: Gpu
    generation: int
    champions: list[SnapshotChampion]


class Quarantined(BaseModel):
    """A served config that a launcher refused, or that failed when it was launched."""

    model_config = ConfigDict(extra="forbid")

    config: Annotated[LaunchConfig, BeforeValidator(_launch_config_body)]
    reason: Annotated[str, StringConstraints(max_length=2000)]


class DemandItem(BaseModel):
    """Launches of a key that has no champion of its own, or whose champion was refused."""

    model_config = ConfigDict(extra="forbid")

    gpu: GpuName
    kernel: Kernel = "kda"
    shape: Annotated[Shape, BeforeValidator(shape_body)]
    count: int = Field(
        default=1,
        ge=1,
        le=(1 << 53) - 1,
        strict=True,
        description=f"launches; of one report at most {MAX_DEMAND_COUNT} are counted for a key",
    )
    quarantined: Quarantined | None = Field(default=None, description="set when a served config could not be used")


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
