"""GET /v1/measurements, /v1/promotions, /v1/runs, /v1/profiles, /v1/gpus: what is stored, a page at a time.

And the kept report of a profile.

Plain functions: FastAPI runs them in its thread pool, where a query may take its time.
"""

import re
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Annotated
from typing import Any
from typing import Literal

from fastapi import APIRouter
from fastapi import Depends
from fastapi import HTTPException
from fastapi import Path
from fastapi import Query
from fastapi import Response
from fastapi.responses import FileResponse
from pydantic import BeforeValidator
from pydantic import Field
from pydantic import ValidationInfo
from pydantic import field_validator

from kdatune_api.deps import Service
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.openapi import errors
from kdatune_api.paging import PageQuery
from kdatune_api.paging import page_of
from kdatune_api.rows import GpuOut
from kdatune_api.rows import MeasurementOut
from kdatune_api.rows import ProfileOut
from kdatune_api.rows import PromotionOut
from kdatune_api.rows import QuarantinedOut
from kdatune_api.rows import RunOut
from kdatune_api.schemas import MAX_ID
from kdatune_api.schemas import GpuName
from kdatune_api.schemas import KernelName
from kdatune_api.schemas import Page
from kdatune_api.schemas import ShapeText
from kdatune_api.schemas import plain_int
from kdatune_api.schemas import shape_key_of_kernel
from kdatune_kernels.spec import Json
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import pages
from kdatune_tuner.store.intake import page_quarantined
from kdatune_tuner.store.profiles import find_profile
from kdatune_tuner.store.records import Decision
from kdatune_tuner.store.records import RunState

_REPORT_TYPE = "application/octet-stream"
_REPORT_NAME = re.compile(r"[0-9a-f]{16}\.ncu-rep")  # what keep_report gives; nothing else is opened

router = APIRouter(tags=["listings"], dependencies=[Depends(strict_query)], responses=errors(422, 503))

Id = Annotated[int, Field(ge=1, le=MAX_ID), BeforeValidator(plain_int)]


class GpuQuery(PageQuery):
    gpu: GpuName | None = Field(default=None, description="only this GPU model")


class KeyQuery(GpuQuery):
    kernel: KernelName | None = Field(default=None, description="only this kernel")
    shape: ShapeText | None = Field(
        default=None, description="only this problem shape, e.g. N=1,H=96,T=8192; of another kernel with kernel="
    )

    @field_validator("shape")
    @classmethod
    def _in_one_spelling(cls, text: str | None, info: ValidationInfo) -> str | None:
        return None if text is None else shape_key_of_kernel(info.data.get("kernel") or "kda", text).key()

    def filters(self) -> Json:
        """The filters under the names of the store."""
        shape = None if self.shape is None else shape_key_of_kernel(self.kernel or "kda", self.shape)
        return {"gpu_name": self.gpu, "kernel": self.kernel, "shape": shape}


class MeasurementQuery(KeyQuery):
    outcome: Outcome | None = Field(default=None, description="only what ended so")
    run_id: Id | None = Field(default=None, description="only this run")


class PromotionQuery(KeyQuery):
    decision: Decision | None = Field(default=None, description="only decisions of this kind")


class RunQuery(KeyQuery):
    state: RunState | None = Field(default=None, description="only runs in this state")


class ProfileQuery(KeyQuery):
    stage: Literal["k1", "k2"] | None = Field(default=None, description="only this stage")
    measurement_id: Id | None = Field(default=None, description="only this measurement")


@router.get("/v1/measurements", summary="Every measurement, of any outcome", response_model=Page[MeasurementOut])
def measurements(query: Annotated[MeasurementQuery, Query()], service: ServiceDep, response: Response) -> Json:
    filters = query.filters() | {"outcome": query.outcome, "run_id": query.run_id}
    return _page(service, response, query, pages.page_measurements, filters)


@router.get(
    "/v1/promotions",
    summary="Every decision about what is served, ties and rejections included",
    response_model=Page[PromotionOut],
)
def promotions(query: Annotated[PromotionQuery, Query()], service: ServiceDep, response: Response) -> Json:
    return _page(service, response, query, pages.page_promotions, query.filters() | {"decision": query.decision})


@router.get("/v1/runs", summary="Every search", response_model=Page[RunOut])
def runs(query: Annotated[RunQuery, Query()], service: ServiceDep, response: Response) -> Json:
    return _page(service, response, query, pages.page_runs, query.filters() | {"state": query.state})


@router.get(
    "/v1/profiles",
    summary="Hardware counters of measured configs, or why there are none",
    response_model=Page[ProfileOut],
)
def profiles(query: Annotated[ProfileQuery, Query()], service: ServiceDep, response: Response) -> Json:
    filters = query.filters() | {"stage": query.stage, "measurement_id": query.measurement_id}
    return _page(service, response, query, pages.page_profiles, filters)


@router.get(
    "/v1/profiles/{profile_id}/report",
    summary="The kept Nsight Compute report of a profile, for its user interface",
    response_class=FileResponse,
    responses={200: {"content": {_REPORT_TYPE: {}}, "description": "a .ncu-rep file"}, **errors(404)},
)
def report(profile_id: Annotated[Id, Path(description="id of the profile")], service: ServiceDep) -> Response:
    with service.reading() as session:
        found = find_profile(session, profile_id)
    name = None if found is None else found.row.report_file
    if found is None or name is None or not _REPORT_NAME.fullmatch(name):
        raise HTTPException(404, f"profile {profile_id} has no kept report; kdatune profile --keep-report keeps one")
    file = FilePath(service.settings.reports_dir, name)
    if not file.is_file():
        raise HTTPException(404, f"the report of profile {profile_id} is not on this machine: {name}")
    return FileResponse(
        file, media_type=_REPORT_TYPE, filename=name, headers={"Cache-Control": "private, max-age=86400"}
    )


@router.get(
    "/v1/quarantined",
    summary="Served configs that launchers could not use, and why",
    response_model=Page[QuarantinedOut],
)
def quarantined(query: Annotated[KeyQuery, Query()], service: ServiceDep, response: Response) -> Json:
    return _page(service, response, query, page_quarantined, query.filters())


@router.get("/v1/gpus", summary="Every GPU model that something was measured on", response_model=Page[GpuOut])
def gpus(query: Annotated[GpuQuery, Query()], service: ServiceDep, response: Response) -> Json:
    return _page(service, response, query, pages.page_gpus, {"name": query.gpu})


def _page(
    service: Service, response: Response, query: PageQuery, fetch: Callable[..., Sequence[Any]], filters: Json
) -> Json:
    response.headers["Cache-Control"] = "no-store"
    with service.reading() as session:
        return page_of(query, lambda **given: fetch(session, **given), **filters)
