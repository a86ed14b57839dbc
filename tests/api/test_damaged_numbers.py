"""A number that was overwritten by hand with text hides no other row: every list and page answers, the log names the row."""

from collections.abc import Iterator
from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest
from sqlalchemy import BigInteger
from sqlalchemy import Double
from sqlalchemy import Engine
from sqlalchemy import Integer
from sqlalchemy import text
from starlette.testclient import TestClient

from kdatune_api.app import create_app
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import night
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.intake import report_quarantine
from kdatune_tuner.store.models import Base
from kdatune_tuner.store.records import NewProfile
from kdatune_tuner.store.records import RunState
from kdatune_tuner.store.regressions import NewRegression
from kdatune_tuner.store.regressions import Standing
from kdatune_tuner.store.regressions import keep

NOW = datetime(2026, 11, 20, 3, tzinfo=UTC)
KEY = "NVIDIA%20H200/N=1,H=96,T=8192"
QUERY = "gpu=NVIDIA+H200&shape=N%3D1,H%3D96,T%3D8192"
JSON_PATHS = [
    "/v1/configs/resolve?gpu=NVIDIA+H200&kernel=kda&N=1&H=96&T=8192",
    "/v1/configs/resolve?gpu=NVIDIA+H200&kernel=kda&N=1&H=96&T=4096",
    "/v1/snapshots/NVIDIA%20H200",
    "/v1/measurements",
    "/v1/promotions",
    "/v1/runs",
    "/v1/profiles",
    "/v1/gpus",
    "/v1/regressions",
    "/v1/quarantined",
    "/metrics",
    "/readyz",
]
PAGES = [
    "/",
    "/configs",
    "/configs?download=configs.json",
    f"/configs/{KEY}",
    "/profiles",
    f"/profiles/{KEY}",
    "/studies",
    f"/studies/{KEY}?kernel=kda",
    f"/studies/{KEY}?kernel=k1",
    "/waves?gpu=NVIDIA+H200",
    "/trends",
    f"/trends/{KEY}",
    "/trends/regressions",
    "/trends/regressions/1",
    "/trends/regressions/2",
    "/nights",
    "/nights/1",
    "/nights/2",
    "/compare?shape_a=N%3D1,H%3D96,T%3D8192&gpu_a=NVIDIA+H200&as_b=m2",
    "/compare?shape_a=N%3D1,H%3D96,T%3D8192&gpu_a=NVIDIA+H200&as_b=previous",
    *(
        f"/charts/{name}?{QUERY}&kernel={kernel}"
        for kernel in ("kda", "k2")
        for name in ("history", "importances", "parallel")
    ),
    f"/charts/trend?{QUERY}",
    "/charts/waves?gpu=NVIDIA+H200",
]
_NUMBERS = (Integer, BigInteger, Double)


def numbers_of(table: str) -> list[str]:
    """The columns of a table that hold a number; ids are what a row is found by."""
    columns = Base.metadata.tables[table].columns
    return [c.name for c in columns if isinstance(c.type, _NUMBERS) and not (c.primary_key or c.foreign_keys)]


TABLES = sorted(name for name in Base.metadata.tables if numbers_of(name))


