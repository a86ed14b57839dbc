"""The process that a profiler watches, run by the interpreter: no card, no NVTX."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import to_json


def run(tmp_path: Path, stages: list[dict], **changes: object) -> dict:
    answer = tmp_path / "answer.json"
    request = {
        "shape": "N=2,H=1,T=40,varlen=true,longest_tokens=27",
        "stages": stages,
        "precision": "fp16",
        "launches": 1,
        "device": "cpu",
        "answer": str(answer),
    } | changes
    (tmp_path / "request.json").write_text(json.dumps(request))
    subprocess.run(
        [sys.executable, "-m", "kdatune_kernels.profile_target", str(tmp_path / "request.json")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        timeout=120,
    )
    return json.loads(answer.read_text())


def test_each_stage_is_launched_and_answered_for(tmp_path: Path) -> None:
    stages = [
        {"stage": "k1", "label": "one", "config": to_json(K1Config(num_warps=1))},
        {"stage": "k2", "label": "two", "config": to_json(K2Config())},
        {"stage": "k2", "label": "slices", "config": to_json(K2Config(block_v=32))},
    ]
    ok = {"outcome": "ok", "detail": None}
    assert run(tmp_path, stages, launches=2) == {"outcomes": {"k1/one": ok, "k2/two": ok, "k2/slices": ok}}
    assert run(tmp_path, stages[:1], precision="bf16") == {"outcomes": {"k1/one": ok}}


def test_without_a_card_it_says_so(tmp_path: Path) -> None:
    refused = run(tmp_path, [], device="cuda")["refused"]
    assert "no CUDA device is visible" in refused


def test_a_malformed_config_is_refused(tmp_path: Path) -> None:
    stages = [{"stage": "k1", "label": "x", "config": {"num_warps": 2}}]
    assert "K1Config lacks field(s)" in run(tmp_path, stages)["refused"]
