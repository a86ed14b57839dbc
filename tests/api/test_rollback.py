"""POST /v1/promotions/{id}/rollback: what was served before is served again, by whom and why is kept."""

import pytest

from kdatune_kernels.spec import to_json
from kdatune_tuner.store import queries
from kdatune_tuner.store.access import page_audit
from kdatune_tuner.store.engine import reading


@pytest.fixture
def undo(client, make_token):
    token = make_token("promotions:write")

    def send(promotion_id, document=None, **headers):
        body = {"reason": "wrong at long sequences"} if document is None else document
        headers = {"Authorization": f"Bearer {token}", **headers}
        return client.post(f"/v1/promotions/{promotion_id}/rollback", json=body, headers=headers)

    return send


def test_what_was_served_before_is_served_again(undo, client, shelf, helpers):
    first, second = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    shelf.promote(config=first)
    shelf.promote(config=second)
    answer = undo(2, **{"X-Request-ID": "undo-1"})
    assert (answer.status_code, answer.json()) == (200, {"generation": 3, "config": to_json(first)})
    body = client.get("/v1/configs/resolve", params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert (body["config"], body["generation"]) == (to_json(first), 3)
    with reading(shelf.engine) as s:
        newest = queries.page_promotions(s)[-1]
        audit = page_audit(s)[0]
    assert (newest.decision, newest.reason) == ("rollback", "wrong at long sequences")
    assert (audit.action, audit.target, audit.request_id) == ("promotion.rollback", "promotion 2", "undo-1")
    assert audit.detail["reason"] == "wrong at long sequences"


def test_before_the_first_promotion_there_was_the_default(undo, client, shelf, helpers, is_problem):
    shelf.promote()
    assert undo(1).json() == {"generation": 2, "config": None}
    body = client.get("/v1/configs/resolve", params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert body["match"] == "default"
    assert "nothing to take back" in is_problem(undo(2), 409, "conflict")["detail"]


def test_doing_it_twice_is_a_conflict_and_changes_nothing(undo, shelf, is_problem):
    shelf.promote()
    shelf.promote(median_us=600.0)
    assert undo(2).status_code == 200
    assert "promotion 3 is served" in is_problem(undo(2), 409, "conflict")["detail"]
    is_problem(undo(1), 409, "conflict")
    with reading(shelf.engine) as s:
        assert queries.generation(s) == 3
        assert len([row for row in page_audit(s) if row.action == "promotion.rollback"]) == 1


def test_a_tie_was_never_served(undo, shelf, is_problem):
    shelf.promote()
    shelf.promote(decision="tie")
    assert "promotion 1 is served" in is_problem(undo(2), 409, "conflict")["detail"]


@pytest.mark.parametrize("promotion_id", ["7", "2147483647"])
def test_a_promotion_that_is_not_there(undo, is_problem, promotion_id):
    is_problem(undo(promotion_id), 404, "unknown-promotion")


@pytest.mark.parametrize("promotion_id", ["0", "-1", "x", "1.0", "99999999999999999999", "1'--", "%00", "1_0", " 1"])
def test_an_id_that_is_none(undo, shelf, is_problem, promotion_id):
    shelf.promote()
    is_problem(undo(promotion_id), 422, "invalid-request")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reason": ""},
        {"reason": "   "},
        {"reason": 5},
        {"reason": "x" * 501},
        {"reason": "a\0b"},
        {"reason": "x", "force": True},
        [],
    ],
)
def test_a_reason_is_needed(undo, shelf, is_problem, body):
    shelf.promote()
    is_problem(undo(1, body), 422, "invalid-request")
    with reading(shelf.engine) as s:
        assert queries.generation(s) == 1
