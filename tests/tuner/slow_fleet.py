"""`kdatune` whose workers take their time and write down what they measure, so that a test can kill them in the middle.

python slow_fleet.py tune --workers 3 ...     the command; its workers are this script again, called with "worker"

SLOW_SECONDS    what a measurement takes (0.01)
SLOW_CALLS      file to which every measurement adds a line: process id, kernel, shape, config digest
SLOW_PAUSE      the measurement of this number and all later ones wait until SLOW_CALLS with the ending .go is there
SLOW_START      workers hang at their start, once SLOW_CALLS with the ending .started is there
SLOW_DEADLY     a shape key on which a worker dies
SLOW_SWEEP      the recording
SLOW_FAKE       measure on fake_device.py instead of a recording; its card is named after CUDA_VISIBLE_DEVICES
"""

import os
import sys
import time
from pathlib import Path

from kdatune_kernels.spec import digest
from kdatune_tuner import cli
from kdatune_tuner import fleet_member
from kdatune_tuner import fleet_worker
from kdatune_tuner.backend_gpu import GpuBackend
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.objective import sum_of_parts
from kdatune_tuner.recording import load_recording
from kdatune_tuner.worker import DeviceModules
from kdatune_tuner.worker import Worker


class Slow(ReplayBackend):
    """A replay that takes its time."""

    def measure(self, kernel, shape, config):
        note(kernel, shape, config)
        return super().measure(kernel, shape, config)

    def measure_pair(self, shape, config, against=None):
        if against is None:
            note("kda", shape, config)
        return super().measure_pair(shape, config, against)

    def _parts(self, shape, config):
        # not through measure() above: the parts of a pair are no measurements of their own
        k1, k2 = (ReplayBackend.measure(self, name, shape, getattr(config, name)) for name in ("k1", "k2"))
        return sum_of_parts(k1, k2)


def note(kernel, shape, config):
    line = f"{os.getpid()} {kernel} {shape.key()} {digest(config)}\n"
    calls = Path(os.environ["SLOW_CALLS"])
    handle = os.open(calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, line.encode())
    os.close(handle)
    if shape.key() == os.environ.get("SLOW_DEADLY"):
        sys.stderr.write("this shape is deadly\n")
        sys.stderr.flush()
        os._exit(3)
    if "SLOW_PAUSE" in os.environ and len(calls.read_bytes().splitlines()) >= int(os.environ["SLOW_PAUSE"]):
        while not calls.with_suffix(".go").exists():
            time.sleep(0.01)
    time.sleep(float(os.environ.get("SLOW_SECONDS", "0.01")))


def open_slow(name, recording, settings):
    return Slow(load_recording(Path(os.environ["SLOW_SWEEP"])))


def open_fake(name, recording, settings):
    os.environ["KDATUNE_FAKE_NAME"] = "Fake B" if os.environ["CUDA_VISIBLE_DEVICES"].startswith("GPU-b") else "Fake A"
    return GpuBackend(Worker(DeviceModules("fake_device", "fake_device")), paired_rounds=9)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        sys.argv.pop(1)
        if "SLOW_START" in os.environ:
            Path(os.environ["SLOW_CALLS"]).with_suffix(".started").touch()
            time.sleep(600)
        fleet_worker.open_backend = open_fake if "SLOW_FAKE" in os.environ else open_slow
        fleet_worker.main()
    else:
        fleet_member.WORKER_COMMAND = [sys.executable, __file__, "worker"]
        cli.main()
