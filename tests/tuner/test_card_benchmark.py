"""benchmarks/tuning_on_a_card.py on a made-up card: that its steps run, and that a missed goal is said."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tuning_on_a_card.py"


def test_the_quick_steps_run_without_a_card(tmp_path: Path) -> None:
    steps = ["tie", "lethal"]  # the others take minutes on a made-up card
    command = [sys.executable, str(SCRIPT), "--fake", "--steps", ",".join(steps), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert "Traceback" not in done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found["steps"]) == steps
    assert [step for step in steps if "error" in found["steps"][step]] == [], found["steps"]
    assert [found["steps"][name]["met"] for name in steps] == [True] * 2
    assert found["steps"]["tie"]["verdicts"] == {"tie": 20}
    assert found["steps"]["lethal"]["outcomes"] == ["abort", "illegal_access", "incorrect", "resource", "timeout"]
    assert done.returncode == 0


def test_an_unknown_step_is_wrong_usage() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "nonsense"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "unknown step(s) nonsense; there are rate, tie, lethal, isolation, shape, sweep" in done.stderr
