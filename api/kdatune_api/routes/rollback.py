"""POST /v1/promotions/{id}/rollback: take back what is served for a key; what was served before it is served again."""

import json
from typing import Annotated

from fastapi import APIRouter
from fastapi import Body
from fastapi import Depends
from fastapi import Path
from fastapi import Request
from pydantic import BeforeValidator
from pydantic import Field

from kdatune_api.auth import caller_of
from kdatune_api.auth import guarded
from kdatune_api.auth import security
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import json_body
from kdatune_api.deps import no_query
from kdatune_api.openapi import errors
from kdatune_api.posted import RollbackRequest
from kdatune_api.posted import RolledBack
from kdatune_api.problems import CONFLICT
from kdatune_api.problems import UNKNOWN_PROMOTION
from kdatune_api.problems import ProblemError
from kdatune_api.schemas import MAX_ID
from kdatune_api.schemas import plain_int
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import from_json
from kdatune_tuner.store import writes
from kdatune_tuner.store.access import Scope
from kdatune_tuner.store.access import add_audit
from kdatune_tuner.store.queries import find_promotion
from kdatune_tuner.store.queries import served

router = APIRouter(tags=["writes"], route_class=guarded(Scope.PROMOTIONS))

PromotionId = Annotated[
    int,
    BeforeValidator(plain_int),
    Field(ge=1, le=MAX_ID),
    Path(alias="id", description="of the promotion that is served"),
]


@router.post(
    "/v1/promotions/{id}/rollback",
    summary="Serve again what was served before this promotion, which must be the one that is served now",
    responses=errors(400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
    dependencies=[Depends(no_query), Depends(json_body)],
    openapi_extra=security(Scope.PROMOTIONS),
)
def rollback(
    request: Request, promotion_id: PromotionId, body: Annotated[RollbackRequest, Body()], service: ServiceDep
) -> RolledBack:
    caller = caller_of(request)
    with service.writing() as session:
        wanted = find_promotion(session, promotion_id)
        if wanted is None:
            raise ProblemError(UNKNOWN_PROMOTION, f"promotion {promotion_id} does not exist; see /v1/promotions")
        key = f"{wanted.shape.key()} on {wanted.gpu_name}"
        now = served(session, wanted.kernel, wanted.gpu_id, wanted.problem_id)
        if now is None or now.id != promotion_id:
            by_now = "nothing is" if now is None else f"promotion {now.id} is"
            raise ProblemError(CONFLICT, f"promotion {promotion_id} is not what is served: {by_now} served for {key}")
        if now.config_json is None:
            raise ProblemError(CONFLICT, f"the default config is served for {key}: there is nothing to take back")
        generation = writes.rollback(session, promotion_id, body.reason)
        before = served(session, wanted.kernel, wanted.gpu_id, wanted.problem_id)
        detail = {"gpu": wanted.gpu_name, "shape": wanted.shape.key(), "generation": generation, "reason": body.reason}
        add_audit(session, caller, "promotion.rollback", f"promotion {promotion_id}", detail)
    config = None if before is None or before.config_json is None else json.loads(before.config_json)
    return RolledBack(
        generation=generation,
        config=config if config is None or wanted.kernel != "kda" else from_json(LaunchConfig, config),
    )
