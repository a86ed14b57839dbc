"""The second go of failed tests, on a folder of tests that are run for real."""

import subprocess
import sys
from pathlib import Path

import second_go

PASSES = "def test_passes():\n    pass\n"
# fails until it was run once
BY_CHANCE = """
from pathlib import Path

def test_by_chance():
    ran = Path(__file__ + ".ran")
    seen = ran.exists()
    ran.touch()
    assert seen
"""
FAILS = "import pytest\n\n@pytest.mark.parametrize('n', range({count}))\ndef test_fails(n):\n    assert n < 0\n"


def run(folder: Path, **files: str) -> tuple[int, int, str]:
    """Return the exit codes of the first and the second go, and what the second printed."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -n 2\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    first = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=folder, capture_output=True, check=False)
    command = [sys.executable, second_go.__file__]
    second = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return first.returncode, second.returncode, second.stdout


def test_what_passes_alone_is_named(tmp_path: Path) -> None:
    first, second, said = run(tmp_path, passes=PASSES, chance=BY_CHANCE)
    assert (first, second) == (1, 0)
    assert "PASSED ONLY ALONE, so it passes by chance. Mend it: test_chance.py::test_by_chance" in said


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    first, second, said = run(tmp_path, chance=BY_CHANCE, fails=FAILS.format(count=1))
    assert (first, second) == (1, 1)
    assert "FAILED TWICE: test_fails.py::test_fails[0]" in said


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    first, second, said = run(tmp_path, fails=FAILS.format(count=second_go.MOST_TESTS + 1))
    assert (first, second) == (1, 1)
    assert said == "4 failures in the last run: a second go is for 1 to 3\n"


def test_a_run_without_failures_has_no_second_go(tmp_path: Path) -> None:
    assert run(tmp_path, passes=PASSES) == (0, 1, "0 failures in the last run: a second go is for 1 to 3\n")
