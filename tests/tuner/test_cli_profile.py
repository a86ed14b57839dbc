"""`kdatune profile` and `kdatune explain`, as a user calls them, over the reports of a real card."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from kdatune_kernels.errors import UsageError
from kdatune_kernels.space import FUSED
from kdatune_kernels.space import default_config
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner import cli_profile
from kdatune_tuner.ncu.metrics import stored_form
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewMeasurement
from kdatune_tuner.store.records import NewProfile

H200 = KNOWN_GPUS["NVIDIA H200"]
SHAPE = shape_of(1, 68, 8192)  # two kernels, of 128 columns
BUILD = Build("k" * 16, "s" * 16, "1", "3.6.0", "12.9", "2.13.0", "13.0", "580.1")
CONFIGS = {
    "default": default_config(SHAPE, H200),
    "eight": LaunchConfig(K1Config(num_warps=8), default_config(SHAPE, H200).k2),
}
COUNTERS = {
    "issued_inst": 100e6,
    "latency_per_issue": 6.0,
    "active_warps": 3.0,
    "sm_active_pct": 99.0,
    "replay_cycles": 500e3,
    "issue_active_pct": 50.0,
    "barrier_stall_per_issue": 0.5,
}
EIGHT = COUNTERS | {
    "latency_per_issue": 24.0,
    "replay_cycles": 2000e3,
    "issue_active_pct": 12.5,
    "barrier_stall_per_issue": 18.0,
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'kdatune.db'}"
    upgrade(url)
    return url


@pytest.fixture
def engine(url: str):
    engine = open_engine(url)
    yield engine
    engine.dispose()


def kdatune(url: str, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", "kdatune_tuner.cli", *arguments],
        env=os.environ | {"KDATUNE_DATABASE_URL": url, "PYTHONWARNINGS": "error"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def store(engine: Engine, gpu=H200) -> None:
    """Two measured configs; the default's K1 and the eight-warp K1 have counters, K2 has none."""
    with writing(engine) as s:
        ids = {
            "gpu_id": writes.put_gpu(s, gpu),
            "problem_id": writes.put_problem(s, "kda", SHAPE),
            "build_id": writes.put_build(s, BUILD),
        }
        for (name, config), counters in zip(CONFIGS.items(), (COUNTERS, EIGHT), strict=True):
            new = NewMeasurement(
                run_id=None,
                kernel="kda",
                config_json=canonical(config),
                config_hash=digest(config),
                outcome="ok",
                median_us=600.0 if name == "default" else 1900.0,
                **ids,
            )
            measurement_id = writes.add_measurement(s, new)
            writes.add_profile(
                s,
                NewProfile(
                    measurement_id=measurement_id,
                    stage="k1",
                    counters=stored_form(counters),
                    issue_active_pct=counters["issue_active_pct"],
                    barrier_stall_per_issue=counters["barrier_stall_per_issue"],
                ),
            )
            reason = "no_permission: ERR_NVGPUCTRPERM. Run as root."
            writes.add_profile(s, NewProfile(measurement_id=measurement_id, stage="k2", unavailable_reason=reason))


def test_explain_tells_the_cause_in_one_line_and_what_has_no_counters(url: str, engine: Engine) -> None:
    store(engine)
    done = kdatune(url, "explain", "--shape", SHAPE.key())
    lines = done.stdout.splitlines()
    assert lines[0].startswith("default: 600.0 us measured; K1 tma 1 warp(s), K2 ws 128 columns")
    assert lines[1] == "  K2 has no counters: no_permission: ERR_NVGPUCTRPERM. Run as root."
    headline = next(line for line in lines if line.startswith("K1: default takes 4.00x fewer cycles than config "))
    assert headline.endswith("issue active 12 % -> 50 %, barrier stall 18.00 -> 0.50 per issue")
    because = next(
        line for line in lines if line.startswith("  because a warp waits 6.0 cycles for its next instruction")
    )
    assert because.endswith("instead of 24.0 (18.00 -> 0.50 for the other warps of the CTA at a barrier)")
    assert " 0 " not in done.stdout


