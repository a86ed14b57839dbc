"""What repeated calls of chunk_kda launch, against what the long way launches, without a card.

    python direct_launch.py PART          PART: a function below; one JSON document out

The kernels are an H200's, the driver does nothing; what its launcher would have been given is kept (benchmarks/call_cost.py).
Run by test_direct_launch.py.
"""

import dataclasses
import importlib.util
import itertools
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from kda_calls import HALVES
from kda_calls import ONE_CONSUMER
from kda_calls import PLAIN
from kda_calls import TWO_CONSUMERS
from triton.runtime.jit import JITFunction

from kdatune_kernels import direct
from kdatune_kernels import inputs
from kdatune_kernels import kda
from kdatune_kernels import launch
from kdatune_kernels import repeated
from kdatune_kernels.environment import Settings
from kdatune_kernels.kda import chunk_kda
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.space import FUSED
from kdatune_kernels.space import PAIRS

spec = importlib.util.spec_from_file_location("call_cost", Path(__file__).parents[2] / "benchmarks" / "call_cost.py")
cost = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cost)

LAUNCHED: list[tuple] = []
BOUND: list[str] = []
RUNTIME = triton.knobs.runtime
OPTIONS = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "lower_bound": -5.0,
}  # fmt: skip


def watched() -> None:
    """Keep what the launcher gets, and which kernels Triton's own path bound."""
    cost.without_a_card()
    keep = SimpleNamespace(launch=lambda *args: LAUNCHED.append(args))
    cost.nvidia.compile_module_from_src = lambda **_source: keep
    # A tensor map stands for what it encodes.
    utils = triton.runtime.driver.active.utils
    utils.fill_tma_descriptor = lambda *args: ("map", *map(_plain, args))
    handles = itertools.count(1)
    utils.load_binary = lambda *_args: ("module", next(handles), 0, 0, 1024)
    run = JITFunction.run

    def counted(self, *args, warmup, **keywords):
        if not warmup:
            BOUND.append(self.__name__)
        return run(self, *args, warmup=warmup, **keywords)

    JITFunction.run = counted


def _plain(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, torch.Tensor) else tuple(x) if isinstance(x, list | tuple) else x


