"""Recording a card: complete, typed, resumable, and readable by the replay backend."""

import gzip
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import median

import pytest

from kdatune_kernels.space import WHOLES
from kdatune_kernels.space import default_config
from kdatune_kernels.space import k1_configs
from kdatune_kernels.space import k2_configs
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.record import Recorder
from kdatune_tuner.record import Sweep
from kdatune_tuner.recording import load_recording
from kdatune_tuner.worker import DeviceError
from kdatune_tuner.worker import DeviceModules

SERVICE_LIBRARIES = ("optuna", "sqlalchemy", "alembic", "typer", "rich", "pydantic", "fastapi", "uvicorn")
SHAPES = [parse_shape("N=1,H=4,T=1024"), parse_shape("N=2,H=4,T=2048")]
K1S = [c for c in k1_configs() if c.variant == "triton"]
K2S = [c for c in k2_configs() if c.variant == "triton"]


def record(fake_device, path: Path, **options) -> Sweep:
    options = {"processes": 2, "trial_timeout_s": 60.0} | options
    shapes = options.pop("shapes", SHAPES)
    return Recorder(path, shapes, command="kdatune record", modules=fake_device.modules, **options).run()


def test_a_sweep_holds_every_config_on_every_shape_and_the_best_as_pairs(fake_device, tmp_path: Path) -> None:
    path = tmp_path / "fake.jsonl.gz"
    said: list[str] = []
    sweep = record(fake_device, path, say=said.append)
    recording = load_recording(path)
    assert recording.gpu.name == "Fake A100"
    assert recording.command == "kdatune record"
    assert (len(said), said[0].split(",")[0]) == (3, f"checked {sweep.checks} configs")
    checked = {check.config for check in recording.checks.values()}
    assert checked >= {c for c in K1S if c.num_warps <= 8}
    assert sweep.complete
    assert sweep.failed == 0
    assert (sweep.checks, sweep.timings) == (len(recording.checks), len(recording.timings))
    assert len(recording.timings) == 2 * len(recording.checks)
    for shape in SHAPES:
        times = {k: median(t.samples_us) for k, t in recording.timings.items() if k[2] == shape}
        best = [
            sorted((k for k in times if k[0] == kernel), key=lambda k, times=times: times[k])[:4]
            for kernel in ("k1", "k2")
        ]
        wanted = {(k1[1], k2[1]) for k1, k2 in product(*best)}
        default = default_config(shape, recording.gpu)
        wanted.add((recording.index[default.k1], recording.index[default.k2]))
        assert {(i1, i2) for i1, i2, s in recording.pairs if s == shape} == wanted
    assert not path.with_name(path.name + ".part").exists()


def test_pairs_of_a_card_that_was_not_steady_are_timed_again(fake_device, tmp_path: Path) -> None:
    """Five, and then a second shape with none: an H200 began each shape with up to ten that were 3 to 18 % too slow."""
    (fake_device.folder / "unsteady.txt").write_text("5")
    said: list[str] = []
    record(fake_device, tmp_path / "fake.jsonl.gz", say=said.append)
    recording = load_recording(tmp_path / "fake.jsonl.gz")
    for (i1, i2, _), pair in recording.pairs.items():
        alone = [median(recording.timings[k, i, SHAPES[0]].samples_us) for k, i in (("k1", i1), ("k2", i2))]
        assert median(pair.samples_us) == pytest.approx(sum(alone), rel=0.001), (i1, i2)
    assert not any("steady" in line for line in said)


def test_a_card_that_never_is_steady_is_said(fake_device, tmp_path: Path) -> None:
    (fake_device.folder / "unsteady.txt").write_text("-1")  # the first of 18 timings of a round, and not the last
    said: list[str] = []
    record(fake_device, tmp_path / "fake.jsonl.gz", shapes=SHAPES[:1], say=said.append)
    assert any("steady" in line for line in said)


