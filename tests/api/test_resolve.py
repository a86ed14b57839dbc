"""GET /v1/configs/resolve: right values, on both databases."""

import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter
from sqlalchemy import event
from starlette.testclient import TestClient

from kdatune_api.app import create_app
from kdatune_api.schemas import Resolved
from kdatune_kernels.match import NEAREST_REGRET
from kdatune_kernels.match import find
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.queries import champions

URL = "/v1/configs/resolve"


def strict(body):
    """The answer fits its declared model, key for key."""
    model = TypeAdapter(Resolved).validate_json(json.dumps(body), strict=True)
    assert set(body) == set(Resolved.model_fields)
    return model


def test_an_exact_answer_says_all_it_knows(client, shelf, helpers):
    stored = shelf.promote(sample_count=15)
    body = client.get(URL, params={"gpu": "NVIDIA H200", "N": 1, "H": 96, "T": 8192}).json()
    strict(body)
    assert body["config"] == to_json(stored.config)
    assert from_json(LaunchConfig, body["config"]) == stored.config
    assert (body["match"], body["gpu_level"], body["reason"]) == ("exact", "exact", "tuned for this shape")
    assert (body["expected_regret"], body["generation"]) == (1.0, stored.generation)
    assert (body["measured_us"], body["estimated"], body["default_us"]) == (610.25, False, 625.5)
    assert (body["stale"], body["stale_reason"]) == (False, None)
    provenance = body["provenance"]
    assert provenance["gpu"] == to_json(helpers.H200)
    assert provenance["shape"] == to_json(helpers.SHAPE)
    assert provenance["build"] == to_json(helpers.BUILD)
    assert provenance["generation"] == stored.generation
    assert provenance["measured_at"].endswith("Z")
    assert body["requested"]["gpu_source"] == "tuned"
    assert body["requested"]["shape_key"] == "N=1,H=96,T=8192"


def test_nothing_tuned_gives_the_default(client, helpers):
    body = client.get(URL, params={"gpu": "NVIDIA B200", "N": 2, "H": 4, "T": 100, "dtype": "fp16"}).json()
    strict(body)
    shape = shape_of(2, 4, 100, dtype="fp16")
    assert body["config"] == to_json(default_config(shape, KNOWN_GPUS["NVIDIA B200"]))
    assert (body["match"], body["gpu_level"], body["generation"]) == ("default", "none", 0)
    assert (body["measured_us"], body["default_us"], body["provenance"]) == (None, None, None)
    assert body["estimated"] is False
    assert body["requested"]["gpu_source"] == "known"


def test_a_time_that_is_a_sum_says_so(client, shelf):
    shelf.promote(shape_of(1, 96, 8192), estimated=True)
    shelf.promote(shape_of(1, 8, 8192))
    told = [
        strict(client.get(URL, params={"gpu": "NVIDIA H200", "N": 1, "H": heads, "T": tokens}).json())
        for heads, tokens in ((96, 8192), (96, 8000), (8, 8192))
    ]
    assert [(one.match, one.measured_us, one.estimated) for one in told] == [
        ("exact", 610.25, True),
        ("bucket", 610.25, True),
        ("exact", 610.25, False),
    ]


MATCHES = {
    shape_of(1, 96, 8192): "exact",
    shape_of(1, 96, 8000): "bucket",
    shape_of(1, 80, 8192): "nearest",
    shape_of(1, 64, 8192): "default",
    shape_of(1, 96, 16384): "nearest",
    shape_of(1, 96, 8192, initial_state=False): "nearest",
    shape_of(1, 8, 256): "default",
    shape_of(1, 96, 8192, dtype="fp16"): "default",
    shape_of(1, 96, 8192, K=64): "default",
}


