"""The child process that touches the card: one JSON request a line on stdin, one JSON answer a line on stdout.

Started by worker.Worker as `python -m kdatune_tuner.worker_main BENCH GPU [KERNEL]`: the device modules by import string,
and another kernel than kda by its name (then BENCH is bench_others). A bad config is answered with its outcome; anything
else that goes wrong is a programming error and is answered with its traceback, which the parent raises.
"""

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any
from typing import TextIO

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import MeasurementError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OtherConfig

_CONFIGS: dict[str, Any] = {"k1": K1Config, "k2": K2Config, "kda": LaunchConfig}
_DEVICE = "cuda"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Device:
    """The card as requests see it: one check problem, and the problem of the shape asked last."""

    def __init__(self, bench: Any, gpu: Any) -> None:
        self.bench = bench
        self.gpu = gpu
        self._small: Any = None
        self._shape = ""
        self._problem: Any = None
        self._checks: dict[str, Json] = {}
        self.opening = False

    def hello(self) -> Json:
        """What card and software this is."""
        gpu, build = self.gpu.current(), self.gpu.current_build()
        return {"gpu": to_json(gpu), "build": to_json(build), "regime": f"protocol {build.protocol}"}

    def check(self, request: Json) -> Json:
        """Compile and verify a config; once a process, the answer is kept."""
        config = from_json(_CONFIGS[request["kernel"]], request["config"])
        key = canonical(config)
        if key not in self._checks:
            if self._small is None:
                self._small = self.bench.small_problem(_DEVICE)
            self._checks[key] = dataclasses.asdict(self.bench.check(self._small, request["kernel"], config))
        return self._checks[key]

    def measure(self, request: Json) -> Json:
        """Check a config, then time it on a shape."""
        checked = self.check(request)
        return checked if checked["outcome"] != "ok" else checked | self.time(request)

    def time(self, request: Json) -> Json:
        """Time a config on a shape."""
        problem = self._open(request["shape"])
        config = from_json(_CONFIGS[request["kernel"]], request["config"])
        samples = self.bench.time_us(problem, config, samples=request["samples"])
        return {"outcome": "ok", "samples_us": list(samples)} | self._clock()

    def interleave(self, request: Json) -> Json:
        """Time several configs in alternating rounds."""
        problem = self._open(request["shape"])
        configs = [from_json(_CONFIGS[request["kernel"]], c) for c in request["configs"]]
        times = self.bench.time_interleaved_us(problem, configs, samples=request["samples"])
        return {"outcome": "ok", "rounds_us": [list(t) for t in times]} | self._clock()

    def _open(self, shape: str) -> Any:
        if shape != self._shape:
            self._problem, self._shape = None, ""  # let go of the last one's memory first
            self.opening = True
            self._problem, self._shape = self.bench.open_problem(parse_shape(shape), _DEVICE), shape
            self.opening = False
            self.bench.warm_up(_DEVICE)
        return self._problem

    def _clock(self) -> Json:
        mhz, reasons = self.gpu.clock_state()
        return {"sm_clock_mhz": mhz, "throttle_reasons": reasons}


class OtherDevice:
    """The same for a kernel of others: it is checked and timed on the shape that is asked for."""

    def __init__(self, bench: Any, gpu: Any, kernel: str) -> None:
        self.bench = bench
        self.gpu = gpu
        self.kernel = registry().require(kernel)
        self._shape = ""
        self._problem: Any = None
        self._checks: dict[str, Json] = {}
        self.opening = False

    def hello(self) -> Json:
        """What card, or Triton's interpreter, and software this is."""
        gpu, build, regime = self.bench.facts(self.kernel, self.gpu)
        return {"gpu": to_json(gpu), "build": to_json(build), "regime": regime}

    def check(self, request: Json) -> Json:
        """Compile and verify a config on a shape; once a shape, the answer is kept."""
        problem, config = self._open(request["shape"]), OtherConfig(request["config"])
        if config.text not in self._checks:
            self._checks[config.text] = dataclasses.asdict(self.bench.check(problem, config))
        return self._checks[config.text]

    def measure(self, request: Json) -> Json:
        """Check a config, then time it."""
        checked = self.check(request)
        return checked if checked["outcome"] != "ok" else checked | self.time(request)

    def time(self, request: Json) -> Json:
        """Time a config on a shape."""
        (samples,) = self._times(request, [request["config"]])
        return {"outcome": "ok", "samples_us": sorted(samples)} | self._clock()

    def interleave(self, request: Json) -> Json:
        """Time several configs in alternating rounds."""
        return {"outcome": "ok", "rounds_us": self._times(request, request["configs"])} | self._clock()

    def _times(self, request: Json, configs: list[Json]) -> list[list[float]]:
        problem = self._open(request["shape"])
        times: list[list[float]] = self.bench.time_interleaved_us(
            problem, [OtherConfig(config) for config in configs], samples=request["samples"]
        )
        return times

    def _open(self, shape: str) -> Any:
        if shape != self._shape:
            self._problem, self._shape, self._checks = None, "", {}
            self.opening = True
            self._problem, self._shape = self.bench.open_problem(self.kernel, self.kernel.parse_shape(shape)), shape
            self.opening = False
        return self._problem

    def _clock(self) -> Json:
        mhz, reasons = self.gpu.clock_state()
        return {"sm_clock_mhz": mhz, "throttle_reasons": reasons}


def answer(device: Device | OtherDevice, request: Json) -> Json:
    """One request's answer."""
    device.opening = False
    ops = {"check": device.check, "measure": device.measure, "time": device.time, "interleave": device.interleave}
    started = time.perf_counter()
    try:
        reply = device.hello() if request["op"] == "hello" else ops[request["op"]](request)
    except MeasurementError as error:
        # tensors that do not fit the free memory say nothing about the context
        reply = {"outcome": error.outcome, "detail": error.detail, "usable": device.opening}
    except KdatuneError as error:
        reply = {"refused": str(error)}
    except Exception:  # noqa: BLE001 - told to the parent with its traceback, which raises it there
        reply = {"error": traceback.format_exc()}
    return reply | {"gpu_seconds": time.perf_counter() - started}


def _die_with_parent() -> None:
    """A tuner that was killed must not leave a child that holds the card."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reply(replies: TextIO, data: Json) -> None:
    replies.write(json.dumps(data) + "\n")
    replies.flush()


def main() -> None:
    # Ctrl-C reaches the whole process group: the parent decides what becomes of this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    # Compilers print: file descriptor 1 becomes stderr, answers go through a copy of the pipe.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        modules = importlib.import_module(sys.argv[1]), importlib.import_module(sys.argv[2])
        device = OtherDevice(*modules, sys.argv[3]) if len(sys.argv) > 3 else Device(*modules)
    except UsageError as error:  # the kernel is not installed, or cannot be used
        _reply(replies, {"refused": str(error)})
        return
    except ImportError as error:
        _reply(
            replies,
            {"refused": f"{error}: pip install -e '.[gpu]'; kdatune tune can replay a recording instead"},
        )
        return
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        _reply(replies, answer(device, json.loads(line)))


if __name__ == "__main__":
    main()
