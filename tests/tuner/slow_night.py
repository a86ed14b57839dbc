"""`kdatune nightly` on a changing card that takes its time, so that a test can end it in the middle."""

import os
import sys
import time

from night_card import NightCard

from kdatune_tuner import cli
from kdatune_tuner import cli_nightly
from kdatune_tuner.recording import SHIPPED
from kdatune_tuner.recording import load_recording


class Slow(NightCard):
    def measure(self, kernel, shape, config):
        time.sleep(float(os.environ.get("SLOW_NIGHT_SECONDS", "0.05")))
        return super().measure(kernel, shape, config)


if __name__ == "__main__":
    cli_nightly.open_backend = lambda *_: Slow(load_recording(SHIPPED), 1)
    sys.argv[0] = "kdatune"
    cli.main()
