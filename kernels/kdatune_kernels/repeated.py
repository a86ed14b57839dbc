"""Repeated calls of chunk_kda: what was called twice goes past checks, folding and binding, straight to the launchers.

Of a call, everything but addresses and the entries of cu_seqlens is its signature. The first call of one goes the long way
and is remembered, the second goes it, too, and leaves a plan (`direct`), from the third on the plan launches. Asked and
checked at every call are the launcher's config, the entries of cu_seqlens, and that nothing wants to see or change the
launches. What the plan does not know, and what fails, goes the long way, which raises what there is to raise.
"""

import contextlib
import itertools
import os
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Protocol

import torch
import triton

from kdatune_kernels import direct
from kdatune_kernels import inputs
from kdatune_kernels.spec import LaunchConfig

enabled = direct.FOLLOWED
"""False: every call goes the long way."""

MAX_ONCE, MAX_ENTRIES, MAX_PLANS, MAX_MADE = 1024, 1024, 256, 16
"""Signatures met once, 3 KB each, those with plans, about 10 KB each, ids of configs of one, and their plans."""
ADMIT_EVERY = 8
"""Of so many signatures that could have a plan, one takes a kept one's place: a plan costs three calls the long way."""

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN_OPTIONS = (bool, int, float, str, type(None), torch.dtype, type)

Output = tuple[torch.Tensor, torch.Tensor | None]


class Lookup(Protocol):
    def lookup(self, key: Hashable) -> LaunchConfig | None: ...


@dataclass(frozen=True)
class Tried:
    """A call that goes the long way.

    Attributes:
        signature: what its plan would be kept under; None: it must leave none.
        config: what the launcher has answered, which counts every answer as a launch.
    """

    signature: Hashable | None = None
    config: LaunchConfig | None = None


NOTHING = Tried()


@dataclass
class Entry:
    """The calls of a signature: what they return and ask for, and the plans of configs, None where there is none.

    Attributes:
        made: by config.
        plans: the same by what is cheaper to look up, the id of a config, which is kept with it.
    """

    key: tuple[Any, ...]
    device: torch.device
    state_sizes: tuple[int, ...] | None
    state_dtype: torch.dtype
    made: dict[LaunchConfig, direct.Plan | None] = field(default_factory=dict)
    plans: dict[Hashable, tuple[LaunchConfig, direct.Plan | None]] = field(default_factory=dict)


_LONGEST = 9
"""Where the longest sequence stands in the launcher's key."""

_once: dict[Hashable, None] = {}
_entries: dict[Hashable, Entry] = {}
_newcomers = itertools.count()


def attempt(
    launcher: Lookup,
    config: LaunchConfig | None,
    options: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    h0: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
) -> Output | Tried:
    """The outputs of a call that is like one before, else what the long way needs to know. options: all else, hashable."""
    try:
        signature = (
            options,
            q.shape, q.is_contiguous() or q.stride(), q.dtype, q.device, type(q),
            k.shape, k.is_contiguous() or k.stride(), k.dtype, k.device, type(k),
            v.shape, v.is_contiguous() or v.stride(), v.dtype, v.device, type(v),
            g.shape, g.is_contiguous() or g.stride(), g.dtype, g.device, type(g),
            beta.shape, beta.is_contiguous() or beta.stride(), beta.dtype, beta.device, type(beta),
            A_log is None or (A_log.shape, A_log.is_contiguous(), A_log.dtype, A_log.device, type(A_log)),
            dt_bias is None or (dt_bias.shape, dt_bias.is_contiguous(), dt_bias.dtype, dt_bias.device, type(dt_bias)),
            h0 is None or (h0.shape, h0.is_contiguous(), h0.dtype, h0.device, type(h0)),
            cu_seqlens is None or _form(cu_seqlens),
            cu_seqlens_cpu is None or _form(cu_seqlens_cpu),
        )  # fmt: skip
        entry = _entries.get(signature)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no tensor, none that is plain: the long way says so
        return NOTHING
    if entry is None:
        return Tried(signature)
    given = (q, k, v, g, beta, A_log, dt_bias, h0)
    if direct.watched() or (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*given, cu_seqlens))
    ):
        return NOTHING
    driver: Any = triton.runtime.driver.active
    index = entry.device.index or 0
    if entry.device.type == "cuda":
        if driver.get_current_device() != index:
            with torch.cuda.device(index):
                return attempt(launcher, config, options, *given, cu_seqlens, cu_seqlens_cpu)
        if torch.cuda.is_current_stream_capturing():
            return NOTHING
    key, longest = entry.key, None
    if cu_seqlens is not None:
        longest = inputs.longest_packed(cu_seqlens, cu_seqlens_cpu, q.shape[1])
        key = (*key[:_LONGEST], longest, *key[_LONGEST + 1 :])
    if config is None:
        counted = launcher.lookup(key)
        which: Hashable = id(counted)
    elif type(config) is LaunchConfig:
        counted = None
        which = _given(config, longest)
    else:
        return NOTHING
    kept = entry.plans.get(which)
    if kept is None:
        return Tried(signature, counted)
    plan = kept[1]
    if plan is None:
        return Tried(None, counted)
    for hooks in plan.pre_run_hooks:
        if hooks:
            return Tried(None, counted)
    device = entry.device
    try:
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        ht = None
        if entry.state_sizes is not None:
            if h0 is not None and h0.dtype is torch.float32:
                ht = torch.empty_like(h0, memory_format=torch.contiguous_format)
            else:
                ht = torch.empty(entry.state_sizes, dtype=torch.float32, device=device)
        block = torch.empty(plan.block_bytes, dtype=torch.uint8, device=device) if plan.block_bytes else None
        bound = direct.bound(plan, (
            plan.serial, driver.get_current_stream(index),
            q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(),
            0 if A_log is None else A_log.data_ptr(), 0 if dt_bias is None else dt_bias.data_ptr(),
            0 if h0 is None else h0.data_ptr(), 0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            o.data_ptr(), 0 if ht is None else ht.data_ptr(), 0 if block is None else block.data_ptr(),
        ))  # fmt: skip
    except (direct.NotPlannedError, RuntimeError):  # an address off 16 bytes; no memory
        return Tried(None, counted)
    try:
        for run, arguments in bound:
            run(*arguments)
    except Exception:  # noqa: BLE001 - launched once more the long way, which says what it is, or quarantines the config
        entry.made[kept[0]] = None
        entry.plans[which] = kept[0], None
        return Tried(None, counted)
    return o, ht if ht is None or entry.state_dtype is torch.float32 else ht.to(entry.state_dtype)


