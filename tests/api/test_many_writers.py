"""64 processes write 50 trials each while the service answers: no error, no lost row, on both databases.

The figures of a run are in docs/service-measurements.md; here only what must always hold.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "many_writers.py"


@pytest.mark.slow
def test_many_writers_and_readers_lose_nothing(database_url: str) -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--database", database_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (found["wrong"], found["exit_codes"], done.returncode) == ([], [0], 0)
    assert (found["processes"], found["trials"]) == (64, 50)
    assert set(found["read_statuses"]) == {"200"}
    assert found["reads"] > 100
