"""Cursor pages. A cursor is opaque: it holds where the page ended and which listing and filters it belongs to."""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable
from collections.abc import Sequence
from typing import Annotated
from typing import Any
from typing import Literal

from pydantic import BeforeValidator
from pydantic import Field
from pydantic import StringConstraints

from kdatune_api.problems import ProblemError
from kdatune_api.problems import invalid_parameter
from kdatune_api.rows import row_json
from kdatune_api.schemas import MAX_ID
from kdatune_api.schemas import Query
from kdatune_api.schemas import plain_int
from kdatune_kernels.spec import Json

MAX_PAGE_ROWS = 500
_CURSOR_VERSION = 1


class PageQuery(Query):
    """What every listing takes beside its filters."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ROWS), BeforeValidator(plain_int)] = Field(
        default=100, description="rows of a page"
    )
    order: Literal["newest", "oldest"] = Field(default="newest", description="which rows come first")
    cursor: Annotated[str, StringConstraints(max_length=200)] | None = Field(
        default=None, description="next_cursor of the page before; the filters must stay the same"
    )

    def identity(self) -> str:
        """What the listing is of: everything but where in it we are, and how much of it is asked for."""
        filters = self.model_dump(mode="json", exclude={"cursor", "limit"})
        text = json.dumps([type(self).__name__, filters], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def page_of(query: PageQuery, fetch: Callable[..., Sequence[Any]], **filters: Any) -> Json:
    """One page as JSON data for a Page.

    Args:
        fetch: gives the records after an id: `fetch(**filters, after_id=, limit=, newest_first=)`.

    Raises:
        ProblemError: invalid-request when the cursor is none of ours, or of another listing or other filters.
    """
    after_id = None if query.cursor is None else _read_cursor(query.cursor, query.identity())
    # One more than asked for: it tells whether a next page exists.
    records = fetch(**filters, after_id=after_id, limit=query.limit + 1, newest_first=query.order == "newest")
    shown = records[: query.limit]
    more = len(records) > query.limit
    cursor = _write_cursor(shown[-1].id, query.identity()) if more else None
    return {"items": [row_json(record) for record in shown], "next_cursor": cursor}


def _write_cursor(after_id: int, identity: str) -> str:
    text = f"{_CURSOR_VERSION}.{after_id}.{identity}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(cursor: str, identity: str) -> int:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
        version, after_id, of = text.split(".")
        if int(version) != _CURSOR_VERSION or not 1 <= int(after_id) <= MAX_ID:
            raise _bad_cursor()
    except (binascii.Error, ValueError) as error:
        raise _bad_cursor() from error
    if of != identity:
        raise invalid_parameter("cursor", "belongs to another listing or other filters; start again without it")
    return int(after_id)


def _bad_cursor() -> ProblemError:
    return invalid_parameter("cursor", "is not a cursor of this service; start again without it")
