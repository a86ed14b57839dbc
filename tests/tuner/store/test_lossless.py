"""A config that is stored and served is the same to the byte; requests that differ have different keys."""

import dataclasses
import itertools

import pytest
from sqlalchemy import Engine

from kdatune_kernels.match import find
from kdatune_kernels.space import K1_LEGAL
from kdatune_kernels.space import K2_LEGAL
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing

BASE = shape_of(N=6, H=64, T=8192, varlen=True, longest_tokens=3063)
OTHER_REQUESTS = {
    "dtype": dataclasses.replace(BASE, dtype="fp16"),
    "varlen": dataclasses.replace(BASE, varlen=False),
    "longest_tokens": dataclasses.replace(BASE, longest_tokens=None),
    "initial_state": dataclasses.replace(BASE, initial_state=False),
    "final_state": dataclasses.replace(BASE, final_state=False),
    "state_v_first": dataclasses.replace(BASE, state_v_first=True),
    "state_dtype": dataclasses.replace(BASE, state_dtype="bf16"),
    "K": dataclasses.replace(BASE, K=64),
    "HV": dataclasses.replace(BASE, HV=128),
}


def every_value() -> list[LaunchConfig]:
    """Configs in which every legal value of every field appears, None and register caps included."""
    k1 = [dataclasses.replace(K1Config(), **{name: value}) for name, values in K1_LEGAL.items() for value in values]
    k2 = [dataclasses.replace(K2Config(), **{name: value}) for name, values in K2_LEGAL.items() for value in values]
    pairs = itertools.zip_longest(k1, k2)
    configs = [
        LaunchConfig(a or K1Config(), b or K2Config(), precision) for a, b in pairs for precision in ("fp16", "bf16")
    ]
    return list(dict.fromkeys(configs))


def test_every_config_is_served_as_it_was_stored(engine: Engine, make_world) -> None:
    configs = every_value()
    worlds = [make_world(shape=shape_of(1, 1, 16 * (1 + i))) for i in range(len(configs))]
    with writing(engine) as s:
        for w, config in zip(worlds, configs, strict=True):
            w.promote(s, writes.add_measurement(s, w.new(config)))
    with reading(engine) as s:
        stored = [row.config_json for row in queries.page_measurements(s, limit=1000)]
        promoted = [row.config_json for row in queries.page_promotions(s, limit=1000)]
        champions = [champion.config for champion in queries.champions(s)]
    expected = [canonical(config) for config in configs]
    assert stored == promoted == expected
    assert [canonical(config) for config in champions] == expected
    assert champions == configs
    assert sum('"maxnreg":null' in c for c in expected) > 0
    assert sum('"maxnreg":96' in c for c in expected) > 0


@pytest.mark.parametrize("field", OTHER_REQUESTS)
def test_requests_that_differ_in_one_field_have_different_keys(engine: Engine, make_world, field: str) -> None:
    other: Shape = OTHER_REQUESTS[field]
    assert [f.name for f in dataclasses.fields(Shape) if getattr(BASE, f.name) != getattr(other, f.name)] == [field]
    one, two = make_world(shape=BASE), make_world(shape=other)
    assert one.problem_id != two.problem_id
    first, second = one.config(stages_in=2), one.config(stages_in=4)
    with writing(engine) as s:
        for w, config in ((one, first), (two, second)):
            w.promote(s, writes.add_measurement(s, w.new(config)))
    with reading(engine) as s:
        champions = queries.champions(s, one.gpu)
        assert {c.shape: c.config for c in champions} == {BASE: first, other: second}
        assert queries.page_measurements(s, shape=other)[0].config_hash == digest(second)
    if other.V == other.K:  # a K other than V is stored, but not launched
        answers = [find(champions, shape, one.gpu) for shape in (BASE, other)]
        assert [(a.match, a.config) for a in answers] == [("exact", first), ("exact", second)]


def test_another_measurement_protocol_is_another_build(engine: Engine, make_world, world) -> None:
    other = make_world(build=dataclasses.replace(world.build, protocol="2"))
    assert other.build_id != world.build_id
    with writing(engine) as s:
        writes.add_measurement(s, world.new())
        assert len(queries.measured(s, "kda", world.gpu_id, world.problem_id, world.build_id)) == 1
        assert queries.measured(s, "kda", world.gpu_id, world.problem_id, other.build_id) == {}


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(1, 1, 0),
        shape_of(1, 8, (1 << 40) - 1, HV=(1 << 40) - 8, K=(1 << 40) - 1, V=(1 << 40) - 1),
        shape_of((1 << 40) - 1, 1, (1 << 40) - 1, longest_tokens=(1 << 40) - 1, varlen=True, state_v_first=True),
    ],
    ids=lambda shape: shape.key(),
)
def test_extreme_shapes_come_back_equal(engine: Engine, make_world, shape: Shape) -> None:
    w = make_world(shape=shape)
    with writing(engine) as s:
        writes.add_measurement(s, w.new())
        assert queries.page_measurements(s)[0].shape == shape