def test_a_launcher_answers_from_the_snapshot_as_the_service_does(client, shelf, helpers):
    """Also what is expected of a nearest answer, and where it is refused."""
    configs = helpers.configs_for(helpers.SHAPE, helpers.H200, 3)
    shelf.promote(helpers.SHAPE, configs[0], nearest_regret=1.0125)
    shelf.promote(shape_of(1, 160, 8192), configs[1], nearest_regret=1.5)  # there the default takes 625.5 of 610.25 us
    shelf.promote(shape_of(4, 36, 65536), configs[2])
    snapshot = parse_snapshot(client.get("/v1/snapshots/NVIDIA H200").content)
    assert len(snapshot.champions) == 3
    answers = {}
    for asked in (*MATCHES, shape_of(1, 150, 8192), shape_of(4, 36, 60000), shape_of(4, 36, 32768)):
        body = client.get(URL, params=helpers.query(asked, "NVIDIA H200")).json()
        found = find(snapshot.champions, asked, helpers.H200)
        told = (found.match, found.expected_regret, found.reason, to_json(found.config))
        assert (body["match"], body["expected_regret"], body["reason"], body["config"]) == told, asked.key()
        answers[asked] = (body["match"], body["expected_regret"])
    assert answers[helpers.SHAPE] == ("exact", 1.0)
    assert answers[shape_of(1, 80, 8192)] == ("nearest", 1.0125)
    # nearest to a shape where nearest answers cost more than the default: the next one answers
    assert answers[shape_of(1, 150, 8192)] == ("nearest", NEAREST_REGRET)
    assert answers[shape_of(4, 36, 60000)] == ("bucket", NEAREST_REGRET)


def test_the_answer_is_that_of_match_find(client, shelf, helpers):
    configs = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    for shape, config in zip((helpers.SHAPE, shape_of(4, 32, 65536)), configs, strict=True):
        shelf.promote(shape, config)
    for asked, match in MATCHES.items():
        with reading(shelf.engine) as s:
            expected = find(champions(s), asked, helpers.H200)
        body = client.get(URL, params=helpers.query(asked, "NVIDIA H200")).json()
        strict(body)
        assert body["match"] == match == expected.match, asked.key()
        assert body["config"] == to_json(expected.config)
        assert body["reason"] == expected.reason
        assert body["gpu_level"] == expected.gpu_level
        assert body["expected_regret"] == expected.expected_regret
        assert body["requested"]["shape"] == to_json(asked)
        assert body["provenance"] is None or body["provenance"]["shape"] == to_json(expected.champion.shape)


def test_hv_is_h_unless_given(local):
    asked = local.get(URL, params={"gpu": "NVIDIA H200", "N": 1, "H": 8, "T": 64}).json()["requested"]
    assert asked["shape"]["HV"] == 8
    asked = local.get(URL, params={"gpu": "NVIDIA H200", "N": 1, "H": 8, "T": 64, "HV": 16}).json()["requested"]
    assert asked["shape_key"] == "N=1,H=8,T=64,HV=16"


def test_a_promotion_and_a_rollback_are_served_at_once(client, shelf, helpers):
    params = helpers.query(helpers.SHAPE, "NVIDIA H200")
    first, second = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    assert client.get(URL, params=params).json()["match"] == "default"
    shelf.promote(config=first)
    assert client.get(URL, params=params).json()["config"] == to_json(first)
    generation = shelf.promote(config=second, median_us=600.0).generation
    body = client.get(URL, params=params).json()
    assert (body["config"], body["measured_us"], body["generation"]) == (to_json(second), 600.0, generation)
    with writing(shelf.engine) as s:
        writes.rollback(s, 2, "slower in production")
    body = client.get(URL, params=params).json()
    assert (body["config"], body["generation"]) == (to_json(first), generation + 1)


def test_a_decision_that_keeps_the_champion_changes_nothing(client, shelf, helpers):
    params = helpers.query(helpers.SHAPE, "NVIDIA H200")
    first, second = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    shelf.promote(config=first)
    before = client.get(URL, params=params)
    shelf.promote(config=second, decision="tie")
    shelf.promote(config=second, decision="rejected")
    after = client.get(URL, params=params)
    assert after.json() == before.json()
    assert after.headers["etag"] == before.headers["etag"]


