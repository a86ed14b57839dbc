"""The example is tuned end to end: on the recording of Triton's interpreter, live in the interpreter, and on a card."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sqlalchemy import Engine

from kdatune_kernels.errors import RecordingError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.spec import INTERPRETER
from kdatune_kernels.tunable import Installed
from kdatune_kernels.values import OtherConfig
from kdatune_tuner.backend_others import OtherGpuBackend
from kdatune_tuner.backend_others import OtherReplayBackend
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.recording import load_recording
from kdatune_tuner.recording_others import load_other_recording
from kdatune_tuner.recording_others import record_other
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.other_champions import other_champions
from kdatune_tuner.tune import Options
from kdatune_tuner.tune_others import OtherTuner

RECORDING = Path(__file__).parent.parent / "data" / "rmsnorm-interpreter.jsonl.gz"
KEY = "columns=500,dtype=bf16,rows=8"


@pytest.fixture
def replay(rmsnorm: Installed) -> OtherReplayBackend:
    return OtherReplayBackend(rmsnorm, load_other_recording(RECORDING))


def tuner(engine: Engine, replay: OtherReplayBackend, **options: object) -> OtherTuner:
    return OtherTuner(engine, replay, Options(kernel="rmsnorm", **options), replay.kernel)  # type: ignore[arg-type]


def test_the_recording_is_of_the_example_as_it_is(replay: OtherReplayBackend, rmsnorm: Installed) -> None:
    assert replay.gpu == INTERPRETER
    assert replay.regime == "wall clock of Triton's interpreter on the CPU"
    assert (replay.build.kernel_hash, replay.build.space_hash) == (rmsnorm.kernel_hash(), rmsnorm.space_hash())
    assert [shape.key() for shape in replay.default_shapes()] == [KEY, "columns=300,dtype=bf16,rows=8"]
    for shape in replay.default_shapes():
        assert set(replay.space("rmsnorm", shape)) == set(rmsnorm.configs(shape, INTERPRETER))


def test_tuned_on_the_recording(engine: Engine, replay: OtherReplayBackend) -> None:
    shape = replay.default_shapes()[0]
    tuned = tuner(engine, replay).tune(shape)
    best = min((r.median_us, c.text) for (s, c), r in replay.recording.trials.items() if s == shape)
    default = replay.measure("rmsnorm", shape, replay.kernel.default(shape, replay.gpu)).median_us
    assert tuned.best is not None
    assert (tuned.best_us, tuned.best.text) == best  # type: ignore[union-attr]
    assert tuned.default_us == default
    assert tuned.promotion is not None
    assert tuned.promotion.decision == "promoted"
    assert tuned.trials == tuned.measured == 48
    document = tuned.to_json()
    assert json.loads(json.dumps(document))["served_config"] == tuned.best.json()  # type: ignore[union-attr]
    with reading(engine) as s:
        (champion,) = other_champions(s)
        assert (champion.shape, champion.config) == (shape, tuned.best)
        assert (champion.measured_us, champion.default_us) == (tuned.best_us, default)
        rows = queries.page_measurements(s, limit=1000)
        assert len(rows) == 48
        assert {row.requested_num_warps for row in rows} == {1, 2, 4, 8, 16}
        assert max(row.o_error_ratio or 0.0 for row in rows) < 1.0
        assert [run.sampler for run in queries.page_runs(s)] == ["enumerate", "finalists"]


def test_nothing_is_measured_twice(engine: Engine, replay: OtherReplayBackend) -> None:
    shape = replay.default_shapes()[0]
    first = tuner(engine, replay).tune(shape)
    again = tuner(engine, replay).tune(shape)
    assert (again.measured, again.trials, again.best) == (0, 48, first.best)
    assert again.promotion is not None
    assert again.promotion.decision == "kept"
    with reading(engine) as s:
        assert len(queries.page_promotions(s)) == 1


def test_few_trials_find_a_fast_config(engine: Engine, replay: OtherReplayBackend) -> None:
    """A search of half the space; the recorded extremes are a factor of eight apart, by the rows of a program."""
    shape = replay.default_shapes()[0]
    tuned = tuner(engine, replay, trials=24).tune(shape)
    assert tuned.trials == 24
    assert tuned.stages["rmsnorm"].sampler != "enumerate"
    times = sorted(r.median_us or 0.0 for (s, _), r in replay.recording.trials.items() if s == shape)
    assert tuned.best_us in times[:8]


def test_a_champion_near_by_is_tried_first(engine: Engine, replay: OtherReplayBackend) -> None:
    there, here = replay.default_shapes()
    best = tuner(engine, replay).tune(there).best
    tuned = tuner(engine, replay, trials=2).tune(here)
    assert list(tuned.stages["rmsnorm"].results) == [replay.kernel.default(here, INTERPRETER), best]


def test_recordings_of_other_kernels_are_told_apart(rmsnorm: Installed, replay: OtherReplayBackend) -> None:
    shipped = Path(__file__).parents[2] / "tuner" / "kdatune_tuner" / "recordings" / "h200.jsonl.gz"
    with pytest.raises(RecordingError, match="is a sweep of kda"):
        load_other_recording(shipped)
    with pytest.raises(RecordingError, match="unknown row kind 'trial'"):
        load_recording(RECORDING)
    with pytest.raises(RecordingError, match=r"is not in .*; recorded: columns=500"):
        replay.space("rmsnorm", rmsnorm.parse_shape("rows=9,columns=500"))


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    lines = gzip.decompress(RECORDING.read_bytes()).decode().splitlines()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([*lines[:3], lines[3].replace('"outcome":"ok"', '"outcome":"timeout"')]))
    with pytest.raises(RecordingError, match=r"bad.jsonl: row 4 cannot be read: .*do not go with outcome timeout"):
        load_other_recording(bad)


def test_the_device_lives_in_a_child(rmsnorm: Installed, tmp_path: Path) -> None:
    """On the card where there is one, else in Triton's interpreter: checked, timed, compared, recorded and replayed."""
    shape = rmsnorm.parse_shape("rows=4,columns=256")
    backend = OtherGpuBackend(rmsnorm)
    try:
        assert (backend.gpu == INTERPRETER) is not torch.cuda.is_available()
        a, b = backend.space("rmsnorm", shape)[0], rmsnorm.default(shape, backend.gpu)
        alone = backend.measure("rmsnorm", shape, a)
        assert alone.outcome is Outcome.OK
        assert len(alone.samples_us) == 5
        assert alone.o_error_ratio is not None
        assert alone.o_error_ratio < 1.0
        pair = backend.measure_pair(shape, a, b)
        assert pair.paired
        assert len(pair.samples_us) == len(pair.against_us) == 15
        # a config that no config_ok lets through, as a compiler or a kernel would refuse it
        broken = backend.measure(
            "rmsnorm", shape, OtherConfig({"rows_per_program": 3, "block_columns": 256, "num_warps": 4})
        )
        assert broken.outcome in (Outcome.COMPILE_ERROR, Outcome.LAUNCH_ERROR)
        backend.space = lambda *_: [a, b]  # type: ignore[method-assign, assignment]
        out = tmp_path / "small.jsonl.gz"
        assert record_other(out, "rmsnorm", backend, [shape], "a test", lambda _: None) == 2
    finally:
        backend.close()
    again = OtherReplayBackend(rmsnorm, load_other_recording(out))
    assert again.measure("rmsnorm", shape, a).outcome is Outcome.OK
    assert (again.gpu, again.build) == (backend.gpu, backend.build)


