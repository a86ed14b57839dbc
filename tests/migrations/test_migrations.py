"""The schema that the migrations make is the one that the models describe, on both databases."""

import re

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import CheckConstraint
from sqlalchemy import Engine
from sqlalchemy import inspect
from sqlalchemy import text

from kdatune_kernels.errors import StoreError
from kdatune_migrations import VERSION_TABLE
from kdatune_migrations import alembic_config
from kdatune_migrations import head
from kdatune_migrations import knows
from kdatune_tuner.store.engine import downgrade
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import schema_state
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.models import Base

TABLES = set(Base.metadata.tables)


def test_the_tables_are_those_of_the_architecture() -> None:
    data = {"gpu", "build", "problem", "run", "measurement", "promotion", "profile", "demand"}
    more = {
        "token",
        "audit",
        "receipt",
        "quarantine",
        "claim",
        "night",
        "reference_time",
        "champion_check",
        "regression",
    }
    assert data | more == TABLES


def test_migrated_from_empty_equals_the_models(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, Base.metadata) == []


def test_checks_and_names_equal_the_models(engine: Engine) -> None:
    """What Alembic's comparison does not look at: CHECK constraints, and the names of primary and foreign keys."""
    inspector = inspect(engine)
    for name, table in Base.metadata.tables.items():
        checks = {str(c.name): c for c in table.constraints if isinstance(c, CheckConstraint)}
        stored = {c["name"]: c["sqltext"] for c in inspector.get_check_constraints(name)}
        assert set(stored) == set(checks), name
        if engine.dialect.name == "sqlite":  # PostgreSQL rewrites the text of an expression
            assert {n: squeezed(sql) for n, sql in stored.items()} == {
                n: squeezed(c.sqltext) for n, c in checks.items()
            }
        assert inspector.get_pk_constraint(name)["name"] == table.primary_key.name == f"pk_{name}"
        keys = {str(c.name): (c.column_keys, c.referred_table.name) for c in table.foreign_key_constraints}
        found = inspector.get_foreign_keys(name)
        assert {k["name"]: (k["constrained_columns"], k["referred_table"]) for k in found} == keys, name


def squeezed(sql: object) -> str:
    return re.sub(r"\s+", " ", str(sql)).strip()


def test_every_constraint_and_index_has_a_name_that_postgresql_keeps_whole() -> None:
    for table in Base.metadata.tables.values():
        for item in (*table.constraints, *table.indexes):
            assert item.name, (table.name, item)
            assert len(str(item.name)) <= 63


def test_numeric_columns_carry_their_unit() -> None:
    """Floats say what they are; dimensionless ones are the gains (speed-ups, x), regrets (x) and error ratios."""
    unit = re.compile(r"_(us|pct|mhz|seconds|ratio|regret|per_issue)$|^gain(_low|_high)?$")
    floats = [
        f"{t.name}.{c.name}" for t in Base.metadata.tables.values() for c in t.columns if c.type.python_type is float
    ]
    assert len(floats) == 31
    assert [name for name in floats if not unit.search(name.split(".")[1])] == []


def test_down_to_nothing_and_up_again(database_url: str) -> None:
    upgrade(database_url)
    engine = open_engine(database_url)
    downgrade(database_url)
    assert set(inspect(engine).get_table_names()) == {VERSION_TABLE}
    assert schema_state(engine) == (None, head())
    with pytest.raises(StoreError, match="holds no kdatune schema"):
        open_engine(database_url)
    upgrade(database_url)
    assert set(inspect(engine).get_table_names()) == TABLES | {VERSION_TABLE}
    engine.dispose()


def test_each_revision_goes_down_and_up(database_url: str) -> None:
    upgrade(database_url)
    for script in ScriptDirectory.from_config(alembic_config()).walk_revisions():
        downgrade(database_url, script.down_revision or "base")
        upgrade(database_url)
    engine = open_engine(database_url)
    assert schema_state(engine) == (head(), head())
    engine.dispose()


def test_upgrading_again_changes_nothing(engine: Engine, database_url: str) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO build VALUES (1, 'd', 'k', 's', 'p', 't', 'x', 't', 'c', 'd', '2026-11-29')")
        )
    upgrade(database_url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM build")) == 1


def test_a_migration_that_fails_leaves_nothing_behind(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = command.upgrade

    def fails(config, revision) -> None:
        real(config, revision)
        raise RuntimeError("out of luck")

    monkeypatch.setattr("kdatune_tuner.store.engine.command.upgrade", fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        upgrade(database_url)
    engine = open_engine(database_url, must_exist=False)
    assert inspect(engine).get_table_names() == []
    engine.dispose()


def test_one_line_of_revisions() -> None:
    scripts = list(ScriptDirectory.from_config(alembic_config()).walk_revisions())
    assert [s.revision for s in scripts] == [f"{n:04d}" for n in range(len(scripts), 0, -1)]
    assert head() == scripts[0].revision
    assert knows("0001")
    assert not knows("9999")


def test_alembic_without_a_connection_says_how_to_migrate() -> None:
    with pytest.raises(TypeError, match="migrate with `kdatune db upgrade`"):
        command.upgrade(alembic_config(), "head")
