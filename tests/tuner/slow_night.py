"""`kdatune nightly` on a changing card that takes its time, so that a test can end it in the middle.

SLOW_NIGHT_MOST     trials after which it hangs until it is ended
"""

import os
import sys
import time

from night_card import NightCard

from kdatune_tuner import cli
from kdatune_tuner import cli_nightly
from kdatune_tuner.recording import SHIPPED
from kdatune_tuner.recording import load_recording


class Slow(NightCard):
    trials = 0

    def measure(self, kernel, shape, config):
        self.trials += 1
        time.sleep(600 if self.trials > float(os.environ.get("SLOW_NIGHT_MOST", "inf")) else 0.05)
        return super().measure(kernel, shape, config)


if __name__ == "__main__":
    cli_nightly.open_backend = lambda *_: Slow(load_recording(SHIPPED), 1)
    sys.argv[0] = "kdatune"
    cli.main()
