"""What the addresses of the pages may hold. An unknown parameter is refused, as by the API; a blank field is no filter."""

import re
from datetime import date
from typing import Annotated
from typing import Any
from typing import Literal

from pydantic import AfterValidator
from pydantic import BeforeValidator
from pydantic import Field
from pydantic import StringConstraints

from kdatune_api.problems import ProblemError
from kdatune_api.problems import invalid_parameter
from kdatune_api.schemas import MAX_ID
from kdatune_api.schemas import GpuName
from kdatune_api.schemas import Query
from kdatune_api.schemas import plain_int
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.store.convert import is_text

MAX_PAGE = 100_000


def _blank(value: Any) -> Any:
    """A form sends an untouched field as an empty text."""
    return None if value == "" else value


def _searchable(value: str) -> str:
    if not value.isprintable() or not is_text(value):
        raise ValueError("holds characters that cannot be printed")
    return value.strip()


def _shape_key(value: str) -> str:
    return parse_shape(value).key()


def _day(value: Any) -> Any:
    """A date as the form sends it. Of itself pydantic reads numbers as dates, too."""
    if isinstance(value, str) and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
        raise ValueError(f"must be a date such as 2026-11-29, not {value[:40]!r}")
    return value


Blank = BeforeValidator(_blank)
OptionalGpu = Annotated[GpuName | None, Blank]
OptionalShape = Annotated[
    Annotated[str, StringConstraints(min_length=1, max_length=400), AfterValidator(_shape_key)] | None, Blank
]
OptionalText = Annotated[Annotated[str, StringConstraints(max_length=100), AfterValidator(_searchable)] | None, Blank]
OptionalId = Annotated[Annotated[int, Field(ge=1, le=MAX_ID), BeforeValidator(plain_int)] | None, Blank]
OptionalDay = Annotated[Annotated[date, BeforeValidator(_day)] | None, Blank]
OptionalKernel = Annotated[Literal["k1", "k2", "kda"] | None, Blank]
OptionalDtype = Annotated[Literal["bf16", "fp16"] | None, Blank]
OptionalYesNo = Annotated[Literal["yes", "no"] | None, Blank]


class ViewQuery(Query):
    """What every page takes beside its filters.

    sort: "<table>:<column>", a minus before the column for descending. page: "<table>:<number>".
    download: "<table>.csv" or "<table>.json", every row that the filters let through.
    """

    sort: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,30}:-?[a-z][a-z0-9_]{0,40}$")] | None = None
    page: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,30}:[1-9][0-9]{0,5}$")] | None = None
    download: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,30}\.(csv|json)$")] | None = None


class SearchQuery(ViewQuery):
    """Filters of lists of keys. q: words of the shape key, e.g. "H=96 T=8192"."""

    gpu: OptionalGpu = None
    q: OptionalText = None
    dtype: OptionalDtype = None
    varlen: OptionalYesNo = None


def shape_in_path(text: str) -> Shape:
    """The shape that a page's path names.

    Raises:
        ProblemError: it is no shape key.
    """
    try:
        return parse_shape(text)
    except ShapeError as error:
        raise invalid_parameter("shape", str(error)) from error


def unknown_parameter(name: str, detail: str) -> ProblemError:
    """A value that is well formed and names nothing on the page."""
    return invalid_parameter(name, detail)
