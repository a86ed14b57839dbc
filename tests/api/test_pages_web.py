"""What surrounds the pages: headers, errors, downloads, assets, charts, and that nothing given is taken on trust."""

import csv
import io
import json
import re
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kdatune_api import charts
from kdatune_api.app import create_app
from kdatune_api.pages import overview
from kdatune_api.pages.assets import CHART_STYLE_IDS
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.tables import Cell
from kdatune_api.pages.tables import Column
from kdatune_api.pages.tables import Spec
from kdatune_api.pages.tables import rows_table
from kdatune_api.pages.tables import to_csv
from kdatune_kernels.space import default_config
from kdatune_kernels.space import legal_k2
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import shape_of
from kdatune_tuner.settings import Settings
from kdatune_tuner.store.dashboard import Trial

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEY = "NVIDIA%20H200/N=1,H=96,T=8192"
PAGES = (
    "/",
    "/configs",
    f"/configs/{KEY}",
    f"/profiles/{KEY}",
    f"/studies/{KEY}",
    "/waves",
    f"/trends/{KEY}",
    "/trends/regressions",
    "/nights",
    "/compare",
)


SHAPE, H200 = shape_of(1, 96, 8192), KNOWN_GPUS["NVIDIA H200"]
CONFIGS = [LaunchConfig(default_config(SHAPE, H200).k1, k2) for k2 in legal_k2(SHAPE, H200)[::9]]


@pytest.fixture(scope="module")
def tuned(local, local_shelf):
    """The service over one champion with a search behind it."""
    run = local_shelf.run(kernel="k2")
    for number in range(12):
        local_shelf.measure(config=CONFIGS[number], kernel="k2", run_id=run, median_us=300.0 + 10 * (number % 5))
    local_shelf.promote()
    return local


@pytest.mark.parametrize("path", PAGES)
def test_a_page_allows_nothing_inline_and_nothing_from_elsewhere(tuned, path):
    response = tuned.get(path, headers=HTML)
    assert response.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert "unsafe-inline" not in response.headers["content-security-policy"]
    assert policy["frame-ancestors"] == "'none'"
    assert response.headers["cache-control"] == "private, no-cache"
    assert response.headers["referrer-policy"] == "same-origin"
    page = response.text
    assert not re.search(r"<script(?![^>]* src=)", page), "no script in the page"
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)
    for address in re.findall(r"""(?:src|href|action)=["']([^"']*)""", page):
        assert address.startswith(("/", "#", "?")), address
        assert not address.startswith("//"), address


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_a_title_one_heading_and_labels(tuned, path):
    page = tuned.get(path, headers=HTML).text
    assert re.search(r"<title>[^<]+ · kdatune</title>", page)
    assert page.count("<h1") == 1
    assert page.count('aria-current="page"') >= 1
    for field in re.findall(r'<(?:select|input) id="([^"]+)"', page):
        assert f'for="{field}"' in page


def test_a_page_is_compressed_for_those_who_take_it(tuned):
    plain = tuned.get("/configs", headers={**HTML, "Accept-Encoding": "identity"})
    packed = tuned.get("/configs", headers={**HTML, "Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.text == plain.text
    assert packed.headers["vary"] == "Accept, Accept-Encoding"
    head = tuned.head("/configs", headers=HTML)
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/nothing", 404, "nothing at /nothing"),
        ("/configs/NVIDIA%20H200", 404, "nothing at"),
        ("/configs/H200/N=1,H=96,T=8192", 404, "stored: NVIDIA H200"),
        ("/configs/NVIDIA%20H200/N=1", 422, "the shape lacks H, T"),
        ("/configs?colour=red", 422, "unknown"),
        ("/configs?gpu=a&gpu=b", 422, "more than once"),
        ("/configs?sort=configs:reason", 422, "sorted by"),
        ("/configs?sort=drop%20table", 422, "sort"),
        ("/configs?page=configs:0", 422, "page"),
        ("/configs?download=other.csv", 422, "no table"),
        ("/configs?download=../secrets", 422, "download"),
        ("/compare?shape_a=N%3D0", 422, "shape_a"),
        ("/compare?on_a=20261129", 422, "date"),
        ("/compare?as_a=m0", 422, "as_a"),
        ("/studies?trigger=%3Cscript%3E", 422, "trigger"),
        ("/profiles/NVIDIA%20H200/N=1,H=96,T=8192?against=zz", 422, "against"),
    ],
)
def test_an_error_is_a_page_for_a_browser_and_a_problem_for_a_program(tuned, is_problem, path, status, told):
    page = tuned.get(path, headers=HTML)
    assert page.status_code == status
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert f">{status}<" in page.text
    assert told in page.text
    assert page.headers["x-request-id"] in page.text
    for accept in ("application/json", "*/*", "application/problem+json, text/html"):
        problem = tuned.get(path, headers={"Accept": accept})
        assert problem.headers["content-type"] == "application/problem+json"
        assert is_problem(
            problem, status, problem.json()["type"].removeprefix("urn:kdatune:problem:").replace("about:blank", "")
        )


