"""Running ncu: the command line, and every way in which counters can be kept away."""

import itertools
import json
import stat
import time
from pathlib import Path

import pytest

from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import to_json
from kdatune_tuner.ncu import collect as collecting
from kdatune_tuner.ncu.collect import Collected
from kdatune_tuner.ncu.collect import Stage
from kdatune_tuner.ncu.collect import collect
from kdatune_tuner.ncu.collect import find_ncu
from kdatune_tuner.ncu.collect import ncu_version
from kdatune_tuner.ncu.collect import stages_of
from kdatune_tuner.ncu.metrics import METRICS
from kdatune_tuner.ncu.unavailable import REMEDIES
from kdatune_tuner.ncu.unavailable import Unavailable
from kdatune_tuner.ncu.unavailable import said_by_ncu


def read(folder: str, name: str):
    return json.loads(Path(folder, name).read_text())


def test_a_run_gives_the_report_and_what_it_was_taken_with(playing_back, t1024) -> None:
    stages = stages_of(list(t1024.configs.values()))
    got = collect(t1024.shape, stages, launches=3)
    assert isinstance(got, Collected)
    assert got.report == t1024.content
    assert (got.ncu_version, got.driver, got.outcomes) == ("2025.3.1.0", "580.159.04", {})
    request = read(playing_back, "request.json")
    assert (request["shape"], request["launches"], request["device"]) == ("N=1,H=96,T=1024", 3, "cuda")
    assert [s["config"] for s in request["stages"]] == [to_json(s.config) for s in stages]
    assert [s["stage"] for s in request["stages"]] == ["k1"] * 3 + ["k2"] * 3
    assert len({s["label"] for s in request["stages"]}) == 6


def test_the_command_leaves_clocks_alone_and_asks_for_exactly_the_table(playing_back, t1024) -> None:
    assert isinstance(collect(t1024.shape, [Stage("k1", K1Config())]), Collected)
    command = read(playing_back, "command.json")
    options = dict(itertools.pairwise(command))
    assert options["--clock-control"] == "none"
    assert options["--metrics"].split(",") == [metric.counter for metric in METRICS]
    assert (options["--set"], options["--profile-from-start"], options["--config-file"]) == ("none", "off", "off")
    assert command[-2:-1] == ["kdatune_kernels.profile_target"]
    assert not Path(command[-1]).exists()  # nothing is left behind


def test_configs_that_share_a_stage_share_its_profile(t1024) -> None:
    config = t1024.configs["default"]
    assert stages_of([config, config]) == [Stage("k1", config.k1), Stage("k2", config.k2)]


def test_without_permission(no_permission, t1024) -> None:
    got = collect(t1024.shape, [Stage("k1", K1Config())])
    assert isinstance(got, Unavailable)
    assert got.code == "no_permission"
    assert got.reason.startswith("ERR_NVGPUCTRPERM - The user does not have permission")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in got.remedy
    assert "SYS_ADMIN" in got.remedy


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("Failed to initialize the profiler: LibraryNotLoaded", "library_not_loaded"),
        (
            "An error was reported by the driver:\n==ERROR== Cuda driver is not compatible with Nsight Compute.",
            "driver_mismatch",
        ),
        (
            "Driver resource was unavailable. Ensure that no other tool (like DCGM) is concurrently collecting",
            "counters_busy",
        ),
        (
            "Profiling is not supported on device 0. To find out supported GPUs refer --list-chips option.",
            "unsupported_gpu",
        ),
        ("Unknown Error on device 0.", "ncu_failed"),
    ],
)
@pytest.mark.parametrize("target", ["answers", "dies"])
def test_what_ncu_dies_of_is_typed(make_ncu, answer, t1024, line: str, code: str, target: str) -> None:
    output = (
        f"==PROF== Connected to process 7\n==ERROR== {line}\n==ERROR== The application returned an error code (11)."
    )
    make_ncu(output=output, exit_code=11, answer=answer if target == "answers" else None)
    got = collect(t1024.shape, [Stage("k1", K1Config())])
    assert isinstance(got, Unavailable)
    assert got.code == (code if target == "answers" or code != "ncu_failed" else "target_failed")
    assert got.remedy == REMEDIES[got.code]
    if target == "answers":
        assert line.rpartition("==ERROR== ")[2] in got.reason


