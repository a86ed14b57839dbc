"""The example kernel of docs/kernels-of-others.md as an installed distribution, on the card or in Triton's interpreter."""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from installed_kernels import distribution

from kdatune_kernels.tunable import Installed
from kdatune_kernels.tunable import registry

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is imported, so before any test module is

EXAMPLE = Path(__file__).parent.parent / "example_kernel"


@pytest.fixture(autouse=True)
def _card(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("NO CARD: this test needs a CUDA device")


@pytest.fixture(scope="session")
def example_paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What must be on sys.path so that the example is installed, as its pyproject.toml says it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("installed")
    distribution(folder, project["name"], project["version"], project["entry-points"]["kdatune.kernels"])
    return [str(EXAMPLE), str(folder)]


@pytest.fixture
def rmsnorm(example_paths: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """The example, installed in this process and in those that it starts."""
    for path in example_paths:
        monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*example_paths, *filter(None, [os.environ.get("PYTHONPATH")])]))
    registry.cache_clear()
    yield registry().require("rmsnorm")
    registry.cache_clear()


@pytest.fixture
def nothing_installed() -> Iterator[None]:
    """No kernel of others in this process."""
    registry.cache_clear()
    assert dict(registry().kernels) == {}
    yield
    registry.cache_clear()
