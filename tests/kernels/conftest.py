"""Kernel tests run on the card where there is one, else in Triton's interpreter on the CPU."""

import os

import pytest
import torch

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
