"""Offline compile: what is served compiles for its cards, with no spills and no serialised wgmma."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from kdatune_kernels import space
from kdatune_kernels.resolve import BUNDLED
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import Precision
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json

H200 = KNOWN_GPUS["NVIDIA H200"]
A100 = KNOWN_GPUS["NVIDIA A100-SXM4-80GB"]
L40S = KNOWN_GPUS["NVIDIA L40S"]
B200 = KNOWN_GPUS["NVIDIA B200"]
PRECISIONS = get_args(Precision)


def _compile(requests: list[dict], python: str = sys.executable, timeout_seconds: float = 250) -> list[dict]:
    """In a process of its own: this one may have imported the kernels for the interpreter."""
    program = Path(__file__).with_name("offline_compile.py")
    run = subprocess.run(
        [python, str(program)],
        input="\n".join(map(json.dumps, requests)),
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_seconds,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def _served() -> list[tuple[str, dict]]:
    """Every K1 and K2 config of two stages that is served on an H200: the bundled champions and the analytic defaults."""
    shapes = [shape_of(1, 96, 8192), shape_of(1, 8, 64), shape_of(8, 64, 8192)]
    launches = [c.config for c in parse_snapshot(BUNDLED.read_bytes()).champions]
    launches += [space.split_default(shape, H200) for shape in shapes]
    launches = [x for x in launches if not x.k2.whole]  # what has no stages has tests of its own
    kinds = [("k1", x.k1) for x in launches] + [("k2", x.k2) for x in launches]
    return [(kernel, to_json(config)) for kernel, config in dict.fromkeys(kinds)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_served_configs_have_no_spills_and_no_serialised_wgmma(precision):
    served = _served()
    resources = _compile([{"kernel": k, "config": c, "cc": "9.0", "precision": precision} for k, c in served])
    assert len(resources) == len(served) >= 4
    for (kernel, config), found in zip(served, resources, strict=True):
        assert found["spill_bytes"] == 0, (kernel, config)
        assert not any("serialized" in line for line in found["wgmma_warnings"]), (kernel, config, found)
        assert 0 < found["registers"] <= 255
        if kernel == "k2":
            bound = space.k2_smem_bytes(_k2(config), shape_of(1, 1, 16))
            assert found["smem_bytes"] <= bound, "config_ok must never let through what the card refuses"


def _k2(config: dict):
    return K2Config(**config)


STATES = (
    {"state_v_first": True},
    {},
    {"initial_state": False},
    {"final_state": False},
    {"state_v_first": True, "state_bf16": True},
    {"initial_state": False, "final_state": False},
)
"""With states of either layout, without either or both, and with an initial one in bf16, v first."""


def _fused_requests() -> list[dict]:
    """The fused kernel with all kinds of states, and in every precision with those of either layout."""
    return [
        {"kernel": "k2", "config": to_json(space.FUSED.k2), "cc": "9.0", "precision": precision, "options": options}
        for precision in PRECISIONS
        for options in (STATES if precision == "fp16" else STATES[:2])
    ]


def _stated_spill_bytes(request: dict) -> int:
    """None where states are fp32 and value first, or there is none to read. Of others the MMA partition spills what is the same
    for all threads, once a chain; in "bf16" the partitions that prepare spill 3 and 20, or 6 and 32, of 2,350 instructions."""
    options = request["options"]
    if request["precision"] == "bf16":
        return 108
    plain = options.get("state_v_first") and not options.get("state_bf16")
    return 0 if plain or not options.get("initial_state", True) else 16


def test_the_fused_kernel_has_no_wgmma_warning_and_spills_what_is_stated():
    requests = _fused_requests()
    resources = _compile(requests)
    assert len(resources) == len(requests) == 10
    for request, found in zip(requests, resources, strict=True):
        assert found["wgmma_warnings"] == [], (request, found)
        assert found["spill_bytes"] <= _stated_spill_bytes(request), (request, found)
        assert found["smem_bytes"] <= space._FUSED_SMEM_BYTES, "config_ok must never let through what the card refuses"
        assert found["registers"] * found["num_warps"] * 32 <= H200.registers_per_sm


PAIRS_REQUESTS = [{"kernel": "pairs k1", "cc": "9.0", "group": group} for group in (1, 2, 4)] + [
    {"kernel": "k2", "config": to_json(space.PAIRS.k2), "cc": "9.0", "precision": "fp16", "options": options}
    for options in STATES
]


def test_both_kernels_of_pairs_have_no_spills_and_no_wgmma_warning():
    resources = _compile(PAIRS_REQUESTS)
    assert len(resources) == len(PAIRS_REQUESTS) == 9
    for request, found in zip(PAIRS_REQUESTS, resources, strict=True):
        assert (found["spill_bytes"], found["wgmma_warnings"]) == (0, []), request
        assert found["registers"] * found["num_warps"] * 32 <= H200.registers_per_sm
    k1s, k2s = resources[:3], resources[3:]
    bound = space.k2_smem_bytes(space.PAIRS_K2, shape_of(1, 1, 32), space.PAIRS.k2.step_tokens)
    assert {one["smem_bytes"] <= bound for one in k2s} == {True}, (
        "config_ok must never let through what the card refuses"
    )
    # seven CTAs, fourteen chunks, an SM: what K1 was measured with
    assert {(one["registers"], one["smem_bytes"]) for one in k1s} == {(144, 31_752)}


def _allowed_spill(request: dict) -> int:
    """By newer releases of Triton."""
    return 28 if request["kernel"] == "k2" and request["config"]["variant"] == "fused" else 0


def _default_requests(gpu, heads: int, precisions: tuple[str, ...] = PRECISIONS, **shape) -> list[dict]:
    default = space.split_default(shape_of(1, heads, 8192, **shape), gpu)
    options = {name: value for name, value in shape.items() if name in ("K", "V", "dtype")}
    return [
        {"kernel": kernel, "config": to_json(config), "cc": gpu.compute_capability, "precision": x, "options": options}
        for kernel, config in (("k1", default.k1), ("k2", default.k2))
        for x in precisions
    ]


@pytest.mark.parametrize("gpu", [A100, L40S, B200], ids=lambda g: g.compute_capability)
def test_defaults_compile_for_other_cards(gpu):
    requests = [request for heads in (8, 96) for request in _default_requests(gpu, heads)]
    assert all(request["config"]["variant"] == "triton" for request in requests)
    _assert_no_spills(requests, gpu)


def _assert_no_spills(requests, gpu):
    for request, found in zip(requests, _compile(requests), strict=True):
        assert found["spill_bytes"] == 0, request
        assert found["smem_bytes"] <= gpu.smem_per_block_bytes
        assert found["registers"] <= 255
        assert not any("serialized" in line for line in found["wgmma_warnings"]), request


OTHER_SHAPES = (
    {"K": 64, "V": 64},
    {"K": 64, "V": 256, "dtype": "fp16"},
    {"V": 64, "dtype": "fp16"},
    {"V": 256},
    {"V": 64},
)


@pytest.mark.parametrize("gpu", [A100, H200, B200], ids=lambda g: g.compute_capability)
def test_the_defaults_of_other_sizes_and_dtypes_compile(gpu):
    """On Hopper K = V = 128 with bf16 runs the Gluon kernels, the rest plain Triton."""
    requests = [request for shape in OTHER_SHAPES for request in _default_requests(gpu, 96, ("fp16",), **shape)]
    _assert_no_spills(requests, gpu)


RECURRENT = [
    {"K": K, "V": 128, "state_v_first": v_first, **more}
    for K in (64, 128, 256)
    for v_first in (False, True)
    for more in (
        {},
        {"pool": True, "dtype": "fp16", "state_dtype": "bf16"},
        {"pool": True, "slots_each_token": True, "softplus": True},
    )
]


@pytest.mark.parametrize("cc", ["8.0", "9.0", "10.0"])
def test_the_decode_step_compiles_without_spills(cc):
    found = _compile([{"kernel": "recurrent", "options": options, "cc": cc} for options in RECURRENT])
    assert len(found) == len(RECURRENT)
    for options, one in zip(RECURRENT, found, strict=True):
        assert one["spill_bytes"] == 0, options


NEWEST = "KDATUNE_TEST_NEWEST_TRITON"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    NEWEST not in os.environ, reason=f"NOT RUN: set {NEWEST}=1 to download the newest Triton and compile with it"
)
def test_the_newest_triton_spills_nothing_and_serialises_no_wgmma(tmp_path, record_property):
    """Everything above, by the newest release on the package index (or the version that the variable names)."""
    wanted = os.environ[NEWEST]
    python = _own_triton(tmp_path, "triton" if wanted in ("1", "newest") else f"triton=={wanted}")
    version = subprocess.run(
        [python, "-c", "import triton; print(triton.__version__)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    served = _served()
    requests = [{"kernel": k, "config": c, "cc": "9.0", "precision": "fp16"} for k, c in served]
    requests += [r for gpu in (A100, L40S, B200) for heads in (8, 96) for r in _default_requests(gpu, heads, ("fp16",))]
    requests += [
        r
        for gpu in (A100, H200, B200)
        for shape in OTHER_SHAPES
        for r in _default_requests(gpu, 96, ("fp16",), **shape)
    ]
    requests += [
        {"kernel": "recurrent", "options": options, "cc": cc} for cc in ("8.0", "9.0", "10.0") for options in RECURRENT
    ]
    ws, plain = to_json(K2Config(variant="ws", segments=4)), to_json(K2Config(segments=4))
    for cc, config in (("9.0", ws), ("8.0", plain), ("9.0", plain), ("10.0", plain)):
        requests += [
            {"kernel": "passes", "config": config, "cc": cc, "precision": precision} for precision in PRECISIONS
        ]
    # not the K1 of pairs, which only 3.6 compiles: by others its calls run as two stages (kda.PAIRS_COMPILE)
    requests += _fused_requests() + PAIRS_REQUESTS[3:]
    found = _compile(requests, python, timeout_seconds=1500)
    asked = [(r["kernel"], r["cc"], r) for r in requests for _ in range(2 if r["kernel"] == "passes" else 1)]
    faults = [
        (version, request, one)
        for (_, _, request), one in zip(asked, found, strict=True)
        if one["spill_bytes"] > _allowed_spill(request) or any("serialized" in line for line in one["wgmma_warnings"])
    ]
    assert not faults
    record_property("triton", version)
    # what -s shows
    print(f"Triton {version}: {len(found)} kernels, no spills that are not stated, no serialised wgmma")  # noqa: T201


def _own_triton(folder: Path, requirement: str) -> str:
    """A Python whose Triton is another one; all else it takes from this environment."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", requirement], check=True)
    where = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    inherited = [entry for entry in sys.path if entry.endswith("site-packages")]
    inherited.append(str(Path(space.__file__).parents[1]))
    Path(where, "inherited.pth").write_text("\n".join(inherited) + "\n")  # after its own packages, so its Triton wins
    return str(python)


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
