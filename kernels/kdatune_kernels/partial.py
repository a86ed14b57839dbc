"""Part of a card: how many SMs the current context has, and confining a process to some of them with a green context.

A green context of 80 SMs of an H200 is a card of its own to a tuner: other shapes fill it, so other configs win there.
"""

import contextlib
import ctypes
import functools
import os
from typing import Any

from kdatune_kernels.errors import UsageError

VARIABLE = "KDATUNE_SMS"
_MOST_DIGITS = 9  # CUDA takes 32 bits, and torch a larger number for one of another type
_SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM of cuda.h
_RESOURCE_BYTES = 512  # a CUdevResource has 144
_SM_COUNT_AT = 96  # behind its type and 92 bytes of padding, first in CUdevSmResource


def wanted_sms() -> int | None:
    """How many SMs KDATUNE_SMS confines the tools to; None where it is not set.

    Raises:
        UsageError: it is no number above 0.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise UsageError(f"{VARIABLE}={text!r} is no number of SMs; unset it to use the whole card")
    return int(text)


@functools.cache
def enter() -> Any:
    """Confine this thread to the SMs that KDATUNE_SMS says, for good, the first time it is called; without it, nothing.

    CUDA rounds the number up, on compute capability 9.0 to a multiple of 8: `context_sms` says what it has become.

    Raises:
        UsageError: the number is none, the card has fewer SMs, or torch or the driver has no green contexts.
    """
    sms = wanted_sms()
    if sms is None:
        return None
    import torch

    try:
        from torch.cuda.green_contexts import GreenContext

        context = GreenContext.create(num_sms=sms, device_id=torch.cuda.current_device())
        context.set_context()
    except (ImportError, RuntimeError) as error:
        have = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        why = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UsageError(
            f"{VARIABLE}={sms}: no green context of that many of {have} SMs could be made ({why[0]}); it takes torch 2.10 "
            f"and CUDA 12.8 or newer. Unset it to use the whole card"
        ) from error
    return context  # kept by the cache: the context lives as long as the process


def context_sms(library: str = "libcuda.so.1") -> int | None:
    """SMs of the context that is current in this thread, which a green context or MPS makes fewer than the card's.

    None where the driver does not say: it is older than 12.4, is not there, or no context is current.
    """
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL(library)
        context = ctypes.c_void_p()
        resource = ctypes.create_string_buffer(_RESOURCE_BYTES)
        if driver.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context.value:
            return None
        if driver.cuCtxGetDevResource(context, resource, _SM_RESOURCE) == 0:
            return int.from_bytes(resource.raw[_SM_COUNT_AT : _SM_COUNT_AT + 4], "little") or None
    return None
