"""`kdatune export` and `kdatune import` as real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdatune_kernels.space import default_config
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewMeasurement

DATA = Path(__file__).parent.parent / "data" / "exchange"
H200 = KNOWN_GPUS["NVIDIA H200"]
SHAPE = shape_of(1, 96, 8192)
BUILD = Build("k" * 16, "s" * 16, "1", "3.6.0", "12.9", "2.13.0", "13.0", "580.1")


def kdatune(folder: Path, database: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KDATUNE_")}
    environment = kept | {"KDATUNE_DATABASE_URL": f"sqlite:///{folder / database}", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "kdatune_tuner.cli", *map(str, arguments)]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a.db, which serves one champion, and b.db, which is empty."""
    for name in ("a.db", "b.db"):
        upgrade(f"sqlite:///{tmp_path / name}")
    engine = open_engine(f"sqlite:///{tmp_path / 'a.db'}")
    config = default_config(SHAPE, H200)
    with writing(engine) as s:
        key = {
            "kernel": "kda",
            "gpu_id": writes.put_gpu(s, H200),
            "problem_id": writes.put_problem(s, "kda", SHAPE),
        }
        new = NewMeasurement(
            run_id=None,
            build_id=writes.put_build(s, BUILD),
            config_json=canonical(config),
            config_hash=digest(config),
            outcome=Outcome.OK,
            median_us=628.48,
            **key,
        )
        writes.promote(
            s,
            measurement_id=writes.add_measurement(s, new),
            baseline_measurement_id=None,
            default_us=640.0,
            gain=1.02,
            gain_low=1.01,
            gain_high=1.03,
            decision="promoted",
            reason="test",
            **key,
        )
    engine.dispose()
    return tmp_path


@pytest.mark.parametrize("form", ["t4", "fla"])
def test_from_one_database_to_another_and_once(folder: Path, form: str) -> None:
    done = kdatune(folder, "a.db", "export", "--format", form, "--gpu", H200.name, "--out", "x.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["count"] == 1
    for stored, known in ((1, 0), (0, 1)):
        done = kdatune(folder, "b.db", "import", "--format", form, "x.json", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        told = json.loads(done.stdout)
        assert (told["stored_count"], told["known_count"]) == (stored, known)
    served = kdatune(folder, "b.db", "history", "--gpu", H200.name, "--shape", SHAPE.key(), "--json")
    assert json.loads(served.stdout)["decisions"] == []
    if form == "t4":
        done = kdatune(folder, "b.db", "export", "--format", form, "--gpu", H200.name, "--out", "y.json")
        assert done.returncode == 0
        assert (folder / "y.json").read_text() == (folder / "x.json").read_text()
        # in the database that it is from it is known, too
        done = kdatune(folder, "a.db", "import", "--format", form, "x.json")
        assert "0 measurements stored, 1 known before" in done.stdout


def test_a_file_of_another_tuner(folder: Path) -> None:
    about = ("--gpu", H200.name, "--kernel", "k2", "--shape", SHAPE.key())
    done = kdatune(folder, "b.db", "import", "--format", "t4", DATA / "kernel-tuner-1.5.0.json", *about)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 measurements stored, 0 known before; what is served has not changed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["import", "--format", "t4", DATA / "kernel-tuner-1.5.0.json"], 1, "does not say its gpu; give --gpu"),
        (["export", "--format", "t4", "--gpu", H200.name, "--out", "no/x"], 1, "no/x cannot be written: No such file"),
        (["export", "--format", "fla", "--kernel", "k2", "--gpu", H200.name, "--out", "x"], 2, "of kda, not of k2"),
        (["export", "--format", "t4", "--gpu", H200.name, "--out", "."], 2, "--out must name a file"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(
    folder: Path, arguments: list[object], code: int, says: str
) -> None:
    done = kdatune(folder, "b.db", *arguments)
    assert done.returncode == code
    assert says in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""
    assert (
        sorted(path.name for path in folder.iterdir() if path.suffix not in (".db", ".db-shm", ".db-wal", ".lock"))
        == []
    )
