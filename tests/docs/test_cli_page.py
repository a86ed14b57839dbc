"""docs/cli.md is what `--help` says, command by command.

To write it anew: make docs, or python tests/docs/test_cli_page.py > docs/cli.md
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from kdatune_tuner.cli import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
WIDTH = 110
HEAD = """# Commands

What `--help` says of every command. A shape is written `N=1,H=96,T=8192`, with any of `HV`, `K`, `V`, `dtype`, `varlen`,
`initial_state` and `final_state` behind it where it is not the usual one; T counts the tokens of all sequences together. A GPU
model is written as `nvidia-smi` names it. Times are written `90s`, `10m` or `1h30m`.

| exit code | means |
|---|---|
| 0 | done |
| 1 | failed; stderr says why, and what to do |
| 2 | wrong usage: an option, a shape or a file that cannot be |
| 3 | `kdatune nightly` only: done, and regressions were found |
| 130 | interrupted by Ctrl-C or SIGTERM; what is finished is stored |

With `--json` a command prints one JSON document on stdout and nothing else; what is meant for people goes to stderr. Settings
are environment variables: [settings.md](settings.md).
"""


def commands(group: Any = None, path: tuple[str, ...] = ("kdatune",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that name it, in the order of `--help`."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if command.hidden:
            continue
        subcommands = hasattr(command, "commands")
        if not subcommands or command.invoke_without_command:
            yield (*path, name), command
        if subcommands:
            yield from commands(command, (*path, name))


def page() -> str:
    """The page as it should be."""
    root = typer.main.get_command(app)
    context_of = type(root.make_context("kdatune", [], resilient_parsing=True))
    parts = [HEAD]
    for words, command in commands():
        context = context_of(command, info_name=" ".join(words), terminal_width=WIDTH, max_content_width=WIDTH)
        said = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        parts.append(f"\n## {' '.join(words)}\n\n```text\n{said}\n```\n")
    return "".join(parts)


def test_the_page_is_of_this_code() -> None:
    assert PAGE.read_text() == page(), "make docs writes it anew"


def test_every_command_and_option_is_on_the_page_with_its_meaning() -> None:
    written = PAGE.read_text()
    for words, command in commands():
        section = written.split(f"\n## {' '.join(words)}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            name = parameter.opts[0]
            assert re.search(rf"^  (-\w, )?{re.escape(name)}(,| ).*\w", section, re.MULTILINE), f"{words} {name}"
            assert getattr(parameter, "help", None), f"{' '.join(words)} {name} has no help"


def test_every_command_is_in_the_readme() -> None:
    table = (PAGE.parents[1] / "README.md").read_text().split("## Commands")[1].split("\n## ")[0]
    verbs = {words[1] for words, _ in commands()}
    assert {verb for verb in verbs if f"`kdatune {verb}" not in table} == set()


if __name__ == "__main__":
    sys.stdout.write(page())
