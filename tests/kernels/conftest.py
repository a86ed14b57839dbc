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

from kdatune_kernels import client as client_module
from kdatune_kernels import transport
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


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """What a test draws at random beside its sample is the same each time: its error has a gate to stay within."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    """What a test puts in place of a launch is called: no call before it left a plan."""
    from kdatune_kernels import repeated

    repeated.forget()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is too busy for some seconds is no service that is gone; the tests of time-outs make them short."""
    monkeypatch.setattr(transport, "TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(transport, "WHOLE_SECONDS", 60.0)
    monkeypatch.setattr(client_module, "FIRST_RETRY_SECONDS", 300.0)  # and nothing is asked or told unasked meanwhile
    monkeypatch.setattr(client_module, "REPORT_SECONDS", 300.0)


@pytest.fixture
def service(patience: None) -> Iterator[Service]:
    running = Service()
    yield running
    running.close()


@pytest.fixture
def make_client(tmp_path: Path, patience: None, caplog: pytest.LogCaptureFixture) -> Iterator[ClientMaker]:
    """Clients with a cache directory of the test, closed at its end."""
    caplog.set_level(logging.INFO, "kdatune")
    made: list[Client] = []

    def make(url: str | None, **settings: object) -> Client:
        made.append(Client(dataclasses.replace(Settings(url, tmp_path / "cache"), **settings)))
        return made[-1]

    yield make
    for client in made:
        client.close()
