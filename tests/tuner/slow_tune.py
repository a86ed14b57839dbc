"""`kdatune` with a replay backend that takes its time, so that a test can interrupt it in the middle."""

import sys
import time
from pathlib import Path

from kdatune_tuner import cli
from kdatune_tuner import cli_tune
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.recording import load_recording


class Slow(ReplayBackend):
    def measure(self, kernel, shape, config):
        time.sleep(0.01)
        return super().measure(kernel, shape, config)


if __name__ == "__main__":
    sweep = Path(sys.argv.pop(1))
    cli_tune.open_backend = lambda *_: Slow(load_recording(sweep))
    cli.main()
