"""The filter bar: one form a page, sent as the page's own address, so that every view can be shared."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kdatune_api.pages.board import Board
from kdatune_api.pages.params import SearchQuery


@dataclass(frozen=True)
class Filter:
    """One field. options: (value, label), for a select; the first has the value "" where the filter may be off."""

    name: str
    label: str
    kind: Literal["select", "search", "date", "number"] = "select"
    value: str = ""
    options: tuple[tuple[str, str], ...] = ()
    hint: str = ""
    suggestions: tuple[str, ...] = ()


def select(name: str, label: str, value: object, options: Iterable[tuple[str, str]], any_label: str = "") -> Filter:
    """A select. any_label: what the choice of no filter is called; "" where one has to be chosen."""
    first = (("", any_label),) if any_label else ()
    return Filter(name, label, "select", "" if value is None else str(value), (*first, *options))


def gpu_filter(board: Board, value: str | None, any_label: str = "all") -> Filter:
    """Which GPU model."""
    names = sorted({card.name for card in board.cards})
    return select("gpu", "GPU model", value, [(name, name) for name in names], any_label)


def search_filters(board: Board, query: SearchQuery) -> list[Filter]:
    """The filters that every list of keys has."""
    yes_no = (("yes", "varlen"), ("no", "dense"))
    return [
        gpu_filter(board, query.gpu),
        Filter("q", "Shape", "search", query.q or "", hint="words of the key, e.g. H=96 T=8192"),
        select("dtype", "dtype", query.dtype, [("bf16", "bf16"), ("fp16", "fp16")], "all"),
        select("varlen", "Sequences", query.varlen, yes_no, "all"),
    ]
