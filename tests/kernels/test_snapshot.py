"""The snapshot document: lossless both ways, whole documents refused, single entries skipped with their reason."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

import kdatune_kernels
from kdatune_kernels import space
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import SnapshotError
from kdatune_kernels.match import Champion
from kdatune_kernels.snapshot import SCHEMA
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import dump_snapshot
from kdatune_kernels.snapshot import parse_json
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.snapshot import seal
from kdatune_kernels.snapshot import unseal
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json

H200 = KNOWN_GPUS["NVIDIA H200"]
SHAPE = shape_of(1, 96, 8192)
BUILD = Build("k" * 16, "s" * 16, "1", "3.6.0", "12.9", "2.11.0", "13.0", "580.95")
CONFIGS = [LaunchConfig(k1, k2) for k1 in space.legal_k1(SHAPE, H200)[::9] for k2 in space.legal_k2(SHAPE, H200)[::31]]


def snapshot() -> Snapshot:
    shapes = [SHAPE, shape_of(6, 64, 8192, varlen=True, longest_tokens=3063), shape_of(1, 8, 4096, state_dtype="bf16")]
    champions = tuple(
        Champion(H200, shape, default_config(shape, H200), i + 1, 610.25, 625.0, BUILD, "2026-11-29T22:31:00Z", None)
        for i, shape in enumerate(shapes)
    )
    bare = Champion(H200, shape_of(2, 8, 64), default_config(shape_of(2, 8, 64), H200), 4, None, None)
    return Snapshot(SCHEMA, H200, 12, (*champions, bare))


def document() -> dict[str, Any]:
    return json.loads(json.dumps(dump_snapshot(snapshot())))


def test_a_snapshot_reads_back() -> None:
    assert parse_snapshot(json.dumps(dump_snapshot(snapshot()))) == snapshot()
    assert parse_snapshot(json.dumps(dump_snapshot(snapshot())).encode()) == snapshot()
    assert parse_snapshot(dump_snapshot(snapshot())) == snapshot()
    assert parse_snapshot(document()).skipped == ()


@settings(deadline=None)
@given(st.sampled_from(CONFIGS), st.sampled_from(("fp16", "fast", "bf16")), st.none() | st.floats(0.1, 1e9))
def test_a_config_goes_through_a_document_without_loss(config: LaunchConfig, precision: str, time_us: float) -> None:
    config = dataclasses.replace(config, precision=precision)
    champion = Champion(H200, SHAPE, config, 1, time_us, time_us, BUILD)
    text = json.dumps(dump_snapshot(Snapshot(SCHEMA, H200, 1, (champion,))))
    (again,) = parse_snapshot(text).champions
    assert again == champion
    assert canonical(again.config) == canonical(config)
    assert '"maxnreg": null' in text


def test_the_entry_has_every_field_of_the_contract() -> None:
    entry = document()["champions"][3]
    assert list(document()) == ["schema", "gpu", "generation", "others", "champions"]
    facts = ("kernel", "gpu", "shape", "config", "generation", "measured_us", "default_us")
    assert sorted(entry) == sorted((*facts, "build", "measured_at", "stale_reason", "nearest_regret", "estimated"))
    assert (entry["build"], entry["measured_us"], entry["stale_reason"]) == (None, None, None)


def test_what_the_nearest_answer_cost_goes_along_and_may_be_left_out() -> None:
    champion = Champion(H200, SHAPE, CONFIGS[0], 1, 600.0, 620.0, nearest_regret=1.0625)
    sent = json.loads(json.dumps(dump_snapshot(Snapshot(SCHEMA, H200, 1, (champion,)))))
    assert parse_snapshot(sent).champions == (champion,)
    del sent["champions"][0]["nearest_regret"]  # of a service of before
    assert parse_snapshot(sent).champions == (dataclasses.replace(champion, nearest_regret=None),)
    sent["champions"][0]["nearest_regret"] = 0.5
    (skipped,) = parse_snapshot(sent).skipped
    assert skipped.reason == "nearest_regret must be a ratio >= 1 or null, not 0.5"


def test_an_estimated_time_goes_along_as_such() -> None:
    champion = Champion(H200, SHAPE, CONFIGS[0], 1, 600.0, 620.0, estimated=True)
    measured = dataclasses.replace(champion, estimated=False)
    sent = json.loads(json.dumps(dump_snapshot(Snapshot(SCHEMA, H200, 1, (champion, measured)))))
    assert [entry["estimated"] for entry in sent["champions"]] == [True, False]
    assert parse_snapshot(sent).champions == (champion, measured)
    del sent["champions"][0]["estimated"]  # of a service or a disk copy of before
    assert parse_snapshot(sent).champions == (measured, measured)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "snapshot schema 2 is not 1; update kdatune"),
        ({"schema": True}, "snapshot schema True is not 1"),
        ({"schema": 1.0}, "snapshot schema 1.0 is not 1"),
        ({"schema": None}, "snapshot schema None is not 1"),
        ({"generation": -1}, "generation must be a whole number >= 0, not -1"),
        ({"generation": "12"}, "generation must be a whole number >= 0, not '12'"),
        ({"generation": None}, "generation must be"),
        ({"champions": {}}, "champions must be a list, not dict"),
        ({"champions": None}, "champions must be a list, not NoneType"),
        ({"gpu": "NVIDIA H200"}, "snapshot gpu: Gpu must be a JSON object"),
        ({"gpu": {"name": "NVIDIA H200"}}, "snapshot gpu: Gpu lacks field(s): compute_capability"),
    ],
)
def test_a_document_that_cannot_be_read_is_refused_whole(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_snapshot({**document(), **change})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "1",
        '"x"',
        "[" * 100_000,
        '{"schema": 1',
        "1" * 5000,
        b"\xff\xfe",
        b'{"a": NaN}',
        "Infinity",
    ],
)
def test_what_is_no_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(SnapshotError):
        parse_snapshot(text)


def _set(entry: dict[str, Any], path: str, value: Any) -> None:
    *folders, last = path.split(".")
    for folder in folders:
        entry = entry[folder]
    entry[last] = value


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("config.k2.stages_in", 8, "config refused: k2 needs "),
        ("config.k2.num_warps", 3, "config refused: k2.num_warps=3 is not one of"),
        ("config.k2.num_warps", "4", "K2Config.num_warps cannot be '4'"),
        ("config.k2.maxnreg", "None", "K2Config.maxnreg cannot be 'None'"),
        ("config.k2.new_knob", 1, "K2Config has unknown field(s): new_knob"),
        ("config.precision", "fp8", "LaunchConfig.precision cannot be 'fp8'"),
        ("config", None, "LaunchConfig must be a JSON object"),
        ("shape.N", 0, "N must be a whole number >= 1"),
        ("shape.T", 1e400, "Shape.T cannot be inf"),
        ("shape", [], "Shape must be a JSON object"),
        ("gpu.compute_capability", "x", "compute_capability must read like 9.0"),
        ("gpu", None, "Gpu must be a JSON object"),
        ("kernel", "k1", "kernel 'k1' is not launched from here"),
        ("kernel", None, "kernel None is not launched from here"),
        ("generation", -3, "generation must be a whole number >= 0, not -3"),
        ("measured_us", -1.0, "measured_us must be a time > 0 or null, not -1.0"),
        ("measured_us", 0, "measured_us must be a time > 0 or null, not 0"),
        ("measured_us", True, "measured_us must be a time > 0 or null, not True"),
        ("default_us", 1e400, "default_us must be a time > 0 or null, not inf"),
        ("estimated", 1, "estimated must be true or false, not 1"),
        ("estimated", None, "estimated must be true or false, not None"),
        ("estimated", "true", "estimated must be true or false, not 'true'"),
        ("build", {}, "Build lacks field(s)"),
        ("measured_at", 17, "measured_at must be a text"),
        ("stale_reason", "x" * 501, "stale_reason must be a text of at most 500 characters"),
    ],
)
def test_an_entry_that_cannot_be_used_is_skipped_with_its_reason(path: str, value: Any, says: str) -> None:
    data = document()
    if path == "config.k2.stages_in":
        data["champions"][1]["config"] = to_json(space.split_default(snapshot().champions[1].shape, H200))
        data["champions"][1]["config"]["k2"].update(block_v=128, num_warps=8, consumers=1, stages_out=4)
        data["champions"][1]["config"]["k2"].update(maxnreg=168, consumer_regs=None)
        data["champions"][1]["gpu"]["smem_per_block_bytes"] = 101376
    _set(data["champions"][1], path, value)
    read = parse_snapshot(data)
    assert len(read.champions) == 3
    assert [skipped.index for skipped in read.skipped] == [1]
    assert says in read.skipped[0].reason
    assert read.champions == tuple(c for i, c in enumerate(snapshot().champions) if i != 1)


def test_a_refused_entry_still_says_what_it_is_about() -> None:
    data = document()
    data["champions"][0]["config"]["k2"]["num_warps"] = 3
    data["champions"][1] = "champion"
    refused, unreadable = parse_snapshot(data).skipped
    assert refused.key == SHAPE.key()
    assert refused.shape == SHAPE
    assert refused.config is not None
    assert refused.config.k2.num_warps == 3
    assert (unreadable.shape, unreadable.config) == (None, None)


def test_what_a_later_service_adds_beside_is_ignored() -> None:
    data = {**document(), "served_by": "kdatune 9"}
    data["champions"][0]["confidence"] = 0.95
    assert parse_snapshot(data) == snapshot()


def test_parsing_gives_way_after_every_entry() -> None:
    pauses = []
    parse_snapshot(document(), pause=lambda: pauses.append(1))
    assert len(pauses) == 4


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in _paths(inner, (*path, key)))]


PATHS = _paths(document())
junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS), junk), min_size=1, max_size=4))
def test_a_damaged_document_raises_nothing_else_and_serves_only_legal_configs(
    damage: list[tuple[tuple[Any, ...], Any]],
) -> None:
    data: Any = document()
    for path, value in damage:
        if not path:
            data = copy.deepcopy(value)
            continue
        holder = data
        try:
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = copy.deepcopy(value)
        except (TypeError, KeyError, IndexError):
            continue
    try:
        read = parse_snapshot(data)
    except SnapshotError:
        return
    for champion in read.champions:
        assert space.config_ok(champion.config, champion.shape, champion.gpu) is None
    assert len(read.champions) + len(read.skipped) == len(data["champions"])
    assert parse_snapshot(json.dumps(dump_snapshot(read))) == read


def test_the_disk_copy_reads_back() -> None:
    assert unseal(seal(document(), '"12"')) == (document(), '"12"')
    assert unseal(seal(document(), None).encode()) == (document(), None)


def test_any_change_of_the_disk_copy_is_found() -> None:
    text = seal(document(), '"12"')
    for damaged in (
        text.replace('"generation":12', '"generation":13'),
        text.replace('\\"12\\"', '\\"13\\"'),
        text[: len(text) // 2],
        "",
        "{}",
        text.replace('"sha256"', '"sha265"'),
        json.dumps({"etag": 5, "snapshot": {}, "sha256": ""}),
        json.dumps({"etag": None, "snapshot": [], "sha256": ""}),
    ):
        assert damaged != text
        with pytest.raises(SnapshotError):
            unseal(damaged)


def test_parse_json_takes_no_nan() -> None:
    with pytest.raises(SnapshotError, match="NaN is not a JSON number"):
        parse_json('{"measured_us": NaN}')


def test_the_bundled_snapshot_is_whole() -> None:
    text = Path(kdatune_kernels.__file__).with_name("bundled.json").read_bytes()
    read = parse_snapshot(text)
    assert read.skipped == ()
    assert read.gpu == H200
    assert len({(c.gpu.name, c.shape) for c in read.champions}) == len(read.champions)


def test_snapshot_errors_are_ours() -> None:
    assert issubclass(SnapshotError, KdatuneError)
    assert issubclass(SnapshotError, ValueError)
