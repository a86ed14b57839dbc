"""docs/settings.md says what every setting is: made from settings.py and environment.py, and checked against the code.

To write it anew: python tests/tuner/test_settings_page.py > docs/settings.md
"""

import re
import sys
from pathlib import Path

from kdatune_kernels import environment
from kdatune_tuner.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# Settings

Read from the environment; none is needed. A value that cannot be read ends a command with a message that names it; a
launcher takes the safe side with a warning instead, since it must never end the process it runs in.

## Tuner and service

| variable | default | what it is |
|---|---|---|
"""
LAUNCHER = """
## Launcher

Read by the process that launches kernels, when it resolves its first config.

| variable | what it is |
|---|---|
"""
OTHER = """
## Of the libraries underneath

| variable | what it is |
|---|---|
| PROMETHEUS_MULTIPROC_DIR | an empty folder in which several service workers count as one for /metrics; set before they start |
| XDG_CACHE_HOME, HOME | where the launcher's disk copies lie when KDATUNE_CACHE_DIR is not set |
"""


def page() -> str:
    """The page as it should be."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "none" if field.default is None else str(field.default)
        rows.append(f"| KDATUNE_{name.upper()} | {default} | {field.description} |\n")
    launcher = []
    for line in (environment.__doc__ or "").splitlines():
        found = re.fullmatch(r"(KDATUNE_[A-Z_]+)\s+(.+)", line)
        if found:
            launcher.append(f"| {found[1]} | {found[2]} |\n")
    return HEAD + "".join(rows) + LAUNCHER + "".join(launcher) + OTHER


def test_the_page_is_of_this_code() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == page()


def test_every_variable_of_the_code_is_on_the_page() -> None:
    written = page()
    used = set()
    for folder in ("kernels", "tuner", "api", "migrations"):
        for source in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"KDATUNE_[A-Z0-9_]*[A-Z0-9]", source.read_text()))
    assert {name for name in used if f"| {name} |" not in written} == set()
    assert {name for name in environment._READ if name not in written} == set()


if __name__ == "__main__":
    sys.stdout.write(page())