def test_without_ncu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, t1024) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(collecting, "_USUAL_PLACES", (f"{tmp_path}/nowhere/*/ncu",))
    got = collect(t1024.shape, [Stage("k1", K1Config())])
    assert isinstance(got, Unavailable)
    assert got.text().startswith("ncu_not_found: there is no ncu on the PATH. Install Nsight Compute")
    got = collect(t1024.shape, [Stage("k1", K1Config())], ncu="/no/such/ncu")
    assert isinstance(got, Unavailable)
    assert "there is no ncu at /no/such/ncu" in got.text()


def test_a_program_that_is_no_ncu(tmp_path: Path, t1024) -> None:
    other = tmp_path / "ncu"
    other.write_text("#!/bin/sh\necho curses\n")
    other.chmod(0o755)
    assert ncu_version(str(other)) is None
    got = collect(t1024.shape, [Stage("k1", K1Config())], ncu=str(other))
    assert isinstance(got, Unavailable)
    assert got.code == "ncu_not_found"


def test_the_newest_of_the_usual_places_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(collecting, "_USUAL_PLACES", (f"{tmp_path}/*/ncu",))
    for version in ("2024.3.2", "2025.3.1"):
        program = tmp_path / version / "ncu"
        program.parent.mkdir()
        program.write_text("")
        program.chmod(stat.S_IRWXU)
    assert find_ncu() == str(tmp_path / "2025.3.1" / "ncu")


def test_a_run_that_takes_too_long_is_ended_with_its_children(make_ncu, t1024) -> None:
    folder = make_ncu()
    # a shell starts its child at once, also where a Python takes seconds
    script = '[ "$1" = --version ] && echo Version 2025.3.1.0 && exit\nsleep 200 & echo $! > "${0%/*}/pid"; wait\n'
    Path(folder, "ncu").write_text("#!/bin/sh\n" + script)
    started = time.monotonic()
    got = collect(t1024.shape, [Stage("k1", K1Config())], timeout_s=4.5)
    assert isinstance(got, Unavailable)
    assert got.text().startswith("timeout: ncu was not done after 4.5 s. Raise KDATUNE_PROFILE_TIMEOUT_S")
    # A killed process is seen running for a moment more. The child slept for 200 s: gone much earlier, it was ended.
    child_state = Path("/proc", Path(folder, "pid").read_text().strip(), "stat")
    while _runs(child_state) and time.monotonic() - started < 100:
        time.sleep(0.02)
    assert not _runs(child_state)
    assert time.monotonic() - started < 100


def _runs(stat_file: Path) -> bool:
    """Whether the process is there and no zombie, which it stays where nobody reaps orphans."""
    try:
        return stat_file.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_target_that_sees_no_card(make_ncu, t1024) -> None:
    make_ncu(
        output="==WARNING== No kernels were profiled.", exit_code=1, answer={"refused": "no CUDA device is visible"}
    )
    got = collect(t1024.shape, [Stage("k1", K1Config())])
    assert isinstance(got, Unavailable)
    assert (got.code, got.reason) == ("no_card", "no CUDA device is visible")


def test_a_target_that_dies_says_its_last_line(make_ncu, t1024) -> None:
    make_ncu(output="Traceback (most recent call last):\nKeyError: 'shape'", exit_code=1)
    got = collect(t1024.shape, [Stage("k1", K1Config())])
    assert isinstance(got, Unavailable)
    assert (got.code, got.reason) == (
        "target_failed",
        "the profiled process left no answer; last said: KeyError: 'shape'",
    )


def test_a_config_that_cannot_run(make_ncu, answer, t1024) -> None:
    stage = Stage("k1", K1Config())
    answer["outcomes"] = {stage.name: {"outcome": "resource", "detail": "OutOfResources: shared memory"}}
    make_ncu(output="==WARNING== No kernels were profiled.", exit_code=0, answer=answer)
    got = collect(t1024.shape, [stage])
    assert isinstance(got, Unavailable)
    assert got.code == "config_failed"
    assert "resource, OutOfResources: shared memory" in got.reason


def test_an_ncu_that_profiles_nothing(make_ncu, answer, t1024) -> None:
    make_ncu(output="==WARNING== No kernels were profiled.", answer=answer)
    got = collect(t1024.shape, [Stage("k1", K1Config())])
    assert isinstance(got, Unavailable)
    assert got.code == "no_kernels"


def test_every_remedy_ends_as_a_sentence() -> None:
    assert all(remedy.endswith((".", ")")) for remedy in REMEDIES.values())
    assert (
        said_by_ncu("", 1).text()
        == "ncu_failed: ncu ended with exit code 1: it printed nothing. See what ncu said; tuning needs no counters."
    )
