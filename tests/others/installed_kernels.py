"""Distributions with kernels, as an installer leaves them."""

from pathlib import Path


def distribution(folder: Path, name: str, version: str, points: dict[str, str]) -> Path:
    """What an installer writes about a distribution with these entry points; the folder belongs on sys.path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{point} = {value}\n" for point, value in points.items())
    (info / "entry_points.txt").write_text(f"[kdatune.kernels]\n{lines}")
    return folder
