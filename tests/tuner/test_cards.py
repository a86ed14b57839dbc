"""Which cards workers are given: what nvidia-smi lists, as far as CUDA_VISIBLE_DEVICES shows it."""

import os
from pathlib import Path

import pytest

from kdatune_kernels.errors import UsageError
from kdatune_tuner.cards import Card
from kdatune_tuner.cards import cards_of
from kdatune_tuner.cards import choose_cards
from kdatune_tuner.worker import DeviceError

# As nvidia-smi 580 prints it; the second GPU is split.
LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
  MIG 3g.71gb     Device  0: (UUID: MIG-33333333-aaaa-bbbb-cccc-000000000000)
  MIG 1g.18gb     Device  1: (UUID: MIG-44444444-aaaa-bbbb-cccc-000000000000)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-55555555-aaaa-bbbb-cccc-000000000000)
"""
TAIL = "-aaaa-bbbb-cccc-000000000000"
H200 = Card("NVIDIA H200", f"GPU-11111111{TAIL}")
A100 = Card("NVIDIA A100-SXM4-80GB", f"GPU-55555555{TAIL}")
MIG = [
    Card("NVIDIA H200 MIG 3g.71gb", f"MIG-33333333{TAIL}"),
    Card("NVIDIA H200 MIG 1g.18gb", f"MIG-44444444{TAIL}"),
]


@pytest.mark.parametrize(
    ("visible", "cards"),
    [
        (None, [H200, *MIG, A100]),
        ("2,0", [Card(A100.name, "2"), Card(H200.name, "0")]),
        (f"{A100.device}, 0", [A100, Card(H200.name, "0")]),
        ("GPU-5555", [Card(A100.name, "GPU-5555")]),
        (MIG[1].device, [MIG[1]]),
        ("0,0", [Card(H200.name, "0")]),
        ("0,7,2", [Card(H200.name, "0")]),  # CUDA stops at the first that names nothing
        ("0,-1,2", [Card(H200.name, "0")]),
        ("GPU-", []),  # names several
        ("", []),
    ],
)
def test_what_cuda_would_show(visible: str | None, cards: list[Card]) -> None:
    assert cards_of(LISTING, visible) == cards


@pytest.mark.parametrize(
    "listing", ["", "No devices found.\n", "NVIDIA-SMI has failed because it couldn't communicate\n"]
)
def test_no_cards(listing: str) -> None:
    assert cards_of(listing, None) == []


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that prints LISTING."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def test_all_or_so_many(smi: Path) -> None:
    assert choose_cards("all", replay=False) == [H200, *MIG, A100]
    assert choose_cards("2", replay=False) == [H200, MIG[0]]
    with pytest.raises(UsageError, match="--workers 5: only 4 cards are visible here"):
        choose_cards("5", replay=False)


def test_hidden_cards_are_said(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match=r"no card is visible \(CUDA_VISIBLE_DEVICES=''"):
        choose_cards("all", replay=False)


def test_without_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match=r"the cards cannot be listed: nvidia-smi.*--backend replay needs no card"):
        choose_cards("1", replay=False)


def test_a_replay_has_as_many_as_it_is_told() -> None:
    assert choose_cards("3", replay=True) == [Card("replay")] * 3
    assert len(choose_cards("all", replay=True)) == min(os.cpu_count(), 64)
    with pytest.raises(UsageError, match="--workers 65: a replay takes at most 64"):
        choose_cards("65", replay=True)


@pytest.mark.parametrize("workers", ["0", "-1", "two", "", "1.5", "99999", "²"])
def test_other_counts_are_refused(workers: str) -> None:
    with pytest.raises(UsageError, match="--workers must be all or a number from 1 on"):
        choose_cards(workers, replay=True)
