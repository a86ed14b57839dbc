"""Run the few tests that failed once more, alone: a test that passes then is named as one that passes by chance.

Thousands of tests with real processes, run beside each other on two cores, find races that no reader finds. A change is
not refused for one of them, but it is not silent about it either. More than MOST_TESTS failures are no chance.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST_TESTS = 3
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    """Return 0 if at most MOST_TESTS failed in the last run and all of them pass now, each in its own process, else 1."""
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 1 <= len(failed) <= MOST_TESTS:
        print(f"{len(failed)} failures in the last run: a second go is for 1 to {MOST_TESTS}")
        return 1
    for name in failed:
        print(f"\nSECOND GO, alone: {name}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", name]
        if subprocess.run(command, check=False).returncode:
            print(f"FAILED TWICE: {name}")
            return 1
    print("\nPASSED ONLY ALONE, so it passes by chance. Mend it: " + ", ".join(failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
