"""`kdatune regressions` and `kdatune regressions ack`, as real processes."""

import json
import subprocess
from collections.abc import Callable
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from pathlib import Path

import pytest

from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import writes
from kdatune_tuner.store.access import page_audit
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewMeasurement

Run = Callable[..., "subprocess.CompletedProcess[str]"]
OLD = Build("k" * 16, "s" * 16, "1", "3.6.0", "12.9", "2.13.0", "13.0", "570.1")
NEW = Build("k" * 16, "s" * 16, "1", "3.6.0", "12.9", "2.13.0", "13.0", "580.1")
CONFIG = LaunchConfig(K1Config(), K2Config())


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with a config that took 600 us for eight nights and takes 630 since a new driver came."""
    url = f"sqlite:///{tmp_path / 'kdatune.db'}"
    upgrade(url)
    engine = open_engine(url)
    now = datetime.now(UTC)
    with writing(engine) as s:
        gpu_id = writes.put_gpu(s, KNOWN_GPUS["NVIDIA H200"])
        problem_id = writes.put_problem(s, "kda", shape_of(1, 96, 8192))
        builds = [writes.put_build(s, build) for build in (OLD, NEW)]
        for night in range(12):
            new = NewMeasurement(
                run_id=None,
                kernel="kda",
                gpu_id=gpu_id,
                problem_id=problem_id,
                build_id=builds[night >= 8],
                config_json=canonical(CONFIG),
                config_hash=digest(CONFIG),
                outcome=Outcome.OK,
                median_us=630.0 if night >= 8 else 600.0,
                measured_at=now - timedelta(days=12 - night),
            )
            writes.add_measurement(s, new)
    engine.dispose()
    return url


@pytest.fixture
def environment(environment: dict[str, str], url: str) -> dict[str, str]:
    return environment | {"KDATUNE_DATABASE_URL": url}


def test_it_looks_lists_and_is_told(run: Run, url: str) -> None:
    found = run("regressions", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    document = json.loads(found.stdout)
    (row,) = document.pop("regressions")
    assert document == {
        "opened_count": 1,
        "resolved_count": 0,
        "machine_count": 0,
        "steady_count": 0,
        "short_count": 0,
    }
    assert (row["id"], row["kernel"], row["gpu"], row["shape"], row["state"]) == (
        1,
        "kda",
        "NVIDIA H200",
        "N=1,H=96,T=8192",
        "open",
    )
    assert (row["before_us"], row["after_us"], row["now_us"], row["change_pct"]) == (
        600.0,
        630.0,
        630.0,
        pytest.approx(5),
    )
    assert row["cause"] == "driver 570.1, now 580.1"
    table = run("regressions")
    assert "driver 570.1, now 580.1" in table.stdout
    assert "+5.0 %" in table.stdout
    told = run("regressions", "ack", "1", "--note", "the new driver", "--json")
    assert told.returncode == 0, told.stderr
    after = json.loads(told.stdout)
    assert (after["state"], after["note"], after["changed"]) == ("acknowledged", "the new driver", True)
    again = run("regressions", "ack", "1")
    assert again.returncode == 0
    assert "nothing is changed" in again.stdout
    assert json.loads(run("regressions", "--json").stdout)["regressions"] == []
    assert run("regressions").stdout == "no open regression\n"
    (row,) = json.loads(run("regressions", "--all", "--json").stdout)["regressions"]
    assert (row["state"], row["note"]) == ("acknowledged", "the new driver")
    engine = open_engine(url)
    with reading(engine) as s:
        assert page_audit(s)[0].actor.startswith("command line, user ")
    engine.dispose()


def test_the_minimum_effect_is_a_setting(run: Run) -> None:
    document = json.loads(run("regressions", "--json", KDATUNE_REGRESSION_MIN_PCT="8").stdout)
    assert (document["regressions"], document["steady_count"]) == ([], 1)
    wrong = run("regressions", KDATUNE_REGRESSION_MIN_PCT="-1")
    assert wrong.returncode == 2
    assert "KDATUNE_REGRESSION_MIN_PCT" in wrong.stderr


def test_a_wrong_id_or_note_is_told(run: Run) -> None:
    missing = run("regressions", "ack", "7")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "regression 7 does not exist; see `kdatune regressions --all`" in missing.stderr
    assert run("regressions", "ack", "0").returncode == 2
    assert run("regressions", "ack", "x").returncode == 2
    run("regressions")
    empty = run("regressions", "ack", "1", "--note", "")
    assert empty.returncode == 1
    assert "a note must be 1 to 500 characters" in empty.stderr
