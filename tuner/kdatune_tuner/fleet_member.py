"""A worker process of a fleet as its parent sees it: started with its orders, read as it goes, and how it ended."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import IO

from kdatune_kernels.spec import Json

WORKER_COMMAND = [sys.executable, "-m", "kdatune_tuner.fleet_worker"]
PATIENCE_S = 30.0
"""For a worker that was told to end: a trial on the card may have to be killed first."""


class Member:
    """A worker process as its parent sees it."""

    def __init__(self, number: int, order: Json, environment: dict[str, str]) -> None:
        self.number = number
        self.owner = order["owner"]
        self.shape: str | None = None
        self.refused: str | None = None
        self.ended = False
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        # a group of its own: Ctrl-C in the terminal reaches the parent, which tells each worker once
        self.process = subprocess.Popen(
            [*WORKER_COMMAND, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=environment,
            process_group=0,
        )
        assert self.process.stdin is not None  # noqa: S101 - for the type checker
        assert self.process.stdout is not None  # noqa: S101
        self.lines = self.process.stdout
        self._pending = b""
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: its exit tells

    def read(self) -> list[Json]:
        """The events that are there; sets `ended` where the pipe is closed."""
        chunk = os.read(self.lines.fileno(), 1 << 16)
        self.ended = not chunk
        *whole, self._pending = (self._pending + chunk).split(b"\n")
        return [json.loads(line) for line in whole]

    def end_of_life(self) -> str | None:
        """How it ended, where that was not in order. It is waited for, and killed when it does not end."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code in (0, 130) or self.refused is not None:
            return self.refused
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.stderr.seek(0)
        said = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended with {how}" + (f": {said[-1][:300]}" if said else "")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.lines.close()
        self.stderr.close()