def test_the_api_answers_browsers_with_problems_too(tuned, is_problem):
    is_problem(tuned.get("/v1/nothing", headers=HTML), 404)
    is_problem(tuned.get("/v1/gpus?limit=0", headers=HTML), 422, "invalid-request")
    is_problem(tuned.get("/static/nothing.js", headers=HTML), 404)


def test_what_is_given_comes_back_as_text(tuned):
    wicked = '"><script>alert(1)</script>'
    for path in (f"/configs?q={quote(wicked)}", f"/configs?gpu={quote(wicked)}", f"/{quote(wicked)}"):
        page = tuned.get(path, headers=HTML).text
        assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in tuned.get(f"/configs?q={quote(wicked)}", headers=HTML).text


def test_without_a_database_every_page_says_what_to_do(homeless):
    for path in PAGES:
        response = homeless.get(path, headers=HTML)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "kdatune db upgrade" in response.text


def test_an_unexpected_error_is_a_page_that_tells_nothing(local_url, caplog, monkeypatch):
    monkeypatch.setattr(overview, "read_board", lambda *_: 1 / 0)
    with TestClient(create_app(Settings(database_url=local_url)), raise_server_exceptions=False) as client:
        response = client.get("/", headers=HTML)
    assert response.status_code == 500
    assert "division" not in response.text
    assert "trace is in the service" in response.text
    assert any("division by zero" in str(record.exc_info) for record in caplog.records)


