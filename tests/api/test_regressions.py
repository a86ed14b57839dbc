"""GET /v1/regressions and POST /v1/regressions/{id}/acknowledge."""

from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest

from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store import writes
from kdatune_tuner.store.access import page_audit
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.regressions import NewRegression
from kdatune_tuner.store.regressions import Standing
from kdatune_tuner.store.regressions import keep

BEGAN = datetime(2026, 11, 20, 2, 30, tzinfo=UTC)


@pytest.fixture
def put(shelf, helpers):
    """Keeps a finding of 5 %; gives its id."""

    def add(shape=helpers.SHAPE, *, is_served=True):
        config = helpers.configs_for(shape, helpers.H200, 1)[0]
        ids = [shelf.measure(shape, config, median_us=us) for us in (600.0, 630.0)]
        with writing(shelf.engine) as s:
            new = NewRegression(
                kernel="kda",
                gpu_id=writes.put_gpu(s, helpers.H200),
                problem_id=writes.put_problem(s, "kda", shape),
                config_json=canonical(config),
                config_hash=digest(config),
                before_us=600.0,
                after_us=630.0,
                now_us=631.0,
                change_pct=5.0,
                confidence_pct=99.9,
                last_good_at=BEGAN - timedelta(days=1),
                began_at=BEGAN,
                build_before_id=writes.put_build(s, helpers.BUILD),
                build_after_id=writes.put_build(s, helpers.BUILD),
                measurement_before_id=ids[0],
                measurement_after_id=ids[1],
                cause="driver 580.1, now 590.1",
                is_served=is_served,
            )
            (made,) = keep(s, [new], lambda row: Standing(row.is_served)).opened
        return made

    return add


@pytest.fixture
def say(client, make_token):
    token = make_token("regressions:write")

    def send(regression_id, document=None, **headers):
        headers = {"Authorization": f"Bearer {token}", **headers}
        body = {"note": "the new driver"} if document is None else document
        return client.post(f"/v1/regressions/{regression_id}/acknowledge", json=body, headers=headers)

    return send


def test_a_finding_is_listed_whole(client, put, helpers):
    made = put()
    body = client.get("/v1/regressions").json()
    (item,) = body["items"]
    assert body["next_cursor"] is None
    config = helpers.configs_for(helpers.SHAPE, helpers.H200, 1)[0]
    assert item.pop("opened_at") == item.pop("seen_at")
    assert item == {
        "id": made,
        "kernel": "kda",
        "gpu_name": "NVIDIA H200",
        "gpu_id": 1,
        "problem_id": 1,
        "shape": to_json(helpers.SHAPE),
        "shape_key": helpers.SHAPE.key(),
        "config": to_json(config),
        "config_hash": digest(config),
        "state": "open",
        "is_served": True,
        "before_us": 600.0,
        "after_us": 630.0,
        "now_us": 631.0,
        "change_pct": 5.0,
        "confidence_pct": 99.9,
        "last_good_at": "2026-11-19T02:30:00Z",
        "began_at": "2026-11-20T02:30:00Z",
        "build_before_id": 1,
        "build_after_id": 1,
        "measurement_before_id": 1,
        "measurement_after_id": 2,
        "cause": "driver 580.1, now 590.1",
        "resolved_at": None,
        "resolution": None,
        "acknowledged_at": None,
        "acknowledged_by": None,
        "note": None,
    }


def test_pages_and_filters(client, put, say):
    ids = [put(shape_of(1, 8, 1024 << n), is_served=n != 1) for n in range(3)]
    assert say(ids[0]).status_code == 200

    def got(query=""):
        return [item["id"] for item in client.get(f"/v1/regressions{query}").json()["items"]]

    assert got() == ids[::-1]
    assert got("?order=oldest") == ids
    assert got("?state=open") == [ids[2], ids[1]]
    assert got("?state=acknowledged") == [ids[0]]
    assert got("?state=resolved") == []
    assert got("?served=false") == [ids[1]]
    assert got("?shape=N=1,H=8,T=2048") == [ids[1]]
    assert got("?gpu=NVIDIA+H20") == []
    first = client.get("/v1/regressions?limit=2").json()
    assert [item["id"] for item in first["items"]] == [ids[2], ids[1]]
    assert got(f"?limit=2&cursor={first['next_cursor']}") == [ids[0]]


@pytest.mark.parametrize("query", ["state=closed", "served=2", "shape=N", "what=1", "state=open&state=open"])
def test_a_filter_that_is_none(client, is_problem, query):
    is_problem(client.get(f"/v1/regressions?{query}"), 422, "invalid-request")


def test_it_is_acknowledged_once_with_an_audit_row(client, put, say, shelf):
    made = put()
    answer = say(made, {"note": " the new driver "}, **{"X-Request-ID": "known-1"})
    body = answer.json()
    assert body["acknowledged_by"].startswith("tester (")  # and the prefix of the token
    assert (answer.status_code, body["changed"], body["note"]) == (
        200,
        True,
        "the new driver",
    )
    again = say(made, {"note": "another word"}).json()
    assert again == {**body, "changed": False}
    (item,) = client.get("/v1/regressions").json()["items"]
    assert (item["state"], item["note"], item["acknowledged_at"]) == (
        "acknowledged",
        "the new driver",
        body["acknowledged_at"],
    )
    with reading(shelf.engine) as s:
        audit = [row for row in page_audit(s) if row.action == "regression.acknowledge"]
    assert [(row.actor, row.target, row.request_id, row.detail) for row in audit] == [
        (body["acknowledged_by"], f"regression {made}", "known-1", {"note": "the new driver"})
    ]


def test_a_note_may_be_left_out(put, say):
    assert say(put(), {}).json()["note"] is None


@pytest.mark.parametrize("regression_id", ["7", "2147483647"])
def test_a_finding_that_is_not_there(say, is_problem, regression_id):
    is_problem(say(regression_id), 404, "unknown-regression")


@pytest.mark.parametrize("regression_id", ["0", "-1", "x", "1.0", "99999999999999999999"])
def test_an_id_that_is_none(say, is_problem, regression_id):
    is_problem(say(regression_id), 422, "invalid-request")


@pytest.mark.parametrize(
    "body", [{"note": ""}, {"note": " "}, {"note": 5}, {"note": "x" * 501}, {"note": "a\0b"}, {"x": 1}, []]
)
def test_a_note_that_cannot_be_kept(put, say, client, is_problem, body):
    is_problem(say(put(), body), 422, "invalid-request")
    assert client.get("/v1/regressions").json()["items"][0]["state"] == "open"
