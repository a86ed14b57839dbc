"""Shapes and configs of kernels that this code does not know: what they may hold, and that their text is one."""

import pickle

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from kdatune_kernels.errors import ConfigError
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import to_json
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_kernels.values import is_other
from kdatune_kernels.values import parse_other_shape

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True)
WORDS = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,8}", fullmatch=True).filter(lambda w: w not in ("true", "false"))
SHAPES = st.dictionaries(NAMES, st.integers(0, 1 << 40) | st.booleans() | WORDS, min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(SHAPES)
def test_a_shape_key_is_read_back_without_the_kernel(values: dict[str, int | bool | str]) -> None:
    shape = OtherShape(values)
    again = parse_other_shape(shape.key())
    assert again == shape
    assert again.json() == values
    assert {name: type(value) for name, value in again.items()} == {name: type(v) for name, v in values.items()}


def test_one_text_whatever_the_order() -> None:
    a, b = OtherShape({"rows": 4, "columns": 8}), OtherShape({"columns": 8, "rows": 4})
    assert a == b
    assert hash(a) == hash(b)
    assert a.key() == "columns=8,rows=4"
    assert canonical(a) == a.text == '{"columns":8,"rows":4}'
    assert digest(a) == digest({"rows": 4, "columns": 8})
    assert to_json(a) == {"columns": 8, "rows": 4}
    assert pickle.loads(pickle.dumps(a)) == a  # noqa: S301 - our own


def test_a_flag_is_no_number_and_a_shape_no_config() -> None:
    assert OtherShape({"a": True}) != OtherShape({"a": 1})
    assert OtherConfig({"a": 1}) != OtherConfig({"a": 1.0})
    assert OtherShape({"a": 1}) != OtherConfig({"a": 1})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "at least one named value"),
        ([1], "at least one named value"),
        ({"a": -1}, "a must be a whole number in 0..2\\^40"),
        ({"a": 1 << 41}, "a must be a whole number"),
        ({"a": 1.0}, "a must be a whole number"),
        ({"a": None}, "a must be a whole number"),
        ({"a": "7"}, "a must be a whole number"),
        ({"a": "true"}, "a must be a whole number"),
        ({"a": "x,y=1"}, "a must be a whole number"),
        ({"a b": 1}, "is not a name"),
        ({"a" * 32: 1}, "is not a name"),
        ({f"{c}{'a' * 30}": "b" * 64 for c in "abcde"}, "longer than 400"),
    ],
)
def test_a_shape_that_is_none(values: object, told: str) -> None:
    with pytest.raises(ShapeError, match=told):
        OtherShape(values)


@pytest.mark.parametrize("text", ["", "a", "a=", "=1", "a=1,a=2", "a=1,,b=2", "a=-1", "a=1.5", "a=\x00", "a=1 b=2"])
def test_a_shape_key_that_is_none(text: str) -> None:
    with pytest.raises(ShapeError):
        parse_other_shape(text)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (None, "a JSON object, not NoneType"),
        ({"a": []}, "a must be null"),
        ({"a": {"b": 1}}, "a must be null"),
        ({"a": float("nan")}, "a must be null"),
        ({"a": float("inf")}, "a must be null"),
        ({"a": 1 << 53}, "a must be null"),
        ({"a": "\x00"}, "a must be null"),
        ({"a": "b" * 201}, "a must be null"),
        ({1: 1}, "is not a name"),
        ({f"a{i}": "b" * 200 for i in range(25)}, "longer than 4000"),
    ],
)
def test_a_config_that_is_none(values: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        OtherConfig(values)


def test_which_names_are_of_others() -> None:
    assert is_other("rmsnorm")
    assert is_other("a-1")
    for name in ("k1", "k2", "kda", "", "A", "1a", "a_b", "a" * 32, "a\n"):
        assert not is_other(name), name
