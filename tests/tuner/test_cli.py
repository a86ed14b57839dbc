"""The command line as its users meet it: real processes, exit codes, stdout and stderr."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import func
from sqlalchemy import select

from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.space import FUSED
from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.models import MeasurementModel

KDATUNE = [sys.executable, "-m", "kdatune_tuner.cli"]
H200 = "NVIDIA H200"
KEY = "N=1,H=96,T=8192"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return environment | {"KDATUNE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "error"}


@pytest.fixture
def replay(run: Run, real_sweep_path: Path, environment: dict[str, str]) -> Run:
    """`kdatune tune` over the real sweep, on a database that exists."""
    upgrade(environment["KDATUNE_DATABASE_URL"])
    return lambda *arguments, **more: run(
        "tune", "--backend", "replay", "--recording", real_sweep_path, *arguments, **more
    )


def known(result: "subprocess.CompletedProcess[str]", code: int, *said: str) -> None:
    """A known error: its exit code, its message on stderr, nothing on stdout, no traceback."""
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert "Traceback" not in result.stderr
    for part in said:
        assert part in result.stderr


def test_one_json_document_and_nothing_else(replay: Run) -> None:
    result = replay("--shape", KEY, "--trials", "40", "--seed", "3", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    stages = sum(stage["trials"] for stage in document["stages"].values())
    assert (document["shape"], document["trials"], document["measured"]) == (KEY, stages + 9, stages + 9)
    assert 40 < stages <= 80  # a search may end before its trials do
    assert document["outcomes"] == {"ok": stages + 9}
    assert document["promotion"]["decision"] == "promoted"
    best = from_json(LaunchConfig, document["best_config"])
    assert config_ok(best, parse_shape(KEY), None) is not None  # ws: needs a card
    assert document["best_us"] < 800
    assert result.stderr == ""  # no bar where stderr is not a terminal


def test_several_shapes_give_results(replay: Run) -> None:
    result = replay("--shape", KEY, "--shape", "N=1,H=64,T=8192", "--trials", "5", "--json")
    results = json.loads(result.stdout)["results"]
    assert [one["shape"] for one in results] == [KEY, "N=1,H=64,T=8192"]


def test_without_a_shape_all_recorded_ones_are_tuned(replay: Run) -> None:
    results = json.loads(replay("--trials", "5", "--json").stdout)["results"]
    assert len(results) == 3


def test_people_get_a_table(replay: Run) -> None:
    result = replay("--shape", KEY, "--trials", "5")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["shape", "trials", "default", "best", "speed-up", "decision"]
    assert lines[1].startswith(KEY)
    assert "promoted" in lines[1]


def test_a_second_run_measures_nothing(replay: Run) -> None:
    first, second = (json.loads(replay("--shape", KEY, "--trials", "30", "--json").stdout) for _ in range(2))
    assert (first["measured"], second["measured"], second["resumed"]) == (69, 0, 69)
    assert second["best_us"] == first["best_us"]


@pytest.mark.parametrize("kernel", ["k1", "k2"])
def test_one_stage(replay: Run, kernel: str) -> None:
    document = json.loads(replay("--shape", KEY, "--kernel", kernel, "--trials", "30", "--json").stdout)
    assert (document["kernel"], document["trials"], document["promotion"]) == (kernel, 30, None)
    assert set(document["stages"]) == {kernel}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "N=1,Q=96,T=8192"], "unknown shape key 'Q'; known keys: N, H, T"),
        (["--shape", "N=1,H=96,T=-1"], "T must be a whole number >= 0"),
        (["--shape", "N=1,H=96,T=0"], "has no tokens"),
        (["--shape", "N=1,H=96"], "lacks T"),
        (
            ["--shape", "N=1,H=96,T=8192", "--kernel", "k9"],
            "no kernel 'k9': no installed package registers it under kdatune.kernels; known: k1, k2, kda",
        ),
        (["--shape", "N=1,H=96,T=8192", "--trials", "0"], "--trials"),
        (["--shape", "N=1,H=96,T=8192", "--budget", "soon"], "--budget must be a time above 0"),
        (["--shape", "N=1,H=96,T=8192", "--budget", "0s"], "--budget must be a time above 0"),
        (["--colour"], "No such option"),
    ],
)
def test_wrong_usage_is_exit_2(replay: Run, arguments: list[str], said: str) -> None:
    known(replay(*arguments), 2, said)


def test_a_recording_goes_with_replay_only(run: Run, real_sweep_path: Path) -> None:
    known(run("tune", "--backend", "gpu", "--recording", real_sweep_path), 2, "--recording belongs to --backend replay")


def test_a_setting_that_cannot_be_read_is_named(run: Run) -> None:
    known(run("tune", KDATUNE_TRIALS="many"), 2, "KDATUNE_TRIALS='many'")


def test_a_missing_database_says_what_to_run(run: Run, environment: dict[str, str], real_sweep_path: Path) -> None:
    known(run("tune", "--backend", "replay", "--recording", real_sweep_path), 1, "kdatune db upgrade")
    known(run("history", "--gpu", H200, "--shape", KEY), 1, "kdatune db upgrade")
    known(run("serve", "--port", "0"), 1, "kdatune db upgrade")
    for _ in range(2):
        upgraded = run("db", "upgrade")
        assert upgraded.returncode == 0
        assert upgraded.stdout == f"{environment['KDATUNE_DATABASE_URL']} is up to date\n"
    assert stored(environment) == 0


def test_a_shape_that_is_not_recorded_names_those_that_are(replay: Run) -> None:
    known(replay("--shape", "N=3,H=96,T=8192"), 1, "N=3,H=96,T=8192 is not in", "N=1,H=64,T=8192")


def test_a_truncated_or_foreign_sweep_file(run: Run, replay: Run, tmp_path: Path, real_sweep_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(real_sweep_path.read_bytes()[:9000])
    known(run("tune", "--backend", "replay", "--recording", cut), 1, "cut.jsonl.gz: truncated after row")
    cut.write_text("hello\n")
    known(run("tune", "--backend", "replay", "--recording", cut), 1, "row 1 is not JSON")
    known(run("tune", "--backend", "replay", "--recording", tmp_path / "none.gz"), 1, "no such sweep file")


def test_without_a_card_the_gpu_backend_is_exit_1(run: Run, replay: Run) -> None:
    known(run("tune", "--backend", "gpu", "--shape", KEY, CUDA_VISIBLE_DEVICES=""), 1, "can replay a recording")
    known(run("record", "--out", "x.jsonl.gz", CUDA_VISIBLE_DEVICES=""), 1, "no CUDA device is visible")


def test_the_version_and_the_commands(run: Run) -> None:
    assert re.fullmatch(r"kdatune \d+\.\d+\.\d+\n", run("--version").stdout)
    helped = run("--help")
    assert helped.returncode == 0
    for command in ("tune", "record", "up", "serve", "resolve", "history", "rollback", "export-snapshot", "db"):
        assert re.search(rf"^  {command} ", helped.stdout, re.MULTILINE)
    assert run("nonsense").returncode == 2


def test_history_rollback_and_snapshot(run: Run, replay: Run, tmp_path: Path) -> None:
    tuned = json.loads(replay("--shape", KEY, "--trials", "30", "--json").stdout)
    decisions = json.loads(run("history", "--gpu", H200, "--shape", KEY, "--json").stdout)["decisions"]
    assert [d["decision"] for d in decisions] == ["promoted"]
    assert decisions[0]["config"] == tuned["best_config"]
    assert "promoted" in run("history", "--gpu", H200, "--shape", KEY).stdout
    exported = run("export-snapshot", "--gpu", H200, "--out", "snapshot.json")
    assert exported.returncode == 0, exported.stderr
    snapshot = parse_snapshot((tmp_path / "snapshot.json").read_bytes())
    assert (snapshot.generation, snapshot.skipped) == (1, ())
    assert [c.config for c in snapshot.champions] == [from_json(LaunchConfig, tuned["best_config"])]
    back = run("rollback", "--gpu", H200, "--shape", KEY, "--reason", "numerics", "--json")
    assert json.loads(back.stdout) == {"gpu": H200, "shape": KEY, "generation": 2, "config": None}
    known(run("rollback", "--gpu", H200, "--shape", KEY), 1, "there is nothing to undo")
    reasons = [
        d["reason"] for d in json.loads(run("history", "--gpu", H200, "--shape", KEY, "--json").stdout)["decisions"]
    ]
    assert reasons[0] == "numerics"
    known(run("export-snapshot", "--gpu", H200, "--out", "no/folder/x.json"), 1, "cannot be written")
    known(run("history", "--gpu", "A/B", "--shape", KEY), 2, "unknown GPU model 'A/B'")


def test_resolve_shows_the_layers_and_the_database(run: Run, replay: Run) -> None:
    without = json.loads(
        run("resolve", "--gpu", H200, "--shape", KEY, "--json", KDATUNE_DATABASE_URL="sqlite:///no.db").stdout
    )
    assert without["database"] is None
    assert [layer["layer"] for layer in without["layers"]] == ["service", "disk", "bundled", "default"]
    assert sum(layer["used"] for layer in without["layers"]) == 1
    tuned = json.loads(replay("--shape", KEY, "--trials", "30", "--json").stdout)
    document = json.loads(run("resolve", "--gpu", H200, "--shape", KEY, "--json").stdout)
    assert document["database"]["match"] == "exact"
    assert document["database"]["config"] == tuned["best_config"]
    assert document["database"]["measured_us"] == pytest.approx(tuned["best_us"])
    assert (document["database"]["estimated"], tuned["estimated"]) == (True, True)  # this sweep holds no pairs
    shown = run("resolve", "--gpu", H200, "--shape", KEY)
    assert shown.returncode == 0
    (line,) = (line for line in shown.stdout.splitlines() if "database" in line)
    assert line.strip().endswith(f"; {tuned['best_us']:.1f} us, estimated as the sum of its parts")
    other = json.loads(run("resolve", "--gpu", H200, "--shape", "N=1,H=64,T=8192", "--json").stdout)
    assert other["estimated"] is False
    known(run("resolve", "--gpu", "", "--shape", KEY), 2, "unknown GPU model ''")
    known(run("resolve", "--gpu", "x" * 500, "--shape", KEY), 2, "unknown GPU model")


def test_resolve_shows_one_kernel_without_a_k1(run: Run) -> None:
    asked = ("resolve", "--gpu", H200, "--shape", "N=1,H=132,T=8192")
    assert json.loads(run(*asked, "--json").stdout)["config"] == to_json(FUSED)
    lines = run(*asked).stdout.splitlines()
    assert "k1: done by k2" in lines
    assert lines[-1].startswith('k2: {"block_v"')


def stored(environment: dict[str, str]) -> int:
    engine = open_engine(environment["KDATUNE_DATABASE_URL"])
    try:
        with reading(engine) as s:
            return s.scalar(select(func.count()).select_from(MeasurementModel)) or 0
    finally:
        engine.dispose()


def run_states(environment: dict[str, str]) -> list[str]:
    engine = open_engine(environment["KDATUNE_DATABASE_URL"])
    try:
        with reading(engine) as s:
            return [str(r.state) for r in queries.page_runs(s)]
    finally:
        engine.dispose()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_search_keeps_its_trials_and_goes_on(
    environment: dict[str, str], run: Run, replay: Run, real_sweep_path: Path, number: signal.Signals
) -> None:
    script = Path(__file__).parent / "slow_tune.py"
    # more than 300 it does not measure, however late the signal is
    command = [sys.executable, str(script), str(real_sweep_path), "300"]
    command += ["tune", "--shape", KEY, "--trials", "1000", "--json"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while stored(environment) < 100 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    kept = stored(environment)
    assert 100 <= kept <= 300
    if number is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert "interrupted" in err
        assert "Traceback" not in err
        document = json.loads(out)
        assert (document["state"], document["trials"]) == ("interrupted", kept)
        assert run_states(environment)[-1] == "interrupted"
    document = json.loads(replay("--shape", KEY, "--trials", "1000", "--json").stdout)
    assert document["resumed"] == kept
    assert document["trials"] == stored(environment) == 508 + 9
    assert document["state"] == "done"


@contextmanager
def started(command: list[str], environment: dict[str, str], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_up_tunes_serves_and_is_quick_the_second_time(
    environment: dict[str, str], tmp_path: Path, real_sweep_path: Path
) -> None:
    command = [*KDATUNE, "up", "--port", "0", "--recording", str(real_sweep_path)]
    tables = []
    for _ in range(2):
        with started(command, environment, tmp_path) as process:
            lines = []
            while not lines or not lines[-1].startswith('  {"match"'):
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read()
            text = "".join(lines)
            url = re.search(r"serves on (http://127\.0\.0\.1:\d+)", text)[1]
            asked = re.search(r"curl '(.*)'", text)[1]
            assert asked == f"{url}/v1/configs/resolve?gpu=NVIDIA%20H200&kernel=kda&N=1&H=96&T=8192"
            with urllib.request.urlopen(asked, timeout=60) as reply:  # noqa: S310 - http, this machine
                document = json.load(reply)
            assert (document["match"], document["measured_us"]) == ("exact", pytest.approx(757.0))
            assert '"estimated": true' in lines[-1]
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
            assert "Traceback" not in process.stderr.read()
            tables.append(text)
    assert tables[0].count("promoted") == 3
    assert tables[1].count("tuned before; estimated") == 3
    assert stored(environment) == 3 * (72 + 436 + 9)


def test_a_busy_port_is_said_before_anything_is_done(run: Run, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        known(run("up", "--port", str(port)), 1, f"port {port} of 127.0.0.1 is in use", "--port")
        assert not (tmp_path / "kdatune.db").exists()
        known(run("serve", "--port", str(port)), 1, f"port {port}")


def test_a_host_of_another_machine_is_said(run: Run) -> None:
    known(run("up", "--host", "203.0.113.7", "--port", "0"), 1, "203.0.113.7")
    known(run("up", "--host", "no such host", "--port", "0"), 1, "no such host")
    known(run("up", "--port", "70000"), 2, "--port")


@pytest.mark.parametrize("storage", ["/nonexistent/x.journal", "sqlite:////nonexistent/x.db"])
def test_an_optuna_storage_that_cannot_be_opened_is_exit_1(replay: Run, storage: str) -> None:
    known(replay("--shape", KEY, "--trials", "40", KDATUNE_OPTUNA_STORAGE=storage), 1, "KDATUNE_OPTUNA_STORAGE")


@pytest.mark.parametrize("name", ["", "."])
def test_a_snapshot_needs_a_file_name(run: Run, name: str) -> None:
    result = run("export-snapshot", "--gpu", "NVIDIA H200", "--out", name)
    assert result.returncode == 2
    assert "--out must name a file" in result.stderr


def test_a_seed_beyond_the_range_is_exit_2(run: Run) -> None:
    assert run("tune", "--backend", "replay", "--shape", KEY, "--seed", "9" * 23).returncode == 2


def test_a_folder_that_was_deleted_is_said_and_no_traceback(environment: dict[str, str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    relative = environment | {"KDATUNE_DATABASE_URL": "sqlite:///kdatune.db"}
    script = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m kdatune_tuner.cli db upgrade"
    done = subprocess.run(["sh", "-c", script], env=relative, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "kdatune: the current folder was deleted; change to one that is there\n"
