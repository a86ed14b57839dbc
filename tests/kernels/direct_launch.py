"""What benchmarks/candidates/direct-launch.patch launches, against Triton's own launch path, without a card.

    python direct_launch.py BENCHMARK        BENCHMARK: call_cost.py for the patched package, which is on the path

The driver does nothing; what its launcher would have been given is kept. Run by test_direct_launch.py, one JSON document out.
"""

import importlib.util
import itertools
import json
import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction
from triton.runtime.jit import compute_cache_key


def _benchmark(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("call_cost", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cost = _benchmark(sys.argv[1])
launch, inputs = cost.launch, cost.inputs
LAUNCHED: list[tuple] = []
BOUND: list[str] = []


def _watched() -> None:
    """Keep what the launcher gets, and which kernels Triton's own path bound."""
    cost.without_a_card()
    cost.nvidia.compile_module_from_src = lambda **_source: SimpleNamespace(launch=lambda *args: LAUNCHED.append(args))
    # A descriptor's encoding stands for what it encodes.
    triton.runtime.driver.active.utils.fill_tma_descriptor = lambda *args: ("map", *map(_plain, args))
    run = JITFunction.run

    def counted(self, *args, **keywords):
        BOUND.append(self.__name__)
        return run(self, *args, **keywords)

    JITFunction.run = counted


def _plain(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, torch.Tensor) else list(x) if isinstance(x, list | tuple) else x


def _calls() -> dict[str, Any]:
    """Makers of bound calls of every kernel that is bound by `direct`, with tensors of their own."""
    spec = cost.shape_of.__globals__  # the patched package's spec module
    K1, K2 = spec["K1Config"], spec["K2Config"]
    given = cost.arguments("cpu", 64, 4, True, 3)
    tables = launch.packed_tables(given["cu_seqlens"], 64)
    problem = inputs.fold(
        *(given[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")), -5.0, None, given["initial_state"],
        False, tables,
    )  # fmt: skip
    ws = launch.workspace(tables, 4, 128, "fp16", torch.device("cpu"))
    o, ht = torch.empty_like(problem.v), torch.empty(3, 4, 128, 128)
    split = cost.split_default(cost.shape_of(1, 8, 64), cost.H200)
    calls = {f"k1 {k.variant}": lambda k=k: launch.k1_call(problem, ws, k) for k in (K1(), split.k1)}
    calls["k1 tma"] = lambda: launch.k1_call(problem, ws, K1(variant="tma", num_warps=1))
    for k in (K2(), split.k2):
        calls[f"k2 {k.variant}"] = lambda k=k: launch.k2_call(problem, ws, o, ht, k)
        calls[f"k2 {k.variant}, no states"] = lambda k=k: launch.k2_call(replace(problem, h0=None), ws, o, None, k)
    calls["fused"] = lambda: launch.fused_call(problem, launch.types_only(128, "fp16", o.device), o, ht)
    return calls


def same_arguments() -> dict[str, Any]:
    """Per kernel, launched once and then with other tensors: what the launcher gets for those by Triton's path and by ours."""
    runtime = triton.knobs.runtime
    known, others = _calls(), _calls()
    found = {}
    for name, make in known.items():
        make()()
        LAUNCHED.clear()
        BOUND.clear()
        runtime.launch_enter_hook.add(_plain)  # with a hook, Triton's path is taken
        first = others[name]()()
        runtime.launch_enter_hook.remove(_plain)
        second = others[name]()()
        by_triton, by_us = LAUNCHED
        # Beside the launch's metadata, which is for hooks, these differ: an empty chain of hooks, and none.
        hooks = [i for i, x in enumerate(by_triton) if isinstance(x, triton.knobs.HookChain)]
        apart = (hooks[0] - 1, *hooks)
        got, expected = ([_plain(x) for i, x in enumerate(one) if i not in apart] for one in (by_us, by_triton))
        found[name] = {
            "bound": len(BOUND),
            "same": got == expected,
            "hooks": [by_us[i] for i in apart],
            "returned": first is second,
        }
    return found


def asks_triton() -> dict[str, int]:
    """How often Triton's own path was taken by a known kernel, per reason to take it."""
    make = _calls()["k1 cp_async"]
    make()()
    runtime = triton.knobs.runtime
    kernel = make().args[0]

    def bound(call: Any) -> int:
        BOUND.clear()
        call()
        return len(BOUND)

    found = {"none": bound(make())}
    for name, chain in (("enter hook", runtime.launch_enter_hook), ("exit hook", runtime.launch_exit_hook)):
        chain.add(_plain)
        found[name] = bound(make())
        chain.remove(_plain)
    kernel.pre_run_hooks.append(lambda *_args, **_keywords: None)
    found["pre-run hook"] = bound(make())
    kernel.pre_run_hooks.clear()
    active = triton.runtime.driver.active
    active.get_current_device = lambda: 1
    found["another device, then again"] = bound(make()) * 10 + bound(make())
    active.get_current_device = lambda: 0
    LAUNCHED.clear()
    active.get_current_stream = lambda _device: 77
    make()()
    found["stream"] = LAUNCHED[0][3]
    return found


def _variants(draw: random.Random, arg: Any) -> Any:
    """Another argument of the same kind, as a call might have."""
    if isinstance(arg, TensorDescriptor):
        x = torch.zeros(draw.choice((32, 64)), 128, dtype=draw.choice((torch.bfloat16, torch.float16)))
        box = draw.choice(([16, 64], [16, 128], [32, 128]))
        return launch._descriptor(x, box, launch._plain_layout(draw.choice((64, 128))))
    if isinstance(arg, torch.Tensor):
        dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64))
        return torch.zeros(64, dtype=dtype)[draw.choice((0, 0, 1, 2, 4, 8)) :]
    if isinstance(arg, int):
        return draw.choice((0, 1, 2, 8, 15, 16, 17, 48, -1, -16, (1 << 31) - 1, -(1 << 31), 1 << 31, 1 << 40))
    return draw.choice((0.0, 1.0, -5.0, 16.0))


def same_keys(pairs: int) -> dict[str, dict[str, int]]:
    """Per kernel, over pairs of argument lists: how often both keys are equal or differ, alike and not."""
    found = {}
    for name, make in _calls().items():
        draw = random.Random(name)
        call = make()
        kernel, kinds, _grid, args, keywords = call.args
        _, _, _, _, binder = kernel.device_caches[0]
        count = {
            "both equal": 0,
            "both differ": 0,
            "only Triton's differ": 0,
            "only ours differ": 0,
            "left to Triton": 0,
        }
        for _ in range(pairs):
            lists = [list(args), list(args)]
            for i in draw.sample(range(len(args)), draw.choice((1, 1, 2, 3))):
                for one in lists:
                    one[i] = _variants(draw, args[i])
            ours = [launch.sketch(tuple(one), kinds) for one in lists]
            if None in ours:
                count["left to Triton"] += 1
                continue
            triton_keys = []
            for one in lists:
                _, specialization, options = binder(*one, **keywords)
                triton_keys.append(compute_cache_key({}, specialization, options))
            equal = (triton_keys[0] == triton_keys[1], ours[0][0] == ours[1][0])
            count[
                {
                    (True, True): "both equal", (False, False): "both differ", (False, True): "only Triton's differ",
                    (True, False): "only ours differ",
                }[equal]
            ] += 1  # fmt: skip
        found[name] = count
    return found


def same_constexprs() -> dict[str, int]:
    """Calls with another constexpr each: how many kernels are known then, of how many different ones."""
    launch._known.clear()
    make = _calls()["k1 triton"]
    kernel, kinds, grid, args, keywords = make().args
    wanted = list(itertools.product((True, False), (1, 2)))
    for head_fast, warps in wanted * 2:
        launch._launch(kernel, kinds, grid, args, {**keywords, "HEAD_FAST": head_fast, "num_warps": warps})
    known = {id(entry.compiled) for entry in launch._known.values() if kernel.__name__ in entry.compiled.name}
    return {"known": len(known), "different": len(wanted)}


if __name__ == "__main__":
    _watched()
    document = {
        "arguments": same_arguments(),
        "asks": asks_triton(),
        "keys": same_keys(400),
        "constexprs": same_constexprs(),
    }
    sys.stdout.write(json.dumps(document) + "\n")