def make(
    dtype=torch.bfloat16,
    sizes=(1, 64, 2, 2, 128, 128),
    state=None,
    ends=None,
    options=None,
    strided=False,
    beta=None,
    bias=True,
) -> dict[str, Any]:
    """The arguments of a call, of tensors of its own. state: (dtype, V first), ends: cu_seqlens."""
    B, T, H, HV, K, V = sizes

    def rows(heads, size):
        if not strided:
            return torch.zeros(B, T, heads, size, dtype=dtype)
        return torch.zeros(B, T, 3 * heads, size, dtype=dtype)[:, :, heads : 2 * heads]

    wide = torch.zeros(B, T, 8 + HV, dtype=beta or dtype)
    given = {
        "q": rows(H, K), "k": rows(H, K), "v": rows(HV, V), "g": rows(HV, K),
        "beta": wide[..., 8:] if strided else wide[..., :HV].contiguous(), **OPTIONS, **(options or {}),
    }  # fmt: skip
    if bias:
        given |= {"A_log": torch.zeros(HV), "dt_bias": torch.nn.Parameter(torch.zeros(HV, K))}
    if ends is not None:
        given["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32)
    if state is not None:
        kind, v_first = state
        N = B if ends is None else len(ends) - 1
        given["initial_state"] = torch.zeros(N, HV, *((V, K) if v_first else (K, V)), dtype=kind)
        given |= {"output_final_state": True, "state_v_first": v_first}
    return given


SEGMENTS = dataclasses.replace(ONE_CONSUMER, k2=dataclasses.replace(ONE_CONSUMER.k2, segments=2))
PLAIN_SEGMENTS = dataclasses.replace(PLAIN, k2=dataclasses.replace(PLAIN.k2, segments=2))
KV, VK, HALF = (torch.float32, False), (torch.float32, True), (torch.bfloat16, True)
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, default config, states": {"state": KV, "options": {"config": None}},
    "default config, packed, V first": {"state": VK, "ends": [0, 20, 20, 64], "options": {"config": None}},
    "batch": {"sizes": (3, 40, 2, 2, 128, 128), "state": KV},
    "packed": {"ends": [0, 20, 64]},
    "V first": {"state": VK},
    "bf16 states in and out": {"state": HALF, "options": {"final_state_dtype": torch.bfloat16}},
    "final state only": {"options": {"output_final_state": True}},
    "strided": {"strided": True},
    "one token of a wider tensor": {"strided": True, "sizes": (1, 1, 2, 2, 128, 128)},
    "strided, by TMA": {"strided": True, "options": {"config": TWO_CONSUMERS}, "state": KV},
    "fp16": {"dtype": torch.float16, "beta": torch.float32},
    "fast": {"options": {"precision": "fast"}},
    "bf16": {"options": {"precision": "bf16"}},
    "no A_log, no dt_bias": {"bias": False},
    "value heads": {"sizes": (1, 64, 2, 4, 64, 256)},
    "scale": {"options": {"scale": 0.5, "lower_bound": -1}},
    "TMA in K1": {"options": {"config": HALVES}},
    "one consumer": {"options": {"config": ONE_CONSUMER}, "ends": [0, 64]},
    "segments": {"options": {"config": SEGMENTS}, "state": KV, "sizes": (1, 128, 2, 2, 128, 128)},
    "segments, packed, final state only": {
        "options": {"config": SEGMENTS, "output_final_state": True}, "ends": [0, 64, 160], "sizes": (1, 160, 2, 2, 128, 128),
    },
    "segments, plain": {"options": {"config": PLAIN_SEGMENTS}, "state": VK},
    "fused": {"options": {"config": FUSED}, "state": KV},
    "fused, fast, packed": {"options": {"config": FUSED, "precision": "fast"}, "ends": [0, 1, 64]},
    "pairs": {"options": {"config": PAIRS}, "state": KV},
    "pairs, packed, V first": {"options": {"config": PAIRS}, "state": VK, "ends": [0, 1, 1, 40, 64]},
    "pairs, strided, batch, no states": {"options": {"config": PAIRS}, "sizes": (3, 40, 2, 4, 128, 128), "strided": True},
    "pairs, final state only": {"options": {"config": PAIRS, "output_final_state": True}, "sizes": (1, 33, 2, 2, 128, 128)},
    "pairs, in a precision that they lack": {"options": {"config": PAIRS, "precision": "bf16"}, "ends": [0, 20, 64]},
    "fused, strided, no states": {"options": {"config": FUSED, "precision": "bf16"}, "strided": True},
}  # fmt: skip


def case(name: str) -> dict[str, Any]:
    about = CASES[name]
    options = {"config": PLAIN, **about.get("options", {})}
    return make(**{**about, "options": options})


def long_way(given: dict[str, Any]) -> Any:
    repeated.enabled = False
    try:
        return chunk_kda(**given)
    finally:
        repeated.enabled = True


def short_way(given: dict[str, Any]) -> Any:
    return chunk_kda(**given)


def told(given: dict[str, Any], returned: tuple) -> list[list[Any]]:
    """The launches since the last call, with names for addresses: of the call's tensors theirs, of others in their order."""
    o, ht = returned
    names = {x.data_ptr(): name for name, x in given.items() if isinstance(x, torch.Tensor)}
    names |= {x.data_ptr(): name for name, x in (("o", o), ("ht", ht)) if x is not None}

    def named(x: Any) -> Any:
        if isinstance(x, tuple):
            return [named(y) for y in x]
        x = _plain(x)
        if isinstance(x, int) and x >= 1 << 22:  # no size or stride here is so large, no address so small
            return names.setdefault(x, f"other {len(names)}")
        return str(x) if isinstance(x, torch.dtype) else x

    found = []
    for one in LAUNCHED:
        # The launch's metadata is for hooks; no hooks are as good as an empty chain of them.
        found.append([named(x) for i, x in enumerate(one) if i not in (10, 11, 12)])
        assert not any(getattr(x, "calls", x) for x in one[11:13])
    LAUNCHED.clear()
    BOUND.clear()
    return found


