"""Resuming, listing page by page, and filters that strangers choose."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy import text

from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewProfile

H20 = KNOWN_GPUS["NVIDIA H20"]


def test_a_resumed_run_knows_what_is_measured_already(engine: Engine, world, make_world) -> None:
    newer = make_world(build=dataclasses.replace(world.build, protocol="2"))
    elsewhere = make_world(gpu=H20)
    done, failed = world.config(stages_in=2), world.config(stages_in=4)
    with writing(engine) as s:
        writes.add_measurement(s, world.new(done, median_us=700.0))
        writes.add_measurement(s, world.new(failed, outcome=Outcome.TIMEOUT, median_us=None))
        writes.add_measurement(s, world.new(done, median_us=690.0))
        writes.add_measurement(s, newer.new(world.config(stages_in=3)))
        writes.add_measurement(s, elsewhere.new(world.config(stages_in=1)))
        found = queries.measured(s, "kda", world.gpu_id, world.problem_id, world.build_id)
    assert {h: (row.outcome, row.median_us) for h, row in found.items()} == {
        digest(done): (Outcome.OK, 690.0),
        digest(failed): (Outcome.TIMEOUT, None),
    }


def test_parts_are_stored_under_their_own_kernel(engine: Engine, make_world) -> None:
    part, pair = make_world(kernel="k1"), make_world()
    config = K1Config(maxnreg=96)
    with writing(engine) as s:
        writes.add_measurement(s, part.new(config_json=canonical(config), config_hash=digest(config)))
        assert queries.measured(s, "kda", pair.gpu_id, pair.problem_id, pair.build_id) == {}
        found = queries.measured(s, "k1", part.gpu_id, part.problem_id, part.build_id)
    assert [(row.kernel, row.config_json) for row in found.values()] == [("k1", canonical(config))]


@pytest.fixture
def many(engine: Engine, make_world) -> dict[str, Any]:
    """Seven measurements, promotions, runs and profiles on two cards and two shapes."""
    worlds = [make_world(), make_world(shape=shape_of(1, 8, 64)), make_world(gpu=H20)]
    with writing(engine) as s:
        for i in range(7):
            w = worlds[i % 3]
            run_id = w.run(s)
            outcome = Outcome.TIMEOUT if i == 6 else Outcome.OK
            row = writes.add_measurement(s, w.new(w.config(stages_in=1 + i), run_id=run_id, outcome=outcome))
            w.promote(s, row, decision="tie" if i == 6 else "promoted")
            writes.add_profile(s, NewProfile(measurement_id=row, stage=("k1", "k2")[i % 2], counters={}))
            if i:
                writes.finish_run(s, run_id, outcome_counts={outcome: 1}, gpu_seconds=1.0, state="done")
    return {"gpu_name": H20.name, "shape": shape_of(1, 8, 64)}


PAGES: list[Callable[..., list[Any]]] = [
    queries.page_measurements,
    queries.page_promotions,
    queries.page_runs,
    queries.page_profiles,
]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("newest_first", [False, True])
def test_pages_join_to_the_whole(engine: Engine, many, page, newest_first: bool) -> None:
    with reading(engine) as s:
        seen: list[int] = []
        while rows := page(s, after_id=seen[-1] if seen else None, limit=3, newest_first=newest_first):
            assert len(rows) <= 3
            seen += [row.id for row in rows]
        assert seen == sorted(range(1, 8), reverse=newest_first)
        assert [row.id for row in page(s, after_id=0)] == list(range(1, 8))


@pytest.mark.parametrize("page", PAGES)
def test_filters_by_card_kernel_and_shape(engine: Engine, many, page) -> None:
    with reading(engine) as s:
        assert [row.id for row in page(s, gpu_name=H20.name)] == [3, 6]
        assert [row.id for row in page(s, shape=many["shape"])] == [2, 5]
        assert [row.id for row in page(s, gpu_name="NVIDIA H200", shape=shape_of(1, 96, 8192))] == [1, 4, 7]
        assert [row.id for row in page(s, kernel="kda", after_id=5)] == [6, 7]
        assert page(s, kernel="k1") == []
        for row in page(s):
            assert (row.gpu_name == H20.name, row.shape == many["shape"]) == (row.id % 3 == 0, row.id % 3 == 2)


def test_filters_of_one_page(engine: Engine, many) -> None:
    with reading(engine) as s:
        assert [row.id for row in queries.page_measurements(s, outcome="timeout")] == [7]
        assert [row.id for row in queries.page_measurements(s, run_id=2)] == [2]
        assert [row.id for row in queries.page_promotions(s, decision="tie")] == [7]
        assert [row.id for row in queries.page_runs(s, state="running")] == [1]
        assert [row.id for row in queries.page_profiles(s, stage="k2")] == [2, 4, 6]
        assert [row.id for row in queries.page_profiles(s, measurement_id=5)] == [5]
        assert [row.gpu for row in queries.page_gpus(s)] == [KNOWN_GPUS["NVIDIA H200"], H20]
        assert [row.gpu for row in queries.page_gpus(s, name=H20.name)] == [H20]
        assert [row.gpu for row in queries.page_gpus(s, after_id=1)] == [H20]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", ["", "A/B", "x" * 500, "a\x00b", "\ud800", "'; DROP TABLE gpu; --", "%", "H2_0"])
def test_a_strange_name_finds_nothing(engine: Engine, many, page, name: str) -> None:
    with reading(engine) as s:
        assert page(s, gpu_name=name) == []
        assert page(s, kernel=name) == []
        assert queries.find_gpu(s, name) is None
        assert queries.page_gpus(s, name=name) == []


@pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 63, 10**30])
def test_a_number_out_of_range_finds_nothing(engine: Engine, many, number: int) -> None:
    with reading(engine) as s:
        assert queries.page_measurements(s, run_id=number) == []
        assert queries.page_profiles(s, measurement_id=number) == []
        assert queries.page_measurements(s, after_id=number) == []
        assert queries.find_measurement(s, number) is None
        assert queries.find_build(s, number) is None
        newest = queries.page_measurements(s, after_id=number, newest_first=True)
    assert len(newest) == (0 if number < 0 else 7)


def test_a_page_is_bounded(engine: Engine, many) -> None:
    with reading(engine) as s:
        assert len(queries.page_measurements(s, limit=0)) == 1
        assert len(queries.page_measurements(s, limit=10**9)) == 7


def test_demand_is_most_wanted_first_and_skips_what_it_cannot_read(engine: Engine, caplog) -> None:
    with writing(engine) as s:
        for count, heads in ((1, 8), (9, 16), (5, 32)):
            writes.report_demand(s, H20.name, "kda", shape_of(1, heads, 64), count)
        s.execute(text("UPDATE demand SET shape_key = 'N=0' WHERE count = 5"))
    with reading(engine) as s:
        assert [(row.count, row.shape.H) for row in queries.demand(s)] == [(9, 16), (1, 8)]
        assert len(queries.demand(s, limit=1)) == 1
    assert "demand 3 is damaged (the shape lacks H, T" in caplog.text


def test_a_build_comes_back_equal(engine: Engine, world) -> None:
    with reading(engine) as s:
        assert queries.find_build(s, world.build_id) == world.build
