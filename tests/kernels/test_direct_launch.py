"""A launch past Triton's binder (benchmarks/candidates/direct-launch.patch) launches what Triton would."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import kdatune_kernels

TREE = Path(kdatune_kernels.__file__).parents[2]
PATCH = TREE / "benchmarks" / "candidates" / "direct-launch.patch"

pytestmark = pytest.mark.skipif(not version("triton").startswith("3.6."), reason="the patch follows Triton 3.6 only")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """What direct_launch.py saw of the patched package, whose kernels were compiled and launched into nothing."""
    folder = tmp_path_factory.mktemp("direct")
    made = subprocess.run(
        [sys.executable, PATCH.with_name("judge.py"), PATCH, "--write", folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    package = Path(made.stdout.strip()).name
    benchmark = folder / "call_cost.py"
    source = (TREE / "benchmarks" / "call_cost.py").read_text(encoding="utf-8")
    benchmark.write_text(source.replace("kdatune_kernels", package), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("direct_launch.py"), benchmark],
        env={**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_the_launcher_gets_what_it_gets_from_triton(found):
    assert len(found["arguments"]) == 8
    for name, launch in found["arguments"].items():
        assert launch == {"bound": 1, "same": True, "hooks": [None, None, None], "returned": True}, name


def test_the_key_tells_apart_what_triton_tells_apart_and_no_more(found):
    for name, pairs in found["keys"].items():
        assert pairs["only Triton's differ"] == pairs["only ours differ"] == 0, name
        assert min(pairs["both equal"], pairs["both differ"]) > 30, name  # so that either is tried


def test_every_constexpr_and_option_has_its_own_kernel(found):
    assert found["constexprs"]["known"] == found["constexprs"]["different"] == 4


def test_hooks_and_another_device_are_left_to_triton_and_the_stream_is_that_of_the_call(found):
    assert found["asks"] == {
        "none": 0, "enter hook": 1, "exit hook": 1, "pre-run hook": 1, "another device, then again": 10, "stream": 77,
    }  # fmt: skip
