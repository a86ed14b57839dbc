"""Profiles as the service hands them out: real counters with their units, and the kept report."""

import json
import lzma
from pathlib import Path

import pytest
from fastapi import FastAPI
from sqlalchemy import Engine

from kdatune_api.app import create_app
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.ncu.metrics import METRICS
from kdatune_tuner.ncu.metrics import stored_form
from kdatune_tuner.ncu.profiling import keep_report
from kdatune_tuner.ncu.report import read_report
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewProfile

DATA = Path(__file__).parent.parent / "data" / "ncu"


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    return tmp_path / "reports"


@pytest.fixture
def app(database_url: str, engine: Engine, reports: Path) -> FastAPI:
    return create_app(Settings(database_url=database_url, reports_dir=str(reports)), check_every_seconds=0.0)


@pytest.fixture
def recorded() -> tuple[dict, bytes]:
    index = json.loads((DATA / "h200.json").read_text())["reports"]["h200-t8192"]
    return index, lzma.decompress((DATA / "h200-t8192.ncu-rep.xz").read_bytes())


def put(shelf, **changes) -> int:
    values = {"measurement_id": shelf.measure(), "stage": "k1", "counters": {}} | changes
    with writing(shelf.engine) as s:
        return writes.add_profile(s, NewProfile(**values))


def test_the_counters_of_a_real_card_are_served_with_their_units(client, shelf, recorded) -> None:
    index, content = recorded
    stages = read_report(content)
    shape = parse_shape(index["shape"])
    for label, data in index["configs"].items():
        measurement_id = shelf.measure(
            shape, from_json(LaunchConfig, data, strict=False), median_us=index["measured_us"][label]
        )
        for stage in ("k1", "k2"):
            counters = stages[f"{stage}/{index['labels'][label][stage]}"].counters
            put(
                shelf,
                measurement_id=measurement_id,
                stage=stage,
                counters=stored_form(counters),
                issue_active_pct=counters["issue_active_pct"],
                barrier_stall_per_issue=counters["barrier_stall_per_issue"],
                ncu_version="2025.3.1.0",
                driver="580.159.04",
            )
    items = client.get("/v1/profiles", params={"shape": index["shape"], "stage": "k1", "order": "oldest"}).json()[
        "items"
    ]
    assert len(items) == 4
    default, _, eight, two = items
    assert set(default["counters"]) == {metric.field for metric in METRICS}
    assert eight["counters"]["registers"] == {"value": 103.0, "unit": "registers/thread"}
    assert (round(two["issue_active_pct"], 1), round(eight["issue_active_pct"], 1)) == (52.8, 40.9)
    assert two["barrier_stall_per_issue"] < eight["barrier_stall_per_issue"]
    assert eight["config"]["k1"]["num_warps"] == 8
    assert {item["driver"] for item in items} == {"580.159.04"}


def test_a_kept_report_is_downloaded_whole(client, shelf, reports, recorded) -> None:
    _, content = recorded
    name = keep_report(reports, content)
    profile_id = put(shelf, report_file=name)
    answer = client.get(f"/v1/profiles/{profile_id}/report")
    assert answer.status_code == 200
    assert answer.content == content
    assert answer.headers["content-type"] == "application/octet-stream"
    assert name in answer.headers["content-disposition"]
    (item,) = client.get("/v1/profiles").json()["items"]
    assert item["report_file"] == name


@pytest.mark.parametrize("name", [None, "../kdatune.db", "/etc/passwd", "0123456789abcdef.ncu-rep/..", "x.ncu-rep"])
def test_only_kept_reports_are_opened(client, shelf, name) -> None:
    profile_id = put(shelf, report_file=name)
    answer = client.get(f"/v1/profiles/{profile_id}/report")
    assert answer.status_code == 404
    assert "has no kept report; kdatune profile --keep-report keeps one" in answer.json()["detail"]


def test_a_report_that_is_kept_elsewhere(client, shelf) -> None:
    profile_id = put(shelf, report_file="0123456789abcdef.ncu-rep")
    detail = client.get(f"/v1/profiles/{profile_id}/report").json()["detail"]
    assert detail == f"the report of profile {profile_id} is not on this machine: 0123456789abcdef.ncu-rep"


def test_no_such_profile(client, shelf) -> None:
    assert client.get("/v1/profiles/4711/report").status_code == 404
    for odd in ("0", "-1", "x", "9" * 30):
        assert client.get(f"/v1/profiles/{odd}/report").status_code == 422
