"""Sweep files: read, refused with a reason, written so that a crash loses one row at most."""

import gzip
import json
from pathlib import Path

import pytest

from kdatune_kernels.errors import RecordingError
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.recording import SweepWriter
from kdatune_tuner.recording import _salvage
from kdatune_tuner.recording import load_recording
from kdatune_tuner.recording import recorded_shapes


def write(path: Path, rows: list[dict], packed: bool = True) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


@pytest.fixture
def rows(real_sweep_path: Path) -> list[dict]:
    with gzip.open(real_sweep_path, "rt") as lines:
        return [json.loads(line) for line in lines]


def test_a_real_sweep_is_read(real_sweep_path: Path) -> None:
    recording = load_recording(real_sweep_path)
    assert (recording.gpu.name, recording.gpu.sm_count) == ("NVIDIA H200", 132)
    assert len(recording.checks) == 520
    assert sum(check.outcome is Outcome.RESOURCE for check in recording.checks.values()) == 12
    assert len(recording.timings) == 3 * 508
    assert {shape.key() for shape in recording.shapes} == {
        "N=1,H=96,T=8192",
        "N=1,H=64,T=8192",
        "N=6,H=96,T=8192,varlen=true,longest_tokens=3063",
    }
    timing = recording.timings["k2", 316, parse_shape("N=1,H=96,T=8192")]
    assert timing.samples_us == (379.3, 382.06, 382.14, 385.74, 387.33)


def test_a_plain_file_reads_like_a_packed_one(tmp_path: Path, rows: list[dict]) -> None:
    packed, plain = write(tmp_path / "a.gz", rows), write(tmp_path / "a.jsonl", rows, packed=False)
    assert load_recording(packed).timings == load_recording(plain).timings


def test_a_field_that_a_later_kernel_added_takes_its_default(tmp_path: Path, rows: list[dict]) -> None:
    old = [row if row["t"] != "check" or row["kernel"] != "k2" else strip(row, "decay_position") for row in rows]
    assert all(c.config.decay_position == 0 for c in load_recording(write(tmp_path / "a.gz", old)).checks.values()
               if c.kernel == "k2")  # fmt: skip


def strip(row: dict, field: str) -> dict:
    return row | {"config": {k: v for k, v in row["config"].items() if k != field}}


def test_a_truncated_file_says_so(tmp_path: Path, real_sweep_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(real_sweep_path.read_bytes()[:20_000])
    with pytest.raises(RecordingError, match=r"cut\.jsonl\.gz: truncated after row \d+; copy or record it again"):
        load_recording(cut)


def test_damage_inside_says_so(tmp_path: Path, real_sweep_path: Path) -> None:
    data = bytearray(real_sweep_path.read_bytes())
    data[12_000:12_400] = b"\x00" * 400
    (tmp_path / "bad.gz").write_bytes(data)
    with pytest.raises(RecordingError, match=r"bad\.gz: (unreadable|row \d+|truncated)"):
        load_recording(tmp_path / "bad.gz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1:], "the first row is not a meta row"),
        (lambda rows: [rows[0] | {"format": 2}, *rows[1:]], "format 2 is not 1"),
        (lambda rows: [rows[0] | {"gpu": {"name": "x"}}, *rows[1:]], "meta row cannot be read.*Gpu lacks field"),
        (lambda rows: [r for r in rows if r["t"] != "time"], "no timing in 521 rows"),
        (lambda rows: [*rows, {"t": "weather"}], "row 2046 cannot be read.*weather"),
        (lambda rows: [*rows, [1]], "row 2046 is not a JSON object"),
        (lambda rows: [*rows, rows[-1] | {"i": 9999}], "has no check row"),
        (lambda rows: [*rows, rows[-1] | {"samples_us": [-1.0]}], "do not go with outcome ok"),
        (lambda rows: [*rows, rows[-1] | {"outcome": "launch_error"}], "do not go with outcome launch_error"),
        (lambda rows: [*rows, rows[-1] | {"outcome": "bored"}], "bored"),
        (lambda rows: [*rows, rows[-1] | {"shape": "N=1"}], "the shape lacks H, T"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason(tmp_path: Path, rows: list[dict], change, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        load_recording(write(tmp_path / "a.gz", change(rows)))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no such sweep file; make one with `kdatune record"):
        load_recording(tmp_path / "nothing.gz")
    with pytest.raises(RecordingError, match="unreadable"):
        load_recording(tmp_path)


def test_the_nineteen_shapes() -> None:
    shapes = recorded_shapes()
    assert len(set(shapes)) == 19
    assert shapes[0].key() == "N=1,H=96,T=8192"
    assert sum(shape.varlen for shape in shapes) == 2


def test_a_torn_row_is_dropped_and_writing_goes_on_behind_it(tmp_path: Path, rows: list[dict]) -> None:
    path = tmp_path / "sweep.jsonl.gz"
    writer = SweepWriter(path)
    for row in rows[:800]:
        writer.add(row)
    writer.close()
    torn = writer.part.read_text()[:-17]  # a crash in the middle of row 800
    writer.part.write_text(torn)
    again = SweepWriter(path)
    assert again.rows == rows[:799]
    for row in rows[799:]:
        again.add(row)
    again.finish()
    assert not again.part.exists()
    with gzip.open(path, "rt") as lines:
        assert [json.loads(line) for line in lines] == rows


def test_equal_rows_give_equal_bytes(tmp_path: Path, rows: list[dict]) -> None:
    for name in ("a.gz", "b.gz"):
        writer = SweepWriter(tmp_path / name)
        for row in rows:
            writer.add(row)
        writer.finish()
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_the_meta_row_keeps_what_it_was_made_with(tmp_path: Path, rows: list[dict]) -> None:
    recording = load_recording(write(tmp_path / "a.gz", rows))
    assert to_json(recording.gpu) == rows[0]["gpu"]
    assert to_json(recording.build) == rows[0]["build"]
    assert (recording.recorded_at, recording.regime) == (rows[0]["recorded_at"], rows[0]["regime"])


def test_a_row_that_is_nested_too_deeply_is_refused(tmp_path: Path, rows: list[dict]) -> None:
    path = write(tmp_path / "a.jsonl", rows, packed=False)
    with path.open("a") as out:
        out.write("[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(RecordingError, match="row 2046 is nested too deeply"):
        load_recording(path)
    assert list(_salvage(path)) == rows
