"""GET /v1/regressions: what became slower in the stored history. POST .../{id}/acknowledge: somebody knows of it."""

from typing import Annotated

from fastapi import APIRouter
from fastapi import Body
from fastapi import Depends
from fastapi import Path
from fastapi import Query
from fastapi import Request
from fastapi import Response
from pydantic import BaseModel
from pydantic import BeforeValidator
from pydantic import ConfigDict
from pydantic import Field
from pydantic import StringConstraints
from pydantic import model_validator

from kdatune_api.auth import caller_of
from kdatune_api.auth import guarded
from kdatune_api.auth import security
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import json_body
from kdatune_api.deps import no_query
from kdatune_api.deps import strict_query
from kdatune_api.openapi import errors
from kdatune_api.paging import page_of
from kdatune_api.problems import UNKNOWN_REGRESSION
from kdatune_api.problems import ProblemError
from kdatune_api.routes.listings import KeyQuery
from kdatune_api.rows import ConfigJson
from kdatune_api.rows import KeyRow
from kdatune_api.rows import row_json
from kdatune_api.schemas import MAX_ID
from kdatune_api.schemas import Page
from kdatune_api.schemas import plain_int
from kdatune_kernels.spec import Json
from kdatune_tuner.store.access import Scope
from kdatune_tuner.store.convert import is_text
from kdatune_tuner.store.regressions import MAX_NOTE_CHARS
from kdatune_tuner.store.regressions import RegressionState
from kdatune_tuner.store.regressions import acknowledge as store_acknowledge
from kdatune_tuner.store.regressions import find_regression
from kdatune_tuner.store.regressions import page_regressions

_TIME = "RFC 3339, UTC"

listing = APIRouter(tags=["listings"], dependencies=[Depends(strict_query)], responses=errors(422, 503))
writes = APIRouter(tags=["writes"], route_class=guarded(Scope.REGRESSIONS))
router = APIRouter()


class RegressionOut(KeyRow):
    """A config that became slower on one key."""

    gpu_id: int
    problem_id: int
    config: ConfigJson = Field(description="as in a measurement")
    config_hash: str
    state: RegressionState = Field(description="resolved: gone, whether it was acknowledged or not")
    is_served: bool = Field(description="whether launchers were given this config when it was last looked at")
    before_us: float = Field(description="median of the nights before the step, on a machine as usual")
    after_us: float = Field(description="the same of the nights after it")
    now_us: float = Field(description="the same of the newest nights")
    change_pct: float = Field(description="after_us over before_us, in per cent (> 0 is slower)")
    confidence_pct: float = Field(description="how sure it is that the step is not noise")
    last_good_at: str = Field(description=f"when the last fast night measured it; {_TIME}")
    began_at: str = Field(description=f"when the first slow night measured it; {_TIME}")
    build_before_id: int
    build_after_id: int
    measurement_before_id: int
    measurement_after_id: int
    cause: str = Field(description="what differs between the two builds: the probable cause")
    opened_at: str = Field(description=f"when it was found; {_TIME}")
    seen_at: str = Field(description=f"when it was last found again; {_TIME}")
    resolved_at: str | None = Field(description=_TIME)
    resolution: str | None = Field(description="why it is gone")
    acknowledged_at: str | None = Field(description=_TIME)
    acknowledged_by: str | None
    note: str | None


class RegressionQuery(KeyQuery):
    state: RegressionState | None = Field(default=None, description="only findings in this state")
    served: bool | None = Field(default=None, description="only of configs that launchers are given, or are not")


class AcknowledgeRequest(BaseModel):
    """That somebody knows of a regression."""

    model_config = ConfigDict(extra="forbid")

    note: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NOTE_CHARS, strip_whitespace=True)] | None = (
        Field(default=None, description="what is known about it, for those who look later")
    )

    @model_validator(mode="after")
    def _is_readable(self) -> "AcknowledgeRequest":
        if self.note is not None and not is_text(self.note):
            raise ValueError("holds characters that no database keeps")
        return self


class Acknowledged(BaseModel):
    """A regression that somebody knows of."""

    changed: bool = Field(description="false: it was acknowledged before, and keeps its first word")
    acknowledged_at: str = Field(description=_TIME)
    acknowledged_by: str
    note: str | None


RegressionId = Annotated[
    int, BeforeValidator(plain_int), Field(ge=1, le=MAX_ID), Path(alias="id", description="of the regression")
]


@listing.get(
    "/v1/regressions", summary="Configs that became slower in the stored history", response_model=Page[RegressionOut]
)
def regressions(query: Annotated[RegressionQuery, Query()], service: ServiceDep, response: Response) -> Json:
    response.headers["Cache-Control"] = "no-store"
    filters = query.filters() | {"state": query.state, "served": query.served}
    with service.reading() as session:
        return page_of(query, lambda **given: page_regressions(session, **given), **filters)


@writes.post(
    "/v1/regressions/{id}/acknowledge",
    summary="Say that somebody knows of a regression: it is open no longer, and nights do not fail by it",
    responses=errors(400, 401, 403, 404, 408, 413, 415, 422, 503),
    dependencies=[Depends(no_query), Depends(json_body)],
    openapi_extra=security(Scope.REGRESSIONS),
)
def acknowledge(
    request: Request, regression_id: RegressionId, body: Annotated[AcknowledgeRequest, Body()], service: ServiceDep
) -> Acknowledged:
    caller = caller_of(request)
    with service.writing() as session:
        if find_regression(session, regression_id) is None:
            raise ProblemError(UNKNOWN_REGRESSION, f"regression {regression_id} does not exist; see /v1/regressions")
        row, changed = store_acknowledge(session, regression_id, caller, body.note)
    shown = row_json(row)
    return Acknowledged(
        changed=changed,
        acknowledged_at=shown["acknowledged_at"],
        acknowledged_by=shown["acknowledged_by"],
        note=row.note,
    )


router.include_router(listing)
router.include_router(writes)