def test_explain_as_json_is_one_document(url: str, engine: Engine) -> None:
    store(engine)
    document = json.loads(kdatune(url, "explain", "--shape", SHAPE.key(), "--json").stdout)
    assert (document["shape"], document["gpu"]) == (SHAPE.key(), "NVIDIA H200")
    assert [one["label"] for one in document["configs"]] == ["default", f"config {digest(CONFIGS['eight'])[:8]}"]
    assert document["configs"][0]["unavailable"] == {"k2": "no_permission: ERR_NVGPUCTRPERM. Run as root."}
    assert [s["rule"] for s in document["explanation"]["k1"]][-2:] == ["headline", "cause_stalls"]
    assert document["explanation"]["k2"] == []


def test_explain_asks_which_card_where_several_were_profiled(url: str, engine: Engine) -> None:
    done = kdatune(url, "explain", "--shape", SHAPE.key(), code=1)
    assert "has no stored profile; take one with kdatune profile --shape N=1,H=68,T=8192" in done.stderr
    store(engine)
    done = kdatune(url, "explain", "--shape", SHAPE.key(), "--gpu", "NVIDIA H20", code=1)
    assert "has no stored profile on NVIDIA H20; take one with kdatune profile" in done.stderr
    store(engine, KNOWN_GPUS["NVIDIA H100 80GB HBM3"])
    done = kdatune(url, "explain", "--shape", SHAPE.key(), code=2)
    assert "is profiled on NVIDIA H100 80GB HBM3, NVIDIA H200; say which with --gpu" in done.stderr
    done = kdatune(url, "explain", "--shape", SHAPE.key(), "--gpu", "NVIDIA H200", "--json")
    assert json.loads(done.stdout)["gpu"] == "NVIDIA H200"


def test_profile_needs_a_card(url: str) -> None:
    done = kdatune(url, "profile", "--shape", SHAPE.key(), code=1, CUDA_VISIBLE_DEVICES="")
    assert "no CUDA device is visible" in done.stderr
    assert done.stdout == ""


def test_profile_of_no_tokens_is_refused(url: str) -> None:
    assert "has no tokens" in kdatune(url, "profile", "--shape", "N=1,H=4,T=0", code=2).stderr


def test_a_config_given_as_json() -> None:
    default = default_config(SHAPE, H200)
    read = cli_profile.read_also('{"k1": {"num_warps": 8}}', SHAPE, H200)
    assert read == LaunchConfig(K1Config(num_warps=8), default.k2)
    read = cli_profile.read_also('{"k2": {"block_v": 32}, "precision": "bf16"}', SHAPE, H200)
    assert read == LaunchConfig(default.k1, K2Config(block_v=32), "bf16")


def test_a_stage_as_json_goes_with_the_default_of_two_kernels_and_a_fused_one_with_no_k1() -> None:
    full = shape_of(1, 128, 8192)
    assert default_config(full, H200) == FUSED
    split = split_default(full, H200)
    assert cli_profile.read_also('{"k2": {"block_v": 32}}', full, H200) == LaunchConfig(split.k1, K2Config(block_v=32))
    assert cli_profile.read_also('{"k1": {"num_warps": 8}}', full, H200) == LaunchConfig(
        K1Config(num_warps=8), split.k2
    )
    assert cli_profile.read_also('{"k2": {"variant": "fused"}}', SHAPE, H200) == FUSED
    assert cli_profile.read_also('{"precision": "fast"}', full, H200) == replace(FUSED, precision="fast")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "--also is not JSON"),
        ("[]", "--also: LaunchConfig must be a JSON object, not list"),
        ('{"k3": {}}', r"--also: LaunchConfig has unknown field\(s\): k3"),
        ('{"k1": {"warps": 8}}', r"--also: K1Config has unknown field\(s\): warps"),
        ('{"k1": {"num_warps": "8"}}', "--also: K1Config.num_warps cannot be '8'"),
    ],
)
def test_a_config_that_cannot_be_read(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        cli_profile.read_also(text, SHAPE, H200)
