"""Which card is meant by a name, and how near the tuned one is."""

import dataclasses
import itertools

import pytest

from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import writing

URL = "/v1/configs/resolve"
PARAMS = {"N": 1, "H": 96, "T": 8192}

# An H200 (132 SMs, compute capability 9.0) is tuned.
LEVELS = {
    "NVIDIA H200": ("exact", "exact"),
    "NVIDIA H200 NVL": ("exact", "silicon"),
    "NVIDIA H100 80GB HBM3": ("exact", "silicon"),
    "NVIDIA H800": ("exact", "silicon"),
    "NVIDIA GH200 480GB": ("exact", "silicon"),
    "NVIDIA H100 PCIe": ("default", "family"),
    "NVIDIA H20": ("default", "family"),
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": ("default", "family"),
    "NVIDIA A100-SXM4-80GB": ("default", "none"),
    "NVIDIA B200": ("default", "none"),
}


def test_every_answer_says_its_level(client, shelf):
    tuned = shelf.promote()
    for name, expected in LEVELS.items():
        body = client.get(URL, params={"gpu": name, **PARAMS}).json()
        assert (body["match"], body["gpu_level"]) == expected, name
        assert body["requested"]["gpu"]["name"] == name
        served = client.get(f"/v1/snapshots/{name}").json()["champions"]
        if body["match"] == "exact":
            assert body["config"] == to_json(tuned.config)
            assert body["provenance"]["gpu"]["name"] == "NVIDIA H200"
            assert [c["config"] for c in served] == [to_json(tuned.config)]
        else:
            assert body["provenance"] is None
            assert served == []


def test_an_h20_never_gets_an_h200_config(client, shelf, helpers):
    for config, tokens in zip(helpers.configs_for(helpers.SHAPE, helpers.H200, 6), range(6), strict=True):
        shelf.promote(dataclasses.replace(helpers.SHAPE, T=8192 + 16 * tokens), config)
    facts_given = ({}, {"sm_count": 78}, {"sm_count": 78, "compute_capability": "9.0"})
    for tokens, facts in itertools.product((8192, 8192 + 16, 8000, 4096), facts_given):
        body = client.get(URL, params={"gpu": "NVIDIA H20", **PARAMS, "T": tokens, **facts}).json()
        assert (body["match"], body["gpu_level"], body["provenance"]) == ("default", "family", None)


def test_an_h20_gets_its_own(client, shelf, helpers):
    h20 = KNOWN_GPUS["NVIDIA H20"]
    of_h200, of_h20 = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    shelf.promote(config=of_h200)
    shelf.promote(config=of_h20, gpu=h20)
    body = client.get(URL, params={"gpu": "NVIDIA H20", **PARAMS}).json()
    assert (body["match"], body["gpu_level"], body["config"]) == ("exact", "exact", to_json(of_h20))
    body = client.get(URL, params={"gpu": "NVIDIA H200", **PARAMS}).json()
    assert (body["gpu_level"], body["config"]) == ("exact", to_json(of_h200))


def test_the_same_card_goes_before_the_same_silicon(client, shelf, helpers):
    own, other = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    shelf.promote(config=own)
    shelf.promote(config=other, gpu=KNOWN_GPUS["NVIDIA H100 80GB HBM3"])  # newer, but of the same silicon only
    body = client.get(URL, params={"gpu": "NVIDIA H200", **PARAMS}).json()
    assert (body["gpu_level"], body["config"]) == ("exact", to_json(own))
    snapshot = client.get("/v1/snapshots/NVIDIA H200").json()
    assert [c["gpu"]["name"] for c in snapshot["champions"]] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]


@pytest.mark.parametrize("name", ["A/B", "A%2FB", "..", "nvidia h200", "NVIDIA H2000", "né", "' OR 1=1 --", "{gpu}"])
@pytest.mark.parametrize("path", ["resolve", "snapshot"])
def test_an_unknown_name_is_a_404_that_says_what_to_give(local, is_problem, name, path):
    if path == "resolve":
        response = local.get(URL, params={"gpu": name, **PARAMS})
    else:
        response = local.get("/v1/snapshots/" + name.replace("%", "%25").replace("..", "%2E%2E").replace(" ", "%20"))
    problem = is_problem(response, 404, "unknown-gpu")
    assert "sm_count" in problem["detail"]
    assert "compute_capability" in problem["detail"]


def test_a_near_miss_is_helped(local, is_problem):
    response = local.get(URL, params={"gpu": "nvidia h200", **PARAMS})
    assert "did you mean NVIDIA H200" in is_problem(response, 404, "unknown-gpu")["detail"]


