"""Many processes write trials while the service answers: no error, no lost row, on both databases.

Here 24 processes with 20 trials each, so that tests beside it get on; the figures of 64 with 50 are in
docs/service-measurements.md.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "many_writers.py"


@pytest.mark.slow
def test_many_writers_and_readers_lose_nothing(database_url: str) -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--processes", "24", "--trials", "20", "--database", database_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (found["wrong"], found["exit_codes"], done.returncode) == ([], [0], 0)
    assert (found["processes"], found["trials"]) == (24, 20)
    assert set(found["read_statuses"]) == {"200"}
    assert found["reads"] > 4  # four are asked before the first write; how many more is the machine's matter
