"""What the installed kernels and the timing protocol are, as a build names them. Stdlib only: a service asks it too."""

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

PROTOCOL = "1"
"""Version of the timing protocol in bench.py; a change makes every stored time stale."""

KERNEL_SOURCES = (
    "fused_prepare_sm90.py",
    "fused_sm90.py",
    "numerics.py",
    "pairs_sm90.py",
    "prepare.py",
    "prepare_sm90.py",
    "recurrence.py",
    "recurrence_sm90.py",
    "segments.py",
    "segments_sm90.py",
)
"""The files that decide what is launched."""


@functools.cache
def kernel_hash() -> str:
    """Identity of the kernel sources, 16 hex digits: their code without comments and docstrings, which launch nothing."""
    here = Path(__file__).parent
    return hash_of_sources([here / name for name in KERNEL_SOURCES])


def hash_of_sources(files: Iterable[Path]) -> str:
    """Identity of Python files by name and code, 16 hex digits. Raises OSError, SyntaxError or ValueError for others."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{code_of(path.read_text(encoding='utf-8'))}\0".encode())
    return digest.hexdigest()[:16]


def code_of(source: str) -> str:
    """A module's code in one normal form: no comments, no docstrings, one layout, alike under every Python."""
    tree = _Unquoted().visit(ast.parse(source))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [line for line in body if not _is_text(line)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


class _Unquoted(ast.NodeTransformer):
    """f-strings as tuples of their parts: how `ast.unparse` quotes them changed with Python 3.12."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        self.generic_visit(node)
        return ast.Tuple(node.values, ast.Load())

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        self.generic_visit(node)
        return ast.Tuple(
            [node.value, ast.Constant(node.conversion), node.format_spec or ast.Constant(None)], ast.Load()
        )


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
