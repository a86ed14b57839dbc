"""Candidate kernels: every patch applies to this tree and compiles for sm_90; their judge says what is wrong with bad input."""

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
KERNEL = {"k1": "k1 cp_async", "k2": "k2 128c2", "seg": "pass A", "fused": "default many chains"}
PATCHES = sorted(FOLDER.glob("*.patch"))
WRONG = """A wrong kernel, on purpose.
--- a/kernels/kdatune_kernels/recurrence.py
+++ b/kernels/kdatune_kernels/recurrence.py
@@ -59,1 +59,1 @@
-        decay = tl.load(DEC + tile * K + key)
+        decay = 0.5 * tl.load(DEC + tile * K + key)
"""


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
def compiled(tmp_path_factory) -> dict[str, list[dict]]:
    """Rows of every candidate's representative kernel and of the shipped K2, compiled in one process."""
    folder = tmp_path_factory.mktemp("candidates")
    run = _judge(*PATCHES, "--write", folder)
    assert run.returncode == 0, run.stderr
    packages = {patch.stem: Path(line).name for patch, line in zip(PATCHES, run.stdout.splitlines(), strict=True)}
    wanted = [(package, KERNEL[stem.split("-")[0]]) for stem, package in packages.items()]
    wanted += [("kdatune_kernels", "k2 64"), (packages["k2-a123"], "k2 64")]
    places = os.pathsep.join([str(TREE / "kernels"), str(folder)])
    run = _run("offline.py", *(word for pair in wanted for word in pair), PYTHONPATH=places)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    names = {package: stem for stem, package in packages.items()} | {"kdatune_kernels": "shipped"}
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(names[row["package"]], []).append(row)
    return found


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_a_candidate_compiles_without_unstated_spills_and_serialised_wgmma(patch, compiled):
    stated = re.search(r"Spilled: (\d+) bytes", patch.read_text())  # a head that states its spills says where they are
    for row in compiled[patch.stem]:
        assert "error" not in row, row
        assert row["warnings"] == [], row
        assert row["spill_bytes"] <= (int(stated.group(1)) if stated else 0), row
        assert 0 < row["registers"] <= 255


def test_there_are_candidates():
    assert {p.stem for p in PATCHES} >= {"k2-mma-v2", "k2-direct-stores", "k2-waits", "k2-a123", "seg-mma-v2"}


def test_a_chunk_has_half_the_barriers_and_no_fence(compiled):
    """What k2-a123 promises of the machine code, counted the same way in the shipped kernel."""
    shipped, candidate = compiled["shipped"][0]["loops"][0], compiled["k2-a123"][-1]["loops"][0]
    assert (shipped["barriers"], shipped["fences"], shipped["wgmma_waits"], shipped["hmma"]) == (4, 2, 3, 0)
    assert (candidate["barriers"], candidate["fences"], candidate["wgmma_waits"], candidate["hmma"]) == (2, 0, 2, 4)


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


def test_compile_only_compares_with_the_shipped_kernels(tmp_path):
    out = tmp_path / "compiled.json"
    run = _judge(FOLDER / "k2-mma-v2.patch", "--compile-only", "--kernels", "k2 64", "--out", out)
    assert run.returncode == 0, run.stdout + run.stderr
    shipped, candidate = json.loads(out.read_text())["compiled"].values()
    assert (shipped[0]["loops"][0]["hgmma"], candidate[0]["loops"][0]["hgmma"]) == (11, 9)
    assert "kdatune_candidate_k2_mma_v2" in run.stdout


def test_without_a_card_the_judge_says_so():
    run = _judge(PATCHES[0], CUDA_VISIBLE_DEVICES="")
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
    assert len(checks) == 2
