"""Whether counters can be had on this machine, as far as can be told without a launch: what `kdatune doctor` asks."""

from pathlib import Path

from kdatune_tuner.ncu.collect import find_ncu
from kdatune_tuner.ncu.collect import ncu_version
from kdatune_tuner.ncu.unavailable import Unavailable
from kdatune_tuner.ncu.unavailable import unavailable

_DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
_OWN_STATUS = Path("/proc/self/status")
_CAPABILITIES = (21, 38)  # CAP_SYS_ADMIN, CAP_PERFMON: either lets a process read counters


def counters_unavailable(
    ncu: str | None = None, *, driver_parameters: Path = _DRIVER_PARAMETERS, own_status: Path = _OWN_STATUS
) -> Unavailable | None:
    """Why a profile would have no counters; None where nothing speaks against them."""
    program = find_ncu(ncu)
    if program is None or ncu_version(program) is None:
        return unavailable("ncu_not_found", "there is no Nsight Compute (ncu) on this machine")
    if not driver_parameters.exists():
        return None  # no driver, or one hidden by a sandbox: the run itself will tell
    restricted = "RmProfilingAdminOnly: 1" in driver_parameters.read_text().splitlines()
    if restricted and not _may_profile(own_status):
        return unavailable(
            "no_permission", "the driver gives counters to administrators only (RmProfilingAdminOnly: 1)"
        )
    return None


def _may_profile(own_status: Path) -> bool:
    for line in own_status.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return any(int(value, 16) >> bit & 1 for bit in _CAPABILITIES)
    return False
