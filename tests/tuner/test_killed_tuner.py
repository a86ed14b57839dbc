"""kill -9 of the tuner at twenty random moments: nothing that was finished is lost, nothing is measured twice, same end."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy import select
from sqlalchemy import text

from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import ProblemModel

SCRIPT = str(Path(__file__).parent / "killed_tune.py")
SHAPES = ("N=1,H=96,T=8192", "N=1,H=64,T=8192")
KILLS = 20
LATE = 15  # measurements later than it should, a run hangs until it is killed


class Tuning:
    """A search that can be killed and started again."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process = process
        self.folder = folder

    def start(self, last: float = float("inf")) -> int:
        """Begin, or go on until the measurement of that number; the process id."""
        self.process.stdin.write(f"{last}\n")
        self.process.stdin.flush()
        word, pid = self.process.stdout.readline().split()
        assert word == "pid"
        return int(pid)

    def status(self) -> int:
        """Wait for its end; how it ended."""
        self.process.stdin.write("wait\n")
        self.process.stdin.flush()
        word, code = self.process.stdout.readline().split()
        assert word == "status"
        return int(code)

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@contextmanager
def tuning(
    url: str, sweep: Path, folder: Path, trials: int = 1000, shapes: tuple[str, ...] = SHAPES[:1]
) -> Iterator[Tuning]:
    folder.mkdir()
    wanted = [part for shape in shapes for part in ("--shape", shape)]
    command = [sys.executable, "-W", "error", SCRIPT, str(sweep), str(folder), "tune", *wanted]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KDATUNE_")}
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(
            [*command, "--trials", str(trials)],
            env=kept | {"KDATUNE_DATABASE_URL": url, "KDATUNE_CACHE_DIR": str(folder / "cache")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            yield Tuning(process, folder)
        finally:
            process.kill()


def kill_at_random(search: Tuning, total: int, dice: random.Random, kills: int = KILLS) -> int:
    """Start and kill so often, spread over all that is to be measured; how many kills hit a running search."""
    moments = sorted(dice.sample(range(total), kills))
    hits = 0
    for number, moment in enumerate(moments):
        pid = search.start(moment + LATE)
        if number % 7 == 0:
            time.sleep(dice.uniform(0.0, 0.3))  # while it opens the database, or a moment after
        else:
            deadline = time.monotonic() + 120
            while len(search.lines("calls.txt")) < moment and runs(pid):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(dice.uniform(0.0, 0.005))
        os.kill(pid, signal.SIGKILL)
        hits += search.status() == -signal.SIGKILL
    return hits


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def stored(engine: Engine) -> dict[int, tuple[str, str, str, float | None]]:
    """Every measurement by its id: kernel, shape, config hash, time."""
    m, p = MeasurementModel, ProblemModel
    columns = select(m.id, m.kernel, p.shape_key, m.config_hash, m.median_us).join(p, p.id == m.problem_id)
    with reading(engine) as s:
        return {row_id: (kernel, shape, config, us) for row_id, kernel, shape, config, us in s.execute(columns)}


def served(engine: Engine) -> dict[str, tuple[object, ...]]:
    with reading(engine) as s:
        return {c.shape.key(): (c.config, c.measured_us, c.default_us) for c in queries.champions(s)}


def check_whole(engine: Engine) -> None:
    """The database is sound."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
            assert connection.execute(text("PRAGMA foreign_key_check")).fetchall() == []
        else:
            left = "SELECT count(*) FROM measurement m LEFT JOIN run r ON r.id = m.run_id WHERE r.id IS NULL"
            assert connection.scalar(text(left)) == 0


def test_twenty_kills_change_nothing(
    database_url: str, tmp_path: Path, real_sweep_path: Path, request: pytest.FixtureRequest
) -> None:
    calm_url = f"sqlite:///{tmp_path / 'calm.db'}"
    upgrade(calm_url)
    upgrade(database_url)
    with tuning(calm_url, real_sweep_path, tmp_path / "calm") as calm:
        calm.start()
        assert calm.status() == 0, (tmp_path / "calm" / "log.txt").read_text()
        total = len(calm.lines("calls.txt"))
    engine, calm_engine = open_engine(database_url), open_engine(calm_url)
    request.addfinalizer(engine.dispose)
    request.addfinalizer(calm_engine.dispose)
    with tuning(database_url, real_sweep_path, tmp_path / "killed") as search:
        hits = kill_at_random(search, total, random.Random(20))
        check_whole(engine)
        # what was said to be stored is stored, after every one of the kills
        acknowledged = [line.split() for line in search.lines("stored.txt")]
        kept = stored(engine)
        for row_id, kernel, shape, config in acknowledged:
            assert kept[int(row_id)][:3] == (kernel, shape, config)
        assert 0 <= len(kept) - len(acknowledged) <= hits  # a kill may fall between the commit and our note
        search.start()
        assert search.status() == 0, (tmp_path / "killed" / "log.txt").read_text()
        calls = search.lines("calls.txt")
    assert hits >= KILLS - 2
    rows = stored(engine)
    assert max(Counter(row[:3] for row in rows.values()).values()) == 1
    assert sorted(rows.values(), key=str) == sorted(stored(calm_engine).values(), key=str)
    assert len(calls) - total <= hits  # what was in flight
    assert served(engine) == served(calm_engine)
    assert set(served(engine)) == {SHAPES[0]}
    check_whole(engine)


def test_a_search_that_proposes_loses_and_repeats_nothing_either(tmp_path: Path, real_sweep_path: Path) -> None:
    """A search that does not look at everything takes another way after a kill, within the same budget."""
    url = f"sqlite:///{tmp_path / 'kdatune.db'}"
    upgrade(url)
    engine = open_engine(url)
    with tuning(url, real_sweep_path, tmp_path / "killed", trials=50, shapes=SHAPES) as search:
        hits = kill_at_random(search, 60, random.Random(6), kills=6)
        kept = stored(engine)
        for row_id, *key in (line.split() for line in search.lines("stored.txt")):
            assert kept[int(row_id)][:3] == tuple(key)
        search.start()
        assert search.status() == 0, (tmp_path / "killed" / "log.txt").read_text()
        calls = search.lines("calls.txt")
    rows = Counter(row[:3] for row in stored(engine).values())
    assert max(rows.values()) == 1
    stages = Counter((kernel, shape) for kernel, shape, _ in rows if kernel != "kda")
    assert set(stages) == {(kernel, shape) for kernel in ("k1", "k2") for shape in SHAPES}
    assert max(stages.values()) <= 50
    assert hits >= 3
    assert len(calls) - len(rows) <= hits
    assert set(served(engine)) == set(SHAPES)
    check_whole(engine)
    engine.dispose()
