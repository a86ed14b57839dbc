"""Candidate kernels beside the shipped ones: compiled offline for sm_90, or checked and timed on a card.

    python benchmarks/candidates/judge.py --compile-only PATCH...        no card needed
    python benchmarks/candidates/judge.py PATCH... --out judged.json     on a card
    python benchmarks/candidates/judge.py PATCH... --write FOLDER        only write the patched packages
    python benchmarks/candidates/judge.py --candidate FOLDER/PACKAGE...  judge packages written before

Every PATCH is one candidate; patches joined by + are one together. On a card a candidate is first checked against the fp64
recurrence (on_card.py lists the cases) and timed only if all was right. Every candidate has processes of its own, with a
time limit, and what is finished is in the file at once: a crash or a hang takes no other candidate along. Checks run
--jobs at a time, times one at a time. Needs torch and triton and the checkout; no patch, no git.

Exit code: 0 all judged right (with --compile-only: all compile, no spill that the shipped kernel has not, no serialised wgmma),
1 some were not, 2 bad input.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
from datetime import datetime
from pathlib import Path
from typing import Any

from offline import COUNTED
from offline import KERNELS
from patched import TREE
from patched import PatchError
from patched import write_candidate

HERE = Path(__file__).resolve().parent
SHAPES = ("N=1,H=64,T=8192", "N=1,H=96,T=8192", "N=1,H=8,T=8192", "N=1,H=64,T=1024", "N=8,H=96,T=8192")
Json = dict[str, Any]


def _child(program: str, arguments: list[str], folders: list[Path], seconds: float, say: Callable[[Json], None]) -> str:
    """Run one of our programs; say gets every JSON line as it comes. Returns "ok", or how it ended otherwise."""
    places = [str(TREE / "kernels"), *dict.fromkeys(map(str, folders))]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, str(HERE / program), *arguments],
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        late = threading.Event()

        def stop() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            for line in child.stdout or ():
                with contextlib.suppress(json.JSONDecodeError):
                    say(json.loads(line, parse_constant=str))  # NaN and infinities as text: strict JSON has none
            code = child.wait()
        finally:
            timer.cancel()
        if late.is_set():
            return f"stopped after {seconds:g} s"
        if code == 0:
            return "ok"
        errors.seek(0)
        last = [line for line in errors.read().splitlines() if line.strip()][-1:]
        return f"ended with exit code {code}: {''.join(last)[:300]}"


@contextlib.contextmanager
def _packages(options: argparse.Namespace) -> Iterator[list[Path]]:
    """The candidates' package folders: those given, and those made of patches."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.write or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        given = [Path(text).resolve() for text in options.candidate]
        for path in given:
            if not (path / "space.py").is_file():
                raise PatchError(f"{path} is not a kernel package written by --write")
        yield given + [write_candidate(text, folder) for text in options.patches]


def _named(row: Json) -> Json:
    return {name: value for name, value in row.items() if name != "package"}


def _compiled(package: str, folders: list[Path], kernels: list[str], seconds: float) -> list[Json]:
    rows: list[Json] = []
    end = _child("offline.py", [package, ",".join(kernels)], folders, seconds, lambda row: rows.append(_named(row)))
    return rows if end == "ok" else [*rows, {"kernel": "-", "error": end}]


def compile_only(packages: list[Path], options: argparse.Namespace) -> Json:
    """Shipped and every candidate, kernel by kernel; of a candidate only what differs is shown."""
    document: Json = {"compiled": {}}
    shipped: list[Json] = []
    for name, folder in [("kdatune_kernels", TREE / "kernels"), *((p.name, p.parent) for p in packages)]:
        rows = _compiled(name, [folder], options.kernels, options.seconds)
        shipped = shipped or rows
        document["compiled"][name] = rows
        _write(document, options.out)
        print(f"\n{name}")  # noqa: T201  the table is this program's answer
        print(_heading())  # noqa: T201
        for row in (r for r in rows if rows is shipped or r not in shipped):
            print("\n".join(_compiled_lines(row)))  # noqa: T201
    return document


def _heading() -> str:
    return f"{'kernel':<24}{'regs':>5}{'spill':>6}{'smem':>8}{'code':>6} | loop: instr  Rmax " + " ".join(COUNTED)


def _compiled_lines(row: Json) -> list[str]:
    if "error" in row:
        return [f"{row['kernel']:<24}{row['error']}"]
    head = (
        f"{row['kernel']:<24}{row['registers']:>5}{row['spill_bytes']:>6}{row['smem_bytes']:>8}{row['instructions']:>6}"
    )
    lines = []
    for loop in row["loops"] or [{}]:
        counts = " ".join(f"{loop.get(name, 0):>{len(name)}}" for name in COUNTED)
        shown = f" |       {loop['instructions']:>5} {loop['highest_register']:>5} {counts}" if loop else ""
        lines.append(head + shown)
        head = " " * len(head)
    return lines + [f"    {warning}" for warning in row["warnings"]]


