"""Launches past Triton's binder: a plan of bound launches, which a later call repeats with other addresses.

What Triton does at every launch (specialise the arguments, look the kernel up, encode descriptors, ask about pointers, call
hooks) it did when the launches were bound; all of it but the addresses is decided by what the caller keeps the plan under.
A plan takes any list of `functools.partial(kernel[grid], ...)`, and keeps what a kernel was compiled with: cooperative grids,
programmatic launches, clusters. It follows the launch path of Triton 3.6; under another there are no plans (`FOLLOWED`).
"""

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kdatune_kernels.numerics import INTERPRET

FOLLOWED = triton.__version__.startswith("3.6.") and not INTERPRET
"""Whether launches can be planned in this process."""

ALIGN_BYTES = 256
"""What the parts of a block begin on, as those of torch's allocator do; TMA needs 128, the kernels 16."""
MAX_BOUND, MAX_ENCODED = 4096, 4096
"""Argument lists and tensor maps that are kept for addresses seen before: about 8 MB."""

ADDRESS_BYTES = 16
"""Of every address of a call: for such ones the kernels are compiled."""


class NotPlannedError(Exception):
    """These launches cannot be repeated by a plan; says why."""


@dataclass(frozen=True, eq=False)  # told apart by identity, which is a hash at once
class Matrix:
    """What a tensor map says besides the address. fields: as Triton's driver passes them, after the address."""

    fields: tuple[Any, ...]

    def encoded(self, address: int) -> Any:
        """The tensor map of such a matrix at an address; it says where memory lies, and holds none."""
        return triton.runtime.driver.active.utils.fill_tma_descriptor(address, *self.fields)


@dataclass(frozen=True)
class Plan:
    """Launches whose arguments are known but for addresses.

    The arguments of all are drawn from one list: the stream, the addresses of the call, those of the parts of its block, the
    tensor maps, the constants. kept: what constant addresses point to.
    """

    serial: int
    offsets: tuple[int, ...]
    block_bytes: int
    maps: tuple[tuple[int, Matrix], ...]
    constants: tuple[Any, ...]
    launches: tuple[tuple[Callable[..., Any], Callable[[list[Any]], tuple[Any, ...]]], ...]
    pre_run_hooks: tuple[list[Any], ...]
    kept: tuple[Any, ...]


Bound = tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]

_serials = itertools.count(1)
_bound: dict[tuple[int, ...], Bound] = {}
_encoded: dict[tuple[int, Matrix], Any] = {}


def watched() -> bool:
    """Whether somebody wants to see launches, or other kernels than were compiled: then Triton has to launch."""
    runtime: Any = triton.knobs.runtime
    return bool(
        runtime.debug
        or getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
        or triton.knobs.compilation.instrumentation_mode
    )


