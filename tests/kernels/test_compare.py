"""The side-by-side comparison: rows, errors, summaries. In the interpreter, with made-up times in place of CUDA graphs."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kdatune_kernels import compare
from kdatune_kernels import reference
from kdatune_kernels import samples
from kdatune_kernels import shape_sets
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import shape_of

SHAPE = shape_of(2, 1, 36, 2)


def stopwatch(calls, rounds):
    """Made-up times, after one real call of each."""
    for call in calls.values():
        call()
    return {name: [100.0 + 10 * i + r for r in range(rounds)] for i, name in enumerate(calls)}


@pytest.fixture
def flash_kda(monkeypatch):
    """A peer under the name and with the signature of FlashKDA: the recurrence in torch, outputs 1 % too large."""
    peer = types.ModuleType("flash_kda")

    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, *, initial_state, final_state, cu_seqlens):
        lengths = None if cu_seqlens is None else cu_seqlens.diff().tolist()
        o, S = reference.recurrence(
            q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, initial_state, lengths, state_v_first=True
        )
        out.copy_(o * 1.01)
        final_state.copy_(S)

    peer.fwd = fwd
    monkeypatch.setitem(sys.modules, "flash_kda", peer)


def compared(shape, peers, device):
    return compare.compare(shape, peers, rounds=5, card=None, device=device, stopwatch=stopwatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
@pytest.mark.parametrize("shape", [SHAPE, shape_of(2, 1, 37, varlen=True, longest_tokens=20)], ids=lambda s: s.key())
def test_a_row(shape, flash_kda, device):
    row = compared(shape, ["flash_kda", "fla"], device)
    assert row["shape"] == shape.key()
    assert (row["ours_us"], row["default_us"], row["fast_us"]) == (102.0, 112.0, 122.0)
    assert (row["flash_kda_us"], row["fla_us"]) == (132.0, None)
    assert (row["ours_p20_us"], row["ours_p80_us"]) == (101.0, 103.0)
    assert row["speedup_vs_flash_kda"] == round(132 / 102, 4)
    assert row["fast_speedup_vs_flash_kda"] == round(132 / 122, 4)
    assert row["speedup_vs_default"] == round(112 / 102, 4)
    assert "speedup_vs_fla" not in row
    assert row["unavailable"].keys() == {"fla"}
    assert row["unavailable"]["fla"].startswith("not installed")
    assert row["ours_o_error_ratio"] < 0.8 * row["fast_o_error_ratio"]
    for name in ("ours", "default", "fast"):
        assert 0 < row[f"{name}_o_error_ratio"] < 0.005
        assert 0 < row[f"{name}_state_error_ratio"] < 0.005
        assert 0 < row[f"{name}_worst_window"] < 0.02
    assert row["flash_kda_o_error_ratio"] == pytest.approx(0.01, rel=0.1)
    assert row["flash_kda_state_error_ratio"] < 1e-6
    assert row["fla_o_error_ratio"] is None
    assert row["error_heads"] == shape.HV
    assert row["match"] == "default"


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_a_peer_that_fails_is_left_out_with_its_reason(monkeypatch, device):
    peer = types.ModuleType("flash_kda")

    def fwd(*_, **__):
        raise RuntimeError("only sm_90")

    peer.fwd = fwd
    monkeypatch.setitem(sys.modules, "flash_kda", peer)
    row = compared(SHAPE, ["flash_kda"], device)
    assert row["unavailable"] == {"flash_kda": "RuntimeError: only sm_90"}
    assert row["flash_kda_us"] is None
    assert row["ours_us"] == 102.0


def test_a_fault_in_some_heads_only_is_seen_by_heads():
    """Errors over the first heads are errors of these heads, groups kept together."""
    sample = samples.make((20, 13), 2, 4, size=16, state_v_first=True)
    o, S = reference.recurrence(**sample.tensors(), lengths=[20, 13], state_v_first=True)
    some_o, some_S = compare.expected(sample, 2)
    assert torch.equal(some_o, o[:, :, :2])
    assert torch.equal(some_S, S[:, :2])
    wrong = o.clone()
    wrong[:, :, 1] *= 1.5
    assert compare.errors("x", wrong, S, (some_o, some_S))["x_o_error_ratio"] > 0.2
    wrong = o.clone()
    wrong[:, :, 3] *= 1.5
    assert compare.errors("x", wrong, S, (some_o, some_S))["x_o_error_ratio"] == 0.0


@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        (shape_of(1, 96, 8192), 96),
        (shape_of(64, 96, 65536), 12),
        (shape_of(1, 4, 32768), 4),
        (shape_of(1, 8, 65536, 16), 12),
        (shape_of(1, 8, 65536, 128), None),
        (shape_of(1, 1, 131072), None),
        (shape_of(1, 2, 1 << 20), None),
    ],
    ids=lambda x: x.key() if hasattr(x, "key") else str(x),
)
def test_how_many_heads_are_compared_with_fp64(shape, heads):
    assert compare.error_heads(shape) == heads


def test_summary():
    rows = [
        {"speedup_vs_fla": 2.0, "fast_speedup_vs_fla": 3.0},
        {"speedup_vs_fla": 8.0, "fast_speedup_vs_fla": 12.0},
        {},
    ]
    assert compare.summary(rows, ["flash_kda", "fla"]) == {
        "geomean_vs_fla": 4.0, "least_vs_fla": 2.0, "fast_geomean_vs_fla": 6.0, "fast_least_vs_fla": 3.0,
    }  # fmt: skip


def test_shape_sets():
    sets = {name: [parse_shape(text) for text in texts] for name, texts in shape_sets.SHAPE_SETS.items()}
    assert {name: len(shapes) for name, shapes in sets.items()} == {"headline": 12, "small": 3, "batch": 3, "long": 3}
    assert {shape.H for shape in sets["headline"]} == {64, 96}
    packed = [shape for shape in sets["headline"] if shape.varlen]
    assert [samples.lengths_of(shape) for shape in packed] == [shape_sets.SKEWED_LENGTHS] * 2
    assert [shape.T // shape.N for shape in sets["batch"]] == [1024, 1024, 256]
    assert [s.key() for s in shape_sets.shapes_of(None, ["N=1,H=2,T=16"])] == ["N=1,H=2,T=16"]
    assert len(list(shape_sets.shapes_of("small", ["N=1,H=2,T=16"]))) == 4
    with pytest.raises(UsageError, match="unknown shape set 'all'; there are headline, small, batch, long"):
        list(shape_sets.shapes_of("all", []))
    with pytest.raises(ShapeError):
        list(shape_sets.shapes_of(None, ["N=x"]))


def test_peers():
    assert shape_sets.peers_of(" fla,flash_kda,fla,") == ["fla", "flash_kda"]
    assert shape_sets.peers_of("") == []
    assert set(compare.PEERS) == set(shape_sets.PEER_NAMES)
    with pytest.raises(UsageError, match="unknown peer 'torch'; there are flash_kda, fla"):
        shape_sets.peers_of("torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card it measures")
def test_the_module_says_that_it_needs_a_card(capsys):
    assert compare.main(["--set", "small"]) == 1
    assert "no CUDA device is visible" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        compare.main(["--set", "nope"])
    assert wrong.value.code == 2
    assert "unknown shape set 'nope'" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_card():
    document = compare.run([shape_of(1, 4, 512)], ["flash_kda"])
    row = document["rows"][0]
    assert row["ours_us"] > 0
    assert row["default_us"] > 0
    assert row["ours_o_error_ratio"] < 0.003


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_the_table_of_errors_by_kind():
    script = Path(__file__).parents[2] / "benchmarks" / "errors_by_kind.py"
    command = [sys.executable, str(script), "--tokens", "16", "--heads", "1", "--key-size", "64"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=True)
    head, _, *rows = done.stdout.splitlines()
    assert head == "| input | T | chunk_kda | chunk_kda, fast | chunk_kda, bf16 tiles | recurrent_kda |"
    assert [row.split(" | ")[0] for row in rows] == [f"| {kind}" for kind in samples.KINDS]
    for row in rows:
        chunked, *_, stepped = (cell.strip(" |").split(" / ") for cell in row.split(" | ")[2:])
        assert 0 < float(stepped[0]) < float(chunked[0]) < 3
