"""Generations, the history, what is served, and going back."""

import json

import pytest
from sqlalchemy import Engine
from sqlalchemy import text

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing


def test_an_empty_store_serves_nothing(engine: Engine) -> None:
    with reading(engine) as s:
        assert (queries.champions(s), queries.generation(s), queries.gpus(s)) == ([], 0, [])
        assert queries.served(s, "kda", 1, 1) is None
        assert queries.find_gpu(s, "NVIDIA H200") is None


def test_a_promotion_is_served_with_its_provenance(engine: Engine, world) -> None:
    config = world.config(block_v=128)
    with writing(engine) as s:
        measurement_id = writes.add_measurement(s, world.new(config, median_us=610.2))
        assert world.promote(s, measurement_id) == 1
    with reading(engine) as s:
        (champion,) = queries.champions(s)
        measured_at = queries.find_measurement(s, measurement_id).measured_at
    assert (champion.gpu, champion.shape, champion.config, champion.build) == (
        world.gpu,
        world.shape,
        config,
        world.build,
    )
    assert (champion.generation, champion.measured_us, champion.default_us) == (1, 610.2, 625.0)
    assert champion.measured_at == measured_at.strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize("estimated", [False, True])
def test_a_champion_says_whether_its_time_is_a_sum(engine: Engine, world, estimated: bool) -> None:
    with writing(engine) as s:
        world.promote(s, writes.add_measurement(s, world.new(estimated=estimated)))
    with reading(engine) as s:
        (champion,) = queries.champions(s)
    assert champion.estimated is estimated


def test_only_promotions_and_rollbacks_change_what_is_served(engine: Engine, world) -> None:
    first, second = world.config(stages_in=2), world.config(stages_in=4)
    with writing(engine) as s:
        a = writes.add_measurement(s, world.new(first))
        b = writes.add_measurement(s, world.new(second, median_us=600.0))
        assert world.promote(s, a) == 1
        assert world.promote(s, b, baseline_measurement_id=a, decision="tie", reason="inside the noise") == 2
        assert world.promote(s, b, baseline_measurement_id=a, decision="rejected", reason="slower held out") == 3
        assert (queries.generation(s), queries.champions(s)[0].config) == (1, first)
        assert world.promote(s, b, baseline_measurement_id=a) == 4
        (champion,) = queries.champions(s)
        assert (queries.generation(s), champion.generation, champion.config) == (4, 4, second)
        history = queries.page_promotions(s)
    assert [(p.generation, p.decision.value, p.measurement_id) for p in history] == [
        (1, "promoted", a),
        (2, "tie", b),
        (3, "rejected", b),
        (4, "promoted", b),
    ]
    assert [p.measured_us for p in history] == [610.2, 600.0, 600.0, 600.0]


def test_generations_run_over_all_keys(engine: Engine, make_world) -> None:
    worlds = [make_world(shape=shape_of(1, H, 8192)) for H in (8, 16, 96)]
    worlds.append(make_world(gpu=KNOWN_GPUS["NVIDIA H20"]))
    with writing(engine) as s:
        given = [w.promote(s, writes.add_measurement(s, w.new())) for w in worlds * 2]
        assert given == list(range(1, 9))
        assert [c.generation for c in queries.champions(s)] == [5, 6, 7, 8]
        assert [c.generation for c in queries.champions(s, KNOWN_GPUS["NVIDIA H20"])] == [8]
        assert queries.champions(s, KNOWN_GPUS["NVIDIA B200"]) == []


def test_a_card_reported_with_another_memory_size_is_the_same_card(engine: Engine, make_world) -> None:
    sheet = make_world()
    driver = make_world(gpu=gpu_of("NVIDIA H200", "9.0", 132, 150_754_820_096, 60 << 20))
    with writing(engine) as s:
        sheet.promote(s, writes.add_measurement(s, sheet.new(sheet.config(stages_in=2))))
        driver.promote(s, writes.add_measurement(s, driver.new(driver.config(stages_in=4))))
        for gpu in (None, sheet.gpu, driver.gpu):
            (champion,) = queries.champions(s, gpu)
            assert champion.config == driver.config(stages_in=4)
        assert queries.find_gpu(s, "NVIDIA H200") == driver.gpu


def test_rollback_serves_what_was_served_before(engine: Engine, world) -> None:
    first, second = world.config(stages_in=2), world.config(stages_in=4)
    with writing(engine) as s:
        a, b = (writes.add_measurement(s, world.new(c)) for c in (first, second))
        world.promote(s, a)
        world.promote(s, b, baseline_measurement_id=a)
        now = queries.served(s, "kda", world.gpu_id, world.problem_id)
        assert writes.rollback(s, now.id, "wrong in production") == 3
        assert queries.champions(s)[0].config == first
        undone = queries.served(s, "kda", world.gpu_id, world.problem_id)
        assert (undone.decision.value, undone.generation, undone.reason) == ("rollback", 3, "wrong in production")
        assert (undone.measurement_id, undone.baseline_measurement_id, undone.gain) == (a, b, None)
        assert writes.rollback(s, undone.id, "it was not") == 4
        assert queries.champions(s)[0].config == second