@pytest.mark.parametrize("name", ["", "x" * 201, "x" * 500, "a\x00b", "a\tb", "a\u202eb"], ids=repr)
def test_a_name_that_is_no_name_is_a_422(local, is_problem, name):
    problem = is_problem(local.get(URL, params={"gpu": name, **PARAMS}), 422, "invalid-request")
    assert [e["parameter"] for e in problem["errors"]] == ["gpu"]
    quoted = "".join(f"%{byte:02X}" for byte in name.encode())
    problem = is_problem(local.get(f"/v1/snapshots/{quoted}"), 422, "invalid-request")
    assert [e["parameter"] for e in problem["errors"]] == ["gpu"]


def test_a_long_name_that_is_a_name_is_looked_up(local, is_problem):
    is_problem(local.get(URL, params={"gpu": "x" * 200, **PARAMS}), 404, "unknown-gpu")


def test_an_unknown_card_is_served_by_its_silicon(client, shelf):
    tuned = shelf.promote()
    facts = {"sm_count": 132, "compute_capability": "9.0"}
    body = client.get(URL, params={"gpu": "NVIDIA H200 Next", **PARAMS, **facts}).json()
    assert (body["match"], body["gpu_level"], body["config"]) == ("exact", "silicon", to_json(tuned.config))
    assert body["requested"]["gpu"] == to_json(gpu_of("NVIDIA H200 Next", "9.0", 132))
    assert body["requested"]["gpu_source"] == "given"
    snapshot = client.get("/v1/snapshots/NVIDIA H200 Next", params=facts).json()
    assert [c["config"] for c in snapshot["champions"]] == [to_json(tuned.config)]
    assert snapshot["gpu"] == to_json(gpu_of("NVIDIA H200 Next", "9.0", 132))


@pytest.mark.parametrize("facts", [{"sm_count": 132}, {"compute_capability": "9.0"}], ids=str)
def test_half_of_the_facts_is_not_enough(local, is_problem, facts):
    is_problem(local.get(URL, params={"gpu": "Unheard Of", **PARAMS, **facts}), 404, "unknown-gpu")


@pytest.mark.parametrize(
    "facts", [{"sm_count": 132}, {"compute_capability": "8.0"}, {"sm_count": 132, "compute_capability": "9.0"}], ids=str
)
def test_facts_that_contradict_the_name_are_refused(local, local_shelf, is_problem, facts):
    local_shelf.promote()
    problem = is_problem(local.get(URL, params={"gpu": "NVIDIA H20", **PARAMS, **facts}), 422, "invalid-request")
    wrong = "sm_count" if "sm_count" in facts else "compute_capability"
    assert [e["parameter"] for e in problem["errors"]] == [wrong]
    assert "NVIDIA H20 has" in problem["errors"][0]["detail"]


def test_a_card_that_was_measured_but_has_no_champion_is_known(client, shelf):
    with writing(shelf.engine) as s:
        writes.put_gpu(s, gpu_of("NVIDIA Prototype 7", "9.0", 100))
    body = client.get(URL, params={"gpu": "NVIDIA Prototype 7", **PARAMS}).json()
    assert body["requested"]["gpu_source"] == "tuned"
    assert body["requested"]["gpu"]["sm_count"] == 100
    # and with the card in memory
    shelf.promote()
    body = client.get(URL, params={"gpu": "NVIDIA Prototype 7", **PARAMS}).json()
    assert (body["requested"]["gpu"]["sm_count"], body["gpu_level"]) == (100, "family")


def test_of_two_cards_of_one_name_the_facts_choose(client, shelf, helpers):
    small, large = gpu_of("NVIDIA Graphics Device", "9.0", 66), gpu_of("NVIDIA Graphics Device", "9.0", 132)
    for gpu, config in zip((large, small), helpers.configs_for(helpers.SHAPE, helpers.H200, 2), strict=True):
        shelf.promote(config=config, gpu=gpu)
    body = client.get(URL, params={"gpu": "NVIDIA Graphics Device", **PARAMS, "sm_count": 66}).json()
    assert (body["gpu_level"], body["provenance"]["gpu"]["sm_count"]) == ("exact", 66)
    body = client.get(URL, params={"gpu": "NVIDIA Graphics Device", **PARAMS, "sm_count": 132}).json()
    assert (body["gpu_level"], body["provenance"]["gpu"]["sm_count"]) == ("exact", 132)
