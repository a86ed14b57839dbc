"""Tables of the pages: sorted and cut on the server, the same rows as HTML, CSV and JSON."""

import csv
import io
import json
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from datetime import datetime
from typing import Any
from typing import Generic
from typing import Literal
from typing import Protocol
from typing import TypeVar

from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.params import unknown_parameter
from kdatune_api.pages.text import NONE
from kdatune_api.pages.text import breakable
from kdatune_api.pages.text import moment
from kdatune_api.pages.text import us
from kdatune_tuner.store.records import rfc3339

R = TypeVar("R")
PAGE_ROWS = 50
MAX_EXPORT_ROWS = 100_000

Kind = Literal["text", "name", "prose", "long", "number", "code", "key"]
Value = str | float | int | bool | datetime | None


@dataclass(frozen=True)
class Column:
    """One column. key: its name in CSV and JSON, unit included; title and unit: its heading."""

    key: str
    title: str
    unit: str = ""
    kind: Kind = "text"
    sortable: bool = False
    hint: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell. value goes into CSV and JSON, text on the page.

    mark: "better", "worse", "same", "differs" or "": told by a sign and a word, never by colour alone.
    tone: shade of a heat-map cell. tag: a word set apart, such as "stale". bar_pct: a bar under the
    number. spark: a small line of numbers that the row's own page holds.
    """

    value: Value
    text: Any = None
    href: str = ""
    mark: str = ""
    note: Any = ""
    tone: str = ""
    tag: str = ""
    title: str = ""
    bar_pct: float | None = None
    spark: tuple[float, ...] = ()

    @property
    def shown(self) -> Any:
        if self.text is not None:
            return self.text
        if self.value is None:
            return NONE
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return rfc3339(self.value) if isinstance(self.value, datetime) else self.value


@dataclass(frozen=True)
class Command:
    """What to do about an empty table or page: a sentence, and the command to run."""

    text: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A table before it has rows. order: the column it is sorted by at first, a minus before it for descending."""

    name: str
    title: str
    columns: tuple[Column, ...]
    order: str = ""
    empty: Command = field(default_factory=lambda: Command("Nothing here."))
    page_rows: int = PAGE_ROWS
    row_headers: bool = True


@dataclass(frozen=True)
class Table:
    """A table as it is shown: one page of its rows."""

    spec: Spec
    rows: Sequence[Sequence[Cell]]
    total: int
    page: int = 1
    sorted_by: str = ""
    descending: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pages(self) -> int:
        return max(1, -(-self.total // self.spec.page_rows))

    @property
    def first(self) -> int:
        return (self.page - 1) * self.spec.page_rows + 1

    @property
    def last(self) -> int:
        return min(self.first + len(self.rows) - 1, self.total)

    def next_order(self, column: Column) -> str:
        """The `sort` that a click on the column asks for: the other way round where it is sorted by it already."""
        turned = self.sorted_by == column.key and not self.descending
        return f"{self.name}:{'-' if turned else ''}{column.key}"


class Source(Protocol):
    """Where the rows of a table come from."""

    def count(self) -> int: ...

    def cells(self, column: str, descending: bool, offset: int, limit: int) -> list[list[Cell]]: ...


@dataclass(frozen=True)
class ListSource(Generic[R]):
    """Rows that are in memory. keys: by what a column is sorted; make: the cells of some records, all at once."""

    records: Sequence[R]
    make: Callable[[Sequence[R]], list[list[Cell]]]
    keys: Mapping[str, Callable[[R], Any]] = field(default_factory=dict)

    def count(self) -> int:
        return len(self.records)

    def cells(self, column: str, descending: bool, offset: int, limit: int) -> list[list[Cell]]:
        records = self.records
        if column in self.keys:
            key = self.keys[column]
            known = sorted((r for r in records if key(r) is not None), key=key, reverse=descending)
            records = [*known, *(r for r in records if key(r) is None)]
        return self.make(records[offset : offset + limit])


@dataclass(frozen=True)
class QuerySource(Generic[R]):
    """Rows that the database orders and cuts: fetch(column, descending, offset, limit)."""

    total: int
    fetch: Callable[[str, bool, int, int], Sequence[R]]
    make: Callable[[Sequence[R]], list[list[Cell]]]

    def count(self) -> int:
        return self.total

    def cells(self, column: str, descending: bool, offset: int, limit: int) -> list[list[Cell]]:
        return self.make(self.fetch(column, descending, offset, limit))


def make_table(spec: Spec, query: ViewQuery, source: Source) -> Table:
    """The page of the table that the query asks for; every row where the query downloads it.

    Raises:
        ProblemError: the query sorts this table by a column that it cannot be sorted by.
    """
    column, descending = _order(spec, query)
    total = source.count()
    if (query.download or "").rpartition(".")[0] == spec.name:
        return Table(spec, source.cells(column, descending, 0, MAX_EXPORT_ROWS), total)
    page = 1
    if query.page is not None and query.page.partition(":")[0] == spec.name:
        page = min(int(query.page.partition(":")[2]), max(1, -(-total // spec.page_rows)))
    rows = source.cells(column, descending, (page - 1) * spec.page_rows, spec.page_rows)
    return Table(spec, rows, total, page, column, descending)


def rows_table(spec: Spec, query: ViewQuery, rows: Sequence[list[Cell]]) -> Table:
    """A table of ready rows, sorted by their values where the query asks for it."""
    index = {column.key: number for number, column in enumerate(spec.columns)}
    keys = {c.key: (lambda row, n=index[c.key]: row[n].value) for c in spec.columns if c.sortable}
    return make_table(spec, query, ListSource(rows, list, keys))


def moment_cell(value: datetime | None) -> Cell:
    """A moment in a table."""
    return Cell(value, None if value is None else moment(value))


def time_cell(median_us: float | None, *, estimated: bool | None) -> Cell:
    """A pair's time in a table, with a word where it is the sum of its parts."""
    return Cell(median_us, us(median_us), note="estimated" if estimated else "")


def shape_cell(shape_key: str, href: str = "") -> Cell:
    """A shape key in a table."""
    return Cell(shape_key, breakable(shape_key), href)


def to_csv(table: Table) -> str:
    """The rows as CSV (RFC 4180), keys as heading. A text that a spreadsheet would run as a formula is quoted."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([column.key for column in table.spec.columns])
    for row in table.rows:
        writer.writerow([_csv_value(cell.value) for cell in row])
    return out.getvalue()


def to_json(table: Table) -> str:
    """The rows as JSON objects, by column key."""
    keys = [column.key for column in table.spec.columns]
    items = [{key: _plain(cell.value) for key, cell in zip(keys, row, strict=True)} for row in table.rows]
    return json.dumps({"items": items}, ensure_ascii=False, separators=(",", ":"))


def _order(spec: Spec, query: ViewQuery) -> tuple[str, bool]:
    order = spec.order
    if query.sort is not None and query.sort.partition(":")[0] == spec.name:
        order = query.sort.partition(":")[2]
        sortable = [column.key for column in spec.columns if column.sortable]
        if order.removeprefix("-") not in sortable:
            known = ", ".join(sortable) or "none"
            raise unknown_parameter("sort", f"{spec.name} has no such column; it is sorted by: {known}")
    return order.removeprefix("-"), order.startswith("-")


def _plain(value: Value) -> Any:
    return rfc3339(value) if isinstance(value, datetime) else value


def _csv_value(value: Value) -> Any:
    plain = _plain(value)
    if isinstance(plain, str) and plain.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{plain}"
    return "" if plain is None else plain
