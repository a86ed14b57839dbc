"""The device side of a trial of another kernel: run a config, compare, and time it, as bench.py does for KDA.

On a card by protocol 1 of bench.py. In Triton's interpreter (TRITON_INTERPRET=1) by the wall clock, a launch a sample: real
times of that device, which say nothing about a card.
"""

import functools
import importlib
import math
import os
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import cast

import torch

from kdatune_kernels import bench
from kdatune_kernels.errors import MeasurementError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import INTERPRETER
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.tunable import Installed
from kdatune_kernels.tunable import TunableDevice
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape

_SEED = 0


@dataclass(frozen=True)
class Problem:
    """Inputs of one shape on the device: several copies to rotate over, so that the L2 is cold."""

    kernel: Installed
    shape: OtherShape
    device: TunableDevice
    copies: tuple[Any, ...]


def interpreted() -> bool:
    """Whether Triton's interpreter is the device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def device_module(kernel: Installed) -> TunableDevice:
    """The part of a kernel that needs torch. Raises UsageError when it cannot be imported or lacks a function."""
    name = kernel.kernel.device
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"{name} of kernel {kernel.name} ({kernel.distribution}) cannot be imported: {error}"
        ) from error
    lacks = [part for part in ("inputs", "launch", "check") if not callable(getattr(module, part, None))]
    if lacks:
        raise UsageError(f"{name} of kernel {kernel.name} ({kernel.distribution}) lacks {', '.join(lacks)}")
    return cast("TunableDevice", module)


def facts(kernel: Installed, gpu_module: Any) -> tuple[Gpu, Build, str]:
    """What card and software this is, and how it is timed.

    Args:
        gpu_module: gpu.py, or what stands in for it.
    """
    device_module(kernel)
    base: Build = gpu_module.current_build()
    build = replace(base, kernel_hash=kernel.kernel_hash(), space_hash=kernel.space_hash())
    if interpreted():
        return INTERPRETER, build, "wall clock of Triton's interpreter on the CPU"
    return gpu_module.current(), build, f"protocol {build.protocol}"


def open_problem(kernel: Installed, shape: OtherShape) -> Problem:
    """Inputs of a shape, with enough copies to keep the L2 cold.

    Raises:
        MeasurementError: outcome "launch_error" when the card has too little free memory.
    """
    device = device_module(kernel)
    if interpreted():
        return Problem(kernel, shape, device, (device.inputs(shape, _SEED, "cpu"),))
    where = torch.device("cuda")
    try:
        before = torch.cuda.memory_allocated(where)
        first = device.inputs(shape, _SEED, "cuda")
        each_bytes = max(1, torch.cuda.memory_allocated(where) - before)
        more = [device.inputs(shape, _SEED, "cuda") for _ in range(bench.copies_for(where, each_bytes) - 1)]
    except torch.cuda.OutOfMemoryError as error:
        raise MeasurementError("launch_error", f"{shape.key()} does not fit the free device memory") from error
    bench.warm_up("cuda")
    return Problem(kernel, shape, device, (first, *more))


def check(problem: Problem, config: OtherConfig) -> bench.CheckResult:
    """Compile a config, run it twice on NaN-poisoned outputs and compare. Never raises for a bad config.

    The largest error ratio is given as that of o: over 1 is incorrect.
    """
    inputs = problem.copies[0]
    started = time.perf_counter()
    try:
        with bench.quiet():
            first = [x.clone() for x in tensors_of(_run(problem, inputs, config))]
            compile_s = time.perf_counter() - started
            outputs = _run(problem, inputs, config)
            ratios = problem.device.check(inputs, outputs)
    except MeasurementError as error:
        return bench.CheckResult(error.outcome, error.detail, compile_s=time.perf_counter() - started)
    if not isinstance(ratios, Mapping) or not ratios:
        raise TypeError(f"check of kernel {problem.kernel.name} must give error ratios by name, not {ratios!r}")
    named = {str(name): float(ratio) for name, ratio in ratios.items()}
    worst = max(named, key=lambda name: math.inf if math.isnan(named[name]) else named[name])
    outcome, detail = "ok", None
    if not named[worst] <= 1.0:
        outcome, detail = "incorrect", f"error ratio of {worst} is {named[worst]:.3g}, 1 is the limit"
    elif not all(map(torch.equal, first, tensors_of(outputs))):
        outcome, detail = "nondeterministic", "two runs on the same input differ"
    ratio = named[worst] if math.isfinite(named[worst]) else None
    return bench.CheckResult(outcome, detail, o_error_ratio=ratio, compile_s=compile_s)


def _run(problem: Problem, inputs: Any, config: OtherConfig) -> Any:
    """One launch; its outputs are NaN before it where it writes the buffers that a launch before it has written."""
    with bench.typed():
        outputs = problem.device.launch(inputs, config)
        for x in tensors_of(outputs):
            if x.is_floating_point():
                x.fill_(float("nan"))
        outputs = problem.device.launch(inputs, config)
        if not interpreted():
            torch.cuda.synchronize()
    return outputs


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """The tensors among the outputs. Raises TypeError when there is none: nothing could be checked."""
    found = list(_tensors(outputs))
    if not found:
        raise TypeError(f"launch must return its outputs, a tensor or several of them, not {type(outputs).__name__}")
    return found


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, tuple | list):
        for one in outputs:
            yield from _tensors(one)


def time_interleaved_us(problem: Problem, configs: Sequence[OtherConfig], samples: int) -> list[list[float]]:
    """Times of one launch in us, one list a config, paired by round: sample i of every config is of the same round.

    Raises:
        MeasurementError: with the outcome of a config that fails.
    """
    calls = [functools.partial(_call, problem, config) for config in configs]
    with bench.typed(), bench.quiet():
        if interpreted():
            return bench.interleave([functools.partial(_wall_us, call(0)) for call in calls], samples)
        return bench.interleave([bench.capture(call, len(problem.copies)).replay_us for call in calls], samples)


def _call(problem: Problem, config: OtherConfig, i: int) -> Callable[[], Any]:
    return functools.partial(problem.device.launch, problem.copies[i], config)


def _wall_us(call: Callable[[], Any]) -> float:
    """A launch by the clock on the wall, where there is no card."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6