def arguments() -> dict[str, Any]:
    """Per case: what the launcher gets for tensors that were not seen before, by a repeated call and the long way."""
    found = {}
    for name in CASES:
        kept = [case(name) for _ in range(4)]
        for given in kept[:2]:
            chunk_kda(**given)
        LAUNCHED.clear()
        BOUND.clear()
        out = []
        for given in kept[2:]:
            returned = chunk_kda(**given)
            bound = len(BOUND)
            ours = told(given, _launched_to(returned))
            expected = long_way(given)
            theirs = told(given, _launched_to(expected))
            like = [None if x is None else [str(x.dtype), list(x.shape), list(x.stride())] for x in returned]
            other = [None if x is None else [str(x.dtype), list(x.shape), list(x.stride())] for x in expected]
            out.append({"bound": bound, "same": ours == theirs and len(ours) > 0, "alike": like == other})
            if ours != theirs:
                sys.stderr.write(f"{name}\n{ours}\n{theirs}\n")
        found[name] = {key: [one[key] for one in out] for key in out[0]}
    return found


def _launched_to(returned: tuple) -> tuple:
    """A bf16 final state is a copy of what was launched, which is known by its order then."""
    o, ht = returned
    return o, ht if ht is None or ht.dtype == torch.float32 else None


def blocks() -> dict[str, Any]:
    """Per case, whether the parts of a block hold what the workspace and tables of the call hold, apart and in order."""
    found = {}
    for name in CASES:
        repeated.forget()
        sizes: list[int] = []
        planned = direct.plan

        def plan(launches, given, scratch, constant, sizes=sizes, planned=planned):
            sizes += [x.nbytes for x in scratch]
            return planned(launches, given, scratch, constant)

        direct.plan = plan
        kept = [case(name) for _ in range(2)]
        for given in kept:
            chunk_kda(**given)
        direct.plan = planned
        (entry,) = repeated._entries.values()
        ((_, made),) = entry.plans.values()
        ends = [*made.offsets[1:], made.block_bytes] if sizes else []
        fits = all(start + size <= end for start, size, end in zip(made.offsets, sizes, ends, strict=True))
        found[name] = {
            "fits": fits,
            "aligned": all(x % 128 == 0 for x in made.offsets),
            "parts": len(sizes),
            "segments": kept[0]["config"] is not None and kept[0]["config"].k2.segments > 1,
            "packed": "cu_seqlens" in kept[0],
            "fused": kept[0]["config"] is FUSED,
        }
    return found


def _error(way: Any, given: dict[str, Any]) -> list[str] | None:
    LAUNCHED.clear()
    try:
        way(given)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return [type(error).__name__, str(error), str(len(LAUNCHED))]
    return None


