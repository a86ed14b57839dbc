"""The real device module of a card, with configs that do what kills tuners. The child process imports it by name.

KDATUNE_LETHAL names a JSON file that maps the digest of a config to one of
    store       a store far outside every buffer
    endless     a kernel that never ends
    abort       os.abort() in the compiler
    shared      a kernel that asks for more shared memory than there is
    wrong       the fastest of all, and its output is zeros
Everything else is measured as kdatune_kernels.bench does it.
"""

import json
import os
from pathlib import Path

import torch
import triton
import triton.language as tl

from kdatune_kernels import bench
from kdatune_kernels import launch
from kdatune_kernels.bench import open_problem  # noqa: F401 - what worker_main asks a device module for
from kdatune_kernels.bench import small_problem  # noqa: F401
from kdatune_kernels.bench import time_interleaved_us  # noqa: F401
from kdatune_kernels.bench import warm_up  # noqa: F401
from kdatune_kernels.spec import digest

FATES = json.loads(Path(os.environ["KDATUNE_LETHAL"]).read_text())


@triton.jit
def store_far_away(x, distance):
    tl.store(x + distance, 1.0)


@triton.jit
def never_end(x):
    while tl.load(x, volatile=True) == 0:
        pass


@triton.jit
def too_much_shared(a, b, c, n: tl.constexpr, depth: tl.constexpr):
    rows = tl.arange(0, n)
    total = tl.zeros((n, n), tl.float32)
    for step in tl.range(0, 4096, n, num_stages=depth):
        left = tl.load(a + rows[:, None] * 4096 + step + rows[None, :])
        right = tl.load(b + (step + rows[:, None]) * n + rows[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * n + rows[None, :], total)


def strike(fate, device):
    """Do the deed; what comes of it is typed as for every config."""
    with bench.typed():
        match fate:
            case "abort":
                os.write(2, b"LLVM ERROR: cannot select\n")
                os.abort()
            case "store":
                store_far_away[(1,)](torch.zeros(1, device=device), 1 << 40)
            case "endless":
                never_end[(1,)](torch.zeros(1, device=device, dtype=torch.int32))
            case "shared":
                a, b = (torch.zeros(128 * 4096, device=device, dtype=torch.float16) for _ in range(2))
                too_much_shared[(1,)](a, b, torch.zeros(128 * 128, device=device), 128, 8)
        torch.cuda.synchronize()


def zeros_for_k2(problem, workspace, o, ht, config):
    o.zero_()
    if ht is not None:
        ht.zero_()


def check(problem, kernel, config):
    fate = FATES.get(digest(config))
    if fate == "wrong":
        right = launch.run_k2
        launch.run_k2 = zeros_for_k2
        try:
            return bench.check(problem, kernel, config)
        finally:
            launch.run_k2 = right
    if fate is not None:
        strike(fate, problem.device)
    return bench.check(problem, kernel, config)


def time_us(problem, config, samples=5):
    if FATES.get(digest(config)) == "wrong":
        return [0.001] * samples  # it would win by far
    return bench.time_us(problem, config, samples)
