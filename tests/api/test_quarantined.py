"""Configs that launchers could not use: stored with their reason, listed, bounded; nothing follows of itself."""

import pytest

from kdatune_kernels.demand import Demand
from kdatune_kernels.demand import Refusal
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store import intake
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import reading

DEMAND, URL = "/v1/demand", "/v1/quarantined"


@pytest.fixture
def report(client, helpers):
    def send(config=None, reason="launch failed: out of resources", shape=None, gpu="NVIDIA H200"):
        config = config or helpers.configs_for(helpers.SHAPE, helpers.H200, 1)[0]
        item = Demand(gpu, shape or helpers.SHAPE, 1, Refusal(config, reason)).item()
        return client.post(DEMAND, json={"items": [item]})

    return send


def test_a_report_is_listed_with_its_reason_and_count(report, client, helpers):
    config = helpers.configs_for(helpers.SHAPE, helpers.H200, 1)[0]
    assert report().json()["quarantined_count"] == 1
    report(reason="an illegal memory access")
    (row,) = client.get(URL).json()["items"]
    assert (row["gpu_name"], row["kernel"], row["shape_key"]) == ("NVIDIA H200", "kda", "N=1,H=96,T=8192")
    assert (row["config"], row["config_hash"]) == (to_json(config), digest(config))
    assert (row["reason"], row["count"]) == ("an illegal memory access", 2)
    assert row["first_seen_at"] <= row["last_seen_at"]


def test_other_keys_and_configs_are_other_rows(report, client, helpers):
    first, second = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    report(first)
    report(second)
    report(first, shape=shape_of(1, 8, 64))
    report(first, gpu="A/B")
    keys = [
        (r["gpu_name"], r["shape_key"], r["config_hash"])
        for r in client.get(URL, params={"order": "oldest"}).json()["items"]
    ]
    assert keys == [
        ("NVIDIA H200", "N=1,H=96,T=8192", digest(first)),
        ("NVIDIA H200", "N=1,H=96,T=8192", digest(second)),
        ("NVIDIA H200", "N=1,H=8,T=64", digest(first)),
        ("A/B", "N=1,H=96,T=8192", digest(first)),
    ]
    assert len(client.get(URL, params={"shape": "N=1,H=8,T=64"}).json()["items"]) == 1
    assert len(client.get(URL, params={"gpu": "A/B"}).json()["items"]) == 1
    assert client.get(URL, params={"kernel": "k1"}).json()["items"] == []
    page = client.get(URL, params={"limit": 3}).json()
    rest = client.get(URL, params={"limit": 3, "cursor": page["next_cursor"]}).json()
    assert [len(page["items"]), len(rest["items"]), rest["next_cursor"]] == [3, 1, None]


def test_a_report_does_not_change_what_is_served(report, client, shelf, helpers):
    stored = shelf.promote()
    report(stored.config)
    body = client.get("/v1/configs/resolve", params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert (body["match"], body["config"]) == ("exact", to_json(stored.config))


def test_both_tables_are_bounded(report, client, shelf, helpers, monkeypatch):
    monkeypatch.setattr(intake, "MAX_DEMAND_KEYS", 3)
    monkeypatch.setattr(intake, "MAX_QUARANTINED", 1)
    first, second = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    report(first)
    report(second)
    assert [row["count"] for row in client.get(URL).json()["items"]] == [1]
    items = [{"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 96, "T": t}, "count": 2} for t in (8192, 1, 2, 3, 4)]
    answer = client.post(DEMAND, json={"items": items}).json()
    assert answer == {"item_count": 5, "key_count": 3, "quarantined_count": 0, "left_out_count": 2}
    with reading(shelf.engine) as s:
        assert sorted((row.shape.T, row.count) for row in queries.demand(s)) == [(1, 2), (2, 2), (8192, 4)]
