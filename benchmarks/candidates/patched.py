"""A copy of the kernel package under another name with a patch in it, so that shipped and candidate share one process.

Stdlib only, with its own reading of unified diffs: a machine with a card need not have patch or git.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
SHIPPED = "kdatune_kernels"
_PACKAGE = TREE / "kernels" / SHIPPED
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class PatchError(Exception):
    """A candidate that cannot be made: no such patch, no unified diff, or a place that is not in the sources."""


@dataclass(frozen=True)
class _Hunk:
    line: int
    before: tuple[str, ...]
    after: tuple[str, ...]


def package_name(label: str) -> str:
    """The candidate's package name for a label such as k2-waits or k2-waits+seg-mma-v2."""
    return "kdatune_candidate_" + re.sub(r"\W", "_", label)


def label_of(text: str) -> str:
    """The label of one command-line argument: patches joined by + become one candidate."""
    return "+".join(Path(part).name.removesuffix(".patch") for part in text.split("+"))


def write_candidate(text: str, folder: Path) -> Path:
    """Write the package patched by one argument (patches joined by +) into a folder; returns the package's folder.

    Raises:
        PatchError: with the patch, the file and the line that does not fit.
    """
    target = folder / package_name(label_of(text))
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(_PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    for part in text.split("+"):
        _apply(Path(part), target)
    name = re.compile(rf"\b{SHIPPED}\b")
    for path in target.rglob("*.py"):
        path.write_text(name.sub(target.name, path.read_text(encoding="utf-8")), encoding="utf-8")
    return target


def _apply(patch: Path, package: Path) -> None:
    try:
        lines = patch.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"{patch} cannot be read: {error}") from None
    files = _parse(patch, lines)
    if not files:
        raise PatchError(f"{patch.name} has no hunk: write it by `git diff` from the root of the tree")
    prefix = f"kernels/{SHIPPED}/"
    for name, hunks in files.items():
        if not name.startswith(prefix) or ".." in name:
            raise PatchError(f"{patch.name} changes {name}: a candidate changes files of {prefix} only")
        path = package / name.removeprefix(prefix)
        path.write_text(_changed(patch, name, path, hunks), encoding="utf-8")


def _parse(patch: Path, lines: list[str]) -> dict[str, list[_Hunk]]:
    """Hunks by the path after the change. What stands before a file's first hunk is comment."""
    files: dict[str, list[_Hunk]] = {}
    name, i = "", 0
    while i < len(lines):
        line = lines[i]
        i += 1
        if line.startswith("+++ "):
            name = line[4:].split("\t")[0].strip().removeprefix("b/")
            continue
        match = _HUNK.match(line)
        if not match:
            continue
        if not name:
            raise PatchError(f"{patch.name} line {i}: a hunk without a +++ line before it")
        want_before, want_after = (int(x) if x is not None else 1 for x in match.group(2, 3))
        before: list[str] = []
        after: list[str] = []
        while len(before) < want_before or len(after) < want_after:
            if i == len(lines):
                raise PatchError(f"{patch.name} ends inside a hunk of {name}")
            mark, rest = lines[i][:1] or " ", lines[i][1:]
            i += 1
            if mark not in " +-\\":
                raise PatchError(f"{patch.name} line {i}: {mark!r} cannot begin a line of a hunk")
            if mark in " -":
                before.append(rest)
            if mark in " +":
                after.append(rest)
        files.setdefault(name, []).append(_Hunk(int(match.group(1)), tuple(before), tuple(after)))
    return files


def _changed(patch: Path, name: str, path: Path, hunks: list[_Hunk]) -> str:
    """The text after the hunks. A hunk may have moved, but what it replaces must stand there word for word, once."""
    text = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    moved = 0
    for hunk in hunks:
        old = list(hunk.before)
        at = max(hunk.line - 1 + moved, 0)
        if text[at : at + len(old)] != old:
            places = [i for i in range(len(text) - len(old) + 1) if text[i : i + len(old)] == old]
            if len(places) != 1:
                found = "is not there" if not places else f"is there {len(places)} times"
                raise PatchError(
                    f"{patch.name} does not apply: what it replaces at line {hunk.line} of {name} {found}; "
                    "make the patch anew from this tree"
                )
            at = places[0]
        text[at : at + len(old)] = hunk.after
        moved = at + len(hunk.after) - len(old) - (hunk.line - 1)
    return "\n".join(text) + "\n"
