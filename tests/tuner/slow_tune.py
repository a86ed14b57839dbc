"""`kdatune` with a replay backend that takes its time, so that a test can interrupt it in the middle.

python slow_tune.py SWEEP MOST tune ...: it measures MOST configs at most, then it hangs until it is interrupted.
"""

import sys
import time
from pathlib import Path

from kdatune_tuner import cli
from kdatune_tuner import cli_tune
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.recording import load_recording


class Slow(ReplayBackend):
    left = 0

    def measure(self, kernel, shape, config):
        self.left -= 1
        time.sleep(0.01 if self.left >= 0 else 600)
        return super().measure(kernel, shape, config)


if __name__ == "__main__":
    sweep, Slow.left = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
    cli_tune.open_backend = lambda *_: Slow(load_recording(sweep))
    cli.main()
