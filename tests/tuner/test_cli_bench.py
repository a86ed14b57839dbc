"""`kdatune bench` without a card: what it refuses, and what its table and document say."""

import shutil
import subprocess
import sys

import pytest

from kdatune_tuner import cli_bench

ROW = {
    "shape": "N=1,H=96,T=8192",
    "unavailable": {"fla": "not installed: No module named 'fla'"},
    "ours_us": 622.04, "default_us": 622.7, "fast_us": 601.0, "flash_kda_us": 1403.0, "fla_us": None,
    "ours_o_error_ratio": 0.0029, "ours_state_error_ratio": 0.0004,
    "default_o_error_ratio": 0.0029, "default_state_error_ratio": 0.0004,
    "fast_o_error_ratio": 0.0031, "fast_state_error_ratio": 0.0005,
    "flash_kda_o_error_ratio": 0.0057, "flash_kda_state_error_ratio": 0.0048,
    "fla_o_error_ratio": None, "fla_state_error_ratio": None,
    "speedup_vs_flash_kda": 2.2555, "fast_speedup_vs_flash_kda": 2.3344, "speedup_vs_default": 1.0011,
}  # fmt: skip
NO_CARD = shutil.which("nvidia-smi") is None


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kdatune_tuner.cli", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(not NO_CARD, reason="a card may be there")
@pytest.mark.parametrize("options", [(), ("--json",), ("--set", "small", "--shape", "N=1,H=2,T=16")])
def test_without_a_card_it_says_so(options: tuple[str, ...]) -> None:
    done = bench(*options)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("kdatune: kdatune bench times on a card: ")
    assert "no CUDA device is visible" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "all"), "unknown shape set 'all'; there are headline, small, batch, long"),
        (("--shape", "N=1,H=x"), "H"),
        (("--peers", "triton"), "unknown peer 'triton'; there are flash_kda, fla"),
        (("--shape", "N=1,H=2,T=0"), "N=1,H=2,T=0 has no tokens: there is nothing to time"),
        (("--shape", "N=3,H=2,T=10"), "T=10 is not 3 equal sequences; add varlen=true"),
    ],
)
def test_wrong_usage_is_named_before_a_card_is_asked_for(options: tuple[str, ...], said: str) -> None:
    done = bench(*options)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    document = {
        "rows": [ROW], "geomean_vs_flash_kda": 2.2555, "least_vs_flash_kda": 2.2555,
        "fast_geomean_vs_flash_kda": 2.3344, "fast_least_vs_flash_kda": 2.3344,
    }  # fmt: skip
    cli_bench._print(document, ["flash_kda", "fla"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "shape"
    cells = lines[1].split("  ")
    shown = [cell.strip() for cell in cells if cell.strip()]
    assert shown == [
        "N=1,H=96,T=8192", "622.0", "622.7", "601.0", "1403.0", "-", "2.26x", "-", "2.90 / 0.40", "2.90 / 0.40", "3.10 / 0.50",
        "5.70 / 4.80", "-",
    ]  # fmt: skip
    assert "over FlashKDA: geomean 2.26x, least 2.26x" in lines
    assert "fla is left out: not installed: No module named 'fla'" in lines


def test_a_peer_that_failed_on_a_shape_is_named_with_the_shape() -> None:
    failed = ROW | {"unavailable": {"flash_kda": "RuntimeError: only sm_90"}}
    assert cli_bench._reasons([failed, ROW]) == {
        "flash_kda": "N=1,H=96,T=8192: RuntimeError: only sm_90",
        "fla": "not installed: No module named 'fla'",
    }
