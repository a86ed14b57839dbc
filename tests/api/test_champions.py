"""The champions in memory: never another answer than match.find, never an error while something is known."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from sqlalchemy import text

from kdatune_api import champions as champions_module
from kdatune_api.caching import document
from kdatune_api.champions import MAX_ANSWERS
from kdatune_api.champions import MAX_VIEWS
from kdatune_api.champions import Answer
from kdatune_api.champions import ChampionCache
from kdatune_api.champions import ChampionIndex
from kdatune_api.metrics import Metrics
from kdatune_kernels.errors import StoreError
from kdatune_kernels.match import Champion
from kdatune_kernels.match import find
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json
from kdatune_tuner.store import writes
from kdatune_tuner.store.changes import Mark
from kdatune_tuner.store.engine import writing

H200 = KNOWN_GPUS["NVIDIA H200"]
GPUS = [
    H200,
    replace(H200, memory_bytes=1 << 37),  # the same card, as another driver reports it
    KNOWN_GPUS["NVIDIA H800"],
    KNOWN_GPUS["NVIDIA H20"],
    KNOWN_GPUS["NVIDIA A100-SXM4-80GB"],
    gpu_of("NVIDIA H200", "9.0", 66),
]
SHAPES = st.builds(
    shape_of,
    N=st.sampled_from([1, 2, 4]),
    H=st.sampled_from([8, 96]),
    T=st.sampled_from([4096, 8000, 8192]),
    K=st.sampled_from([64, 128]),
    dtype=st.sampled_from(["bf16", "fp16"]),
    varlen=st.booleans(),
    initial_state=st.booleans(),
)
CONFIGS = [
    LaunchConfig(K1Config(), K2Config()),
    LaunchConfig(K1Config(num_warps=4), K2Config(block_v=128)),
    LaunchConfig(K1Config(), K2Config(block_v=7)),  # config_ok refuses it
]
FOUND = st.lists(
    st.tuples(st.sampled_from(GPUS), SHAPES, st.sampled_from(CONFIGS)), max_size=12, unique_by=lambda found: found[:2]
)


def champion_list(found):
    return [Champion(*one, generation=i + 1, measured_us=1.0, default_us=2.0) for i, one in enumerate(found)]


@given(FOUND, SHAPES, st.sampled_from(GPUS))
@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_index_answers_what_match_find_answers(found, shape, gpu):
    champions = champion_list(found)
    index = ChampionIndex(Mark(99), champions, GPUS)
    assert index.view(gpu).find(shape) == find(reversed(champions), shape, gpu)


@given(FOUND, st.sampled_from(GPUS))
@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_view_holds_what_may_be_served_newest_first(found, gpu):
    champions = champion_list(found)
    view = ChampionIndex(Mark(99), champions, GPUS).view(gpu)
    served = [c for c in reversed(champions) if gpu.sameness(c.gpu) in ("exact", "silicon")]
    assert view.served == tuple(served)


def test_what_is_remembered_is_bounded():
    index = ChampionIndex(Mark(1), champion_list([(H200, shape_of(1, 8, 64), CONFIGS[0])]), [H200])
    answer = Answer(document(1, b"{}"), "exact", "/")
    for i in range(MAX_ANSWERS + 5):
        index.remember(b"%d" % i, answer)
    assert 0 < len(index.answers) <= MAX_ANSWERS
    assert index.recall(b"%d" % (MAX_ANSWERS + 4)) is answer
    index.remember(b"snapshot", Answer(document(1, b"{}"), None, "/"))
    assert index.recall(b"snapshot")
    for sms in range(1, 3 * MAX_VIEWS):
        index.view(gpu_of("made up", "9.0", sms))
    assert len(index._views) <= MAX_VIEWS
    assert index.recall(b"snapshot") is None
    assert index.view(H200).find(shape_of(1, 8, 64)).match == "exact"


def test_the_last_known_champions_are_served_while_the_database_fails(engine, shelf, caplog):
    broken = False

    def open_or_fail():
        if broken:
            raise StoreError("the disk is gone")
        return engine

    champions = ChampionCache(open_or_fail, Metrics(), 0.0)
    stored = shelf.promote()
    try:
        before = asyncio.run(champions.current())
        assert before.generation == stored.generation
        broken = True
        for _ in range(3):
            assert asyncio.run(champions.current()) is before
        assert [r.getMessage() for r in caplog.records if "disk is gone" in r.getMessage()] == [
            "the database fails, generation 1 can be served: the disk is gone"
        ]
        broken = False
        assert asyncio.run(champions.current()) is before
        shelf.promote(median_us=600.0)
        assert asyncio.run(champions.current()).generation == 2
    finally:
        champions.close()


def test_a_look_is_under_way_before_what_is_served_is_too_old(engine, shelf, monkeypatch):
    """Requests that found the last look too old went the long way until the next had ended: 2 % of them, and so the p99."""
    go_on = threading.Event()
    go_on.set()
    looks = []

    def open_slowly():
        looks.append(clock[0])
        go_on.wait(60)
        return engine

    clock = [1000.0]
    monkeypatch.setattr(champions_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    champions = ChampionCache(open_slowly, Metrics(), 0.9)
    shelf.promote()
    try:
        before = asyncio.run(champions.current())
        clock[0] += 0.55
        assert (champions.fresh, len(looks)) == (before, 1)
        shelf.promote(median_us=600.0)
        go_on.clear()
        clock[0] += 0.1
        assert [champions.fresh for _ in range(3)] == [before] * 3
        under_way = champions._checking
        go_on.set()
        under_way.result(60)
        assert len(looks) == 2
        assert champions.fresh.generation == before.generation + 1
        clock[0] += 0.91
        assert champions.fresh is None
    finally:
        go_on.set()
        champions.close()


def test_without_anything_known_the_error_comes_through(tmp_path):
    def fail():
        raise StoreError("no database")

    champions = ChampionCache(fail, Metrics(), 3600.0)
    try:
        for _ in range(2):
            with pytest.raises(StoreError, match="no database"):
                asyncio.run(champions.current())
    finally:
        champions.close()


def test_a_database_that_hangs_does_not_hang_the_answers(engine, shelf, monkeypatch):
    monkeypatch.setattr(champions_module, "PATIENCE_SECONDS", 0.1)
    hang = threading.Event()
    hang.set()

    def open_slowly():
        hang.wait(60)
        return engine

    champions = ChampionCache(open_slowly, Metrics(), 0.0)
    shelf.promote()
    try:
        before = asyncio.run(champions.current())
        hang.clear()
        shelf.promote(median_us=600.0)
        assert asyncio.run(champions.current()) is before
        hang.set()
        end = time.monotonic() + 60
        while asyncio.run(champions.current()).generation != 2:
            assert time.monotonic() < end
    finally:
        hang.set()
        champions.close()


def test_a_generation_is_in_the_metrics_once_it_is_served(engine, shelf, monkeypatch):
    metrics = Metrics()
    champions = ChampionCache(lambda: engine, metrics, 3600.0)
    served = []
    monkeypatch.setattr(metrics.generation, "set", lambda number: served.append((number, champions._index)))
    stored = shelf.promote()
    try:
        index = asyncio.run(champions.current())
    finally:
        champions.close()
    assert served == [(stored.generation, index)]


def test_many_at_once_see_generations_that_only_grow(client, shelf, helpers):
    """Eight threads ask while promotions are made: no error, no step back, and in the end the last one."""
    params = helpers.query(helpers.SHAPE, "NVIDIA H200")
    done = threading.Event()
    all_ask = threading.Barrier(9)

    def ask():
        seen = []
        all_ask.wait(60)
        while not done.is_set() or not seen:  # a thread may get its first turn when all is done
            for url, query in (
                ("/v1/configs/resolve", params),
                ("/v1/snapshots/NVIDIA%20H200", {}),
                ("/v1/promotions", {}),
            ):
                response = client.get(url, params=query)
                assert response.status_code == 200, response.text
            body = client.get("/v1/configs/resolve", params=params).json()
            if body["provenance"]:
                assert body["measured_us"] == 1000.0 - body["provenance"]["generation"]
            seen.append(body["generation"])
        assert seen == sorted(seen)
        return len(seen)

    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(ask) for _ in range(8)]
        try:
            all_ask.wait(60)
            for i in range(1, 16):
                shelf.promote(median_us=1000.0 - i)
        finally:
            done.set()
        assert all(future.result() > 0 for future in asking)
    assert client.get("/v1/configs/resolve", params=params).json()["generation"] == 15


def test_a_poisoned_row_does_not_stop_the_others(client, shelf, helpers):
    shelf.promote()
    shelf.promote(replace(helpers.SHAPE, H=8, HV=8))
    with shelf.engine.begin() as connection:
        connection.execute(text("UPDATE promotion SET config_json = '{\"k1\": 5}' WHERE generation = 2"))
    assert len(client.get("/v1/snapshots/NVIDIA H200").json()["champions"]) == 1
    body = client.get("/v1/configs/resolve", params=helpers.query(helpers.SHAPE, "NVIDIA H200")).json()
    assert body["match"] == "exact"


def test_the_default_is_always_there(client, helpers):
    for gpu in KNOWN_GPUS.values():
        body = client.get("/v1/configs/resolve", params=helpers.query(helpers.SHAPE, gpu.name)).json()
        assert body["config"] == to_json(default_config(helpers.SHAPE, gpu))


def test_a_promotion_among_many_is_read_alone(client, shelf, helpers):
    shapes = [replace(helpers.SHAPE, T=tokens) for tokens in (1024, 2048, 4096)]
    for shape in shapes:
        shelf.promote(shape)
    before = client.get("/v1/snapshots/NVIDIA H200").json()
    shelf.promote(shapes[1], median_us=500.0)
    after = client.get("/v1/snapshots/NVIDIA H200").json()
    assert [c["generation"] for c in after["champions"]] == [4, 3, 1]
    assert after["champions"][1:] == [c for c in before["champions"] if c["shape"]["T"] != 2048]
    with writing(shelf.engine) as s:
        writes.rollback(s, 4, "wrong")
        writes.rollback(s, 1, "wrong")
    assert [c["shape"]["T"] for c in client.get("/v1/snapshots/NVIDIA H200").json()["champions"]] == [2048, 4096]
    counted = client.get("/metrics").text
    assert 'kdatune_champion_reloads_total{what="changes"} 2.0' in counted


def test_what_is_stale_is_decided_anew_at_every_change(client, shelf, helpers):
    older, newer = replace(helpers.BUILD, driver="1"), replace(helpers.BUILD, driver="2")
    other = replace(helpers.SHAPE, T=64)
    shelf.promote(build=older)

    def reasons():
        return {c["shape"]["T"]: c["stale_reason"] for c in client.get("/v1/snapshots/NVIDIA H200").json()["champions"]}

    assert reasons() == {8192: None}
    shelf.promote(other, build=newer)
    assert reasons() == {8192: "measured with driver 1, now 2", 64: None}
    with writing(shelf.engine) as s:
        writes.rollback(s, 2, "the driver was taken back")
    assert reasons() == {8192: None}


def test_a_restored_database_is_served_even_at_the_same_generation(client, shelf, helpers):
    shelf.promote(median_us=600.0)
    shape = helpers.query(helpers.SHAPE, "NVIDIA H200")
    assert client.get("/v1/configs/resolve", params=shape).json()["measured_us"] == 600.0
    with shelf.engine.begin() as connection:  # what another database would hold in its place
        connection.execute(text("UPDATE measurement SET median_us = 555.0"))
        connection.execute(text("UPDATE promotion SET decided_at = '2020-01-01 00:00:00+00'"))
    assert client.get("/v1/configs/resolve", params=shape).json()["measured_us"] == 555.0


def test_a_poisoned_card_does_not_stop_the_others(client, shelf, helpers):
    shelf.promote()
    shelf.promote(gpu=KNOWN_GPUS["NVIDIA H20"])
    with shelf.engine.begin() as connection:
        connection.execute(text("UPDATE gpu SET sm_count = -5 WHERE name = 'NVIDIA H20'"))
    shelf.promote(replace(helpers.SHAPE, T=64))
    assert len(client.get("/v1/snapshots/NVIDIA H200").json()["champions"]) == 2
