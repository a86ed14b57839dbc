"""Why there are no counters, typed, each with what to do about it. What ncu says is matched against one table."""

import re
from dataclasses import dataclass

_DETAIL_CHARACTERS = 300


@dataclass(frozen=True)
class Unavailable:
    """Counters could not be had. code: stable, for programs; reason: what happened; remedy: what to do."""

    code: str
    reason: str
    remedy: str

    def text(self) -> str:
        """The form that is stored with a profile: "code: reason. Remedy."""
        return f"{self.code}: {self.reason.rstrip('.')}. {self.remedy}"


PERMISSION_REMEDY = (
    "Run as root, or on the host set the module option NVreg_RestrictProfilingToAdminUsers=0 for nvidia and reload the "
    "driver; in a container add the capability SYS_ADMIN. Tuning needs no counters."
)

REMEDIES = {
    "ncu_not_found": "Install Nsight Compute (ncu) or name it with KDATUNE_NCU. Tuning needs no counters.",
    "no_permission": PERMISSION_REMEDY,
    "driver_mismatch": "Install the Nsight Compute that belongs to the driver, or a newer driver.",
    "library_not_loaded": (
        "The driver's profiling library cannot be loaded, as in sandboxes that hide it (gVisor): profile on the host or "
        "in a container with the NVIDIA runtime."
    ),
    "counters_busy": "Another tool holds the counters: stop it (for DCGM: dcgmi profile --pause) and profile again.",
    "unsupported_gpu": "This Nsight Compute does not know the card: install one that lists it (ncu --list-chips).",
    "no_card": "Profile on a machine with a CUDA card, after pip install -e '.[gpu]' in the checkout.",
    "timeout": "Raise KDATUNE_PROFILE_TIMEOUT_S, or look whether the card hangs (nvidia-smi).",
    "target_failed": "The profiled process failed; run `kdatune tune` for the shape, which tells failing configs.",
    "config_failed": "The config cannot run for this shape on this card; `kdatune tune` finds one that can.",
    "no_kernels": "Update Nsight Compute: 2025.3 is known to see these launches.",
    "no_reader": "In the checkout: pip install -e '.[gpu]', which brings ncu-report.",
    "bad_report": "The report is incomplete or of an Nsight Compute that ncu-report cannot read; update ncu-report.",
    "ncu_failed": "See what ncu said; tuning needs no counters.",
}
"""What to do, by code."""

# The first line that matches decides. Texts: Nsight Compute 2024.1 to 2025.3.
_SIGNS: tuple[tuple[str, str], ...] = (
    (r"ERR_NVGPUCTRPERM", "no_permission"),
    (r"LibraryNotLoaded|library.{0,40}(not|failed to) load", "library_not_loaded"),
    (
        r"driver is not compatible|driver version.{0,40}(insufficient|not supported)|DriverNotSupported",
        "driver_mismatch",
    ),
    (r"Driver resource was unavailable|DCGM", "counters_busy"),
    (r"Profiling is not supported on|Unsupported ?Gpu|not supported on this device", "unsupported_gpu"),
)


def unavailable(code: str, reason: str) -> Unavailable:
    """An Unavailable with the remedy of its code."""
    return Unavailable(code, reason, REMEDIES[code])


def said_by_ncu(output: str, exit_code: int | None) -> Unavailable:
    """What an ncu run that left no usable report died of, from what it printed."""
    errors = [line.partition("==ERROR==")[2].strip() for line in output.splitlines() if "==ERROR==" in line]
    for line in errors:
        for sign, code in _SIGNS:
            if re.search(sign, line, re.IGNORECASE):
                return unavailable(code, line[:_DETAIL_CHARACTERS])
    if errors:
        return unavailable("ncu_failed", "; ".join(errors)[:_DETAIL_CHARACTERS])
    if "No kernels were profiled" in output:
        return unavailable("no_kernels", "ncu profiled no launch")
    last = (output.strip().splitlines() or ["it printed nothing"])[-1]
    return unavailable("ncu_failed", f"ncu ended with exit code {exit_code}: {last}"[:_DETAIL_CHARACTERS])
