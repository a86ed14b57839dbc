"""The judge of candidate kernels: what is a patch, what it compiles to, and that a wrong kernel is found wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kdatune_kernels

TREE = Path(kdatune_kernels.__file__).parents[2]
FOLDER = TREE / "benchmarks" / "candidates"
# One representative kernel for the patches of a stage, by the first word of their names.
KERNEL = {
    "k1": "k1 cp_async",
    "k2": "k2 64",
    "seg": "pass A",
    "fused": "default many chains",
    "pairs": "default one wave",
}
WAITING = sorted(FOLDER.glob("*.patch"))
WRONG = """A wrong kernel, on purpose.
--- a/kernels/kdatune_kernels/recurrence.py
+++ b/kernels/kdatune_kernels/recurrence.py
@@ -59,1 +59,1 @@
-        decay = tl.load(DEC + tile * K + key)
+        decay = 0.5 * tl.load(DEC + tile * K + key)
"""
FENCED = """The fence that a store by TMA needs, where none is needed.
--- a/kernels/kdatune_kernels/recurrence_sm90.py
+++ b/kernels/kdatune_kernels/recurrence_sm90.py
@@ -168,1 +168,1 @@
-    BY_TMA: gl.constexpr = v_s.shape[2] != 64  # as recurrence_ws
+    BY_TMA: gl.constexpr = True
"""


@pytest.fixture(scope="module")
def fenced(tmp_path_factory) -> Path:
    """A candidate for K2 with 64 columns that compiles, and differs from the shipped kernel by one instruction a chunk."""
    patch = tmp_path_factory.mktemp("patches") / "k2-fenced.patch"
    patch.write_text(FENCED)
    return patch


def _run(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / program), *map(str, arguments)],
        env={**os.environ, "TRITON_INTERPRET": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def _judge(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return _run("judge.py", *arguments, **environment)


@pytest.fixture(scope="module")
def compiled(fenced, tmp_path_factory) -> dict[str, list[dict]]:
    """Rows of every candidate's representative kernel and of the shipped K2, compiled in one process."""
    folder = tmp_path_factory.mktemp("candidates")
    patches = [*WAITING, fenced]
    run = _judge(*patches, "--write", folder)
    assert run.returncode == 0, run.stderr
    packages = {patch.stem: Path(line).name for patch, line in zip(patches, run.stdout.splitlines(), strict=True)}
    wanted = [(package, KERNEL[stem.split("-")[0]]) for stem, package in packages.items()]
    wanted.append(("kdatune_kernels", "k2 64"))
    places = os.pathsep.join([str(TREE / "kernels"), str(folder)])
    run = _run("offline.py", *(word for pair in wanted for word in pair), PYTHONPATH=places)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    names = {package: stem for stem, package in packages.items()} | {"kdatune_kernels": "shipped"}
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(names[row["package"]], []).append(row)
    return found


@pytest.mark.parametrize("patch", [*WAITING, Path("k2-fenced.patch")], ids=lambda p: p.stem)
def test_a_candidate_compiles_without_unstated_spills_and_serialised_wgmma(patch, compiled):
    head = patch.read_text() if patch in WAITING else FENCED
    stated = re.search(r"Spilled: (\d+) bytes", head)  # a head that states its spills says where they are
    for row in compiled[patch.stem]:
        assert "error" not in row, row
        assert row["warnings"] == [], row
        assert row["spill_bytes"] <= (int(stated.group(1)) if stated else 0), row
        assert 0 < row["registers"] <= 255


def test_the_counts_of_a_loop_tell_a_candidate_from_the_shipped_kernel(compiled):
    """The shipped K2 stores 64 columns by threads, which takes no fence of the async proxy."""
    shipped, candidate = compiled["shipped"][0]["loops"][0], compiled["k2-fenced"][0]["loops"][0]
    assert candidate["fences"] > shipped["fences"] == 0
    assert (shipped["hgmma"], candidate["hgmma"]) == (12, 12)


