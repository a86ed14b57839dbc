"""The example compiles for cards that are not here: it is a kernel, not only something that the interpreter runs."""

import json
import os
import subprocess
import sys

from kdatune_kernels.tunable import Installed

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kdatune_kernels.spec import KNOWN_GPUS
from rmsnorm_kernel.kernel import rmsnorm_kernel
from rmsnorm_kernel.tuning import RMSNORM

names = {"x": "*bf16", "weight": "*bf16", "y": "*bf16", "rows": "i32", "columns": "i32", "eps": "fp32"}
for gpu in (KNOWN_GPUS["NVIDIA A100-SXM4-80GB"], KNOWN_GPUS["NVIDIA H200"]):
    shape = {"rows": 4096, "columns": 8192, "dtype": "bf16"}
    legal = [c for c in RMSNORM.configs(shape, gpu) if RMSNORM.config_ok(c, shape, gpu) is None]
    for config in (RMSNORM.default(shape, gpu), legal[0], legal[-1]):
        source = ASTSource(
            rmsnorm_kernel,
            {**names, "ROWS": "constexpr", "BLOCK": "constexpr"},
            constexprs={"ROWS": config["rows_per_program"], "BLOCK": config["block_columns"]},
        )
        capability = int(gpu.compute_capability.replace(".", ""))
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": config["num_warps"]})
        kept = made.metadata.num_warps == config["num_warps"]
        print(json.dumps([len(legal), kept, made.metadata.shared, len(made.asm["cubin"])]))
"""


def test_the_example_compiles_for_ampere_and_hopper(rmsnorm: Installed) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6
    for space, warps_kept, shared_bytes, cubin_bytes in rows:
        assert space == 114  # of the 150 combinations
        assert warps_kept
        assert shared_bytes <= 4096  # only what a sum over warps needs
        assert cubin_bytes > 1000