def test_rollback_of_the_first_promotion_serves_the_default(engine: Engine, world) -> None:
    with writing(engine) as s:
        world.promote(s, writes.add_measurement(s, world.new()))
        (first,) = queries.page_promotions(s)
        assert writes.rollback(s, first.id, "wrong") == 2
        assert (queries.champions(s), queries.generation(s)) == ([], 2)
        served = queries.served(s, "kda", world.gpu_id, world.problem_id)
        assert (served.decision.value, served.config_json, served.measured_us) == ("rollback", None, None)


def test_only_what_is_served_can_be_rolled_back(engine: Engine, world) -> None:
    with writing(engine) as s:
        a, b = (writes.add_measurement(s, world.new()) for _ in range(2))
        world.promote(s, a)
        world.promote(s, b)
        world.promote(s, a, decision="tie")
        first, second, tie = queries.page_promotions(s)
        for row in (first, tie):
            with pytest.raises(StoreError, match=f"promotion {row.id} is not what is served: promotion {second.id} is"):
                writes.rollback(s, row.id, "wrong")
        for unknown in (4711, -1, 10**30):
            with pytest.raises(StoreError, match=f"promotion {unknown} does not exist"):
                writes.rollback(s, unknown, "wrong")
        assert len(queries.page_promotions(s)) == 3


@pytest.mark.parametrize("outcome", [o for o in Outcome if not o.ok])
def test_what_did_not_end_ok_is_never_served(engine: Engine, world, outcome: Outcome) -> None:
    with writing(engine) as s:
        bad = writes.add_measurement(s, world.new(outcome=outcome, median_us=1.0))
        for decision in ("promoted", "rollback"):
            with pytest.raises(StoreError, match=f"ended {outcome}; only an ok one can be served"):
                world.promote(s, bad, decision=decision)
        world.promote(s, bad, decision="rejected", reason=f"ended {outcome}")
        assert queries.champions(s) == []


def test_a_promotion_that_makes_no_sense_is_refused(engine: Engine, world, make_world) -> None:
    other = make_world(shape=shape_of(1, 8, 64))
    with writing(engine) as s:
        measurement_id = writes.add_measurement(s, world.new())
        with pytest.raises(StoreError, match="unknown decision 'maybe'; use one of promoted, tie, rejected, rollback"):
            world.promote(s, measurement_id, decision="maybe")
        with pytest.raises(StoreError, match="measurement 4711 does not exist"):
            world.promote(s, 4711)
        with pytest.raises(StoreError, match="is of another kernel, GPU model or problem shape"):
            other.promote(s, measurement_id)


def test_a_generation_cannot_be_given_twice(engine: Engine, world) -> None:
    with writing(engine) as s:
        for _ in range(2):
            world.promote(s, writes.add_measurement(s, world.new()))
    with pytest.raises(StoreError, match="refused the write"), writing(engine) as s:
        s.execute(text("UPDATE promotion SET generation = 1"))


def test_an_entry_that_cannot_be_read_does_not_stop_the_others(engine: Engine, make_world, caplog) -> None:
    worlds = [make_world(shape=shape_of(1, H, 8192)) for H in (8, 16, 96)]
    with writing(engine) as s:
        for w in worlds:
            w.promote(s, writes.add_measurement(s, w.new()))
        s.execute(text("UPDATE promotion SET config_json = '{\"k1\":' WHERE generation = 1"))
        s.execute(text("UPDATE promotion SET config_json = '{}' WHERE generation = 2"))
    with reading(engine) as s:
        assert [c.generation for c in queries.champions(s)] == [3]
    assert [r.getMessage().split(" (")[0] for r in caplog.records] == [
        "promotion 1 cannot be served",
        "promotion 2 cannot be served",
    ]


def test_a_readable_but_illegal_entry_is_handed_on_for_config_ok_to_refuse(engine: Engine, world) -> None:
    illegal = canonical(world.config(variant="ws", block_v=128, stages_in=8))
    with writing(engine) as s:
        world.promote(s, writes.add_measurement(s, world.new()))
        s.execute(text("UPDATE promotion SET config_json = :config"), {"config": illegal})
    with reading(engine) as s:
        assert queries.champions(s)[0].config == from_json(LaunchConfig, json.loads(illegal))


def test_only_whole_launches_have_champions(engine: Engine) -> None:
    with pytest.raises(StoreError, match="kernel 'k1' has no champions"), reading(engine) as s:
        queries.champions(s, kernel="k1")