@pytest.fixture
def local(sqlite: Engine) -> Iterator[TestClient]:
    settings = Settings(database_url=str(sqlite.url))
    with TestClient(create_app(settings, check_every_seconds=0.0), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def full(sqlite: Engine, local_shelf, helpers) -> Engine:
    """At least two rows of every table that holds numbers."""
    shelf = type(local_shelf)(sqlite)
    configs = helpers.configs_for(helpers.SHAPE, helpers.H200, 4)
    for number, config in enumerate(configs):
        run = shelf.run(budget_trials=10, budget_seconds=60.0, seed=1)
        values = {
            "run_id": run, "p20_us": 590.0, "p80_us": 620.0, "sample_count": 9, "registers": 90, "spills": 0,
            "smem_bytes": 1024, "occupancy_pct": 50.0, "sm_clock_mhz": 1980.0, "requested_num_warps": 4,
            "effective_num_warps": 4, "measured_at": NOW - timedelta(days=number),
        }  # fmt: skip
        shelf.measure(config=config, kernel="k1", median_us=200.0 + number, **values)
        shelf.measure(config=config, kernel="k2", median_us=400.0 + number, **values)
        stored = shelf.promote(config=config, median_us=600.0 - number, nearest_regret=0.1, **values)
        with writing(sqlite) as s:
            writes.finish_run(s, run, outcome_counts={"ok": 3}, gpu_seconds=1.0, state="done")
            counters = {"issue_active_pct": {"value": 50.0, "unit": "%"}}
            for stage in ("k1", "k2"):
                profile = NewProfile(
                    measurement_id=stored.measurement_id, stage=stage, counters=counters, issue_active_pct=50.0,
                    barrier_stall_per_issue=0.5,
                )  # fmt: skip
                writes.add_profile(s, profile)
            shape = shape_of(1, 8, 1024 + number)
            report_quarantine(s, "NVIDIA H200", "kda", shape, config, "does not launch")
            writes.report_demand(s, "NVIDIA H200", "kda", shape, 5)
    with writing(sqlite) as s:
        ids = {"gpu_id": 1, "build_id": 1}
        for number in range(2):
            night_id = night.start_night(
                s, **ids, backend="gpu", host="tuner-1", budget_seconds=60.0, report={"format": 1}
            )
            night.save_night(s, night_id, report={"format": 1}, state=RunState.DONE, machine_ratio=1.0, exit_code=0)
            night.add_reference(
                s,
                night.ReferenceRow(
                    night_id=night_id, **ids, backend="gpu", shape_key="N=1,H=96,T=8192", config_hash="x",
                    outcome="ok", detail=None, median_us=600.0, p20_us=590.0, p80_us=620.0, sample_count=9,
                    sm_clock_mhz=1980.0, throttle_reasons=None, measured_at=NOW - timedelta(days=number),
                ),
            )  # fmt: skip
            night.add_check(
                s,
                night.CheckRow(
                    night_id=night_id, **ids, problem_id=1, config_hash=digest(configs[0]), against_hash=None,
                    outcome="ok", measured_us=600.0, against_us=610.0, expected_us=600.0, machine_ratio=1.0,
                    verdict=night.Verdict.OK, checked_at=NOW,
                ),
            )  # fmt: skip
        steps = [
            NewRegression(
                kernel="kda", gpu_id=1, problem_id=1, config_json="{}", config_hash=digest(config), before_us=600.0,
                after_us=630.0, now_us=630.0, change_pct=5.0, confidence_pct=99.9, last_good_at=NOW, began_at=NOW,
                build_before_id=1, build_after_id=1, measurement_before_id=1, measurement_after_id=2, cause="unknown",
                is_served=True,
            )
            for config in configs[:3]
        ]  # fmt: skip
        keep(s, steps, lambda _: Standing(True))
    return sqlite


def overwrite(engine: Engine, table: str, columns: list[str], row_id: int = 2) -> None:
    changes = ", ".join(f"{column} = 'abc'" for column in columns)
    with engine.begin() as connection:
        connection.execute(text("PRAGMA ignore_check_constraints = ON"))
        connection.execute(text(f"UPDATE {table} SET {changes} WHERE id = {row_id}"))
        connection.execute(text("PRAGMA ignore_check_constraints = OFF"))


@pytest.mark.parametrize(
    ("table", "column", "path"),
    [
        ("measurement", "p20_us", "/v1/measurements"),
        ("promotion", "gain", "/v1/promotions"),
        ("promotion", "generation", "/v1/promotions"),
        ("run", "seed", "/v1/runs"),
        ("profile", "issue_active_pct", "/v1/profiles"),
        ("regression", "now_us", "/v1/regressions"),
        ("quarantine", "count", "/v1/quarantined"),
    ],
)
def test_a_list_passes_it_over_and_the_log_names_it(full, local, caplog, table, column, path) -> None:
    before = [item["id"] for item in local.get(path).json()["items"]]
    overwrite(full, table, [column])
    answer = local.get(path)
    assert answer.status_code == 200
    assert [item["id"] for item in answer.json()["items"]] == [one for one in before if one != 2]
    assert f"{table} 2 is damaged ({column} is no number: 'abc')" in caplog.text


# what is about the row itself says that there is none
_OF_ROW_2 = {"night": "/nights/2", "regression": "/trends/regressions/2"}


@pytest.mark.parametrize("table", [name for name in TABLES if name not in ("claim", "gpu", "problem")])
@pytest.mark.parametrize("newest", [False, True])
def test_every_page_answers(full, local, table, newest) -> None:
    with full.connect() as connection:
        row_id = connection.scalar(text(f"SELECT max(id) FROM {table}")) if newest else 2
    overwrite(full, table, numbers_of(table), row_id)
    for path in (*JSON_PATHS, *PAGES):
        answer = local.get(path, headers={} if path in JSON_PATHS else {"Accept": "text/html"})
        of_row = row_id == 2 and path == _OF_ROW_2.get(table)
        assert answer.status_code == (404 if of_row else 200), (path, answer.text[:300])


@pytest.mark.parametrize("column", ["sm_count", "l2_bytes"])
def test_a_card_is_passed_over(full, local, column) -> None:
    overwrite(full, "gpu", [column], 1)
    assert local.get("/v1/gpus").json()["items"] == []
    for path in (*JSON_PATHS, *PAGES):
        assert local.get(path).status_code in (200, 404), path
