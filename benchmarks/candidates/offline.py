"""What a kernel package costs on sm_90 without a card: registers, spills, shared memory, and its loops in machine code.

Run as a program, `offline.py PACKAGE KERNEL,... [PACKAGE KERNEL,...]`: one JSON line a kernel, of packages on the import path.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
K2_TILES = ("64", "64r128", "128w8", "128c2")
# Shapes whose default config is compiled, every stage: there a changed default shows, or a fused kernel.
DEFAULTS = {"default one wave": (1, 64, 8192), "default many chains": (64, 96, 65536)}
KERNELS = ("k1 cp_async", "k1 tma", *(f"k2 {tile}" for tile in K2_TILES), "pass A", "pass B", *DEFAULTS)

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_MATRIX = ("HGMMA", "HMMA")
# What the counts of a loop are called, and the first words of the instructions they count.
COUNTED = {
    "hgmma": ("HGMMA",),
    "hmma": ("HMMA",),
    "barriers": ("BAR",),
    "fences": ("MEMBAR", "FENCE"),
    "arrives": ("WARPGROUP.ARRIVE",),
    "wgmma_waits": ("WARPGROUP.DEPBAR",),
    "mbarrier_ops": ("SYNCS",),
    "shared_loads": ("LDS", "LDSM"),
    "shared_stores": ("STS", "STSM"),
    "spilled": ("LDL", "STL"),
}


def loops(sass: str) -> list[dict[str, int]]:
    """Innermost loops with matrix instructions in them: instructions, highest register, and the counts of COUNTED.

    An instruction is counted once, whether or not a branch inside the loop may skip it.
    """
    code: list[tuple[str, str]] = []
    conditional = set()
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label.group(1)] = len(code)
        found = _LINE.search(line)
        if found:
            if found.group(1):
                conditional.add(len(code))
            code.append((found.group(2), found.group(3)))
    spans = []
    for i, (word, rest) in enumerate(code):
        # an unconditional branch back is the end of a spin loop that stands out of line, or of a partition's dispatch
        back = word.startswith("BRA") and i in conditional
        target = re.search(r"`\((\.L_x_\d+)\)", rest) if back else None
        first = labels.get(target.group(1), i + 1) if target else i + 1
        if first <= i and any(word.startswith(_MATRIX) for word, _ in code[first : i + 1]):
            spans.append((first, i + 1))
    outer = [s for s in spans if any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    return [_counts(code[first:end]) for first, end in spans if (first, end) not in outer]


def _counts(code: list[tuple[str, str]]) -> dict[str, int]:
    registers = [int(n) for _, rest in code for n in re.findall(r"\bR(\d+)\b", rest)]
    words = Counter(word for word, _ in code)
    found = {"instructions": len(code), "highest_register": max(registers, default=0)}
    for name, prefixes in COUNTED.items():
        found[name] = sum(n for word, n in words.items() if any(_begins(word, p) for p in prefixes))
    return found


def _begins(word: str, prefix: str) -> bool:
    return word == prefix or word.startswith(prefix + ".")


def _disassembled(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([str(DISASSEMBLER), "-c", str(path)], capture_output=True, text=True, check=True).stdout


def compile_kernel(package: str, kernel: str) -> list[dict[str, Any]]:
    """Compile one of KERNELS of a package for an H200, fp16 tiles, as `compile.py` of that package does."""
    compiler = importlib.import_module(f"{package}.compile")
    space = importlib.import_module(f"{package}.space")
    spec = importlib.import_module(f"{package}.spec")
    built: list[Any] = []
    measured = compiler._resources

    def keep(kernel: Any, suffix: str) -> Any:
        built.append(kernel)
        return measured(kernel, suffix)

    compiler._resources = keep
    try:
        found = _compile(compiler, space, spec, kernel)
    finally:
        compiler._resources = measured
    return [
        {
            "kernel": kernel if len(found) == 1 else f"{kernel} {i}",
            "registers": r.registers,
            "spill_bytes": r.spill_bytes,
            "smem_bytes": r.smem_bytes,
            "warps": r.num_warps,
            "warnings": [w for w in r.wgmma_warnings if "serialized" in w or re.match(r"C751[0-7]", w)],
            "instructions": len(_LINE.findall(sass)),
            "loops": loops(sass),
        }
        for i, (r, b) in enumerate(zip(found, built, strict=True))
        for sass in [_disassembled(b.asm["cubin"])]
    ]


def _compile(compiler: Any, space: Any, spec: Any, kernel: str) -> list[Any]:
    kind, _, which = kernel.partition(" ")
    if kind == "k1":
        return [
            compiler.compile_config(
                spec.K1Config(variant=which, num_warps=1, transposed_dots=True, fast_reciprocal=True)
            )
        ]
    if kind == "k2":
        return [compiler.compile_config(space._ws(which, 5 if which == "128c2" else 4, 1, True, 2))]
    if kind == "pass":
        both = compiler.compile_passes(spec.K2Config(variant="ws", segments=4))
        return list(both)
    shape = spec.shape_of(*DEFAULTS[kernel])
    config = space.default_config(shape, spec.KNOWN_GPUS["NVIDIA H200"])
    if config == space.PAIRS:
        return [compiler.compile_pairs_k1(), compiler.compile_config(config.k2)]
    parts = (config.k2,) if config.k2.whole else (config.k1, config.k2)
    return [compiler.compile_config(part) for part in parts]


def _rows(package: str, kernel: str) -> list[dict[str, Any]]:
    try:
        rows = compile_kernel(package, kernel)
    except Exception as error:  # noqa: BLE001  a candidate that does not compile is a result
        rows = [{"kernel": kernel, "error": f"{type(error).__name__}: {error}".strip()[:400]}]
    for row in rows:
        if kernel == "pass" and "error" not in row:
            row["kernel"] = "pass A" if row["kernel"].endswith("0") else "pass B"
    return rows


def main() -> None:
    for package, text in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        for kernel in dict.fromkeys("pass" if w.startswith("pass") else w for w in text.split(",")):
            for row in _rows(package, kernel):
                sys.stdout.write(json.dumps({"package": package, **row}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
