"""Reports recorded on an H200, and an `ncu` that plays them back or fails as the real one does."""

import json
import lzma
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_shape
from kdatune_tuner.ncu.collect import Stage
from kdatune_tuner.ncu.explain import Profiled
from kdatune_tuner.ncu.report import StageProfile
from kdatune_tuner.ncu.report import read_report
from kdatune_tuner.objective import stage_of

DATA = Path(__file__).parent.parent.parent / "data" / "ncu"
INDEX = json.loads((DATA / "h200.json").read_text())


@dataclass(frozen=True)
class Recorded:
    """A recorded report: which shape, which configs, its bytes and what the reader makes of them."""

    name: str
    shape: Shape
    gpu: Gpu
    configs: dict[str, LaunchConfig]
    content: bytes
    stages: dict[str, StageProfile]

    def profiled(self, label: str, stage: str) -> Profiled:
        config = stage_of(self.configs[label], stage)
        return Profiled(label, stage, config, self.stages[Stage(stage, config).name].counters)


def load(name: str) -> Recorded:
    entry = INDEX["reports"][name]
    content = lzma.decompress((DATA / f"{name}.ncu-rep.xz").read_bytes())
    configs = {label: from_json(LaunchConfig, data, strict=False) for label, data in entry["configs"].items()}
    # A launch is labelled with the hash of its config; a config field added since changes the hash, not the length
    for label, config in configs.items():
        for stage, recorded in entry["labels"][label].items():
            content = content.replace(recorded.encode(), Stage(stage, stage_of(config, stage)).label.encode())
    stages = read_report(content)
    assert isinstance(stages, dict)
    return Recorded(name, parse_shape(entry["shape"]), KNOWN_GPUS[INDEX["gpu"]], configs, content, stages)


@pytest.fixture(scope="session")
def t1024() -> Recorded:
    return load("h200-t1024")


@pytest.fixture(scope="session")
def t8192() -> Recorded:
    return load("h200-t8192")


NcuMaker = Callable[..., str]

_SCRIPT = '''#!{python}
"""Stands in for ncu: says its version, answers for the target, prints what it is told, leaves the report it is told."""
import json, sys
from pathlib import Path

if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute Command Line Profiler")
    print("Copyright (c) 2018-2025 NVIDIA Corporation")
    print("Version 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit(0)
here = Path(__file__).parent
told = json.loads((here / "told.json").read_text())
(here / "command.json").write_text(json.dumps(sys.argv))
request = json.loads(Path(sys.argv[-1]).read_text())
(here / "request.json").write_text(json.dumps(request))
print(told["output"], flush=True)
if told["answer"] is not None:
    answer = dict(told["answer"])
    if "outcomes" in answer:
        names = [f"{{s['stage']}}/{{s['label']}}" for s in request["stages"]]
        answer["outcomes"] = {{n: {{"outcome": "ok", "detail": None}} for n in names}} | answer["outcomes"]
    Path(request["answer"]).write_text(json.dumps(answer))
if told["report"] is not None:
    Path(sys.argv[sys.argv.index("--export") + 1]).write_bytes((here / told["report"]).read_bytes())
sys.exit(told["exit_code"])
'''

ANSWER = {"outcomes": {}, "gpu": {"name": "NVIDIA H200"}, "build": {"driver": INDEX["driver"]}}


@pytest.fixture
def make_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NcuMaker:
    """An executable `ncu`, first on the PATH, that behaves as it is told. Returns its folder's path."""

    def make(
        *,
        output: str = "",
        exit_code: int = 0,
        report: bytes | None = None,
        answer: dict | None = None,
    ) -> str:
        folder = tmp_path / "fake-ncu"
        folder.mkdir(exist_ok=True)
        if report is not None:
            (folder / "recorded.ncu-rep").write_bytes(report)
        told = {
            "output": output,
            "exit_code": exit_code,
            "report": None if report is None else "recorded.ncu-rep",
            "answer": answer,
        }
        (folder / "told.json").write_text(json.dumps(told))
        program = folder / "ncu"
        program.write_text(_SCRIPT.format(python=sys.executable))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        return str(folder)

    return make


# What the real one prints without permission (Nsight Compute 2025.3; the text is the same since 2020).
_PERMISSION = """\
==PROF== Connected to process 467 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device \
0. For instructions on enabling permissions and to get more information see https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 467
==WARNING== No kernels were profiled."""


@pytest.fixture
def no_permission(make_ncu: NcuMaker) -> str:
    """An ncu that may not read the counters: the target runs, nothing is profiled, the exit code is 1."""
    return make_ncu(output=_PERMISSION, exit_code=1, answer=ANSWER)


@pytest.fixture
def playing_back(make_ncu: NcuMaker, t1024: Recorded) -> str:
    """An ncu that leaves the report of a real card."""
    return make_ncu(output="==PROF== Report: stages.ncu-rep", report=t1024.content, answer=ANSWER)


@pytest.fixture
def answer() -> dict:
    """What the profiled process answers when all went well."""
    return dict(ANSWER)
