"""What `kdatune doctor` looks at: database, who may write, service, cache, card, software, clocks, counters.

Every check says what is there, and where something is wrong, what to do. Nothing is changed.
"""

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kdatune_kernels import gpu
from kdatune_kernels.environment import from_environment
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.transport import ServiceError
from kdatune_kernels.transport import request
from kdatune_kernels.tunable import registry
from kdatune_tuner.exposure import is_loopback
from kdatune_tuner.ncu.preflight import counters_unavailable
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import access
from kdatune_tuner.store import queries
from kdatune_tuner.store.address import parse_address
from kdatune_tuner.store.address import sqlite_path
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import schema_state
from kdatune_tuner.store.records import utc_now

State = Literal["ok", "note", "problem"]
_SLOWED = ("hw_slowdown", "hw_thermal", "sw_thermal", "sw_power_cap")
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "beegfs"})


@dataclass(frozen=True)
class Finding:
    """What one check found. note: fine as it is, but good to know; problem: something will not work."""

    check: str
    state: State
    detail: str
    remedy: str | None = None


def examine(settings: Settings) -> Iterator[Finding]:
    """Every check, in order. A check that fails by itself is a finding, too."""
    for check in (_database, _disk, _tokens, _service, _cache, _kernels, _card, _software, _clocks, _counters):
        name = check.__name__.lstrip("_")
        try:
            yield check(settings)
        except KdatuneError as error:
            yield Finding(name, "problem", str(error))
        except Exception as error:  # noqa: BLE001 - a doctor that dies of what it looks for is of no use
            yield Finding(name, "problem", f"the check itself failed: {type(error).__name__}: {error}")


def _database(settings: Settings) -> Finding:
    engine = open_engine(settings.database_url)
    try:
        current, wanted = schema_state(engine)
        with reading(engine) as s:
            generation, count = queries.generation(s), len(queries.champions(s))
        where = engine.url.render_as_string(hide_password=True)
    finally:
        engine.dispose()
    told = f"{where}: schema {current}, generation {generation}, {count} champions"
    return Finding("database", "ok" if current == wanted else "problem", told)


def _disk(settings: Settings) -> Finding:
    path = sqlite_path(parse_address(settings.database_url))
    if path is None:
        return Finding("disk", "ok", "PostgreSQL keeps the data")
    kind = _filesystem(path.absolute().parent)
    if kind in _NETWORK:
        told = f"{path} lies on {kind}, where SQLite's locks cannot be trusted"
        return Finding("disk", "problem", told, "move it to a local disk, or use PostgreSQL")
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        return Finding("disk", "problem", f"{folder} cannot be written", "SQLite writes files beside the database")
    stat = os.statvfs(folder)
    free_mib = stat.f_bavail * stat.f_frsize >> 20
    state: State = "ok" if free_mib > 500 else "problem"
    return Finding("disk", state, f"{folder}: {free_mib} MiB free ({kind})")


def _tokens(settings: Settings) -> Finding:
    engine = open_engine(settings.database_url)
    try:
        with reading(engine) as s:
            now = utc_now()
            active = [row for row in access.tokens(s) if row.is_active(now)]
    finally:
        engine.dispose()
    if active:
        return Finding("tokens", "ok", f"{len(active)} in use: {', '.join(sorted({row.name for row in active}))}")
    if is_loopback(settings.host):
        return Finding("tokens", "note", "none: nobody can write over the network, which may be as wanted")
    remedy = "kdatune token create NAME --scope results:write"
    return Finding("tokens", "problem", f"none, and KDATUNE_HOST={settings.host}: `kdatune serve` will refuse", remedy)


def _service(settings: Settings) -> Finding:
    launcher = from_environment()
    host = settings.host if is_loopback(settings.host) else "127.0.0.1"
    url = launcher.url or f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    remedy = "start it with `kdatune serve`, or set KDATUNE_URL; launches go on without it"
    try:
        reply = request("GET", f"{url}/readyz", token=launcher.token)
    except ServiceError as error:
        state: State = "note" if launcher.url is None else "problem"
        return Finding("service", state, f"{url} does not answer ({error})", remedy)
    if reply.status != 200:
        return Finding("service", "problem", f"{url}/readyz says {reply.status}", "look into its log")
    said = json.loads(reply.body)
    return Finding("service", "ok", f"{url} is ready, generation {said.get('generation')}")


def _cache(_settings: Settings) -> Finding:
    folder = from_environment().cache_dir
    if folder is None:
        return Finding("cache", "note", "no home directory", "set KDATUNE_CACHE_DIR to keep snapshots over restarts")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        return Finding("cache", "note", f"{folder} cannot be written", "set KDATUNE_CACHE_DIR to keep snapshots")
    return Finding("cache", "ok", f"{folder}")


def _kernels(_settings: Settings) -> Finding:
    """Kernels of others: those that are installed, and those that are registered and cannot be used."""
    found = registry()
    told = ", ".join(f"{name} ({one.distribution})" for name, one in sorted(found.kernels.items()))
    if found.faults:
        return Finding("kernels", "problem", "; ".join(found.faults.values()), "ask whoever maintains that package")
    return Finding("kernels", "ok", f"of others: {told}" if told else "no kernel of others is installed")


def _card(_settings: Settings) -> Finding:
    remedy = "tuning needs a card and its driver; serving, and replaying a recording, need none"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return Finding("card", "note", "no nvidia-smi on this machine", remedy)
    if said.returncode != 0:
        return Finding("card", "problem", (said.stdout + said.stderr).strip()[:300], remedy)
    cards = [", ".join(part.strip() for part in line.split(",")) for line in said.stdout.strip().splitlines()]
    return Finding("card", "ok", "; ".join(cards) + " (name, driver, memory)")


def _software(_settings: Settings) -> Finding:
    found = {name: _version(name) for name in ("torch", "triton", "optuna", "fastapi", "sqlalchemy")}
    told = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    if found["torch"] is None or found["triton"] is None:
        return Finding(
            "software", "note", told, "to tune or launch on a card, in the checkout: pip install -e '.[gpu]'"
        )
    return Finding("software", "ok", f"{told}, ptxas {gpu.ptxas_version()}")


def _clocks(_settings: Settings) -> Finding:
    clock_mhz, reasons = gpu.clock_state()
    if clock_mhz is None:
        return Finding("clocks", "note", "NVML says nothing here: stored times carry no clock")
    slowed = [reason for reason in _SLOWED if reason in (reasons or "")]
    told = f"SM clock {clock_mhz} MHz, throttle reasons {reasons}"
    if slowed:
        return Finding(
            "clocks", "problem", told, "times taken now are not comparable: cool the card or lift its power cap"
        )
    return Finding("clocks", "ok", told)


def _counters(settings: Settings) -> Finding:
    missing = counters_unavailable(settings.ncu)
    if missing is None:
        return Finding("counters", "ok", "nothing speaks against Nsight Compute's counters")
    state: State = "note" if missing.code == "ncu_not_found" else "problem"
    return Finding("counters", state, f"{missing.code}: {missing.reason}", missing.remedy)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _filesystem(folder: Path) -> str:
    """The kind of file system a folder lies on; "unknown" where the system does not say."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "unknown"
    inside: Callable[[str], bool] = lambda point: folder.resolve().is_relative_to(point)  # noqa: E731 - used once
    found = max((m for m in mounts if inside(m[1])), key=lambda m: len(m[1]), default=None)
    return found[2] if found else "unknown"