def test_what_was_recorded_is_what_is_replayed(fake_device, tmp_path: Path) -> None:
    fake_device.fate(K1S[3], us=42.0)
    record(fake_device, tmp_path / "a.gz")
    backend = ReplayBackend.open(tmp_path / "a.gz")
    result = backend.measure("k1", SHAPES[0], K1S[3])
    assert result.samples_us == pytest.approx([42.0, 42.042, 42.084, 42.126, 42.168])
    assert (result.registers, result.smem_bytes, result.o_error_ratio) == (96, 4096, 0.001)
    default = default_config(SHAPES[0], backend.gpu)
    assert not backend.measure_pair(SHAPES[0], default).estimated
    slow = max(backend.space("k2", SHAPES[0]), key=lambda c: backend.measure("k2", SHAPES[0], c).median_us)
    assert backend.measure_pair(SHAPES[0], LaunchConfig(default.k1, slow)).estimated


def test_what_has_no_stages_is_recorded_whole_wherever_it_may_run(fake_device, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KDATUNE_FAKE_CARD", "NVIDIA H200")
    shapes = [parse_shape("N=1,H=128,T=8192"), parse_shape("N=1,H=8,T=1024"), parse_shape("N=1,H=8,T=1024,V=256")]
    path = tmp_path / "fake.jsonl.gz"
    assert record(fake_device, path, shapes=shapes).complete
    recording = load_recording(path)
    backend = ReplayBackend(recording)
    for whole in WHOLES:
        i1, i2 = recording.index[whole.k1], recording.index[whole.k2]
        assert fake_device.calls("check").count(digest(whole)) == 1
        assert digest(whole.k2) not in [*fake_device.calls("check"), *fake_device.calls("time")]
        assert [s for k1, k2, s in recording.pairs if (k1, k2) == (i1, i2)] == shapes[:2]
        assert not [key for key in recording.timings if key[:2] == ("k2", i2)]
        assert whole.k2 not in backend.space("k2", shapes[0])
        assert not backend.measurable("k2", shapes[0], whole.k2)
        assert backend.measurable("kda", shapes[0], whole)
        result = backend.measure_pair(shapes[0], whole)
        assert (result.ok, result.estimated, result.registers) == (True, False, 96)
    for shape in shapes:
        split = split_default(shape, recording.gpu)
        assert (recording.index[split.k1], recording.index[split.k2], shape) in recording.pairs


@pytest.mark.parametrize("whole", WHOLES, ids=lambda whole: whole.k2.variant)
def test_one_without_stages_that_fails_its_check_is_not_timed(whole, fake_device, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KDATUNE_FAKE_CARD", "NVIDIA H200")
    fake_device.fate(whole.k2, check="incorrect")
    shape = parse_shape("N=1,H=128,T=8192")
    record(fake_device, tmp_path / "fake.jsonl.gz", shapes=[shape])
    backend = ReplayBackend.open(tmp_path / "fake.jsonl.gz")
    assert digest(whole) not in fake_device.calls("time")
    assert backend.measurable("kda", shape, whole)
    result = backend.measure_pair(shape, whole)
    assert (result.outcome, result.samples_us) == (Outcome.INCORRECT, ())


def test_lethal_configs_cost_their_own_rows_only(fake_device, tmp_path: Path) -> None:
    fake_device.fate(K1S[0], check="abort")
    fake_device.fate(K1S[1], check="hang")
    fake_device.fate(K2S[2], check="incorrect")
    fake_device.fate(K2S[3], time="illegal_access")
    # the endless one costs all of the time-out, which the others must not reach on a busy machine
    sweep = record(fake_device, tmp_path / "a.gz", trial_timeout_s=8.0)
    recording = load_recording(tmp_path / "a.gz")
    outcomes = {check.config: check.outcome for check in recording.checks.values()}
    assert [outcomes[c] for c in (K1S[0], K1S[1], K2S[2])] == [Outcome.ABORT, Outcome.TIMEOUT, Outcome.INCORRECT]
    assert sum(outcome is not Outcome.OK for outcome in outcomes.values()) == 3
    faulty = recording.index[K2S[3]]
    assert [recording.timings["k2", faulty, s].outcome for s in SHAPES] == [Outcome.ILLEGAL_ACCESS] * 2
    assert sweep.failed == 3 + 2
    others = [t for (k, i, _), t in recording.timings.items() if (k, i) != ("k2", faulty)]
    assert {t.outcome for t in others} == {Outcome.OK}
    assert len(others) == 2 * (len(recording.checks) - 4)


def test_a_limit_leaves_a_readable_file_and_the_same_command_goes_on(fake_device, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KDATUNE_FAKE_SECONDS", "0.1")  # all of it takes far longer than the limit
    path = tmp_path / "a.gz"
    first = record(fake_device, path, limit_seconds=6.0)  # until the first is timed: one second on a quiet machine
    monkeypatch.setenv("KDATUNE_FAKE_SECONDS", "0")
    assert not first.complete
    assert load_recording(path).timings
    part = path.with_name(path.name + ".part")
    assert part.exists()
    calls = len(fake_device.calls("time"))
    assert calls == first.timings + first.pairs
    second = record(fake_device, path)
    assert second.complete
    assert not part.exists()
    # the first pair of each of two shapes is timed again, to see whether the card was steady
    assert len(fake_device.calls("time")) == second.timings + second.pairs + len(SHAPES)
    assert len(set(fake_device.calls("check"))) == len(fake_device.calls("check")) == second.checks


def test_a_sweep_that_was_cut_off_between_two_pairs_holds_each_once(fake_device, tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    first = record(fake_device, path, shapes=SHAPES[:1])
    rows = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.with_name(path.name + ".part").write_bytes(b"".join(rows[:-3]))
    second = record(fake_device, path, shapes=SHAPES[:1])
    again = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    assert (second.pairs, len(again)) == (first.pairs, len(rows))
    assert sorted(again) == sorted(rows)


def test_a_part_of_another_build_is_dropped(fake_device, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.gz"
    monkeypatch.setenv("KDATUNE_FAKE_SECONDS", "0.05")
    record(fake_device, path, limit_seconds=1.0)
    monkeypatch.setenv("KDATUNE_FAKE_SECONDS", "0")
    part = path.with_name(path.name + ".part")
    assert part.exists()
    monkeypatch.setenv("KDATUNE_FAKE_SPACE", "another")
    said: list[str] = []
    sweep = record(fake_device, path, say=said.append, shapes=SHAPES[:1])
    assert sweep.complete
    assert not any("going on" in line for line in said)
    assert load_recording(path).build.space_hash == "another"
    with gzip.open(path, "rt") as lines:
        assert sum(json.loads(line)["t"] == "meta" for line in lines) == 1


def test_a_mistake_of_ours_ends_the_sweep_and_keeps_the_rows(fake_device, tmp_path: Path) -> None:
    fake_device.fate(K2S[-1], check="mistake")
    path = tmp_path / "a.gz"
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        record(fake_device, path)
    assert not path.exists()
    assert len(path.with_name(path.name + ".part").read_text().splitlines()) > 1


def test_without_a_card_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    with pytest.raises(DeviceError):
        Recorder(path, SHAPES, command="x", modules=DeviceModules("nothing_here", "nothing_here")).run()
    assert list(tmp_path.iterdir()) == []


def test_it_runs_where_only_torch_is_installed(tmp_path: Path) -> None:
    """No library of the service may be needed on the machine with the card."""
    root = Path(__file__).parents[2]
    code = (
        "import sys, runpy\n"
        f"for name in {SERVICE_LIBRARIES}: sys.modules[name] = None\n"
        f"sys.argv = ['record', {str(tmp_path / 'a.gz')!r}]\n"
        "runpy.run_module('kdatune_tuner.record', run_name='__main__')\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{root / 'kernels'}:{root / 'tuner'}"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("kdatune: ")
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