def plan(
    launches: Sequence[Callable[[], Any]],
    given: Sequence[torch.Tensor | None],
    scratch: Sequence[torch.Tensor],
    constant: Sequence[torch.Tensor],
) -> Plan:
    """A plan of bound launches that were launched before, of tensors that are all alive.

    Args:
        given: the tensors whose addresses a call brings, None for those it lacks; the last of them is the block.
        scratch: tensors that a block of the call stands for, uninitialised.
        constant: tensors that stay where they are.

    Raises:
        NotPlannedError: a launch has another form, or reads what is none of these tensors.
    """
    offsets, end = [], 0
    for x in scratch:
        offsets.append(end)
        end += -(-x.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    first_part = 1 + len(given)
    places = {x.data_ptr(): i for i, x in enumerate(given, 1) if x is not None}
    places |= {x.data_ptr(): i for i, x in enumerate(scratch, first_part)}
    if len(places) != len(scratch) + sum(x is not None for x in given) or 0 in places:
        raise NotPlannedError("two tensors lie at one address")
    drawn = [_launched(launch) for launch in launches]
    here = _Pool(first_part + len(scratch), places, {x.data_ptr() for x in constant})
    taken = [(one.run, [here.place_of(value) for value in one.arguments]) for one in drawn]
    return Plan(
        serial=next(_serials),
        offsets=tuple(offsets),
        block_bytes=end,
        maps=tuple(here.maps),
        constants=tuple(here.constants),
        launches=tuple((run, operator.itemgetter(*here.numbered(indices))) for run, indices in taken),
        pre_run_hooks=tuple(one.pre_run_hooks for one in drawn),
        kept=(tuple(constant), tuple(one.compiled for one in drawn)),
    )


def bound(plan: Plan, where: tuple[int, ...]) -> Bound:
    """The launchers of a plan with their arguments. where: its serial, the stream, the addresses, 0 for what is absent.

    Raises NotPlannedError when an address is not what the kernels were compiled for.
    """
    known = _bound.get(where)
    if known is not None:
        return known
    if any(x % ADDRESS_BYTES for x in where[2:]):
        raise NotPlannedError(f"an address is off {ADDRESS_BYTES} bytes")
    block = where[-1]
    pool: list[Any] = [*where[1:], *(block + offset for offset in plan.offsets)]
    pool += [_map_of(matrix, pool[at]) for at, matrix in plan.maps]
    pool += plan.constants
    made = tuple((run, draw(pool)) for run, draw in plan.launches)
    if len(_bound) >= MAX_BOUND:
        _bound.clear()
    _bound[where] = made
    return made


def _map_of(matrix: Matrix, address: int) -> Any:
    made = _encoded.get((address, matrix))
    if made is None:
        made = matrix.encoded(address)
        if len(_encoded) >= MAX_ENCODED:
            _encoded.clear()
        _encoded[address, matrix] = made
    return made


STREAM = object()
"""Stands for the stream among the arguments of a launch."""


@dataclass(frozen=True)
class _Launched:
    run: Callable[..., Any]
    arguments: list[Any]
    pre_run_hooks: list[Any]
    compiled: Any


class _Pool:
    """Where the arguments of launches lie in the list they are drawn from; maps and constants are gathered on the way."""

    def __init__(self, first_map: int, places: Mapping[int, int], constant: set[int]) -> None:
        self.maps: list[tuple[int, Matrix]] = []
        self.constants: list[Any] = []
        self._first_map = first_map
        self._places = places
        self._constant = constant

    def place_of(self, value: Any) -> tuple[str, int]:
        if value is STREAM:
            return "list", 0
        if isinstance(value, torch.Tensor):
            address = value.data_ptr()
            if address in self._places:
                return "list", self._places[address]
            if address not in self._constant:
                raise NotPlannedError("a launch reads a tensor that is none of the call's")
            return self._constant_place(address)
        if isinstance(value, _Mapped):
            at = self._places.get(value.address)
            if at is None:
                raise NotPlannedError("a descriptor is of a tensor that is none of the call's")
            self.maps.append((at, value.matrix))
            return "maps", len(self.maps) - 1
        return self._constant_place(value)

    def _constant_place(self, value: Any) -> tuple[str, int]:
        self.constants.append(value)
        return "constants", len(self.constants) - 1

    def numbered(self, places: list[tuple[str, int]]) -> list[int]:
        starts = {"list": 0, "maps": self._first_map, "constants": self._first_map + len(self.maps)}
        return [starts[part] + i for part, i in places]


@dataclass(frozen=True)
class _Mapped:
    address: int
    matrix: Matrix


def _launched(launch: Callable[[], Any]) -> _Launched:
    """What the launcher in C gets at a launch, with STREAM, tensors and _Mapped in their places."""
    kernel, grid = _kernel_and_grid(launch)
    assert isinstance(launch, functools.partial)  # noqa: S101 - _kernel_and_grid has seen to it
    if kernel.pre_run_hooks:
        raise NotPlannedError("a kernel has hooks")
    compiled = kernel.warmup(*launch.args, grid=grid, **launch.keywords)
    if not isinstance(compiled, triton.compiler.CompiledKernel):
        raise NotPlannedError("a kernel is still being compiled")
    runner = compiled.run
    if runner.global_scratch_size or runner.profile_scratch_size:
        raise NotPlannedError("Triton allocates scratch memory for a kernel")
    own = {name: value for name, value in launch.keywords.items() if name in kernel.arg_names}
    named = kernel.signature.bind(*launch.args, **own)
    named.apply_defaults()
    meta = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    arguments: list[Any] = []
    for value in named.arguments.values():
        arguments += _expanded_argument(value, meta)
    if meta:
        raise NotPlannedError("a kernel has other descriptors than it was given")
    sizes = [*grid, 1, 1][:3]
    if not math.prod(sizes):
        raise NotPlannedError("a grid is empty")
    head = [*sizes, STREAM, compiled.function, runner.launch_cooperative_grid, runner.launch_pdl, None, None]
    return _Launched(
        run=_in_c(runner),
        arguments=[*head, compiled.packed_metadata, None, None, None, *arguments],
        pre_run_hooks=kernel.pre_run_hooks,
        compiled=compiled,
    )


def _expanded_argument(value: Any, meta: list[Any]) -> list[Any]:
    """An argument as the launcher takes it; descriptors use up meta."""
    if not hasattr(value, "block_shape"):
        plain = isinstance(value, torch.Tensor) or not (isinstance(value, tuple | list) or hasattr(value, "data_ptr"))
        if not plain:
            raise NotPlannedError(f"a launch takes a {type(value).__name__}")
        return [value]
    if not meta or meta[0] is None:
        raise NotPlannedError("a descriptor is none of the hardware's")
    from triton.backends.nvidia import driver

    about, shape, strides = meta.pop(0), tuple(value.shape), tuple(value.strides)
    if about["fp4_padded"]:
        raise NotPlannedError("a descriptor of 4-bit numbers")
    kind = driver.TMA_DTYPE_DEVICE_TO_HOST[about["elem_type"]]
    padding = 1 if value.padding == "nan" else 0
    fields = (about["swizzle"], about["elem_size"], kind, tuple(about["block_size"]), shape, strides, padding)
    return [_Mapped(value.base.data_ptr(), Matrix(fields)), *shape, *strides]


def _kernel_and_grid(launch: Callable[[], Any]) -> tuple[Any, tuple[int, ...]]:
    """The kernel and the grid of `functools.partial(kernel[grid], ...)`."""
    target = launch.func if isinstance(launch, functools.partial) else None
    held = inspect.getclosurevars(target).nonlocals if inspect.isfunction(target) else {}
    kernel, grid = held.get("self"), held.get("grid")
    if not isinstance(kernel, triton.runtime.jit.JITFunction) or not isinstance(grid, tuple):
        raise NotPlannedError("a launch is no kernel with a grid")
    return kernel, grid


def _in_c(runner: Any) -> Callable[..., Any]:
    """The launcher in C, under what makes descriptors of a kernel that has some."""
    launch: Callable[..., Any] = runner.launch
    if inspect.isfunction(launch) and "tensordesc_meta" in launch.__code__.co_freevars:
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    return launch


def forget() -> None:
    """What was kept for addresses: `repeated` does after a fork."""
    _bound.clear()
    _encoded.clear()
