"""Kernels of others in the database, on SQLite and PostgreSQL: what goes in comes out, and KDA's rows are what they were."""

import json

import pytest
from sqlalchemy import Engine
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_tuner.store import intake
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.changes import changes
from kdatune_tuner.store.changes import newest_mark
from kdatune_tuner.store.engine import downgrade
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.other_champions import other_champions
from kdatune_tuner.store.records import NewMeasurement

H200 = KNOWN_GPUS["NVIDIA H200"]
BUILD = Build("k", "s", "1", "3.6.0", "12.9", "2.13", "13.0", "580.1")
SHAPE = OtherShape({"rows": 64, "columns": 512, "dtype": "bf16"})
CONFIG = OtherConfig({"rows_per_program": 2, "block_columns": 512, "num_warps": 4})
KDA_SHAPE = shape_of(1, 96, 8192)
KDA_CONFIG = LaunchConfig(K1Config(), K2Config())


def promote(engine: Engine, kernel: str, shape: object, config: object, gpu: Gpu = H200, us: float = 10.0) -> int:
    with writing(engine) as s:
        ids = {
            "gpu_id": writes.put_gpu(s, gpu),
            "problem_id": writes.put_problem(s, kernel, shape),  # type: ignore[arg-type]
        }
        measurement = writes.add_measurement(
            s,
            NewMeasurement(
                run_id=None,
                kernel=kernel,
                build_id=writes.put_build(s, BUILD),
                config_json=canonical(config),
                config_hash=digest(config),
                outcome="ok",  # type: ignore[arg-type]
                median_us=us,
                **ids,
            ),
        )
        return writes.promote(
            s,
            kernel=kernel,
            measurement_id=measurement,
            baseline_measurement_id=None,
            default_us=12.0,
            gain=1.2,
            gain_low=1.1,
            gain_high=1.3,
            decision="promoted",
            reason="faster",
            **ids,
        )


def test_a_champion_comes_out_as_it_went_in(engine: Engine) -> None:
    promote(engine, "rmsnorm", SHAPE, CONFIG)
    promote(engine, "kda", KDA_SHAPE, KDA_CONFIG)
    with reading(engine) as s:
        (other,) = other_champions(s)
        assert (other.kernel, other.gpu, other.shape, other.config) == ("rmsnorm", H200, SHAPE, CONFIG)
        assert (other.generation, other.measured_us, other.default_us, other.build) == (1, 10.0, 12.0, BUILD)
        assert other_champions(s, kernel="softmax") == []
        assert other_champions(s, KNOWN_GPUS["NVIDIA H20"]) == []
        (ours,) = queries.champions(s)
        assert (ours.shape, ours.config, ours.generation) == (KDA_SHAPE, KDA_CONFIG, 2)
        rows = queries.page_measurements(s, kernel="rmsnorm", shape=SHAPE)
        assert [(row.shape, json.loads(row.config_json)) for row in rows] == [(SHAPE, CONFIG.json())]
        assert [row.shape for row in queries.page_promotions(s)] == [SHAPE, KDA_SHAPE]


def test_a_rollback_brings_back_what_was_served(engine: Engine) -> None:
    promote(engine, "rmsnorm", SHAPE, CONFIG)
    second = OtherConfig({**CONFIG, "num_warps": 8})
    promote(engine, "rmsnorm", SHAPE, second)
    for expected in (CONFIG, second):  # undoing the undoing serves the second again
        with writing(engine) as s:
            newest = [row for row in queries.page_promotions(s, kernel="rmsnorm", limit=1000) if row.config_json][-1]
            served = queries.served(s, "rmsnorm", newest.gpu_id, newest.problem_id)
            assert served is not None
            writes.rollback(s, served.id, "by hand")
            assert [c.config for c in other_champions(s)] == [expected]


def test_changes_tell_both_kinds(engine: Engine) -> None:
    promote(engine, "kda", KDA_SHAPE, KDA_CONFIG)
    with reading(engine) as s:
        mark = newest_mark(s)
    promote(engine, "rmsnorm", SHAPE, CONFIG)
    with reading(engine) as s:
        told = changes(s, mark)
        assert told is not None
        assert (told.shapes, told.champions) == (frozenset(), ())
        assert told.other_keys == {("rmsnorm", SHAPE)}
        assert told.others == tuple(other_champions(s))
        mark = newest_mark(s)
    promote(engine, "kda", KDA_SHAPE, KDA_CONFIG)
    with reading(engine) as s:
        told = changes(s, mark)
        assert told is not None
        assert (told.shapes, told.other_keys) == ({KDA_SHAPE}, frozenset())


def test_a_shape_of_the_wrong_kind_is_refused(engine: Engine) -> None:
    with writing(engine) as s:
        for kernel, shape in (("kda", SHAPE), ("rmsnorm", KDA_SHAPE)):
            with pytest.raises(StoreError, match=f"is no shape of kernel {kernel}"):
                writes.put_problem(s, kernel, shape)  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="unknown kernel 'Rms_Norm'"):
            writes.put_problem(s, "Rms_Norm", SHAPE)


def test_the_database_itself_refuses_half_a_problem(engine: Engine) -> None:
    columns = "(kernel, shape_hash, shape_key, shape_json)"
    for values in ("('kda', 'h', 'k', '{}')", "('rmsnorm', 'h', 'k', NULL)", "('kda', 'h', 'k', NULL)"):
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(text(f"INSERT INTO problem {columns} VALUES {values}"))


def test_demand_and_quarantine_of_any_kernel(engine: Engine) -> None:
    with writing(engine) as s:
        writes.report_demand(s, "NVIDIA H200", "rmsnorm", SHAPE, 3)
        writes.report_demand(s, "NVIDIA H200", "kda", KDA_SHAPE, 2)
        assert intake.has_demand(s, "NVIDIA H200", "rmsnorm", SHAPE)
        assert [(row.kernel, row.shape, row.count) for row in queries.demand(s)] == [
            ("rmsnorm", SHAPE, 3),
            ("kda", KDA_SHAPE, 2),
        ]
        assert intake.report_quarantine(s, "NVIDIA H200", "rmsnorm", SHAPE, CONFIG, "out of registers")
        (row,) = intake.page_quarantined(s, kernel="rmsnorm", shape=SHAPE)
        assert (row.shape, row.config_json, row.reason) == (SHAPE, CONFIG.text, "out of registers")


def test_an_older_schema_cannot_hold_them_and_says_so(engine: Engine, database_url: str) -> None:
    promote(engine, "rmsnorm", SHAPE, CONFIG)
    engine.dispose()
    with pytest.raises(StoreError, match="schema 0004 cannot hold what is stored of rmsnorm"):
        downgrade(database_url, "0004")
    with reading(engine) as s:
        assert [c.shape for c in other_champions(s)] == [SHAPE]


def test_a_row_that_cannot_be_read_does_not_stop_the_others(engine: Engine) -> None:
    promote(engine, "rmsnorm", SHAPE, CONFIG)
    promote(engine, "softmax", SHAPE, CONFIG)
    with engine.begin() as connection:
        connection.execute(text("UPDATE promotion SET config_json = '[]' WHERE kernel = 'softmax'"))
    with reading(engine) as s:
        assert [c.kernel for c in other_champions(s)] == ["rmsnorm"]
