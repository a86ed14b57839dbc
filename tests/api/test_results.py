"""POST /v1/results: what remote tuners measured is checked, stored once, audited, and promotes nothing."""

import copy
import json
import math
from dataclasses import replace
from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest

from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store import queries
from kdatune_tuner.store.access import page_audit
from kdatune_tuner.store.engine import reading

URL = "/v1/results"
NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def posted(helpers):
    """A report with one result of each kernel and one that failed."""
    whole = helpers.configs_for(helpers.SHAPE, helpers.H200, 8)[7]
    common = {"shape": {"N": 1, "H": 96, "T": 8192}, "measured_at": (NOW - timedelta(hours=1)).isoformat()}
    ok = {"outcome": "ok", "median_us": 610.25, "p20_us": 609.0, "p80_us": 612.5, "sample_count": 15}
    return {
        "gpu": to_json(helpers.H200),
        "build": to_json(helpers.BUILD),
        "results": [
            {"kernel": "kda", "config": to_json(whole), **common, **ok, "o_error_ratio": 0.5, "registers": 168},
            {"kernel": "k1", "config": to_json(K1Config(maxnreg=96)), **common, **ok, "regime": "L2-cold, CUDA graph"},
            {"kernel": "k2", "config": to_json(K2Config()), **common, "outcome": "timeout", "detail": "no end"},
        ],
    }


@pytest.fixture
def post(client, make_token):
    token = make_token("results:write")

    def send(document, **headers):
        return client.post(URL, json=document, headers={"Authorization": f"Bearer {token}", **headers})

    return send


def stored(shelf):
    with reading(shelf.engine) as s:
        return queries.page_measurements(s)


def test_results_are_stored_as_they_were_measured(post, posted, shelf, helpers):
    answer = post(posted, **{"X-Request-ID": "night-1"})
    assert (answer.status_code, answer.json()) == (
        200,
        {"stored_count": 3, "known_count": 0, "measurement_ids": [1, 2, 3]},
    )
    whole, k1, k2 = stored(shelf)
    assert [row.kernel for row in (whole, k1, k2)] == ["kda", "k1", "k2"]
    assert {row.shape for row in (whole, k1, k2)} == {helpers.SHAPE}
    assert whole.config_json == canonical(posted["results"][0]["config"])
    assert (whole.median_us, whole.p20_us, whole.p80_us, whole.sample_count) == (610.25, 609.0, 612.5, 15)
    assert (whole.o_error_ratio, whole.registers, whole.estimated) == (0.5, 168, False)
    assert k1.config_json == canonical(K1Config(maxnreg=96))
    assert (k2.outcome, k2.detail, k2.median_us) == ("timeout", "no end", None)
    assert whole.measured_at == NOW - timedelta(hours=1)
    with reading(shelf.engine) as s:
        assert queries.find_build(s, whole.build_id) == helpers.BUILD
        (audit,) = [row for row in page_audit(s) if row.action == "results.post"]
    assert audit.actor.startswith("tester (")
    assert (audit.target, audit.request_id) == ("measurements 1 to 3", "night-1")
    assert audit.detail == {"gpu": "NVIDIA H200", "results": 3, "stored": 3}