def _faults() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Calls that were planned, and what makes of each one that must not be launched."""
    dense = make(state=KV, options={"config": PLAIN, "scale": 1.0})
    packed = make(state=KV, ends=[0, 20, 64], options={"config": PLAIN, "max_num_seqs": 2})
    x = torch.zeros(1, 64, 2, 128, dtype=torch.bfloat16)
    ones = {
        "q none": {"q": None},
        "v three-dimensional": {"v": x[0]},
        "g fp16": {"g": x.half()},
        "beta fp64": {"beta": torch.zeros(1, 64, 2, dtype=torch.float64)},
        "A_log bf16": {"A_log": torch.zeros(2, dtype=torch.bfloat16)},
        "state fp16": {"initial_state": torch.zeros(1, 2, 128, 128, dtype=torch.float16)},
        "two states": {"initial_state": torch.zeros(2, 2, 128, 128)},
        "a list": {"initial_state": [0.0]},
        "grad": {"v": torch.zeros(1, 64, 2, 128, dtype=torch.bfloat16, requires_grad=True)},
        "grad of a parameter": {"dt_bias": torch.nn.Parameter(torch.zeros(2, 128))},
        "scale a bool": {"scale": True},
        "scale a complex": {"scale": 1 + 0j},
        "scale nan": {"scale": float("nan")},
        "lower_bound none": {"lower_bound": None},
        "lower_bound a complex": {"lower_bound": -5 + 0j},
        "lower_bound 0": {"lower_bound": 0},
        "no l2norm": {"use_qk_l2norm_in_kernel": False},
        "no gate": {"use_gate_in_kernel": 0},
        "negative eigenvalues": {"allow_neg_eigval": True},
        "disable_recompute": {"disable_recompute": True},
        "cp_context": {"cp_context": object()},
        "cp_context unhashable": {"cp_context": []},
        "precision": {"precision": "fp8"},
        "precision unhashable": {"precision": ["fp16"]},
        "final_state_dtype": {"final_state_dtype": torch.float16},
        "config a word": {"config": "plain"},
        "config that may not run": {"config": dataclasses.replace(PLAIN, k2=dataclasses.replace(PLAIN.k2, stages_in=64))},
        "max_num_seqs": {"max_num_seqs": 2},
        "cu_seqlens_cpu alone": {"cu_seqlens_cpu": torch.tensor([0, 64])},
        "checkpoint_tokens alone": {"checkpoint_tokens": 16},
        "checkpoints alone": {"checkpoints": torch.zeros(1, 1, 2, 128, 128)},
    }  # fmt: skip
    ends = {
        "decreasing": torch.tensor([0, 80, 64], dtype=torch.int32),
        "not from 0": torch.tensor([1, 20, 64], dtype=torch.int32),
        "not to T": torch.tensor([0, 20, 63], dtype=torch.int32),
        "of floats": torch.tensor([0.0, 20, 64]),
        "square": torch.tensor([[0, 20, 64]], dtype=torch.int32),
        "of one": torch.tensor([0], dtype=torch.int32),
        "of one sequence, max_num_seqs 2": torch.tensor([0, 64], dtype=torch.int32),
    }
    found = {f"dense, {name}": (dense, change) for name, change in ones.items()}
    for name, x in packed.items():
        if isinstance(x, torch.Tensor):
            axis = 1 if x.dim() > 2 else 0
            for what, other in (
                ("short", x.narrow(axis, 0, x.shape[axis] - 1).clone()), ("fp64", x.double()), ("elsewhere", x.to("meta")),
            ):  # fmt: skip
                alike = torch.nn.Parameter(other, False) if isinstance(x, torch.nn.Parameter) else other
                found[f"{name} {what}"] = (packed, {name: alike})
    found |= {f"packed, {name}": (packed, {"cu_seqlens": x}) for name, x in ends.items()}
    found |= {
        f"cu_seqlens_cpu {name}": (packed, {"cu_seqlens_cpu": x}) for name, x in ends.items() if "max" not in name
    }
    return found


def errors() -> dict[str, Any]:
    """Per fault, what a call raises after its like were planned, and what it raises the long way."""
    found = {}
    faults = _faults()
    for good, _ in faults.values():
        for _ in range(3):
            with torch.no_grad():
                chunk_kda(**good)
    for name, (good, change) in faults.items():
        given = {**good, **change}
        with torch.no_grad():
            chunk_kda(**good)
            BOUND.clear()
            chunk_kda(**good)
        bound = len(BOUND)
        with torch.set_grad_enabled("grad" in name):
            found[name] = {"bound": bound, "ours": _error(short_way, given), "theirs": _error(long_way, given)}
    # In place, without another tensor: of the entries only the version of the tensor tells
    ends = torch.tensor([0, 20, 64], dtype=torch.int32)
    given = make(ends=ends.tolist(), options={"config": PLAIN}) | {"cu_seqlens": ends}
    for _ in range(3):
        chunk_kda(**given)
    ends[1] = 65
    found["changed in place"] = {"bound": 0, "ours": _error(short_way, given), "theirs": _error(long_way, given)}
    return found


def _fresh_launcher() -> Resolver:
    kda.launcher = Resolver(Settings(url=None), Path("/nonexistent"))
    return kda.launcher


def _bound(given: dict[str, Any]) -> int:
    """How many kernels Triton's path bound for a call."""
    BOUND.clear()
    chunk_kda(**given)
    return len(BOUND)


