"""The images, built outside a container, once for all tests of the folder."""

import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from dockerfile_steps import Image
from dockerfile_steps import build


@pytest.fixture(scope="session")
def image_folder() -> Iterator[Path]:
    """A folder that the image's user may enter (pytest's own is closed to others)."""
    folder = Path(tempfile.mkdtemp(prefix="kdatune-image-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def api_image(image_folder: Path) -> Image:
    """docker/Dockerfile.api with all its steps: the service installed from the package index, without torch."""
    return build("Dockerfile.api", image_folder / "api")


@pytest.fixture(scope="session")
def tuner_image(image_folder: Path) -> Image:
    """docker/Dockerfile.tuner, with the packages that are here already: torch is gigabytes."""
    here = Path(sysconfig.get_path("purelib"))
    return build("Dockerfile.tuner", image_folder / "tuner", {"python3 -m venv": here})
