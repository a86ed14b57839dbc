"""What the commands share: settings, the database, cards by name, durations, and where output goes."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from typing import Any

import typer
from pydantic import ValidationError
from rich.console import Console
from sqlalchemy import Engine

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Gpu
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading

_PIPED_COLUMNS = 200
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")

ShapeOption = Annotated[
    list[str] | None, typer.Option("--shape", help="a problem shape, e.g. N=1,H=96,T=8192; may be given several times")
]
OneShapeOption = Annotated[str, typer.Option("--shape", help="a problem shape, e.g. N=1,H=96,T=8192")]
GpuOption = Annotated[str, typer.Option("--gpu", help='a GPU model as nvidia-smi names it, e.g. "NVIDIA H200"')]
KernelOption = Annotated[str, typer.Option("--kernel", help="kda, or a kernel of others")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]


def read_settings() -> Settings:
    """Settings from the environment. Raises UsageError naming the variable that cannot be read."""
    try:
        return Settings()
    except ValidationError as error:
        told = "; ".join(f"KDATUNE_{str(e['loc'][0]).upper()}={e['input']!r}: {e['msg']}" for e in error.errors())
        raise UsageError(told) from error


@contextmanager
def database(url: str) -> Iterator[Engine]:
    """The engine of a database that exists. Raises StoreError with the remedy when it does not."""
    engine = open_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody finds half of it. Raises KdatuneError where it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise KdatuneError(f"{path} cannot be written: {error.strerror}") from error


def out() -> Console:
    """stdout for people: as wide as the terminal, wide enough for one line a row where it is piped."""
    return Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS, highlight=False)


def err() -> Console:
    """stderr for people."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else _PIPED_COLUMNS, highlight=False, markup=False)


def print_json(document: Any) -> None:
    """The one JSON document of --json."""
    typer.echo(json.dumps(document, indent=2))


def parse_seconds(text: str, option: str) -> float:
    """A duration such as 90, 90s, 10m, 1h30m in seconds. Raises UsageError when it is none, or not above 0."""
    found = _DURATION.fullmatch(text.strip().lower())
    hours, minutes, seconds = (float(part or 0) for part in found.groups()) if found else (0.0, 0.0, 0.0)
    total = hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise UsageError(f"{option} must be a time above 0 such as 90s, 10m or 1h30m, not {text!r}")
    return total


def known_gpu(name: str, engine: Engine | None) -> Gpu:
    """The GPU model of a name: the database's, else a well-known one.

    Raises:
        UsageError: neither knows it; the message lists the names.
    """
    if engine is not None:
        with reading(engine) as s:
            stored = queries.find_gpu(s, name)
            names = [gpu.name for gpu in queries.gpus(s)]
        if stored is not None:
            return stored
    else:
        names = []
    if name in KNOWN_GPUS:
        return KNOWN_GPUS[name]
    known = ", ".join(sorted({*names, *KNOWN_GPUS}))
    raise UsageError(f"unknown GPU model {name[:200]!r}; known: {known}")


def card_visible() -> bool:
    """Whether nvidia-smi lists a card and torch is installed (it is not imported here)."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    if listed.returncode != 0 or "GPU " not in listed.stdout:
        return False
    # find_spec would do, but a broken installation must count as none: ask a child
    probe = [sys.executable, "-c", "import torch, triton"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=180, check=False).returncode == 0
    except subprocess.SubprocessError:
        return False
