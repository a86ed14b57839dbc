"""docs/kernels-of-others.md shows the example as it is: its code blocks are the text of the files."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kernels-of-others.md").read_text()
EXAMPLE = ROOT / "tests" / "example_kernel"
BLOCK = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_file_of_the_example_is_shown_as_it_is() -> None:
    shown = dict(BLOCK.findall(PAGE))
    files = {str(path.relative_to(EXAMPLE)) for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")}
    assert set(shown) == files - {"rmsnorm_kernel/__init__.py"}
    for name, text in shown.items():
        assert text == (EXAMPLE / name).read_text(), name


def test_every_part_of_a_kernel_is_explained() -> None:
    from kdatune_kernels.tunable import TunableKernel

    told = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    parts = set(TunableKernel.__annotations__) | {name for name in vars(TunableKernel) if not name.startswith("_")}
    assert told == parts - {"name"}
