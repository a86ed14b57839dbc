"""Kernel tests run on the card where there is one, else in Triton's interpreter on the CPU."""

import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loopback_service import ClientMaker
from loopback_service import Service

from kdatune_kernels.client import Client
from kdatune_kernels.environment import Settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, so before any test module is

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def _card(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and DEVICE == "cpu":
        pytest.skip("NO CARD: this test needs a CUDA device")


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.close()


@pytest.fixture
def make_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[ClientMaker]:
    """Clients with a cache directory of the test, closed at its end."""
    caplog.set_level(logging.INFO, "kdatune")
    made: list[Client] = []

    def make(url: str | None, **settings: object) -> Client:
        made.append(Client(dataclasses.replace(Settings(url, tmp_path / "cache"), **settings)))
        return made[-1]

    yield make
    for client in made:
        client.close()
