"""The disk copy: whole or not at all, and never in the way."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from loopback_service import H200
from loopback_service import OTHER
from loopback_service import SHAPE
from loopback_service import ClientMaker
from loopback_service import Service
from loopback_service import document
from loopback_service import lines
from loopback_service import snapshot
from loopback_service import watch

from kdatune_kernels import disk
from kdatune_kernels.disk import DiskCopy
from kdatune_kernels.disk import file_name


@pytest.mark.parametrize("place", ["under a file", "/proc/kdatune", "no home"])
def test_a_home_that_cannot_be_written_costs_one_warning(
    place: str, service: Service, make_client: ClientMaker, tmp_path: Path, caplog
) -> None:
    (tmp_path / "file").write_text("")
    directory = {"under a file": tmp_path / "file" / "cache", "/proc/kdatune": Path(place), "no home": None}[place]
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url, cache_dir=directory)
    feed = watch(client)
    service.documents[H200.name] = document(8, {SHAPE: 4})
    client.refresh(60)
    assert feed.service == snapshot(8, {SHAPE: 4})
    assert client.copy.errors >= 2
    warnings = [line for line in lines(caplog) if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "snapshot copy" in warnings[0]


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 100, b'{"etag": null, "snapshot": {}, "sha256": "0"}'])
def test_a_damaged_copy_is_left_alone_and_replaced(
    content: bytes, service: Service, make_client: ClientMaker, tmp_path: Path, caplog
) -> None:
    path = tmp_path / "cache" / "NVIDIA_H200.json"
    path.parent.mkdir()
    path.write_bytes(content)
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)
    feed = client.watch(H200)
    assert feed.disk is None
    client.refresh(60)
    assert DiskCopy(path.parent).read(H200.name) == (snapshot(7, {SHAPE: 3}), '"7"')
    assert len([line for line in lines(caplog) if str(path) in line]) == 1


def test_readers_of_the_copy_see_the_old_or_the_new_one(tmp_path: Path) -> None:
    documents = [document(n, {SHAPE: n, OTHER: n + 1}) for n in (1, 2)]
    copies = [DiskCopy(tmp_path) for _ in range(3)]
    copies[0].write(H200.name, documents[0], None)
    stop = threading.Event()

    def write(copy: DiskCopy, data: dict[str, object]) -> None:
        while not stop.is_set():
            copy.write(H200.name, data, None)

    writers = [threading.Thread(target=write, args=pair) for pair in zip(copies[:2], documents, strict=True)]
    for writer in writers:
        writer.start()
    seen = [copies[2].read(H200.name) for _ in range(200)]
    stop.set()
    for writer in writers:
        writer.join()
    assert all(kept is not None and kept[0].generation in (1, 2) for kept in seen)
    assert [copy.errors for copy in copies] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["NVIDIA_H200.json"]


def test_a_copy_larger_than_any_service_sends_is_not_read(tmp_path: Path, monkeypatch, caplog) -> None:
    copy = DiskCopy(tmp_path)
    assert copy.write(H200.name, document(7, {SHAPE: 3}), '"7"')
    whole = len((tmp_path / "NVIDIA_H200.json").read_bytes())
    monkeypatch.setattr(disk, "MAX_COPY_BYTES", whole)
    assert copy.read(H200.name) == (snapshot(7, {SHAPE: 3}), '"7"')
    monkeypatch.setattr(disk, "MAX_COPY_BYTES", whole // 2)
    assert copy.read(H200.name) is None
    assert len(lines(caplog)) == 1


def test_only_a_changed_copy_is_read_again(tmp_path: Path) -> None:
    writer, reader = DiskCopy(tmp_path), DiskCopy(tmp_path)
    assert reader.read_changed(H200.name) is None
    for generation in (7, 8):
        writer.write(H200.name, document(generation, {SHAPE: 3}), None)
        assert reader.read_changed(H200.name) == (snapshot(generation, {SHAPE: 3}), None)
        assert reader.read_changed(H200.name) is None
    (tmp_path / "NVIDIA_H200.json").write_text("damaged")
    assert reader.read_changed(H200.name) is None
    assert reader.errors == 1


@settings(deadline=None)
@given(st.text(max_size=600))
def test_any_gpu_name_makes_a_sound_file_name(name: str) -> None:
    made = file_name(name)
    assert len(made) <= 105
    assert made.isascii()
    assert Path(made).name == made
    assert not made.startswith(".")
    assert made.endswith(".json")
