"""Shapes and configs of kernels that this code does not know: named plain values, frozen. Stdlib only.

KDA's own are the dataclasses of spec.py. Those of another kernel are flat JSON objects; which names and values make sense
is for that kernel to say (tunable.py). What holds for all of them is checked here, so that a service can store, serve
and compare them without having the kernel installed.
"""

import json
import math
import re
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from kdatune_kernels.errors import ConfigError
from kdatune_kernels.errors import ShapeError

OUR_KERNELS = ("k1", "k2", "kda")
"""What no other kernel may be called."""

KERNEL_NAME = r"[a-z][a-z0-9-]{0,30}"
MAX_KEY_CHARS = 400
"""Of a shape key."""
MAX_CONFIG_CHARS = 4000
"""Of a config's canonical JSON."""

_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,30}")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")
_MAX_INT = (1 << 53) - 1  # what every JSON reader reads exactly
_MAX_SIZE = 1 << 40  # spec.MAX_DIMENSION, which imports this module

Scalar = None | bool | int | float | str
ShapeValue = bool | int | str


def is_other(kernel: str) -> bool:
    """Whether the name may be that of a kernel which this code does not know."""
    return kernel not in OUR_KERNELS and re.fullmatch(KERNEL_NAME, kernel) is not None


class _Values(Mapping[str, Any]):
    """Named values in the order of their names; equal and hashed by them, a bool never equal to a number."""

    __slots__ = ("_hash", "_values", "text")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: values[name] for name in sorted(values)}
        self.text = json.dumps(self._values, separators=(",", ":"), ensure_ascii=True)
        """The canonical JSON."""
        self._hash = hash(self.text)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.text == other.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._values,)

    def json(self) -> dict[str, Any]:
        """As a plain JSON object, a new one each time."""
        return dict(self._values)


class OtherShape(_Values):
    """A problem shape of another kernel: names to whole numbers 0..2^40, true, false, or words such as bf16.

    Raises:
        ShapeError: not an object, no fields, or a name or value of another kind.
    """

    __slots__ = ("_key",)

    def __init__(self, values: Any) -> None:
        if not isinstance(values, Mapping) or not values:
            raise ShapeError("a shape is an object of at least one named value, e.g. rows=4096,columns=8192")
        for name, value in values.items():
            if not isinstance(name, str) or not _FIELD.fullmatch(name):
                raise ShapeError(f"shape field {_brief(name)} is not a name: letters, digits and _, 31 at most")
            if not _is_shape_value(value):
                raise ShapeError(
                    f"{name} must be a whole number in 0..2^40, true, false or a word such as bf16, not {_brief(value)}"
                )
        super().__init__(values)
        self._key = ",".join(f"{name}={_spelled(value)}" for name, value in self.items())
        if len(self._key) > MAX_KEY_CHARS:
            raise ShapeError(f"the shape key is longer than {MAX_KEY_CHARS} characters: {self._key[:80]}...")

    def key(self) -> str:
        """The shape key: every field, by name. `parse_other_shape` reads it back, whatever kernel it is of."""
        return self._key


class OtherConfig(_Values):
    """A launch config of another kernel: names to null, true, false, finite numbers or texts of 200 characters at most.

    Raises:
        ConfigError: not an object, or a name or value of another kind.
    """

    __slots__ = ()

    def __init__(self, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"a config is a JSON object, not {type(values).__name__}")
        for name, value in values.items():
            if not isinstance(name, str) or not _FIELD.fullmatch(name):
                raise ConfigError(f"config field {_brief(name)} is not a name: letters, digits and _, 31 at most")
            if not _is_scalar(value):
                raise ConfigError(
                    f"{name} must be null, true, false, a finite number or a text of 200 characters at most, "
                    f"not {_brief(value)}"
                )
        super().__init__(values)
        if len(self.text) > MAX_CONFIG_CHARS:
            raise ConfigError(f"the config is longer than {MAX_CONFIG_CHARS} characters: {self.text[:80]}...")


def parse_other_shape(text: str) -> OtherShape:
    """Read a shape key of any other kernel, such as "columns=8192,dtype=bf16,rows=4096".

    Digits are a whole number, true and false are themselves, all else is a word: the fields of no kernel are needed.

    Raises:
        ShapeError: a part is not key=value, a key is repeated, or a value is none of these.
    """
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, sep, raw = (piece.strip() for piece in part.partition("="))
        if not sep or not name or not raw:
            raise ShapeError(f"shape part {_brief(part)} is not key=value; write e.g. rows=4096,columns=8192")
        if name in values:
            raise ShapeError(f"shape key {_brief(name)} is given twice")
        values[name] = {"true": True, "false": False}.get(raw, int(raw) if _NUMBER.fullmatch(raw) else raw)
    return OtherShape(values)


def _is_shape_value(value: Any) -> bool:
    if type(value) is int:
        return 0 <= value <= _MAX_SIZE
    if type(value) is str:
        return _WORD.fullmatch(value) is not None and value not in ("true", "false")
    return type(value) is bool


def _is_scalar(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _MAX_INT
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is str:
        return len(value) <= 200 and "\x00" not in value and value.isascii() and value.isprintable()
    return value is None or type(value) is bool


def _spelled(value: ShapeValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
