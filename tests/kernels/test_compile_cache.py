"""Triton's own cache: a home that cannot be written costs one warning, not the kernels."""

import os
import subprocess
import sys

PROGRAM = """
import logging, os
logging.basicConfig(level=logging.WARNING)
from kdatune_kernels.compile import compile_config
from kdatune_kernels.spec import K1Config
print(compile_config(K1Config()).registers, os.environ.get("TRITON_CACHE_DIR", "its own"))
"""


def _run(tmp_path, home):
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET")}
    environment = {**clean, "HOME": str(home), "TMPDIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    )


def test_a_home_that_cannot_be_written(tmp_path):
    """A home under a file cannot be made, not even by root."""
    (tmp_path / "file").write_text("")
    done = _run(tmp_path, tmp_path / "file" / "home")
    registers, cache = done.stdout.split(maxsplit=1)
    assert 0 < int(registers) <= 255
    assert cache.startswith(str(tmp_path / "kdatune-triton-"))
    assert done.stderr.count("cannot be written") == 1


def test_a_home_that_can(tmp_path):
    (tmp_path / "home").mkdir()
    done = _run(tmp_path, tmp_path / "home")
    assert done.stdout.endswith("its own\n")
    assert done.stderr == ""
