"""What card and what software this process runs on."""

import contextlib
import functools
import importlib.metadata
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from kdatune_kernels import partial
from kdatune_kernels.errors import UsageError
from kdatune_kernels.identity import PROTOCOL
from kdatune_kernels.identity import kernel_hash
from kdatune_kernels.space import space_hash
from kdatune_kernels.spec import INTERPRETER
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import gpu_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "PROTOCOL",
    "clock_state",
    "current",
    "current_build",
    "driver_version",
    "kernel_hash",
    "of",
    "of_device",
    "ptxas_version",
]


_known: dict[int, Gpu] = {}


def of_device(index: int) -> Gpu:
    """The GPU model of a CUDA device of this process, with the SMs of the context in which it is asked first.

    During a graph capture the driver is not asked for the context: the device's own SMs count then, for that once.
    """
    found = _known.get(index)
    return _ask(index) if found is None else found


def _ask(index: int) -> Gpu:
    import torch

    p = torch.cuda.get_device_properties(index)
    capturing = torch.cuda.is_current_stream_capturing()
    sms = None
    if not capturing:
        with torch.cuda.device(index):
            sms = partial.context_sms()
    found = gpu_of(
        p.name, f"{p.major}.{p.minor}", sms or p.multi_processor_count, p.total_memory, getattr(p, "L2_cache_size", 0)
    )
    if not capturing:
        _known[index] = found
    return found


def of(device: "torch.device") -> Gpu:
    """The GPU model of the tensors' device, for kernels of others; the CPU's is Triton's interpreter."""
    return INTERPRETER if device.type == "cpu" else of_device(device.index or 0)


def current() -> Gpu:
    """The GPU model of the current CUDA device, once the thread is confined to the SMs of KDATUNE_SMS, if that is set.

    Raises:
        UsageError: torch is not installed, it sees no CUDA device, or KDATUNE_SMS cannot be had.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            "torch is not installed (pip install -e '.[gpu]'); kdatune tune can replay a recording instead"
        ) from error
    if not torch.cuda.is_available():
        raise UsageError(
            "no CUDA device is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES; kdatune tune can replay a recording instead"
        )
    partial.enter()
    return of_device(torch.cuda.current_device())


@functools.cache
def ptxas_version() -> str:
    """The release of the ptxas that Triton ships, or "unknown"."""
    with contextlib.suppress(ImportError, OSError, subprocess.SubprocessError):
        import triton

        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        text = subprocess.run([str(tool), "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
        found = re.search(r"release ([\d.]+), (V[\d.]+)", text)
        if found:
            return found.group(2)
    return "unknown"


@functools.cache
def driver_version() -> str:
    """The NVIDIA driver's version as NVML gives it, or "unknown"."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return "unknown"


def current_build() -> Build:
    """What a measurement made now is made with."""
    import torch

    return Build(
        kernel_hash=kernel_hash(),
        space_hash=space_hash(),
        protocol=PROTOCOL,
        triton=importlib.metadata.version("triton"),
        ptxas=ptxas_version(),
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda),
        driver=driver_version(),
    )


def nvml_handle(nvml: Any, visible: str | None) -> Any:
    """NVML's handle of the first card that CUDA shows to a process with this CUDA_VISIBLE_DEVICES (None: not set).

    NVML itself lists all cards whatever the variable says: on a host of several, index 0 is another worker's card.
    """
    first = (visible or "0").split(",")[0].strip()
    if first.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(first))
    if first.startswith("MIG-"):  # an instance has no clock of its own
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(first))
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(first):  # CUDA takes a shortened one, NVML does not
            return handle
    raise UsageError(f"CUDA_VISIBLE_DEVICES={visible!r} names no card")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def clock_state() -> tuple[int | None, str | None]:
    """SM clock in MHz and the active throttle reasons as text; None where NVML does not say. Read only."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = nvml_handle(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        clock = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        bits = int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        names = {
            0x1: "idle",
            0x2: "app_clocks",
            0x4: "sw_power_cap",
            0x8: "hw_slowdown",
            0x20: "sw_thermal",
            0x40: "hw_thermal",
        }
        return clock, "+".join(name for bit, name in names.items() if bits & bit) or "none"
    return None, None
