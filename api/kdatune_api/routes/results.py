"""POST /v1/results: measurements of remote tuners. They are stored, once each; nothing is promoted by them."""

from typing import Annotated

from fastapi import APIRouter
from fastapi import Body
from fastapi import Depends
from fastapi import Request
from sqlalchemy.orm import Session

from kdatune_api.auth import caller_of
from kdatune_api.auth import guarded
from kdatune_api.auth import security
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import json_body
from kdatune_api.deps import no_query
from kdatune_api.openapi import errors
from kdatune_api.posted import PostedResult
from kdatune_api.posted import PostedResults
from kdatune_api.posted import ResultsStored
from kdatune_api.posted import build_errors
from kdatune_api.posted import gpu_errors
from kdatune_api.problems import INVALID_REQUEST
from kdatune_api.problems import FieldError
from kdatune_api.problems import ProblemError
from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import to_json
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import is_other
from kdatune_tuner.store import intake
from kdatune_tuner.store import writes
from kdatune_tuner.store.access import Caller
from kdatune_tuner.store.access import Scope
from kdatune_tuner.store.access import add_audit
from kdatune_tuner.store.checks import COUNT_FIELDS
from kdatune_tuner.store.queries import find_gpu
from kdatune_tuner.store.records import NewMeasurement

router = APIRouter(tags=["writes"], route_class=guarded(Scope.RESULTS))

_COPIED = (
    "kernel",
    "outcome",
    "detail",
    "median_us",
    "p20_us",
    "p80_us",
    *COUNT_FIELDS,
    "o_error_ratio",
    "state_error_ratio",
    "occupancy_pct",
    "sm_clock_mhz",
    "throttle_reasons",
    "regime",
    "estimated",
    "measured_at",
)


@router.post(
    "/v1/results",
    summary="Store what a remote tuner measured; the same result posted again adds nothing",
    responses=errors(400, 401, 403, 408, 413, 415, 422, 503),
    dependencies=[Depends(no_query), Depends(json_body)],
    openapi_extra=security(Scope.RESULTS),
)
def results(request: Request, posted: Annotated[PostedResults, Body()], service: ServiceDep) -> ResultsStored:
    _refuse(build_errors(posted.build) + _config_errors(posted))
    caller = caller_of(request)
    with service.writing() as session:
        _refuse(gpu_errors(posted.gpu, find_gpu(session, posted.gpu.name)))
        ids, stored_count = _store(session, posted, caller)
        if stored_count:
            detail = {"gpu": posted.gpu.name, "results": len(ids), "stored": stored_count}
            add_audit(session, caller, "results.post", f"measurements {min(ids)} to {max(ids)}", detail)
    return ResultsStored(stored_count=stored_count, known_count=len(ids) - stored_count, measurement_ids=ids)


def _store(session: Session, posted: PostedResults, caller: Caller) -> tuple[list[int], int]:
    assert caller.token_id is not None  # noqa: S101 - the scope of this route is never open
    gpu_id, build_id = writes.put_gpu(session, posted.gpu), writes.put_build(session, posted.build)
    ids, stored_count = [], 0
    for result in posted.results:
        new = NewMeasurement(
            run_id=None,
            gpu_id=gpu_id,
            build_id=build_id,
            problem_id=writes.put_problem(session, result.kernel, result.shape),
            config_json=canonical(result.config),
            config_hash=digest(result.config),
            **{name: getattr(result, name) for name in _COPIED},
        )
        measurement_id, is_new = intake.receive(session, new, _identity(posted, result), caller.token_id)
        ids.append(measurement_id)
        stored_count += is_new
    return ids, stored_count


def _identity(posted: PostedResults, result: PostedResult) -> str:
    """The digest of a result: two are the same when all that was posted about them is."""
    values = {name: getattr(result, name) for name in _COPIED} | {"measured_at": result.measured_at.isoformat()}
    about = {"gpu": to_json(posted.gpu), "build": to_json(posted.build)}
    return digest(values | about | {"shape": to_json(result.shape), "config": to_json(result.config)})


def _config_errors(posted: PostedResults) -> list[FieldError]:
    """A config that may not be launched was not measured."""
    return [
        FieldError(pointer=f"/results/{i}/config", detail=f"refused: {reason}")
        for i, result in enumerate(posted.results)
        if (reason := _refused(result, posted.gpu)) is not None
    ]


def _refused(result: PostedResult, gpu: Gpu) -> str | None:
    if is_other(result.kernel):
        return registry().require(result.kernel).config_ok(result.config, result.shape, gpu)
    return config_ok(result.config, result.shape, gpu)


def _refuse(found: list[FieldError]) -> None:
    if found:
        raise ProblemError(INVALID_REQUEST, f"{found[0].pointer}: {found[0].detail}", found)
