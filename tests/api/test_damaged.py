"""A row that was broken by hand does not hide the others: lists and pages answer, and the log names it."""

import json
import logging

import pytest
from sqlalchemy import text

from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.intake import report_quarantine
from kdatune_tuner.store.night import start_night
from kdatune_tuner.store.records import NewProfile

HTML = {"Accept": "text/html"}
KEY = "NVIDIA%20H200/N=1,H=96,T=8192"
BROKEN = '{"k1": {"variant'


@pytest.fixture
def four(shelf, helpers):
    """Four configs of one key, each measured, promoted and profiled in a run of its own."""
    for number, config in enumerate(helpers.configs_for(helpers.SHAPE, helpers.H200, 4)):
        run = shelf.run()
        stored = shelf.promote(config=config, median_us=600.0 - number, run_id=run)
        with writing(shelf.engine) as s:
            writes.finish_run(s, run, outcome_counts={"ok": 1}, gpu_seconds=1.0, state="done")
            counters = {"issue_active_pct": {"value": 50.0, "unit": "%"}}
            for stage in ("k1", "k2"):
                writes.add_profile(
                    s,
                    NewProfile(
                        measurement_id=stored.measurement_id, stage=stage, counters=counters, issue_active_pct=50.0
                    ),
                )
            report_quarantine(s, "NVIDIA H200", "kda", shape_of(1, 8, 1024 + number), config, "does not launch")


@pytest.fixture
def broken(shelf, four):
    """Breaks row 2 of some tables, as an editor or a bad disk would; SQLite's JSON columns as well."""
    with shelf.engine.begin() as connection:
        for table in ("measurement", "promotion", "quarantine"):
            connection.execute(text(f"UPDATE {table} SET config_json = :text WHERE id = 2"), {"text": BROKEN})
        if connection.dialect.name == "sqlite":  # PostgreSQL lets no such text into a JSON column
            connection.execute(text("UPDATE run SET outcome_counts = :text WHERE id = 2"), {"text": '{"ok": '})
            connection.execute(text("UPDATE profile SET counters = :text WHERE id = 5"), {"text": "{"})


@pytest.mark.parametrize(
    ("path", "ids"),
    [
        ("/v1/measurements", [4, 3, 1]),
        ("/v1/promotions", [4, 3, 1]),
        ("/v1/quarantined", [4, 3, 1]),
        ("/v1/gpus", [1]),
    ],
)
def test_a_list_passes_it_over_and_the_log_names_it(client, broken, caplog, path, ids):
    with caplog.at_level(logging.WARNING, "kdatune_tuner.store.damaged"):
        answer = client.get(path)
    assert answer.status_code == 200
    assert [item["id"] for item in answer.json()["items"]] == ids
    if len(ids) > 1:
        table = {"/v1/quarantined": "quarantine"}.get(path, path.removeprefix("/v1/").removesuffix("s"))
        assert f"{table} 2 is damaged (config_json of {table} 2 is no JSON object" in caplog.text


def test_runs_and_profiles_as_well(client, shelf, broken):
    sqlite = shelf.engine.dialect.name == "sqlite"
    runs = [item["id"] for item in client.get("/v1/runs").json()["items"]]
    assert runs == ([4, 3, 1] if sqlite else [4, 3, 2, 1])
    profiles = [item["id"] for item in client.get("/v1/profiles").json()["items"]]
    # 3 and 4 are of measurement 2, whose config cannot be read
    assert profiles == ([8, 7, 6, 2, 1] if sqlite else [8, 7, 6, 5, 2, 1])


@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_pages_hold_as_many_as_asked_for_and_miss_none(client, broken, order):
    seen, cursor = [], None
    while True:
        query = {"limit": 1, "order": order} | ({"cursor": cursor} if cursor else {})
        page = client.get("/v1/promotions", params=query).json()
        assert len(page["items"]) == 1
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ([4, 3, 1] if order == "newest" else [1, 3, 4])


