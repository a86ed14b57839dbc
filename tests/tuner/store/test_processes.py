"""Many processes on one database: starting together, writing together, and Optuna beside us."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import pytest
from sqlalchemy import Engine
from sqlalchemy import inspect

from kdatune_kernels.spec import parse_shape
from kdatune_migrations import VERSION_TABLE
from kdatune_migrations import head
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import schema_state
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.models import Base

PROCESSES = 8
ROWS = 20

START = """
import json, sys
from kdatune_kernels.spec import gpu_of
from kdatune_tuner.store.engine import open_engine, reading, upgrade, writing
from kdatune_tuner.store import queries, writes
url, me = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
upgrade(url)
engine = open_engine(url)
with writing(engine) as s:
    writes.put_gpu(s, gpu_of("NVIDIA H200", "9.0", 132))
with reading(engine) as s:
    print(json.dumps([gpu.name for gpu in queries.gpus(s)]))
engine.dispose()
"""

WRITE = """
import json, sys
from kdatune_kernels.spec import K1Config, K2Config, LaunchConfig, canonical, digest
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.engine import open_engine, reading, writing
from kdatune_tuner.store.records import NewMeasurement
from kdatune_tuner.store import queries, writes
url, me, gpu_id, problem_id, build_id, rows = sys.argv[1], *map(int, sys.argv[2:])
config = LaunchConfig(K1Config(), K2Config())
engine = open_engine(url)
print("ready", flush=True)
sys.stdin.readline()
generations = []
for i in range(rows):
    with writing(engine) as s:
        before = queries.generation(s)  # a read before the write: what SQLite refuses when it is not meant as a write
        new = NewMeasurement(
            run_id=None, kernel="kda", gpu_id=gpu_id, problem_id=problem_id, build_id=build_id,
            config_json=canonical(config), config_hash=digest(config), outcome=Outcome.OK,
            median_us=1.0 + me * rows + i,
        )
        measurement_id = writes.add_measurement(s, new)
        generations.append(writes.promote(
            s, kernel="kda", gpu_id=gpu_id, problem_id=problem_id, measurement_id=measurement_id,
            baseline_measurement_id=None, default_us=None, gain=None, gain_low=None, gain_high=None,
            decision="promoted", reason="test",
        ))
        assert generations[-1] == before + 1
    with reading(engine) as s:
        assert queries.generation(s) >= generations[-1]
engine.dispose()
print(json.dumps(generations))
"""


@contextmanager
def started_together(script: str, url: str, *arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    """PROCESSES interpreters that have imported everything and now go on at once."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), url]
    processes = [
        subprocess.Popen(
            [*command, str(me), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def results(processes: list[subprocess.Popen[str]]) -> list[object]:
    """What each process printed; an error of one is shown with its traceback."""
    answers = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        answers.append(json.loads(out))
    return answers


def test_processes_that_start_together_make_one_database(database_url: str) -> None:
    with started_together(START, database_url) as processes:
        assert results(processes) == [["NVIDIA H200"]] * PROCESSES
    engine = open_engine(database_url)
    with reading(engine) as s:
        assert len(queries.page_gpus(s)) == 1
    engine.dispose()


def test_processes_that_write_together_lose_nothing(engine: Engine, database_url: str, world) -> None:
    with started_together(WRITE, database_url, world.gpu_id, world.problem_id, world.build_id, ROWS) as processes:
        seen = 0
        while any(process.poll() is None for process in processes):
            with reading(engine) as s:
                now = queries.generation(s)
                assert now >= seen
                assert len(queries.page_measurements(s, limit=1000)) == now  # a row and its promotion appear together
                seen = now
        given = results(processes)
    with reading(engine) as s:
        rows = queries.page_measurements(s, limit=1000)
        promotions = queries.page_promotions(s, limit=1000)
        (champion,) = queries.champions(s)
    everything = PROCESSES * ROWS
    assert sorted(row.median_us for row in rows) == [1.0 + i for i in range(everything)]
    assert sorted(g for one in given for g in one) == list(range(1, everything + 1))
    assert all(one == sorted(one) for one in given)
    assert [p.generation for p in promotions] == list(range(1, everything + 1))
    assert champion.generation == everything


@pytest.mark.parametrize("optuna_first", [False, True])
def test_optuna_may_live_in_the_same_database(database_url: str, optuna_first: bool) -> None:
    def trials(add: int) -> int:
        storage = optuna.storages.RDBStorage(database_url)
        study = optuna.create_study(storage=storage, study_name="k2", load_if_exists=True)
        study.optimize(lambda trial: trial.suggest_int("stages_in", 1, 8), n_trials=add)
        count = len(study.trials)
        storage.remove_session()
        storage.engine.dispose()
        return count

    if not optuna_first:
        upgrade(database_url)
    assert trials(add=3) == 3
    upgrade(database_url)
    engine = open_engine(database_url)
    with writing(engine) as s:
        writes.report_demand(s, "NVIDIA H20", "kda", parse_shape("N=1,H=8,T=64"), 1)
    upgrade(database_url)
    assert schema_state(engine) == (head(), head())
    assert trials(add=2) == 5
    with reading(engine) as s:
        assert len(queries.demand(s)) == 1
    tables = set(inspect(engine).get_table_names())
    assert tables > {*Base.metadata.tables, VERSION_TABLE, "alembic_version", "studies", "trials", "version_info"}
    engine.dispose()