def launcher() -> dict[str, Any]:
    """What the launcher is asked, and that its answers hold: counts, another answer, refresh, quarantine."""
    resolver = _fresh_launcher()
    given = make(options={"config": None})
    found: dict[str, Any] = {"bound": [_bound(given) for _ in range(5)]}
    (entry,) = resolver._entries.values()
    found["counted"] = entry.count
    first = entry.config
    entry.config = dataclasses.replace(PLAIN, k2=dataclasses.replace(PLAIN.k2, transposed=True))
    found["another answer"] = [_bound(given) for _ in range(3)]
    found["another answer counted"] = entry.count
    entry.config = first
    found["the first again"] = _bound(given)
    resolver.refresh(timeout_seconds=0)
    found["refreshed"] = [_bound(given) for _ in range(3)]
    found["refreshed counted"] = next(iter(resolver._entries.values())).count
    # A launch that fails goes the long way, fails there, too, and its config is never launched again
    config, tries = next(iter(resolver._entries.values())).config, []

    def fails(*_args):
        tries.append(1)
        raise RuntimeError("Triton Error [CUDA]: out of resource")

    for kept, plan in _plans():
        if kept is config:
            object.__setattr__(plan, "launches", tuple((fails, draw) for _, draw in plan.launches))
    direct._bound.clear()
    real = launch.run_k1
    launch.run_k1 = lambda p, ws, k1: fails() if k1 == config.k1 else real(p, ws, k1)
    found["quarantined"] = [resolver.counters()["quarantined"], _bound(given), resolver.counters()["quarantined"]]
    found["tries"] = len(tries)
    now = next(iter(resolver._entries.values()))
    found["instead"] = [config.k1.variant, now.config.k1.variant]
    found["after quarantine"] = [_bound(given) for _ in range(3)]
    found["tries after"] = len(tries)
    found["after quarantine counted"] = now.count
    return found


def _plans() -> list[tuple[Any, direct.Plan]]:
    return [(kept, plan) for entry in repeated._entries.values() for kept, plan in entry.plans.values() if plan]


def asks_triton() -> dict[str, Any]:
    """How many kernels Triton's own path bound in a repeated call, per reason to take it."""
    given = make(options={"config": PLAIN})
    for _ in range(2):
        chunk_kda(**given)
    found = {"none": _bound(given)}
    for name, chain in (("enter hook", RUNTIME.launch_enter_hook), ("exit hook", RUNTIME.launch_exit_hook)):
        chain.add(_plain)
        found[name] = _bound(given)
        chain.remove(_plain)
    kernel = launch.prepare.prepare_kernel
    kernel.pre_run_hooks.append(lambda *_args, **_keywords: None)
    found["pre-run hook"] = _bound(given)
    kernel.pre_run_hooks.clear()
    RUNTIME.debug = True
    found["debug"] = _bound(given)
    RUNTIME.debug = False
    enter, RUNTIME.launch_enter_hook = RUNTIME.launch_enter_hook, None
    found["no chain of hooks"] = _bound(given)
    RUNTIME.launch_enter_hook = enter
    found["checkpoints"] = _bound({**given, "checkpoints": torch.zeros(4, 1, 2, 128, 128), "checkpoint_tokens": 16})
    off = torch.zeros(1 * 64 * 2 + 1, dtype=torch.bfloat16)[1:].view(1, 64, 2)
    found["an address off 16 bytes"] = _bound({**given, "beta": off})
    found["again"] = _bound(given)
    LAUNCHED.clear()
    triton.runtime.driver.active.get_current_stream = lambda _device: 77
    chunk_kda(**given)
    found["streams"] = sorted({one[3] for one in LAUNCHED})
    triton.runtime.driver.active.get_current_stream = lambda _device: 0
    return found