def test_a_patch_that_does_not_fit_is_refused(tmp_path):
    patch = tmp_path / "old.patch"
    patch.write_text(WRONG.replace("-        decay = tl", "-        decay = 2 * tl"))
    run = _judge(patch, "--compile-only")
    assert run.returncode == 2
    assert "old.patch does not apply" in run.stderr
    assert "recurrence.py" in run.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("no diff\n", "has no hunk"),
        (WRONG.replace("kernels/kdatune_kernels/recurrence.py", "pyproject.toml"), "changes files of kernels/"),
        (WRONG[: WRONG.index("+        decay")], "ends inside a hunk"),
    ],
)
def test_what_is_no_patch_of_the_kernels_is_refused(text, reason, tmp_path):
    patch = tmp_path / "bad.patch"
    if text is not None:
        patch.write_text(text)
    run = _judge(patch, "--compile-only")
    assert run.returncode == 2
    assert reason in run.stderr


def test_compile_only_compares_with_the_shipped_kernels(fenced, tmp_path):
    out = tmp_path / "compiled.json"
    run = _judge(fenced, "--compile-only", "--kernels", "k2 64", "--out", out)
    assert run.returncode == 0, run.stdout + run.stderr
    shipped, candidate = json.loads(out.read_text())["compiled"].values()
    assert candidate[0]["loops"][0]["fences"] > shipped[0]["loops"][0]["fences"]
    assert "kdatune_candidate_k2_fenced" in run.stdout


def test_the_fused_kernel_may_spill_what_the_shipped_one_does(fenced, tmp_path):
    out = tmp_path / "compiled.json"
    run = _judge(fenced, "--compile-only", "--kernels", "default many chains", "--out", out)
    assert run.returncode == 0, run.stdout + run.stderr
    shipped, candidate = json.loads(out.read_text())["compiled"].values()
    assert shipped == candidate
    assert len(shipped) == 1, "one kernel, K1 in it"
    assert shipped[0]["spill_bytes"] > 0
    *prepare, mma = shipped[0]["loops"]
    assert len(prepare) == 2, "two partitions prepare"
    assert ([loop["hgmma"] for loop in prepare], mma["hmma"]) == ([0, 0], 0)
    assert [loop["spilled"] for loop in (*prepare, mma)] == [0, 0, 0], "what is spilled is outside the inner loops"


def test_without_a_card_the_judge_says_so(fenced):
    run = _judge(fenced, CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 2
    assert "no card" in run.stderr
    assert "--compile-only" in run.stderr


def test_a_moved_hunk_is_found_and_the_tree_stays_as_it_is(tmp_path):
    patch = tmp_path / "moved.patch"
    patch.write_text(WRONG.replace("@@ -59,1 +59,1 @@", "@@ -3,1 +3,1 @@"))
    before = (TREE / "kernels/kdatune_kernels/recurrence.py").read_text()
    run = _judge(patch, "--write", tmp_path / "written")
    assert run.returncode == 0, run.stderr
    written = tmp_path / "written" / "kdatune_candidate_moved"
    assert "decay = 0.5 * tl.load" in (written / "recurrence.py").read_text()
    assert not any("from kdatune_kernels" in path.read_text() for path in written.rglob("*.py"))
    assert (TREE / "kernels/kdatune_kernels/recurrence.py").read_text() == before


def test_a_wrong_kernel_is_found_wrong(tmp_path):
    """The checks of a card, in the interpreter: the plain Triton kernels of a candidate whose decay is halved."""
    (tmp_path / "wrong.patch").write_text(WRONG)
    assert _judge(tmp_path / "wrong.patch", "--write", tmp_path).returncode == 0
    places = os.pathsep.join([str(TREE / "kernels"), str(tmp_path)])
    run = _run(
        "on_card.py", "check", "kdatune_candidate_wrong", "T 17", PYTHONPATH=places, TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    *checks, last = map(json.loads, run.stdout.splitlines())
    assert last == {"step": "checked", "right": False}
    assert all("is over" in check["fault"] and check["shipped"]["state"] < 0.005 for check in checks)
    assert [check["config"] for check in checks] == ["default", "default, fast", "default, bf16 tiles"]
