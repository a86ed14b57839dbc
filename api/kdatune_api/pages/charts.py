"""/charts/*: the figures that pages draw, as JSON. Apart from the pages, so that a page need not wait for its charts."""

import json
from collections.abc import Callable
from typing import Annotated
from typing import Literal

from fastapi import APIRouter
from fastapi import Depends
from fastapi import Query
from fastapi import Request
from fastapi import Response

from kdatune_api import charts
from kdatune_api import figures
from kdatune_api.caching import accepts_gzip
from kdatune_api.caching import document
from kdatune_api.caching import matches
from kdatune_api.deps import ServiceDep
from kdatune_api.deps import strict_query
from kdatune_api.pages.board import read_board
from kdatune_api.pages.params import SearchQuery
from kdatune_api.pages.state import state_of
from kdatune_api.pages.studies import TITLES
from kdatune_api.pages.studies import TrialFilter
from kdatune_api.pages.study_data import gather as gather_study
from kdatune_api.pages.trends import TrendQuery
from kdatune_api.pages.trends import course_of
from kdatune_api.pages.waves import gather as gather_waves
from kdatune_api.schemas import GpuName
from kdatune_api.schemas import ShapeKey
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.store.dashboard_lists import newest_measurement_id
from kdatune_tuner.store.queries import generation

router = APIRouter(dependencies=[Depends(strict_query)])


class StudyChartQuery(TrialFilter):
    gpu: GpuName
    shape: ShapeKey


class TrendChartQuery(TrendQuery):
    gpu: GpuName
    shape: ShapeKey


@router.get("/charts/waves")
def waves(request: Request, query: Annotated[SearchQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        found = gather_waves(s, state_of(request), query)
    points = [
        figures.WavePoint(
            row.chains,
            row.tokens_per_chain,
            row.entry.row.measured_us,
            row.choice.label,
            row.entry.row.shape_key,
        )
        for row in found.rows
        if row.entry.row.measured_us is not None
    ]
    sm_count = found.card.gpu.sm_count if found.card else 0
    return _answer(request, figures.waves(points[: charts.MAX_TRIALS], sm_count, found.boundaries()))


@router.get("/charts/trend")
def trend(request: Request, query: Annotated[TrendChartQuery, Query()], service: ServiceDep) -> Response:
    with service.reading() as s:
        card = read_board(s, state_of(request)).card(query.gpu)
        course = course_of(s, card, parse_shape(query.shape), query.days)
    points = [
        figures.NightPoint(
            night.day.isoformat(),
            night.timing.median_us,
            night.timing.p20_us,
            night.timing.p80_us,
            "; ".join(night.changes),
        )
        for night in course
    ]
    marks = [(night.day.isoformat(), "; ".join(night.changes)) for night in course if night.changes]
    return _answer(request, figures.trend(points, marks))


@router.get("/charts/{name}")
def study(
    request: Request,
    name: Literal["history", "importances", "parallel"],
    query: Annotated[StudyChartQuery, Query()],
    service: ServiceDep,
) -> Response:
    state = state_of(request)
    with service.reading() as s:
        key = (name, query.model_dump_json(), newest_measurement_id(s), generation(s))
        card = read_board(s, state).card(query.gpu)

        def make() -> Json:
            found = gather_study(s, card, parse_shape(query.shape), **query.wanted())
            title = TITLES[found.kernel]
            draw: dict[str, Callable[[], Json]] = {
                "history": lambda: charts.history(found.trials, title),
                "importances": lambda: charts.importances(found.trials),
                "parallel": lambda: charts.parallel(found.trials, title),
            }
            return draw[name]()

        figure: Json = state.charts.get(key, make)
    return _answer(request, figure)


def _answer(request: Request, figure: Json) -> Response:
    """The figure, or 304 where the browser has it."""
    doc = document(0, json.dumps(figure, separators=(",", ":")).encode(), compress=True)
    gzipped = doc.gzipped if accepts_gzip(request.headers.get("accept-encoding")) else None
    etag = doc.gzip_etag if gzipped else doc.etag
    headers = {"ETag": etag, "Cache-Control": "private, no-cache", "Vary": "Accept-Encoding"}
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    if gzipped:
        return Response(gzipped, media_type="application/json", headers={**headers, "Content-Encoding": "gzip"})
    return Response(doc.body, media_type="application/json", headers=headers)