def _form(ends: torch.Tensor) -> tuple[Any, ...]:
    return ends.shape, ends.is_contiguous(), ends.dtype, ends.device, type(ends)


def _given(config: LaunchConfig, longest: int | None) -> Hashable:
    """The key of a given config's plan. Whether it may run depends on the longest sequence; a resolved one is made for it."""
    return id(config), longest


def remember(
    tried: Tried,
    options: tuple[Any, ...],
    config: LaunchConfig,
    given: bool,
    key: tuple[Any, ...],
    tensors: Sequence[torch.Tensor | None],
    o: torch.Tensor,
    ht: torch.Tensor | None,
    state_dtype: torch.dtype,
    make: Callable[[], direct.Plan],
) -> None:
    """Keep what a call that went the long way and was launched with `config` has shown, for calls of its signature.

    Args:
        given: whether the caller gave the config.
        key: the launcher's, with the longest sequence in it.
        tensors: those of `attempt` up to cu_seqlens.
        ht: the fp32 state of the launch, which is returned as state_dtype.
        make: the plan of these launches, made when the signature is met again.
    """
    signature = tried.signature
    if signature is None or not _plain(options, tensors):
        return
    entry = _entries.get(signature)
    if entry is None and signature not in _once:
        if len(_once) >= MAX_ONCE:
            _once.clear()
        _once[signature] = None
        return
    addresses = [x.data_ptr() for x in (*tensors, o, ht) if x is not None]
    one_place = len(set(addresses)) < len(addresses)  # then which of them a launch reads shows in another call only
    if one_place or any(x % direct.ADDRESS_BYTES for x in addresses) or direct.watched():
        return
    longest = key[_LONGEST]
    if entry is None:
        if len(_entries) >= MAX_ENTRIES and next(_newcomers) % ADMIT_EVERY:
            return
        entry = Entry(key, o.device, None if ht is None else tuple(ht.shape), state_dtype)
    plan = entry.made.get(config)
    if config not in entry.made:
        with contextlib.suppress(Exception):  # NotPlannedError, mostly; what was launched is right, whatever this is
            plan = make()
        if len(entry.made) >= MAX_MADE:
            entry.made.clear()
        entry.made[config] = plan
    if len(entry.plans) >= MAX_PLANS:
        entry.plans.clear()
    entry.plans[_given(config, longest) if given else id(config)] = config, plan
    if len(_entries) >= MAX_ENTRIES and signature not in _entries:
        for oldest in list(_entries)[:1]:
            _entries.pop(oldest, None)
    _once.pop(signature, None)
    _entries[signature] = entry


def _plain(options: tuple[Any, ...], tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether equal options mean the same for ever, and no tensor has ways of its own."""
    options_are = all(type(x) in _PLAIN_OPTIONS and not (type(x) is float and x == 0.0) for x in options)  # -0.0 == 0.0
    return options_are and all(x is None or type(x) in _PLAIN_TENSORS for x in tensors)


def forget() -> None:
    """Every plan: after a fork the handles in them are of another process."""
    _once.clear()
    _entries.clear()
    direct.forget()


os.register_at_fork(after_in_child=forget)
