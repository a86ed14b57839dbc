"""`kdatune nightly` as a scheduler meets it: real processes, exit codes, signals, what is printed; and its lock."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import func
from sqlalchemy import select

from kdatune_kernels.spec import shape_of
from kdatune_tuner.store import night
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.records import RunState

KDATUNE = [sys.executable, "-m", "kdatune_tuner.cli"]
SLOW = [sys.executable, str(Path(__file__).parent / "slow_night.py")]
A, B = shape_of(1, 64, 8192), shape_of(1, 16, 8192)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(environment: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return environment | {"PYTHONWARNINGS": "error", "PYTHONPATH": path}


@contextmanager
def started(url: str, environment: dict[str, str], *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A night of 14 configs a stage for A and B; entered once it has stored some trials, and it does not come to its end."""
    upgrade(url)
    engine = open_engine(url)
    with writing(engine) as s:
        for shape, count in ((A, 50), (B, 5)):
            writes.report_demand(s, "NVIDIA H200", "kda", shape, count)
    command = [*SLOW, "nightly", "--trials", "14", *arguments]
    env = environment | {"KDATUNE_DATABASE_URL": url, "SLOW_NIGHT_MOST": "25"}
    try:
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                deadline = time.monotonic() + 120
                while measured(engine) < 10:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                yield process
            finally:
                process.kill()
    finally:
        engine.dispose()


def measured(engine) -> int:
    with reading(engine) as s:
        return s.scalar(select(func.count()).select_from(MeasurementModel)) or 0


def known(result: "subprocess.CompletedProcess[str]", code: int, *said: str) -> None:
    """A known error: its exit code, its message on stderr, nothing on stdout, no traceback."""
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert "Traceback" not in result.stderr
    for part in said:
        assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--budget", "0"], 2, "--budget must be a time above 0"),
        (["--budget", "soon"], 2, "such as 90s, 10m or 1h30m, not 'soon'"),
        (["--backend", "cpu"], 2, "'cpu' is not one of"),
        (["--trials", "0"], 2, "--trials"),
        (["--backend", "replay", "--workers", "0"], 1, "there is no database at"),
        (["--backend", "gpu", "--recording", "x"], 2, "--recording belongs to --backend replay"),
        (["--backend", "replay"], 1, "there is no database at"),
    ],
)
def test_what_it_cannot_work_with_is_said(run: Run, arguments: list[str], code: int, said: str) -> None:
    known(run("nightly", *arguments), code, said)


def test_a_recording_that_is_not_there_and_a_night_that_is_not(run: Run, environment: dict[str, str]) -> None:
    upgrade(environment["KDATUNE_DATABASE_URL"])
    known(run("nightly", "--backend", "replay", "--recording", "none.gz"), 1, "no such sweep file")
    known(run("nights", "--night", "7"), 1, "there is no night 7; see kdatune nights")
    known(run("nights", "--night", "99999999999"), 1, "there is no night 99999999999")
    assert run("nights").stdout == "no night is stored yet; run kdatune nightly\n"
    assert json.loads(run("nights", "--json").stdout) == {"nights": []}


def test_one_json_document_and_the_same_stored(run: Run, environment: dict[str, str]) -> None:
    upgrade(environment["KDATUNE_DATABASE_URL"])
    result = run("nightly", "--backend", "replay", "--budget", "90s", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["format"], report["night"], report["state"], report["exit_code"]) == (1, 1, "done", 0)
    assert (report["budget_seconds"], report["gpu"], report["backend"]) == (90.0, "NVIDIA H200", "replay")
    assert [point["shape"] for point in report["reference"]["points"]] == [
        "N=1,H=96,T=8192",
        "N=1,H=8,T=8192",
        "N=1,H=64,T=1024",
    ]
    assert json.loads(run("nights", "--night", "1", "--json").stdout) == report
    text = run("nights", "--night", "1").stdout
    assert text.startswith("night 1 on NVIDIA H200 (replay, ")
    assert "clean" in text
    assert run("nights").stdout.splitlines() == text.splitlines()[:1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_night_that_is_ended_goes_on_and_repeats_nothing(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    url = environment["KDATUNE_DATABASE_URL"]
    with started(url, environment, "--json") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    engine = open_engine(url)
    kept = measured(engine)
    assert kept >= 10
    with reading(engine) as s:
        (row,) = night.page_nights(s)
        runs = queries.page_runs(s)
    if number is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert (row.state, row.exit_code, runs[-1].state) == (RunState.RUNNING, None, RunState.RUNNING)
    else:
        assert process.returncode == 130, err
        assert "interrupted" in err
        assert "Traceback" not in err
        assert json.loads(out) == row.report
        assert (row.state, row.exit_code, runs[-1].state) == (RunState.INTERRUPTED, 130, RunState.INTERRUPTED)
        assert "left" in {item["state"] for item in row.report["plan"]}
    command = [*SLOW, "nightly", "--trials", "14", "--json"]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert report["resumed_nights"] == [1]
    assert report["swept_runs"] == ([runs[-1].id] if number is signal.SIGKILL else [])
    assert {f["kind"] for f in report["findings"]} == {"demand_served"}
    assert {item["state"] for item in report["plan"]} == {"done", "skipped"}
    with reading(engine) as s:
        rows = [row for kernel in ("k1", "k2") for row in queries.page_measurements(s, kernel=kernel, limit=1000)]
        states = {run.state for run in queries.page_runs(s, limit=1000)}
        served = {champion.shape for champion in queries.champions(s)}
    assert len({(row.kernel, row.shape, row.config_hash) for row in rows}) == len(rows) == 2 * 2 * 14
    assert states == {RunState.DONE, RunState.INTERRUPTED}
    assert served == {A, B}
    engine.dispose()


def test_a_second_night_at_once_leaves_with_a_clear_word(database_url: str, environment: dict[str, str]) -> None:
    command = [*KDATUNE, "nightly", "--backend", "replay", "--json"]
    env = environment | {"KDATUNE_DATABASE_URL": database_url}
    with started(database_url, environment) as process:
        second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert process.poll() is None, "the first one is at work still"
        known(second, 1, "another nightly run is at work on this database; this one leaves")
        process.send_signal(signal.SIGKILL)  # its lock dies with it
        process.communicate(timeout=120)
    third = subprocess.run(
        [*command, "--trials", "1"], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert third.returncode == 0, third.stderr
    assert json.loads(third.stdout)["resumed_nights"] == [1]


def test_workers_do_the_searches(run: Run, environment: dict[str, str]) -> None:
    """Two processes over the shipped recording, one database."""
    url = environment["KDATUNE_DATABASE_URL"]
    upgrade(url)
    known(run("nightly", "--backend", "replay", "--workers", "none"), 2, "--workers must be all or a number")
    engine = open_engine(url)
    with writing(engine) as s:
        for shape, count in ((A, 50), (B, 5)):
            writes.report_demand(s, "NVIDIA H200", "kda", shape, count)
    result = run("nightly", "--backend", "replay", "--workers", "2", "--trials", "5", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert [(f["kind"], f["shape"], f["figures"]["miss_count"]) for f in report["findings"]] == [
        ("demand_served", A.key(), 50),
        ("demand_served", B.key(), 5),
    ]
    searches = [item for item in report["plan"] if item["kind"] == "search"]
    assert [(item["shape"], item["state"]) for item in searches] == [(A.key(), "done"), (B.key(), "done")]
    assert all("by worker" in item["result"] for item in searches)
    with reading(engine) as s:
        assert {(r.trigger, r.state) for r in queries.page_runs(s)} == {("nightly", RunState.DONE)}
    engine.dispose()