WRONG = """
import itertools
from rmsnorm_kernel.kernel import *
from rmsnorm_kernel import kernel
calls = itertools.count(1)
def launch(given, config):
    y = kernel.launch(given, config)
    if config["num_warps"] == 2:
        y[0, 0] += 1
    if config["num_warps"] == 4:
        y.view(-1)[y.abs().argmin()] = 1e-4 * next(calls)
    if config["num_warps"] == 8:
        y[0, 0] = float("nan")
    if config["num_warps"] == 16:
        raise RuntimeError("Triton Error: an illegal memory access was encountered")
    return y
"""


def test_a_wrong_config_is_data(rmsnorm: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rmsnorm_kernel_wrong.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)]))
    # the child's kernel has this device: as if its distribution said so
    (tmp_path / "sitecustomize.py").write_text(
        "import rmsnorm_kernel.tuning\nrmsnorm_kernel.tuning.RmsNorm.device = 'rmsnorm_kernel_wrong'\n"
    )
    shape = rmsnorm.parse_shape("rows=2,columns=256")
    backend = OtherGpuBackend(rmsnorm)
    try:
        found = {
            warps: backend.measure(
                "rmsnorm", shape, OtherConfig({"rows_per_program": 2, "block_columns": 256, "num_warps": warps})
            )
            for warps in (1, 2, 4, 8, 16)
        }
    finally:
        backend.close()
    assert found[1].outcome is Outcome.OK
    assert found[2].outcome is Outcome.INCORRECT
    assert found[2].detail is not None
    assert found[2].detail.startswith("error ratio of y is")
    assert found[4].outcome is Outcome.NONDETERMINISTIC
    assert (found[8].outcome, found[8].o_error_ratio) == (Outcome.INCORRECT, None)
    assert found[16].outcome is Outcome.ILLEGAL_ACCESS