def cards() -> dict[str, Any]:
    """On a card that is not the current one, and in a capture: what is current at the launch. The card is a stand-in."""
    given = make(options={"config": FUSED}, sizes=(1, 64, 2, 2, 128, 128))
    for _ in range(2):
        chunk_kda(**given)
    current, seen, capturing = [0], [], [False]
    active = triton.runtime.driver.active
    active.get_current_device = lambda: current[-1]
    active.get_current_stream = lambda device: seen.append((device, current[-1])) or 100 + device
    torch.cuda.is_current_stream_capturing = lambda: capturing[0]

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    torch.cuda.device = Device
    (entry,) = repeated._entries.values()
    found = {}
    for index in (1, 0):
        entry.device = SimpleNamespace(type="cuda", index=index)
        LAUNCHED.clear()
        seen.clear()
        bound = _bound(given)
        found[f"card {index}"] = [bound, len(seen), *seen[0], *{one[3] for one in LAUNCHED}, list(current)]
    capturing[0] = True
    found["capturing"] = _bound(given)
    return found


def threads() -> dict[str, Any]:
    """Calls of several threads at once: whether each launch had the tensors of one call, and o of the same."""
    calls = [make(options={"config": PLAIN}) for _ in range(8)]
    for given in calls[:2]:
        chunk_kda(**given)
    places = {one["q"].data_ptr(): i for i, one in enumerate(calls)}
    wrong: list[Any] = []
    done = []

    @torch.no_grad()
    def run(given: dict[str, Any]) -> None:
        for _ in range(200):
            o, _ = chunk_kda(**given)
            done.append((o.data_ptr(), given["v"].data_ptr()))

    workers = [threading.Thread(target=run, args=(given,)) for given in calls]
    LAUNCHED.clear()
    BOUND.clear()
    direct.MAX_BOUND = 3  # so that what is kept is dropped all the time
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for one in LAUNCHED:
        mine = {calls[places[x]]["q"].data_ptr() for x in one if x in places}
        if len(mine) > 1:
            wrong.append(one)
    by_k1 = [one for one in LAUNCHED if any(x in places for x in one)]
    return {"wrong": len(wrong), "k1": len(by_k1), "calls": len(done), "bound": len(BOUND)}


