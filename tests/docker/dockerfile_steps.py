"""Carries out a Dockerfile's steps in a folder of this machine instead of a container.

What is absolute in ENV, WORKDIR and COPY is taken to lie in the folder; a RUN line must name such places by their variables,
then it runs here as it is written. What USER, ENTRYPOINT, CMD and HEALTHCHECK say is run by `start` and `check`: as that
user, who may write nowhere but in HOME and /tmp, as in a container whose root file system is read-only.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
_OURS = ("/opt/", "/var/lib/kdatune")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True)
class Step:
    """One instruction, its lines joined."""

    instruction: str
    value: str


def steps_of(name: str) -> list[Step]:
    """The instructions of docker/<name>, without comments."""
    parser = DockerfileParser(fileobj=io.BytesIO((DOCKER / name).read_bytes()))
    return [Step(s["instruction"], s["value"]) for s in parser.structure if s["instruction"] != "COMMENT"]


@dataclass
class Image:
    """What the steps of a Dockerfile leave behind, and how it is started."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: Path = Path("/")
    user: int = 0
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    health: tuple[str, ...] = ()

    def place(self, path: str) -> str:
        """Where a path of the image lies here."""
        return f"{self.folder}{path}" if path.startswith(_OURS) else path

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a process in the image: nothing of this one's but how the package index is reached."""
        outside = {n: v for n, v in os.environ.items() if n.startswith(("PIP_", "SSL_", "UV_")) or n.endswith("_proxy")}
        return outside | self.env | more

    def start(self, arguments: Iterable[str] | None = None, **options: object) -> "subprocess.Popen[str]":
        """Start the ENTRYPOINT with the arguments, or with CMD, as USER."""
        command = [*self.entrypoint, *(self.cmd if arguments is None else arguments)]
        return self._popen(command, **options)

    def call(self, arguments: Iterable[str] | None = None, **more: str) -> "subprocess.CompletedProcess[str]":
        """Run the ENTRYPOINT with the arguments to its end."""
        process = self.start(arguments, env=more)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def healthy(self, **more: str) -> bool:
        """Whether the HEALTHCHECK says so."""
        process = self._popen(self.health, env=more)
        process.communicate(timeout=60)
        return process.returncode == 0

    def _popen(self, command: Iterable[str], env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        first, *rest = command
        environment = self.environment(**(env or {}))
        found = shutil.which(first, path=environment["PATH"])
        assert found, f"{first} is not in {environment['PATH']}"
        return subprocess.Popen(
            [*self.as_user(), found, *rest],
            env=environment,
            cwd=self.workdir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def as_user(self) -> list[str]:
        """What makes a command run as USER, where that is possible: who may read all, the interpreter may be root's."""
        if os.geteuid() != 0:
            return []
        become = [f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        return ["setpriv", *become, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--"]


def build(name: str, folder: Path, between: Mapping[str, Path] | None = None) -> Image:
    """Carry out docker/<name> in the folder. Both stages share it, as COPY --from would make it.

    apt-get is left out: its packages are the base's matter. `between` maps the beginning of a RUN line to a folder of
    packages that the environment it has just made sees from then on.

    Raises:
        subprocess.CalledProcessError: a RUN line failed; its output is in the error.
    """
    interpreters = folder / "usr" / "bin"
    interpreters.mkdir(parents=True)
    for alias in ("python", "python3"):
        (interpreters / alias).symlink_to(getattr(sys, "_base_executable", sys.executable))
    base_path = f"{interpreters}:/usr/sbin:/usr/bin:/sbin:/bin"
    image = Image(folder)
    arguments: dict[str, str] = {}
    for step in steps_of(name):
        known = arguments | image.env
        match step.instruction:
            case "FROM":
                image, arguments = Image(folder, {"PATH": base_path, "HOME": os.environ.get("HOME", "/root")}), {}
            case "ARG":
                key, _, value = step.value.partition("=")
                arguments[key] = value
            case "ENV":
                for pair in step.value.split():
                    key, _, value = pair.partition("=")
                    parts = _expand(value, known).split(":") if key == "PATH" else [_expand(value, known)]
                    image.env[key] = ":".join(image.place(part) for part in parts)
            case "WORKDIR":
                image.workdir = Path(image.place(step.value))
                image.workdir.mkdir(parents=True, exist_ok=True)
            case "COPY":
                _copy(step.value, image)
            case "RUN":
                _run(step.value, image, arguments, between or {})
            case "USER":
                image.user = int(step.value.partition(":")[0])
            case "ENTRYPOINT":
                image.entrypoint = tuple(json.loads(step.value))
            case "CMD":
                image.cmd = tuple(json.loads(step.value))
            case "HEALTHCHECK":
                _, _, command = step.value.partition("CMD ")
                image.health = tuple(json.loads(command)) if command else ()
            case "LABEL" | "EXPOSE" | "STOPSIGNAL":
                pass
            case other:
                raise AssertionError(f"{other}: not known here; teach it to {__name__}")
    return image


def _expand(value: str, known: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: known.get(found[1] or found[2], ""), value)


def _copy(value: str, image: Image) -> None:
    *sources, target = [part for part in value.split() if not part.startswith("--")]
    if "--from=" in value:
        assert Path(image.place(sources[0])).exists(), value
        return
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in sources:
        assert f"!{source}" in ignored, f".dockerignore keeps {source} out of the build"
        to = image.workdir / target
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / source, to)


def _run(line: str, image: Image, arguments: Mapping[str, str], between: Mapping[str, Path]) -> None:
    line = re.sub(r"^(--\S+\s+)+", "", line)
    if line.startswith("apt-get"):
        return
    if os.geteuid() != 0:
        line = re.sub(r" -[og] \d+", "", line)  # only root may give a folder away
    subprocess.run(
        ["/bin/sh", "-c", line],
        env=image.environment(**arguments),
        cwd=image.workdir,
        check=True,
        capture_output=True,
        text=True,
        timeout=280,
    )
    for beginning, packages in between.items():
        if line.startswith(beginning):
            (site,) = Path(image.env["VIRTUAL_ENV"]).glob("lib/python3.*/site-packages")
            (site / "of-this-machine.pth").write_text(f"{packages}\n")
