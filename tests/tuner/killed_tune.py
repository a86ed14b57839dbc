"""`kdatune tune` again and again, each time in a process that may be killed: forked, so that it starts in milliseconds.

python killed_tune.py SWEEP FOLDER tune --shape ... ; a line on stdin starts a run and gives "pid N", the next
waits for its end and gives "status S". The first line is the number of the measurement in which the run hangs, as all
runs count them, or "inf": one that is to be killed does not come to its end before.
In FOLDER, calls.txt gets a line when a measurement begins, stored.txt one when the store has taken it in.
"""

import os
import sys
import time
from pathlib import Path

from kdatune_kernels.spec import digest
from kdatune_tuner import cli
from kdatune_tuner import cli_tune
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.objective import sum_of_parts
from kdatune_tuner.recording import load_recording


def note(path, *words):
    # O_APPEND and one write: what was written before a kill -9 is there after it
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, (" ".join(map(str, words)) + "\n").encode())
    os.close(handle)


def main():
    sweep, folder = Path(sys.argv[1]), Path(sys.argv[2])
    del sys.argv[1:3]
    recording = load_recording(sweep)
    add = Ledger.add

    def begin(kernel, shape, config):
        note(folder / "calls.txt", kernel, shape.key(), digest(config))
        time.sleep(0.001 if len((folder / "calls.txt").read_bytes().splitlines()) < last else 600)

    class Slow(ReplayBackend):
        def measure(self, kernel, shape, config):
            begin(kernel, shape, config)
            return super().measure(kernel, shape, config)

        def measure_pair(self, shape, config, against=None):
            if against is None:  # the run before a decision may be made again
                begin("kda", shape, config)
            return super().measure_pair(shape, config, against)

        def _parts(self, shape, config):
            # not through measure() above: the parts of a pair are no trials
            k1, k2 = (ReplayBackend.measure(self, name, shape, getattr(config, name)) for name in ("k1", "k2"))
            return sum_of_parts(k1, k2)

    def add_and_note(self, run, kernel, config, result, *then):
        known = add(self, run, kernel, config, result, *then)
        note(folder / "stored.txt", known.measurement_id, kernel, self.shape.key(), digest(config))
        return known

    cli_tune.open_backend = lambda *_: Slow(recording)
    Ledger.add = add_and_note
    for line in sys.stdin:
        last = float(line)
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            try:
                cli.main()
            except SystemExit as end:
                os._exit(end.code or 0)
            os._exit(1)
        sys.stdout.write(f"pid {pid}\n")
        sys.stdout.flush()
        sys.stdin.readline()  # until then its process id is its own, also when it has ended
        sys.stdout.write(f"status {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