def bounded() -> dict[str, Any]:
    """What is kept, after many signatures, addresses and configs."""
    repeated.MAX_ONCE, repeated.MAX_ENTRIES, repeated.MAX_PLANS, direct.MAX_BOUND, direct.MAX_ENCODED = 4, 8, 3, 5, 20
    repeated.MAX_MADE = 2
    for tokens in range(16, 16 + 20):
        given = make(sizes=(1, tokens, 2, 2, 128, 128), options={"config": FUSED})
        for _ in range(3):
            chunk_kda(**given)
    found = {"entries": len(repeated._entries), "once": len(repeated._once), "bound": len(direct._bound)}
    found["encoded"] = len(direct._encoded)
    repeated.forget()
    kept, plans = [], []
    for _ in range(8):
        kept.append(dataclasses.replace(PLAIN))
        given = make(sizes=(1, 64, 2, 2, 128, 128), options={"config": kept[-1]})
        for _ in range(3):
            chunk_kda(**given)
        entry = repeated._entries[list(repeated._entries)[-1]]
        plans.append([len(entry.plans), len({id(plan) for _, plan in entry.plans.values()})])
    found["plans"] = plans
    for warps in (1, 2, 8):
        given["config"] = dataclasses.replace(PLAIN, k1=dataclasses.replace(PLAIN.k1, num_warps=warps))
        for _ in range(3):
            chunk_kda(**given)
    found["made"] = len(entry.made)
    for i in range(10):
        chunk_kda(**make(sizes=(1, 100 + i, 2, 2, 128, 128), options={"config": PLAIN}))
    found["once after"] = len(repeated._once)
    repeated.forget()
    chunk_kda(**{**given, "lower_bound": torch.tensor(-5.0)})
    found["tensors kept"] = len(repeated._once)
    for _ in range(2):
        chunk_kda(**given)
    chunk_kda(**given)
    child = os.fork()
    if not child:
        left = (repeated._entries, repeated._once, direct._bound, direct._encoded)
        os._exit(0 if not any(left) else 1)
    found["in a child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found["in the parent"] = _bound(given)
    return found


def crowded() -> dict[str, Any]:
    """More signatures in turn than are kept: how many calls of 20 rounds were repeated ones, and how many plans were made."""
    repeated.MAX_ENTRIES = 8
    made, planned = [], direct.plan
    direct.plan = lambda *args: made.append(1) or planned(*args)
    calls = [make(sizes=(1, 16 * i, 2, 2, 128, 128), options={"config": FUSED}) for i in range(1, 13)]
    bound = [_bound(given) for _ in range(20) for given in calls]
    return {"calls": len(bound), "repeated": bound.count(0), "made": len(made), "kept": len(repeated._entries)}


def one_place() -> dict[str, Any]:
    """Calls in which two arguments are one tensor are never planned by, and read the right ones where they are planned."""
    alike = make(options={"config": PLAIN})
    alike["k"] = alike["q"]
    found = {"alike": [_bound(alike) for _ in range(4)]}
    apart = make(options={"config": PLAIN})
    found["apart"] = [_bound(apart) for _ in range(2)]
    LAUNCHED.clear()
    returned = chunk_kda(**alike)
    ours = told(alike, returned)
    found["same"] = ours == told(alike, long_way(alike))
    return found


def one_changed() -> dict[str, Any]:
    """Calls of which one tensor has other strides or another type than planned ones: whether they launch as the long way."""
    found = {}
    for ends in (None, [0, 20, 64]):
        about = {"state": KV, "ends": ends, "options": {"config": PLAIN}}
        for _ in range(3):
            chunk_kda(**make(**about))
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
        kinds = {"beta": torch.float32, "initial_state": torch.bfloat16, "cu_seqlens": torch.int64}
        for name, kind in [*((name, None) for name in names), *kinds.items()]:
            given = make(**about)
            x = given.get(name)
            if x is None:
                continue
            wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
            apart = wide[..., ::2]
            if name in ("q", "k", "v", "g"):
                apart = make(**{**about, "strided": True})[name]
            apart.copy_(x)
            given[name] = torch.nn.Parameter(apart, False) if isinstance(x, torch.nn.Parameter) else apart
            if kind is not None:
                given[name] = x.to(kind)
            bound, same = [], []
            for _ in range(3):  # the last by a plan, where one can be made
                LAUNCHED.clear()
                BOUND.clear()
                returned = chunk_kda(**given)
                bound.append(len(BOUND))
                ours = told(given, returned)
                same.append(ours == told(given, long_way(given)) and ours != [])
            found[f"{name}, {kind}, {ends}"] = {"bound": bound[0] > 0, "same": all(same)}
    return found


def refused() -> dict[str, Any]:
    """A plan whose launch fails where the long way does not, and one that cannot be made: both are tried once."""
    given = make(options={"config": PLAIN})
    for _ in range(3):
        chunk_kda(**given)
    tries = []

    def fails(*_args):
        tries.append(1)
        raise ValueError("Pointer argument cannot be accessed")

    for _, plan in _plans():
        object.__setattr__(plan, "launches", tuple((fails, draw) for _, draw in plan.launches))
    direct._bound.clear()
    found = {"bound": [_bound(given) for _ in range(3)], "tries": len(tries)}
    repeated.forget()
    planned, direct.plan = direct.plan, lambda *_args: tries.append(1) or fails()
    found["no plan"] = [_bound(given) for _ in range(4)]
    direct.plan = planned
    return {**found, "made once": len(tries) - found["tries"]}


if __name__ == "__main__":
    watched()
    inputs.INTERPRET = True
    with torch.no_grad():
        document = {part: globals()[part]() for part in sys.argv[1:]}
    sys.stdout.write(json.dumps(document) + "\n")