def test_a_table_of_nothing_else_is_an_empty_page(client, shelf, four):
    with shelf.engine.begin() as connection:
        connection.execute(text("UPDATE measurement SET config_json = '[1]'"))
    assert client.get("/v1/measurements").json() == {"items": [], "next_cursor": None}


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/configs",
        f"/configs/{KEY}",
        "/profiles",
        f"/profiles/{KEY}",
        "/studies",
        f"/studies/{KEY}?kernel=kda",
        "/waves?gpu=NVIDIA+H200",
        "/trends",
        f"/trends/{KEY}",
        "/trends/regressions",
        "/nights",
        "/compare?shape_a=N%3D1,H%3D96,T%3D8192&gpu_a=NVIDIA+H200&as_b=m2",
        "/compare?shape_a=N%3D1,H%3D96,T%3D8192&gpu_a=NVIDIA+H200&as_b=previous",
        "/charts/history?gpu=NVIDIA+H200&shape=N%3D1,H%3D96,T%3D8192&kernel=kda",
        "/charts/waves?gpu=NVIDIA+H200",
    ],
)
@pytest.mark.parametrize("newest", [False, True], ids=["in between", "what is served"])
def test_every_page_answers(client, shelf, broken, path, newest):
    if newest:
        with shelf.engine.begin() as connection:
            for table in ("measurement", "promotion"):
                connection.execute(text(f"UPDATE {table} SET config_json = :text WHERE id = 4"), {"text": BROKEN})
    answer = client.get(path, headers=HTML)
    assert answer.status_code == 200, answer.text


def test_a_damaged_promotion_is_marked_in_the_list_of_configs(client, shelf, broken):
    with shelf.engine.begin() as connection:
        connection.execute(text("UPDATE promotion SET config_json = :text WHERE id = 4"), {"text": BROKEN})
    (row,) = client.get("/configs", params={"download": "configs.json"}).json()["items"]
    assert (row["state"], row["gain_low"]) == ("damaged", None)


def test_what_can_be_served_is_served(client, broken, helpers):
    body = client.get("/v1/configs/resolve", params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert body["config"] == to_json(helpers.configs_for(helpers.SHAPE, helpers.H200, 4)[3])


def test_a_search_resumes_without_it(shelf, broken):
    with reading(shelf.engine) as s:
        known = queries.measured(s, "kda", 1, 1, 1)
    assert len(known) == 3
    assert all(json.loads(row.config_json) for row in known.values())


def test_a_night_whose_report_is_damaged_says_so(client, shelf, helpers):
    with writing(shelf.engine) as s:
        start_night(
            s,
            gpu_id=writes.put_gpu(s, helpers.H200),
            build_id=writes.put_build(s, helpers.BUILD),
            backend="gpu",
            host="tuner-1",
            budget_seconds=60.0,
            report={"format": 1},
        )
    if shelf.engine.dialect.name == "sqlite":
        with shelf.engine.begin() as connection:
            connection.execute(text("UPDATE night SET report = '{'"))
    assert client.get("/nights", headers=HTML).status_code == 200
    page = client.get("/nights/1", headers=HTML)
    assert page.status_code == 200
    assert ("is damaged" in page.text) == (shelf.engine.dialect.name == "sqlite")


def test_a_night_whose_report_holds_odd_values_is_shown(client, shelf, helpers):
    odd = 10**400
    with writing(shelf.engine) as s:
        start_night(
            s,
            gpu_id=writes.put_gpu(s, helpers.H200),
            build_id=writes.put_build(s, helpers.BUILD),
            backend="gpu",
            host="tuner-1",
            budget_seconds=60.0,
            report={
                "format": 1,
                "spent_seconds": odd,
                "findings": [{"kind": {}, "text": [1], "shape": "N=1", "night": odd}, 5],
                "plan": [{"seconds": -odd, "value": "x", "shape": 7}],
                "reference": {"points": [{"ratio": odd, "median_us": odd, "usual_us": None}, {"ratio": 0}]},
            },
        )
    for path in ("/nights", "/nights/1"):
        assert client.get(path, headers=HTML).status_code == 200, path


def test_a_night_whose_report_is_no_object_is_shown(client, shelf, helpers):
    with writing(shelf.engine) as s:
        ids = {"gpu_id": writes.put_gpu(s, helpers.H200), "build_id": writes.put_build(s, helpers.BUILD)}
        start_night(s, **ids, backend="gpu", host="tuner-1", budget_seconds=60.0, report=["format"])
    assert client.get("/nights", headers=HTML).status_code == 200
    assert "is damaged" in client.get("/nights/1", headers=HTML).text
