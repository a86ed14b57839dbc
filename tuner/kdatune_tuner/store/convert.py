"""Between the values of kdatune_kernels.spec and the columns of the store, without loss."""

import json
from typing import Any

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json
from kdatune_kernels.values import OtherShape
from kdatune_kernels.values import is_other
from kdatune_kernels.values import parse_other_shape
from kdatune_tuner.store.damaged import check_number
from kdatune_tuner.store.damaged import textless
from kdatune_tuner.store.models import BuildModel
from kdatune_tuner.store.models import GpuModel
from kdatune_tuner.store.models import ProblemModel

CONFIG_TYPES: dict[str, type[K1Config] | type[K2Config] | type[LaunchConfig]] = {
    "k1": K1Config,
    "k2": K2Config,
    "kda": LaunchConfig,
}
"""What the config JSON of a kernel is the JSON of."""

MAX_ID = (1 << 31) - 1

# Fields of Shape and the columns of `problem` that hold them.
_SHAPE_COLUMNS = {
    "N": "n_sequences",
    "H": "n_heads",
    "HV": "n_value_heads",
    "T": "n_tokens",
    "K": "key_dim",
    "V": "value_dim",
    "dtype": "dtype",
    "varlen": "varlen",
    "longest_tokens": "longest_tokens",
    "initial_state": "initial_state",
    "final_state": "final_state",
    "state_v_first": "state_v_first",
    "state_dtype": "state_dtype",
}
_BUILD_FIELDS = tuple(Build.__dataclass_fields__)


def gpu_columns(gpu: Gpu) -> dict[str, Any]:
    """The columns of `gpu`; mig_profile None is ''."""
    return to_json(gpu) | {"mig_profile": gpu.mig_profile or ""}


def gpu_of_row(row: GpuModel) -> Gpu:
    """The GPU model that a row of `gpu` holds. Raises StoreError for one that is damaged."""
    values = {name: getattr(row, name) for name in Gpu.__dataclass_fields__}
    for name in textless(Gpu):
        check_number(name, values[name])
    return Gpu(**values | {"mig_profile": row.mig_profile or None})


def shape_columns(shape: Shape | OtherShape) -> dict[str, Any]:
    """The columns of `problem` but kernel, with the bucket that the shape falls into."""
    if isinstance(shape, OtherShape):
        return {"shape_hash": digest(shape), "shape_key": shape.key(), "shape_json": shape.text}
    values = to_json(shape)
    bucket = shape.bucket()
    if set(values) != set(_SHAPE_COLUMNS):
        raise StoreError(f"no column for shape field(s) {sorted(set(values) ^ set(_SHAPE_COLUMNS))}")
    return {column: values[name] for name, column in _SHAPE_COLUMNS.items()} | {
        "shape_hash": digest(shape),
        "shape_key": shape.key(),
        "bucket_n_sequences": bucket.N,
        "bucket_n_tokens": bucket.T,
    }


def shape_of_row(row: ProblemModel) -> Shape | OtherShape:
    """The problem shape that a row of `problem` holds."""
    return OtherShape(json.loads(row.shape_json)) if row.shape_json is not None else kda_shape_of_row(row)


def kda_shape_of_row(row: ProblemModel) -> Shape:
    """The same of a row that is of k1, k2 or kda."""
    return Shape(**{name: getattr(row, column) for name, column in _SHAPE_COLUMNS.items()})


def read_shape_key(kernel: str, key: str) -> Shape | OtherShape:
    """The shape of a stored key. Raises ShapeError when it cannot be read."""
    return parse_other_shape(key) if is_other(kernel) else parse_shape(key)


def build_of_row(row: BuildModel) -> Build:
    """The build that a row of `build` holds."""
    return Build(**{name: getattr(row, name) for name in _BUILD_FIELDS})


def is_id(value: int) -> bool:
    """Whether a row can have the number as its id; one out of range is an error of the database, not a miss."""
    return 0 <= value <= MAX_ID


def is_text(value: str) -> bool:
    """Whether both databases keep the text: no NUL (PostgreSQL) and no lone surrogates (both)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\x00" not in value