def test_every_worker_sees_a_promotion(database_url, shelf, helpers):
    params = helpers.query(helpers.SHAPE, "NVIDIA H200")
    settings = Settings(database_url=database_url)
    with (
        TestClient(create_app(settings, check_every_seconds=0.0)) as one,
        TestClient(create_app(settings, check_every_seconds=0.0)) as two,
    ):
        assert [c.get(URL, params=params).json()["match"] for c in (one, two)] == ["default", "default"]
        shelf.promote()
        answers = [c.get(URL, params=params) for c in (one, two)]
        assert [a.json()["match"] for a in answers] == ["exact", "exact"]
        assert answers[0].headers["etag"] == answers[1].headers["etag"]


def test_the_database_is_not_asked_for_every_request(database_url, shelf, helpers):
    shelf.promote()
    app = create_app(Settings(database_url=database_url), check_every_seconds=3600.0)
    with TestClient(app) as client:
        client.get(URL, params=helpers.query(helpers.SHAPE, "NVIDIA H200"))
        statements = []
        engine = app.state.service.database.engine()
        event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
        for tokens in range(50):
            shape = replace(helpers.SHAPE, T=8192 + tokens)
            assert client.get(URL, params=helpers.query(shape, "NVIDIA H200")).status_code == 200
            assert client.get("/v1/snapshots/NVIDIA H200").status_code == 200
        assert statements == []


LOSSLESS = [
    shape_of(1, 96, 8192),
    shape_of(1, 96, 8192, dtype="fp16"),
    shape_of(1, 96, 8192, varlen=True),
    shape_of(1, 96, 8192, initial_state=False),
    shape_of(1, 96, 8192, final_state=False),
    shape_of(1, 96, 8192, state_v_first=True),
    shape_of(1, 96, 8192, state_dtype="bf16"),
    shape_of(1, 96, 8192, longest_tokens=8192),
]


def test_keys_that_differ_in_one_field_are_never_mixed_up(client, shelf, helpers):
    served = {}
    for i, shape in enumerate(LOSSLESS):
        config = helpers.configs_for(shape, helpers.H200, len(LOSSLESS))[i]
        served[shape] = shelf.promote(shape, config).config
    assert len({canonical(config) for config in served.values()}) == len(LOSSLESS)
    assert any('"maxnreg":null' in canonical(config) for config in served.values())
    assert any(config.k1.maxnreg or config.k2.maxnreg for config in served.values())
    for shape, config in served.items():
        body = client.get(URL, params=helpers.query(shape, "NVIDIA H200")).json()
        assert body["match"] == "exact"
        assert canonical(body["config"]) == canonical(config)
        assert canonical(from_json(LaunchConfig, body["config"])) == canonical(config)


