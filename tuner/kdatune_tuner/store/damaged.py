"""Rows that somebody or something broke: each is named in the log and passed over, so that it does not hide the others."""

import functools
import json
import logging
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from types import NoneType
from typing import Any
from typing import TypeVar
from typing import get_args
from typing import get_type_hints

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import StoreError

logger = logging.getLogger(__name__)

R = TypeVar("R")
Out = TypeVar("Out")
_LEAST_FETCHED = 20
_TEXTLESS = {bool, int, float, datetime, NoneType}
_NOTED: ContextVar[dict[str, None] | None] = ContextVar("kdatune_damaged", default=None)


class DamagedJson(dict[str, Any]):
    """Stands for a JSON column whose text is no JSON: an empty object, so that reading the other columns goes on."""


def read_json(text: str) -> Any:
    """What SQLite's JSON columns are read by; PostgreSQL lets no text into such a column that is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter: nested deeper than any of ours
        return DamagedJson()


def check_object(column: str, text: str | None) -> None:
    """Raises StoreError for a config or shape that is stored as text and is no JSON object."""
    if text is not None and not _is_object(text):
        raise StoreError(f"{column} is no JSON object: {text[:60]!r}")


def check_json(column: str, value: Any) -> None:
    """Raises StoreError for a JSON column that could not be read."""
    if isinstance(value, DamagedJson):
        raise StoreError(f"{column} is no JSON")


def check_number(column: str, value: object) -> None:
    """Raises StoreError for a text where a number belongs: SQLite keeps one in a column of any type."""
    if isinstance(value, str | bytes):
        raise StoreError(f"{column} is no number: {value[:60]!r}")


def checked(record: R) -> R:
    """The record (a dataclass or a named tuple). Raises StoreError where a field that is a number or a moment holds text."""
    record_type: Any = type(record)
    for name in textless(record_type):
        check_number(name, getattr(record, name))
    return record


@contextmanager
def noting() -> Iterator[dict[str, None]]:
    """Inside the block the rows that are passed over are noted: each once, in words, in the order in which they were met."""
    noted: dict[str, None] = {}
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def pass_over(table: str, row_id: int, error: Exception) -> None:
    """Say in the log, and to `noting`, that a row is damaged."""
    told = f"{table} {row_id} is damaged ({error})"
    logger.warning("%s; passed over", told)
    noted = _NOTED.get()
    if noted is not None:
        noted[told] = None


def whole(rows: Iterable[R], convert: Callable[[R], Out], id_of: Callable[[R], tuple[str, int]]) -> Iterator[Out]:
    """The rows that can be read, each as a record; of any other the log says which it is and why.

    Args:
        id_of: the table's name and the row's id.
    """
    for row in rows:
        try:
            record = convert(row)
        except (KdatuneError, ValueError, TypeError) as error:
            pass_over(*id_of(row), error)
            continue
        yield record


def whole_tuples(rows: Iterable[Sequence[Any]], make: Callable[[Sequence[Any]], R], table: str) -> list[R]:
    """Rows of an id and the fields of a named tuple, each as one; make is its `_make`. As `whole` does with damaged ones."""
    return list(whole(rows, lambda row: checked(make(row[1:])), lambda row: (table, row[0])))


def whole_page(
    fetch: Callable[[int | None, int], Sequence[R]],
    convert: Callable[[R], Out],
    id_of: Callable[[R], tuple[str, int]],
    after_id: int | None,
    limit: int,
) -> list[Out]:
    """As many records as a page may hold: rows that are passed over make room for those behind them.

    Args:
        fetch: gives so many rows after an id, in the order of the page.
    """
    found: list[Out] = []
    while len(found) < limit:
        wanted = max(limit - len(found), _LEAST_FETCHED)
        rows = fetch(after_id, wanted)
        found += whole(rows, convert, id_of)
        if len(rows) < wanted:
            break
        after_id = id_of(rows[-1])[1]
    return found[:limit]


@functools.cache
def textless(record_type: Any) -> tuple[str, ...]:
    """The fields that are a number or a moment."""
    hints = get_type_hints(record_type)
    return tuple(name for name, hint in hints.items() if {*(get_args(hint) or (hint,))} <= _TEXTLESS)


@functools.lru_cache(maxsize=8192)
def _is_object(text: str) -> bool:
    """Many rows share few configs: each text is looked at once."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