def test_nothing_is_promoted_by_a_post(post, posted, client, shelf, helpers):
    posted["results"][0]["median_us"] = posted["results"][0]["p20_us"] = posted["results"][0]["p80_us"] = 1e-3
    assert post(posted).status_code == 200
    with reading(shelf.engine) as s:
        assert (queries.generation(s), queries.page_promotions(s)) == (0, [])
    body = client.get("/v1/configs/resolve", params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert body["match"] == "default"


def test_posting_again_adds_nothing(post, posted, shelf):
    first = post(posted).json()
    again = post(posted).json()
    assert again == {"stored_count": 0, "known_count": 3, "measurement_ids": first["measurement_ids"]}
    more = copy.deepcopy(posted)
    more["results"][0]["median_us"] = 611.0
    assert post(more).json() == {"stored_count": 1, "known_count": 2, "measurement_ids": [4, 2, 3]}
    # the same moment, written with another offset
    at = datetime.fromisoformat(more["results"][0]["measured_at"])
    more["results"][0]["measured_at"] = at.astimezone().isoformat()
    assert post(more).json()["known_count"] == 3
    later = copy.deepcopy(posted)
    later["results"] = [posted["results"][0] | {"measured_at": NOW.isoformat()}]
    assert post(later).json()["stored_count"] == 1
    twice = copy.deepcopy(posted)
    twice["results"] = [posted["results"][2] | {"detail": "twice in one post"}] * 2
    assert post(twice).json() == {"stored_count": 1, "known_count": 1, "measurement_ids": [6, 6]}
    assert len(stored(shelf)) == 6
    with reading(shelf.engine) as s:
        assert len([row for row in page_audit(s) if row.action == "results.post"]) == 4


def changed(path, value):
    def change(document):
        *way, last = path
        for step in way:
            document = document[step]
        if value is KeyError:
            del document[last]
        else:
            document[last] = value

    return change


SMEM_EATER = to_json(
    LaunchConfig(
        K1Config(),
        K2Config(
            "ws",
            128,
            4,
            8,
            4,
            consumers=2,
            load_warps=1,
            store_warps=1,
            maxnreg=168,
            consumer_regs=232,
            load_regs=24,
            store_regs=24,
        ),
    )
)


def over_the_shared_memory(document):
    document["results"][0] |= {"config": SMEM_EATER, "shape": {"N": 1, "H": 96, "T": 8192, "K": 256}}


BAD = {
    "gpu missing": (changed(["gpu"], KeyError), "/gpu"),
    "gpu a name": (changed(["gpu"], "NVIDIA H200"), "/gpu"),
    "gpu of more fields": (changed(["gpu", "x"], 1), "/gpu"),
    "gpu with another SM count": (changed(["gpu", "sm_count"], 78), "/gpu/sm_count"),
    "gpu of another architecture": (changed(["gpu", "compute_capability"], "9.9"), "/results/0/config"),
    "gpu with more shared memory": (changed(["gpu", "smem_per_block_bytes"], 1 << 20), "/gpu/smem_per_block_bytes"),
    "gpu with more warps": (changed(["gpu", "warps_per_sm"], 128), "/gpu/warps_per_sm"),
    "gpu split without saying so": (changed(["gpu", "mig_profile"], "1g.10gb"), "/gpu/mig_profile"),
    "gpu without a name": (changed(["gpu", "name"], ""), "/gpu/name"),
    "gpu with a long name": (changed(["gpu", "name"], "x" * 201), "/gpu/name"),
    "gpu with a NUL": (changed(["gpu", "name"], "a\0b"), "/gpu/name"),
    "build missing": (changed(["build"], KeyError), "/build"),
    "build short of a field": (changed(["build", "triton"], KeyError), "/build"),
    "build with a long text": (changed(["build", "driver"], "x" * 101), "/build/driver"),
    "build with an empty text": (changed(["build", "driver"], ""), "/build/driver"),
    "no results": (changed(["results"], []), "/results"),
    "more than is said": (changed(["promote"], True), "/promote"),
    "kernel unknown": (changed(["results", 0, "kernel"], "k9"), "/results/0/kernel"),
    "shape without T": (changed(["results", 0, "shape", "T"], KeyError), "/results/0/shape"),
    "shape out of range": (changed(["results", 0, "shape", "N"], 0), "/results/0/shape"),
    "config of another kernel": (changed(["results", 0, "config"], to_json(K1Config())), "/results/0"),
    "config a text": (changed(["results", 0, "config"], "{}"), "/results/0"),
    "config with a float": (changed(["results", 1, "config", "num_warps"], 2.0), "/results/1"),
    "config without a field": (changed(["results", 1, "config", "maxnreg"], KeyError), "/results/1"),
    "config out of the space": (changed(["results", 1, "config", "num_warps"], 3), "/results/1/config"),
    "config over the shared memory": (over_the_shared_memory, "/results/0/config"),
    "outcome unknown": (changed(["results", 0, "outcome"], "fine"), "/results/0/outcome"),
    "ok without a time": (changed(["results", 0, "median_us"], None), "/results/0"),
    "a failure with a time": (changed(["results", 2, "median_us"], 5.0), "/results/2"),
    "time zero": (changed(["results", 0, "median_us"], 0), "/results/0/median_us"),
    "time negative": (changed(["results", 0, "median_us"], -1), "/results/0/median_us"),
    "time a text": (changed(["results", 0, "median_us"], "610"), "/results/0/median_us"),
    "time a bool": (changed(["results", 0, "median_us"], True), "/results/0/median_us"),
    "time of a quarter of an hour": (changed(["results", 0, "median_us"], 1.1e9), "/results/0/median_us"),
    "quantiles upside down": (changed(["results", 0, "p20_us"], 700.0), "/results/0"),
    "ok with a wrong output": (changed(["results", 0, "o_error_ratio"], 1.01), "/results/0"),
    "occupancy above all": (changed(["results", 0, "occupancy_pct"], 101), "/results/0/occupancy_pct"),
    "count negative": (changed(["results", 0, "registers"], -1), "/results/0/registers"),
    "count huge": (changed(["results", 0, "smem_bytes"], 1 << 31), "/results/0/smem_bytes"),
    "detail long": (changed(["results", 2, "detail"], "x" * 2001), "/results/2/detail"),
    "detail with a NUL": (changed(["results", 2, "detail"], "a\0b"), "/results/2"),
    "moment without a zone": (changed(["results", 0, "measured_at"], "2026-11-29T22:31:00"), "/results/0/measured_at"),
    "moment in the future": (
        changed(["results", 0, "measured_at"], (NOW + timedelta(days=1)).isoformat()),  # a run of all tests takes long
        "/results/0",
    ),
    "moment long ago": (changed(["results", 0, "measured_at"], "1999-01-01T00:00:00Z"), "/results/0"),
    "moment missing": (changed(["results", 0, "measured_at"], KeyError), "/results/0/measured_at"),
    "more fields": (changed(["results", 0, "gain"], 2.0), "/results/0/gain"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_result_is_named_and_nothing_is_stored(post, posted, shelf, is_problem, name):
    change, pointer = BAD[name]
    change(posted)
    problem = is_problem(post(posted), 422, "invalid-request")
    assert problem["errors"][0]["pointer"] == pointer
    assert stored(shelf) == []
    with reading(shelf.engine) as s:
        assert queries.gpus(s) == []
        assert [row.action for row in page_audit(s)] == ["token.create"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_time_that_is_no_number_is_refused(client, posted, make_token, is_problem, value):
    body = json.dumps(posted).replace("610.25", value).encode()
    headers = {"Authorization": f"Bearer {make_token()}", "Content-Type": "application/json"}
    response = client.post(URL, content=body, headers=headers)
    is_problem(response, 422, "invalid-request")


def test_a_card_that_is_known_only_from_here_stays_what_it_was(post, posted, is_problem):
    card = gpu_of("NVIDIA H300", "9.0", 140, 1 << 37)
    assert post(posted | {"gpu": to_json(card)}).status_code == 200
    problem = is_problem(post(posted | {"gpu": to_json(replace(card, sm_count=132))}), 422, "invalid-request")
    assert "NVIDIA H300 has 140" in problem["detail"]


def test_five_hundred_results_are_a_post(post, posted, is_problem):
    result = posted["results"][1]
    posted["results"] = [result | {"median_us": 610.0 + i / 1000} for i in range(501)]
    is_problem(post(posted), 422, "invalid-request")
    posted["results"] = [r | {"p20_us": None, "p80_us": None} for r in posted["results"][:500]]
    assert post(posted).json()["stored_count"] == 500


def test_text_that_looks_like_sql_is_text(post, posted, shelf):
    evil = "'); DROP TABLE measurement; --"
    posted["results"][2]["detail"] = evil
    posted["build"]["torch"] = evil
    posted["gpu"] = to_json(gpu_of(evil, "9.0", 132))
    assert post(posted).status_code == 200
    rows = stored(shelf)
    assert (rows[2].detail, rows[2].gpu_name) == (evil, evil)
    assert math.isclose(rows[0].median_us, 610.25)
