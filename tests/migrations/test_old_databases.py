"""A database of every released schema is upgraded and still serves what it served."""

import sqlite3
from pathlib import Path

import pytest

from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import shape_of
from kdatune_migrations import head
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import schema_state
from kdatune_tuner.store.engine import upgrade

OLD = sorted((Path(__file__).parent / "old").glob("*.sql"))


@pytest.mark.parametrize("dump", OLD, ids=lambda path: path.stem)
def test_an_old_database_is_upgraded(dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    old = sqlite3.connect(path)
    old.executescript(dump.read_text())
    assert old.execute("SELECT version_num FROM kdatune_alembic_version").fetchall() == [(dump.stem,)]
    old.close()
    upgrade(f"sqlite:///{path}")
    engine = open_engine(f"sqlite:///{path}")
    assert schema_state(engine) == (head(), head())
    with reading(engine) as s:
        (champion,) = queries.champions(s, KNOWN_GPUS["NVIDIA H200"])
        assert (queries.generation(s), champion.generation) == (3, 3)
        assert champion.shape == shape_of(1, 96, 8192)
        assert champion.config.k1.maxnreg == 96
        assert champion.config.k2 == K2Config(stages_in=4)
        assert (champion.measured_us, champion.default_us) == (602.5, 625.0)
        assert champion.measured_at == "2026-11-29T22:31:00Z"
        assert champion.build is not None
        assert (champion.build.triton, champion.build.protocol) == ("3.6.0", "1")
        rows = queries.page_measurements(s)
        assert [row.outcome.value for row in rows] == ["ok", "timeout", "ok"]
        assert rows[2].config_json == canonical(champion.config)
        assert [p.decision.value for p in queries.page_promotions(s)] == ["promoted", "tie", "promoted"]
        assert [run.state.value for run in queries.page_runs(s)] == ["done"]
        assert [p.unavailable_reason for p in queries.page_profiles(s)] == [None, "ERR_NVGPUCTRPERM"]
        assert [(d.gpu_name, d.count) for d in queries.demand(s)] == [("NVIDIA H20", 7)]
    engine.dispose()


def test_the_current_schema_is_among_them() -> None:
    assert [path.stem for path in OLD] == [f"{n:04d}" for n in range(1, int(head()) + 1)]
