"""Offline compile: what is served compiles for its cards, with no spills and no serialised wgmma."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdatune_kernels import space
from kdatune_kernels.resolve import BUNDLED
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json

H200 = KNOWN_GPUS["NVIDIA H200"]
A100 = KNOWN_GPUS["NVIDIA A100-SXM4-80GB"]
B200 = KNOWN_GPUS["NVIDIA B200"]


def _compile(requests: list[dict]) -> list[dict]:
    """In a process of its own: this one may have imported the kernels for the interpreter."""
    program = Path(__file__).with_name("offline_compile.py")
    run = subprocess.run(
        [sys.executable, str(program)],
        input="\n".join(map(json.dumps, requests)),
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def _served() -> list[tuple[str, dict]]:
    """Every K1 and K2 config that is served on an H200: the bundled champions and the analytic defaults."""
    shapes = [shape_of(1, 96, 8192), shape_of(1, 8, 64), shape_of(8, 64, 8192)]
    launches = [c.config for c in parse_snapshot(BUNDLED.read_bytes()).champions]
    launches += [space.default_config(shape, H200) for shape in shapes]
    kinds = [("k1", x.k1) for x in launches] + [("k2", x.k2) for x in launches]
    return [(kernel, to_json(config)) for kernel, config in dict.fromkeys(kinds)]


def test_served_configs_have_no_spills_and_no_serialised_wgmma():
    served = _served()
    resources = _compile([{"kernel": k, "config": c, "cc": "9.0", "half": True} for k, c in served])
    assert len(resources) == len(served) >= 4
    for (kernel, config), found in zip(served, resources, strict=True):
        assert found["spill_bytes"] == 0, (kernel, config)
        assert not any("serialized" in line for line in found["wgmma_warnings"]), (kernel, config, found)
        assert 0 < found["registers"] <= 255
        if kernel == "k2":
            bound = space.k2_smem_bytes(_k2(config), shape_of(1, 1, 16))
            assert found["smem_bytes"] <= bound, "config_ok must never let through what the card refuses"


def _k2(config: dict):
    from kdatune_kernels.spec import K2Config

    return K2Config(**config)


@pytest.mark.parametrize("gpu", [A100, B200], ids=lambda g: g.compute_capability)
def test_defaults_compile_for_other_cards(gpu):
    default = space.default_config(shape_of(1, 96, 8192), gpu)
    assert (default.k1.variant, default.k2.variant) == ("triton", "triton")
    requests = [
        {"kernel": kernel, "config": to_json(config), "cc": gpu.compute_capability, "half": half}
        for kernel, config in (("k1", default.k1), ("k2", default.k2))
        for half in (True, False)
    ]
    for found in _compile(requests):
        assert found["smem_bytes"] <= gpu.smem_per_block_bytes
        assert found["registers"] <= 255


def test_a_config_that_does_not_compile_is_typed():
    program = (
        "from kdatune_kernels.compile import compile_config; from kdatune_kernels.spec import K2Config\n"
        "from kdatune_kernels.errors import MeasurementError\n"
        "try: compile_config(K2Config(block_v=48))\n"
        "except MeasurementError as error: print(error.outcome)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "compile_error"