def test_a_shape_is_spelled_in_one_way(tuned):
    response = tuned.get("/studies/NVIDIA%20H200/H=96,N=1,T=8192", headers=HTML, follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (308, f"/studies/{KEY}")


def test_a_table_is_csv_and_json(tuned):
    as_csv = tuned.get("/configs?download=configs.csv")
    as_json = tuned.get("/configs?download=configs.json")
    assert as_csv.headers["content-type"] == "text/csv; charset=utf-8"
    assert as_csv.headers["content-disposition"] == 'attachment; filename="kdatune-configs.csv"'
    (row,) = csv.DictReader(io.StringIO(as_csv.text))
    (item,) = as_json.json()["items"]
    assert row == {key: "" if value is None else str(value) for key, value in item.items()}
    assert (item["shape"], item["measured_us"], item["gain_low"]) == (
        "N=1,H=96,T=8192",
        610.25,
        1.011,
    )


def test_a_spreadsheet_runs_nothing():
    spec = Spec("t", "T", (Column("a", "A"), Column("b", "B", kind="number")))
    table = rows_table(spec, ViewQuery(), [[Cell("=cmd|'/C calc'!A0"), Cell(-1.5)], [Cell("@x"), Cell(None)]])
    assert to_csv(table) == "a,b\r\n'=cmd|'/C calc'!A0,-1.5\r\n'@x,\r\n"


@pytest.mark.parametrize("name", ["kdatune.css", "kdatune.js", "htmx.min.js", "icon.svg", "plotly.min.js"])
def test_an_asset_is_kept_for_ever_under_the_address_that_pages_give(tuned, name):
    page = tuned.get(f"/studies/{KEY}", headers=HTML).text
    address = re.search(rf'"(/static/{re.escape(name)}\?v=[^"]+)"', page)[1]
    response = tuned.get(address)
    assert response.status_code == 200
    assert "immutable" in response.headers["cache-control"]
    assert response.headers["x-content-type-options"] == "nosniff"
    again = tuned.get(address, headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert tuned.get(f"/static/{name}").headers["cache-control"] == "no-cache"
    assert tuned.get(f"/static/{name}?v=old").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", ["../app.py", "..%2Fapp.py", "%2e%2e/app.py", "kdatune.css/../../app.py", ""])
def test_nothing_but_the_assets_is_served(tuned, name):
    response = tuned.get(f"/static/{name}")
    assert response.status_code in (404, 422)
    assert b"create_app" not in response.content


def test_the_chart_library_adds_no_style_sheet_that_the_pages_do_not_stand_in_for(tuned):
    library = tuned.get("/static/plotly.min.js").text
    assert set(re.findall(r'getElementById\("([0-9a-f]{32,64})"\)', library)) == set(CHART_STYLE_IDS)
    assert ".no-inline-styles" in library


def study_chart(client, name, **params):
    query = {"gpu": "NVIDIA H200", "shape": "N=1,H=96,T=8192", "kernel": "k2", **params}
    return client.get(f"/charts/{name}", params=query)


def test_the_history_has_every_trial_and_the_best_so_far(tuned):
    figure = study_chart(tuned, "history").json()
    trials, best = figure["data"][:2]
    assert (trials["name"], best["name"]) == ("trial", "best so far")
    times = [300.0 + 10 * (n % 5) for n in range(12)]
    assert _numbers(trials["y"]) == times
    assert _numbers(best["y"]) == [min(times[: n + 1]) for n in range(12)]
    assert figure["layout"]["yaxis"]["title"]["text"] == "K2 median, µs"


def test_importances_and_parallel_coordinates_are_of_what_varies(tuned):
    importances = study_chart(tuned, "importances").json()
    shown = set(importances["data"][0]["y"])
    assert "stages_in" in shown
    assert "segments" not in shown, "it is 1 everywhere"
    lines = study_chart(tuned, "parallel").json()
    assert len(lines["data"]) == 12
    assert len(lines["layout"]["xaxis"]["ticktext"]) <= charts.MAX_AXES + 1
    assert lines["layout"]["xaxis"]["ticktext"][0] == "K2 median, µs"


def test_axes_whose_names_are_cut_alike_keep_their_own_values():
    configs = [{"parameter_of_a_kernel_b": 10 * n, "parameter_of_a_kernel_a": n} for n in (1, 2, 3)]
    nothing = dict.fromkeys(Trial._fields)
    trials = [
        Trial(**nothing | {"id": n, "config_json": json.dumps(config), "outcome": "ok", "median_us": 300.0 + n})
        for n, config in enumerate(configs)
    ]
    layout = charts.parallel(trials, "us")["layout"]
    assert layout["xaxis"]["ticktext"] == ["us", "parameter of a ke...", "parameter of a ke..."]
    values = {x: {note["text"] for note in layout["annotations"] if note["x"] == x} for x in (1, 2)}
    assert values == {1: {"1", "2", "3"}, 2: {"10", "20", "30"}}


def test_a_chart_without_data_says_so(tuned):
    assert "No trial ended ok" in study_chart(tuned, "history", outcome="timeout").json()["empty"]
    assert "need" in study_chart(tuned, "importances", kernel="kda").json()["empty"]


def test_a_chart_is_not_sent_twice(tuned):
    first = study_chart(tuned, "history")
    query = {"gpu": "NVIDIA H200", "shape": "N=1,H=96,T=8192", "kernel": "k2"}
    again = tuned.get("/charts/history", params=query, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/charts/history", "/charts/secrets?gpu=a&shape=N%3D1,H%3D1,T%3D1", "/charts/trend?gpu=a", "/charts/waves?x=1"],
)
def test_a_chart_of_nothing_is_refused(tuned, is_problem, path):
    is_problem(tuned.get(path), 422, "invalid-request")


def test_pages_are_not_part_of_the_api(tuned):
    paths = tuned.get("/openapi.json").json()["paths"]
    assert {path for path in paths if not path.startswith("/v1/")} == {"/healthz", "/readyz", "/version"}


def _numbers(values):
    """A column of a figure: a list, or the chart library's packed form."""
    if isinstance(values, dict):
        import base64

        import numpy as np

        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).tolist()
    return values


ADDRESSES = st.sampled_from(
    (
        "/",
        "/configs",
        "/profiles",
        "/studies",
        "/waves",
        "/trends",
        "/trends/regressions",
        "/trends/regressions/1",
        "/nights",
        "/nights/1",
        "/compare",
        "/charts/waves",
    )
)
NAMES = (
    "gpu",
    "q",
    "dtype",
    "varlen",
    "status",
    "sort",
    "page",
    "download",
    "stage",
    "kernel",
    "state",
    "trigger",
    "served",
)
VALUES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ("configs:-speedup", "trends:shape", "runs:2", "configs:9999", "waves.csv", "heatmap.json", "k1", "bf16")
    ),
    st.sampled_from(
        ("NVIDIA H200", "yes", "stale", "done", "N=1", "' OR 1=1 --", "\x00", "%s", "{{7*7}}", "../../etc")
    ),
)


def fuzz(max_examples):
    """The same examples every time, however long they take."""
    ignored = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=max_examples, derandomize=True, deadline=None, suppress_health_check=ignored)


@fuzz(150)
@given(path=ADDRESSES, query=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_no_address_breaks_a_page(tuned, path, query):
    response = tuned.get(path, params=query, headers=HTML)
    assert response.status_code in (200, 404, 422), (path, query, response.text[:500])
    assert "49" not in re.findall(r'value="([^"]*)"', response.text)


@fuzz(80)
@given(
    page=st.sampled_from(("configs", "profiles", "studies", "trends", "trends/regressions", "nights")),
    gpu=st.one_of(st.text(max_size=20), st.just("NVIDIA H200")),
    shape=st.one_of(st.text(max_size=30), st.sampled_from(("N=1,H=96,T=8192", "T=1,H=2,N=3", "N=1,H=1,T=0"))),
)
def test_no_key_breaks_a_page(tuned, page, gpu, shape):
    response = tuned.get(f"/{page}/{quote(gpu, safe='')}/{quote(shape, safe='')}", headers=HTML)
    assert response.status_code in (200, 404, 422), (page, gpu, shape, response.text[:500])