def _compiled_right(document: Json) -> bool:
    """No candidate's kernel spills more than the shipped one of its name, or is serialised."""
    allowed = {r["kernel"]: r.get("spill_bytes", 0) for r in document["compiled"]["kdatune_kernels"]}
    candidates = [rows for name, rows in document["compiled"].items() if name != "kdatune_kernels"]
    return all(
        "error" not in r and r["spill_bytes"] <= allowed.get(r["kernel"], 0) and not r["warnings"]
        for rows in candidates
        for r in rows
    )


def _write(document: Json, out: str | None) -> None:
    """Whole or not at all: whoever looks while we work sees the last finished step."""
    if out:
        path = Path(out)
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)


def on_card(packages: list[Path], options: argparse.Namespace, document: Json) -> bool:
    """Check all, then time those that were right. True if every candidate was checked right and timed."""
    lock = threading.Lock()
    document["candidates"] = {p.name: {"checks": [], "times": [], "outcome": "not run"} for p in packages}

    def step(package: Path, what: str, arguments: list[str]) -> str:
        found = document["candidates"][package.name]

        def say(line: Json) -> None:
            kept = {"check": "checks", "time": "times"}.get(line.get("step", ""))
            with lock:
                if kept:
                    found[kept].append(line)
                    _write(document, options.out)
            for text in _said(package.name, line):
                print(text, flush=True)  # noqa: T201  progress

        return _child("on_card.py", [what, package.name, *arguments], [package.parent], options.seconds, say)

    def check(package: Path) -> bool:
        end = step(package, "check", [])
        found = document["candidates"][package.name]
        wrong = [c for c in found["checks"] if c["fault"]]
        found["outcome"] = "right" if end == "ok" and not wrong else "wrong" if wrong else end
        print(f"{package.name}: {len(found['checks'])} checks, {found['outcome']}", flush=True)  # noqa: T201
        return bool(found["outcome"] == "right")

    with ThreadPoolExecutor(options.jobs) as pool:
        right = list(pool.map(check, packages))
    _write(document, options.out)
    for package in (p for p, good in zip(packages, right, strict=True) if good):
        end = step(package, "time", options.shapes)
        found = document["candidates"][package.name]
        faults = [t["fault"] for t in found["times"] if t["fault"]]
        found["outcome"] = "timed" if end == "ok" and not faults else "wrong" if faults else end
        _write(document, options.out)
    for name, found in document["candidates"].items():
        print(f"{name}: {found['outcome']}")  # noqa: T201
    return all(found["outcome"] == "timed" for found in document["candidates"].values())


def _said(name: str, line: Json) -> list[str]:
    """What a step said, for people; of the checks only what is wrong."""
    if line.get("step") == "check" and line["fault"]:
        return [f"{name}: WRONG {line['case']}, {line['config']}: {line['fault']}"]
    if line.get("step") != "time":
        return []
    if line["fault"]:
        return [f"{name}: WRONG {line['shape']}: {line['fault']}"]
    times = f"{line['shipped_us']:>9.2f} -> {line['candidate_us']:>9.2f} us  {line['speedup']:.3f}x"
    return [f"{name}: {line['shape']:<20} {line['stage']:<3} {times}"]


def _card() -> Json:
    """Date, card, versions and command. Raises PatchError without a card."""
    sys.path.insert(0, str(TREE / "kernels"))
    from kdatune_kernels import gpu
    from kdatune_kernels.errors import KdatuneError
    from kdatune_kernels.spec import to_json

    try:
        card, build = gpu.current(), gpu.current_build()
    except KdatuneError as error:
        raise PatchError(f"no card: {error}; --compile-only needs none") from None
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "gpu": to_json(card),
        "build": to_json(build),
        "command": shlex.join(sys.argv),
        "method": "shipped and candidate in one process, CUDA graphs, replays interleaved, order rotated, median of 15",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patches", nargs="*", metavar="PATCH", help="unified diffs; joined by + they are one candidate")
    parser.add_argument("--candidate", action="append", default=[], metavar="FOLDER", help="a package written before")
    parser.add_argument("--write", metavar="FOLDER", help="write the packages there; without --out only that")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=list(KERNELS), help=", ".join(KERNELS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--out", metavar="FILE.json")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="a candidate's limit for its checks, and for its times"
    )
    parser.add_argument("--jobs", type=int, default=4, help="candidates checked at a time")
    return parser


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if not options.patches and not options.candidate:
        parser.error("name a PATCH or a --candidate")
    started = time.monotonic()
    try:
        with _packages(options) as packages:
            if options.compile_only:
                return 0 if _compiled_right(compile_only(packages, options)) else 1
            if options.write and not options.out:
                print("\n".join(map(str, packages)))  # noqa: T201
                return 0
            document = _card()
            good = on_card(packages, options, document)
            document["took_s"] = round(time.monotonic() - started, 1)
            _write(document, options.out)
            return 0 if good else 1
    except PatchError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
