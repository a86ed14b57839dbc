"""Every kdatune command line that is written down can be typed: its verb exists, and so do its options and their values.

Where: README, docs/, docker/ with its schedules and manifests, and what messages and pages of the code tell people to run.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml
from dockerfile_steps import steps_of

from kdatune_kernels.spec import parse_shape
from kdatune_tuner.cli import app
from kdatune_tuner.cli_support import parse_seconds

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
GROUP = typer.main.get_command(app)
_SPAN = re.compile(r"`(kdatune [^`]+)`")
_LINE = re.compile(r"(?:^|&& |-- |ExecStart=|ExecStartPre=)(?:[\w./-]*/)?kdatune\s+(?P<arguments>[a-z-].*)$")
_COMPOSE = re.compile(r"docker compose .*\brun --rm (?P<service>nightly|migrate|api|token)\b(?P<arguments>.*)$")


@dataclass(frozen=True)
class Written:
    """A command line and where it is. whole: it is all there, so it must be complete, too."""

    where: str
    arguments: tuple[str, ...]
    whole: bool = True


def in_blocks(path):
    """The commands in a page's code blocks; continued lines are joined."""
    text = path.read_text().replace("\\\n", " ")
    fenced = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(
        r"^ {4}(\S.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    for line in [*"".join(fenced).splitlines(), *indented]:
        yield from in_line(path, line)


def in_line(path, line, *, whole=True):
    """The kdatune command of a shell line, without what is said about it, where it goes and what comes after it."""
    line = re.sub(r"\s+#\s.*$|\s{2,}\S.*$", "", line.strip()).removesuffix("\\")
    found = _COMPOSE.search(line) or _LINE.search(line)
    if found and not found["arguments"].startswith("serves on"):
        arguments = re.split(r"\s(?:\d?>|<|\||\|\||&&|;)(?:\s|&|$)", found["arguments"])[0].strip()
        if arguments:
            yield Written(str(path), tuple(shlex.split(arguments)), whole)


def in_spans(path):
    """The commands that a page or a message names in backticks; a message's values are left open."""
    text = re.sub(r"\"\s*\n\s*f?\"", "", path.read_text())
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in _SPAN.findall(text.replace("\n", " ") if path.suffix == ".md" else text):
        if "{" not in span:
            yield Written(str(path), tuple(span.split()[1:]), whole=False)


def in_docker():
    """What the containers and the schedules run."""
    for name in ("Dockerfile.api", "Dockerfile.tuner"):
        (command,) = (json.loads(s.value) for s in steps_of(name) if s.instruction == "CMD")
        yield Written(name, tuple(command))
    for name, service in yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"].items():
        if "command" in service:
            yield Written(f"compose.yaml {name}", tuple(service["command"]))
    for path in (DOCKER / "kubernetes").iterdir():
        for document in yaml.safe_load_all(path.read_text()):
            for arguments in arguments_of(document):
                yield Written(path.name, tuple(arguments))
    for path in DOCKER.rglob("*"):
        if path.is_file():
            for line in path.read_text().splitlines():
                yield from in_line(path, line.lstrip("# "))


def arguments_of(node):
    if isinstance(node, dict):
        if isinstance(node.get("args"), list):
            yield node["args"]
        for value in node.values():
            yield from arguments_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from arguments_of(value)


def everything():
    pages = [ROOT / "README.md", *(p for p in (ROOT / "docs").rglob("*.md") if p.name not in ("cli.md", "api.md"))]
    for page in pages:
        yield from in_blocks(page)
        yield from in_spans(page)
    yield from in_docker()
    for part in ("kernels", "tuner", "api"):
        for path in [*(ROOT / part).rglob("*.py"), *(ROOT / part).rglob("*.html")]:
            yield from in_spans(path)


def leaf(arguments):
    """The command that the arguments name, and those that are its own."""
    command, rest = GROUP, list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no command {rest[0]!r} in {' '.join(arguments)!r}"
        command = command.commands[rest.pop(0)]
    return command, rest


def check(written):
    """Raise AssertionError where the line cannot be typed."""
    command, rest = leaf(written.arguments)
    said = " ".join(written.arguments)
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("-")} | {"--help"}
    names = [part.partition("=")[0] for part in rest if part.startswith("--")]
    assert set(names) <= options, f"{written.where}: {said}: no option {sorted(set(names) - options)}"
    if not written.whole or "--version" in rest or "--help" in rest:
        return
    runs = not hasattr(command, "commands") or command.invoke_without_command
    assert runs, f"{written.where}: {said} is not complete"
    try:
        given = command.make_context(" ".join(written.arguments), list(rest)).params
        shapes = given.get("shape") or []
        for text in [shapes] if isinstance(shapes, str) else shapes:
            parse_shape(text)
        if given.get("budget"):
            parse_seconds(given["budget"], "--budget")
    except Exception as error:  # typer does not hand out the classes of its parser's errors
        raise AssertionError(f"{written.where}: kdatune {said}: {error}") from error


def test_every_command_line_that_is_written_down_can_be_typed():
    found = list(everything())
    wrong = []
    for written in found:
        try:
            check(written)
        except AssertionError as error:
            wrong.append(str(error))
    assert wrong == []
    where = {Path(written.where.split()[0]).name for written in found}
    assert {
        "README.md", "quick-start.md", "operate.md", "install.md", "troubleshooting.md", "Dockerfile.api",
        "Dockerfile.tuner", "compose.yaml", "api.yaml", "nightly.yaml", "fleet.yaml", "kdatune.crontab",
        "kdatune-nightly.service", "kdatune.service", "compose.profiling.yaml", "address.py", "base.html",
    } - where <= {"base.html"}  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        "nosuch",
        "tune --no-such-option",
        "tune --shape N=1",
        "token create",
        "tune --budget soon",
        "db",
        "serve --port many",
    ],
)
def test_a_line_that_cannot_be_typed_is_seen(arguments):
    with pytest.raises(AssertionError):
        check(Written("here", tuple(arguments.split())))


def test_lines_are_found_where_they_are(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Say `kdatune db\nupgrade` first.\n\n    kdatune tune --shape N=1,H=8,T=64      # a comment\n"
        "    kdatune serves on http\n\n"
        "```\nkubectl exec deploy/kdatune-api -- kdatune token list\n"
        "docker compose -f x run --rm nightly doctor > log 2>&1 || echo\n```\n"
    )
    assert [written.arguments for written in in_blocks(page)] == [
        ("token", "list"),
        ("doctor",),
        ("tune", "--shape", "N=1,H=8,T=64"),
    ]
    assert [written.arguments for written in in_spans(page)] == [("db", "upgrade")]
