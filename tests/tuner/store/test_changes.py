"""What has changed since a mark: never another world than reading everything, and None where that cannot be said."""

import random

from sqlalchemy import Engine
from sqlalchemy import text

from kdatune_kernels.match import Champion
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of
from kdatune_tuner.store import changes as changes_module
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.changes import Mark
from kdatune_tuner.store.changes import changes
from kdatune_tuner.store.changes import newest_mark
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing

H200 = KNOWN_GPUS["NVIDIA H200"]
CARDS = [H200, gpu_of("NVIDIA H200", "9.0", 132, 1 << 37), KNOWN_GPUS["NVIDIA H20"]]  # the second is the first again
SHAPES = [shape_of(1, 96, tokens) for tokens in (1024, 2048, 4096)]


def test_following_changes_is_reading_everything(engine: Engine, make_world) -> None:
    """200 random decisions, looked at after one or several of them."""
    dice = random.Random(5)
    worlds = [make_world(card, shape) for card in CARDS for shape in SHAPES]
    known: dict[tuple[object, ...], Champion] = {}
    at = Mark(0)
    for _ in range(200):
        world = dice.choice(worlds)
        with writing(engine) as s:
            served = queries.served(s, "kda", world.gpu_id, world.problem_id)
            kind = dice.choice(["promoted", "promoted", "tie", "rejected", "undo", "undo"])
            if kind == "undo":
                if served is not None and served.config_json is not None:
                    writes.rollback(s, served.id, "undo")
            else:
                config = world.config(stages_in=dice.randint(1, 4))
                measurement = writes.add_measurement(s, world.new(config, median_us=dice.uniform(1, 9)))
                world.promote(s, measurement, decision=kind)
        if dice.random() < 0.5:
            continue
        with reading(engine) as s:
            found = changes(s, at)
            assert found is not None
            at = newest_mark(s)
            known = {key: c for key, c in known.items() if c.shape not in found.shapes}
            known |= {(c.gpu, c.shape): c for c in found.champions}
            everything = queries.champions(s)
            assert at.generation == queries.generation(s)
        assert sorted(known.values(), key=lambda c: c.generation) == everything
    assert any(c.gpu == CARDS[1] for c in known.values())


def test_nothing_has_changed(engine: Engine, world) -> None:
    with writing(engine) as s:
        assert newest_mark(s) == Mark(0)
        world.promote(s, writes.add_measurement(s, world.new()))
        at = newest_mark(s)
        world.promote(s, writes.add_measurement(s, world.new()), decision="tie")
    with reading(engine) as s:
        assert newest_mark(s) == at
        found = changes(s, at)
        assert found is not None
        assert (found.shapes, found.champions) == (frozenset(), ())


def test_a_database_that_took_the_place_of_another_is_read_anew(engine: Engine, world) -> None:
    with writing(engine) as s:
        for _ in range(3):
            world.promote(s, writes.add_measurement(s, world.new()))
        at = newest_mark(s)
        s.execute(text("UPDATE promotion SET decided_at = '2020-01-01 00:00:00+00' WHERE generation = 3"))
    with reading(engine) as s:
        assert newest_mark(s) != at
        assert changes(s, at) is None
        assert changes(s, Mark(99, 99, at.decided_at)) is None


def test_many_changes_are_read_with_everything(engine: Engine, make_world, monkeypatch) -> None:
    monkeypatch.setattr(changes_module, "MAX_CHANGES", 2)
    for shape in SHAPES:
        world = make_world(H200, shape)
        with writing(engine) as s:
            world.promote(s, writes.add_measurement(s, world.new()))
    with reading(engine) as s:
        assert changes(s, Mark(0)) is None


def test_a_row_of_gpu_that_cannot_be_read_stops_nobody(engine: Engine, make_world) -> None:
    good, bad = make_world(H200), make_world(KNOWN_GPUS["NVIDIA H20"])
    with writing(engine) as s:
        for world in (good, bad):
            world.promote(s, writes.add_measurement(s, world.new()))
        s.execute(text("UPDATE gpu SET compute_capability = 'nine' WHERE name = 'NVIDIA H20'"))
    with reading(engine) as s:
        assert queries.gpus(s) == [H200]
        assert queries.find_gpu(s, "NVIDIA H20") is None
        assert [c.gpu for c in queries.champions(s)] == [H200]