def test_measurement_protocols_are_kept_apart(client, shelf, helpers):
    newer = replace(helpers.BUILD, protocol="2")
    old = shelf.promote(median_us=610.0)
    body = client.get(URL, params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert body["provenance"]["build"]["protocol"] == "1"
    new = shelf.promote(build=newer, median_us=612.0)
    assert old.measurement_id != new.measurement_id
    body = client.get(URL, params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert (body["provenance"]["build"]["protocol"], body["measured_us"], body["stale"]) == ("2", 612.0, False)
    items = client.get("/v1/measurements").json()["items"]
    assert len({item["build_id"] for item in items}) == 2
    assert len({item["config_hash"] for item in items}) == 1


def test_a_champion_of_an_older_build_is_stale(client, shelf, helpers):
    other = replace(helpers.SHAPE, H=8, HV=8)
    shelf.promote()
    shelf.promote(other, build=replace(helpers.BUILD, driver="590.1", triton="3.7.0"))
    old = client.get(URL, params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert old["stale"] is True
    assert old["stale_reason"] == "measured with triton 3.6.0, now 3.7.0; driver 580.95.05, now 590.1"
    assert old["match"] == "exact"
    new = client.get(URL, params=helpers.query(other, "NVIDIA H200")).json()
    assert (new["stale"], new["stale_reason"]) == (False, None)
    snapshot = client.get("/v1/snapshots/NVIDIA H200").json()
    assert [c["stale_reason"] is None for c in snapshot["champions"]] == [True, False]


def test_a_champion_of_other_kernel_sources_is_stale(client, shelf, helpers):
    shelf.promote(build=replace(helpers.BUILD, kernel_hash="0" * 16))
    body = client.get(URL, params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    told = f"measured with kernel sources {'0' * 16}, those installed here are {helpers.BUILD.kernel_hash}"
    assert (body["match"], body["stale"], body["stale_reason"]) == ("exact", True, told)
    (champion,) = client.get("/v1/snapshots/NVIDIA H200").json()["champions"]
    assert champion["stale_reason"] == told


def test_a_champion_of_another_config_space_is_stale(client, shelf, helpers):
    shelf.promote(build=replace(helpers.BUILD, space_hash="0" * 16))
    body = client.get(URL, params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert body["stale_reason"] == "the config space has changed since it was tuned"


def test_a_poisoned_champion_is_passed_over(client, shelf, helpers):
    shape = shape_of(1, 96, 8192, K=256)
    deep = K2Config("ws", 128, 8, 8, 4, load_warps=1, store_warps=1, load_regs=24, store_regs=24)
    assert "needs K = V = 128" in config_ok(deep, shape, helpers.H200)
    shelf.promote(shape, replace(helpers.configs_for(shape, helpers.H200, 1)[0], k2=deep))
    body = client.get(URL, params=helpers.query(shape, "NVIDIA H200")).json()
    assert body["match"] == "default"
    assert "N=1,H=96,T=8192,K=256 refused: k2.variant=ws needs K = V = 128" in body["reason"]
    assert config_ok(from_json(LaunchConfig, body["config"]), shape, helpers.H200) is None


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"N": ""}, "N"),
        ({"N": "0"}, "N"),
        ({"N": "-1"}, "N"),
        ({"N": "1.0"}, "N"),
        ({"N": "1_0"}, "N"),
        ({"N": "+1"}, "N"),
        ({"N": " 1"}, "N"),
        ({"N": "٣"}, "N"),
        ({"T": "9" * 15}, "T"),
        ({"T": "9" * 400}, "T"),
        ({"H": "nan"}, "H"),
        ({"HV": "97"}, None),
        ({"dtype": "fp32"}, "dtype"),
        ({"state_dtype": "fp16"}, "state_dtype"),
        ({"varlen": "yes"}, "varlen"),
        ({"longest_tokens": "8193"}, None),
        ({"kernel": "k1"}, "kernel"),
        ({"Kernel": "kda"}, "Kernel"),
        ({"sm_count": "0"}, "sm_count"),
        ({"sm_count": "132.0"}, "sm_count"),
        ({"compute_capability": "nine"}, "compute_capability"),
        ({"gpu": ""}, "gpu"),
        ({"gpu": "x" * 201}, "gpu"),
        ({"gpu": "NVIDIA\x00H200"}, "gpu"),
        ({"gpu": "NVIDIA\nH200"}, "gpu"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_named(local, is_problem, params, named):
    given = {"gpu": "NVIDIA H200", "N": 1, "H": 96, "T": 8192} | params
    problem = is_problem(local.get(URL, params=given), 422, "invalid-request")
    assert [e.get("parameter") for e in problem["errors"]] == [named]


def test_a_missing_and_a_repeated_parameter_are_named(local, is_problem):
    problem = is_problem(local.get(URL, params={"gpu": "NVIDIA H200", "N": 1}), 422, "invalid-request")
    assert {e["parameter"] for e in problem["errors"]} == {"H", "T"}
    problem = is_problem(local.get(f"{URL}?gpu=NVIDIA+H200&N=1&H=96&T=8192&T=1"), 422, "invalid-request")
    assert problem["detail"] == "T: given more than once"


def test_a_shape_that_no_config_runs_is_no_answer(local, is_problem):
    params = {"gpu": "NVIDIA H200", "N": 1, "H": 96, "T": 8192, "V": 100}
    assert "V=100" in is_problem(local.get(URL, params=params), 422, "unsupported")["detail"]
    params = {"gpu": "Old", "N": 1, "H": 96, "T": 8192, "sm_count": 80, "compute_capability": "7.0"}
    assert "8.0 is the least" in is_problem(local.get(URL, params=params), 422, "unsupported")["detail"]
