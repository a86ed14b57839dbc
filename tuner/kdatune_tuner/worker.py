"""A child process for everything that touches the card, so that a fault kills only the trial it fell into.

The parent never imports torch. Requests and answers are plain JSON lines; a child that dies, hangs or has had a fault that
poisons its CUDA context is ended, and the next request starts a new one.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.spec import Json
from kdatune_tuner.outcome import Outcome

# After these the CUDA context of the child is not to be trusted: an illegal access makes every later call fail.
_FATAL = {Outcome.ILLEGAL_ACCESS, Outcome.LAUNCH_ERROR, Outcome.ABORT, Outcome.TIMEOUT}
_START_TIMEOUT_S = 180.0  # importing torch from a cold network disk takes a minute
_PATIENCE_S = 10.0  # a busy machine takes a moment to end a process that has closed its pipe
_DETAIL_CHARACTERS = 300


class DeviceError(KdatuneError):
    """No card can be used: none is visible, torch is missing, or the child process cannot be started."""


@dataclass(frozen=True)
class DeviceModules:
    """Import strings of the modules that the child measures with, and the other kernel that it measures, if any."""

    bench: str = "kdatune_kernels.bench"
    gpu: str = "kdatune_kernels.gpu"
    kernel: str | None = None


class Worker:
    """One child process, started when it is first needed. Not to be shared by threads: it dies with the one that starts it."""

    def __init__(self, modules: DeviceModules | None = None) -> None:
        self._modules = modules or DeviceModules()
        self._child: _Child | None = None
        self.starts = 0

    def hello(self) -> Json:
        """The card and the software: keys gpu, build, regime.

        Raises:
            DeviceError: no card, no torch, or the child does not start.
        """
        reply = self.call({"op": "hello"}, _START_TIMEOUT_S)
        if "outcome" in reply:
            raise DeviceError(f"the card cannot be asked: {reply['outcome']}, {reply['detail']}")
        return reply

    def call(self, request: Json, timeout_s: float) -> Json:
        """The child's answer. A child that dies or takes too long gives outcome abort or timeout with a detail.

        Raises:
            DeviceError: the child cannot be started, or refuses to work at all.
            RuntimeError: a programming error in the child, with its traceback.
        """
        child = self._child or self._start()
        started = time.monotonic()
        line = child.exchange(json.dumps(request).encode() + b"\n", started + timeout_s)
        if line is None:
            if time.monotonic() >= started + timeout_s:
                how = {"outcome": str(Outcome.TIMEOUT), "detail": f"no answer within {timeout_s:g} s; killed"}
            else:
                how = {"outcome": str(Outcome.ABORT), "detail": f"the process ended with {child.end_of_life()}"}
            self.close()
            return how | {"gpu_seconds": time.monotonic() - started}
        answer: Json = json.loads(line)
        if "refused" in answer or "error" in answer or (answer.get("outcome") in _FATAL and not answer.get("usable")):
            self.close()
        if "refused" in answer:
            raise DeviceError(answer["refused"])
        if "error" in answer:
            raise RuntimeError(f"the measuring process failed on {request}:\n{answer['error']}")
        return answer

    def interrupt(self) -> None:
        """Kill the child from another thread: the call that waits for it ends with outcome abort."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the child at once; the driver frees what it held."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _start(self) -> "_Child":
        self.starts += 1
        child = self._child = _Child(self._modules)
        line = child.exchange(b"", time.monotonic() + _START_TIMEOUT_S)
        if line is None:
            how = child.end_of_life()
            self.close()
            raise DeviceError(f"the measuring process did not start: {how}")
        answer = json.loads(line)
        if "refused" in answer:
            self.close()
            raise DeviceError(answer["refused"])
        return child


class _Child:
    """The process and its two pipes."""

    def __init__(self, modules: DeviceModules) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._answers, child_end = os.pipe()
        requests_end, self._requests = os.pipe()
        command = [sys.executable, "-m", "kdatune_tuner.worker_main", modules.bench, modules.gpu]
        command += [] if modules.kernel is None else [modules.kernel]
        self._process = subprocess.Popen(command, stdin=requests_end, stdout=child_end, stderr=self._stderr)
        os.close(child_end)
        os.close(requests_end)
        self._pending = b""

    def exchange(self, message: bytes, deadline: float) -> bytes | None:
        """Send one line, wait for one line. None: the child died, or the deadline passed."""
        try:
            while message:
                message = message[os.write(self._requests, message) :]
        except BrokenPipeError:
            return None
        with selectors.DefaultSelector() as ready:
            ready.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not ready.select(left):
                    return None
                chunk = os.read(self._answers, 1 << 16)
                if not chunk:
                    return None
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def end_of_life(self) -> str:
        """How the child ended and the last line it wrote to stderr."""
        try:
            code = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "no answer"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {said[-1][:_DETAIL_CHARACTERS]}" if said else how

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._answers)
        os.close(self._requests)
        self._stderr.close()