@pytest.mark.gpu
def test_tuned_on_a_card(engine: Engine, rmsnorm: Installed) -> None:
    shape = rmsnorm.parse_shape("rows=4096,columns=8192")
    backend = OtherGpuBackend(rmsnorm)
    try:
        tuned = OtherTuner(engine, backend, Options(kernel="rmsnorm", trials=30), rmsnorm).tune(shape)
    finally:
        backend.close()
    assert tuned.best_us is not None
    assert tuned.default_us is not None
    assert tuned.best_us <= 1.02 * tuned.default_us
    with reading(engine) as s:
        (champion,) = other_champions(s)
    assert champion.gpu == backend.gpu
    assert set(tuned.outcomes()) <= {"ok", "resource", "compile_error"}


def kdatune(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kdatune_tuner.entry import main; main()", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"KDATUNE_DATABASE_URL": url}, check=False
    )


def test_the_commands(rmsnorm: Installed, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kdatune.db'}"
    assert kdatune("db", "upgrade", url=url).returncode == 0
    options = ("--kernel", "rmsnorm", "--recording", str(RECORDING), "--shape", "rows=8,columns=500")
    tuned = kdatune("tune", *options, "--json", url=url)
    assert tuned.returncode == 0, tuned.stderr
    best = json.loads(tuned.stdout)["best_config"]
    card = ("--kernel", "rmsnorm", "--gpu", "Triton interpreter", "--shape", "rows=8,columns=500")
    resolved = json.loads(kdatune("resolve", *card, "--json", url=url).stdout)
    assert (resolved["layer"], resolved["database"]["match"]) == ("default", "exact")
    assert resolved["database"]["config"] == best
    history = json.loads(kdatune("history", *card, "--json", url=url).stdout)
    assert [one["config"] for one in history["decisions"]] == [best]
    snapshot = tmp_path / "snapshot.json"
    assert kdatune("export-snapshot", "--gpu", "Triton interpreter", "--out", str(snapshot), url=url).returncode == 0
    assert [one["config"] for one in json.loads(snapshot.read_text())["others"]] == [best]
    undone = json.loads(kdatune("rollback", *card, "--json", url=url).stdout)
    assert undone["config"] is None
    for wrong, told in (
        (
            ("tune", "--kernel", "softmax"),
            "no kernel 'softmax': no installed package registers it under kdatune.kernels",
        ),
        (
            ("tune", "--kernel", "rmsnorm", "--backend", "replay"),
            "no recording of rmsnorm is shipped; give --recording FILE",
        ),
        (("tune", "--kernel", "rmsnorm", "--workers", "2"), "--workers shares the shapes of kda"),
        (("tune", *options[:-1], "rows=8"), "the shape of rmsnorm lacks columns"),
        (("history", *card[2:], "--kernel", "k1"), "--kernel: k1 is a stage of kda"),
    ):
        refused = kdatune(*wrong, url=url)
        assert refused.returncode in (1, 2), wrong
        assert told in refused.stderr.replace("\n", " "), refused.stderr


def test_no_shape_of_its_own(rmsnorm: Installed) -> None:
    with pytest.raises(UsageError, match=r"say which shapes of rmsnorm to tune: --shape rows=\.\.\.,columns=\.\.\."):
        OtherGpuBackend.default_shapes(type("Of", (), {"kernel": rmsnorm})())  # type: ignore[arg-type]
