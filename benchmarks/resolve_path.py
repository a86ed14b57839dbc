"""What resolving a config costs a launch, in ns: the look-up itself, with its key built as chunk_kda does, and the slow path.

python benchmarks/resolve_path.py
"""

import json
import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kdatune_kernels.environment import Settings
from kdatune_kernels.match import Champion
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.snapshot import SCHEMA
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.snapshot import dump_snapshot
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import shape_of

H200 = KNOWN_GPUS["NVIDIA H200"]
SHAPE = shape_of(1, 96, 8192)


def cost_ns(call: Callable[[], object], number: int) -> tuple[float, float]:
    """Median and worst of seven rounds, less an empty call."""

    def rounds(f: Callable[[], object]) -> list[float]:
        return [t / number * 1e9 for t in timeit.repeat(f, repeat=7, number=number)]

    empty = statistics.median(rounds(lambda: None))
    found = rounds(call)
    return statistics.median(found) - empty, max(found) - empty


def snapshot(champions: int) -> Snapshot:
    """A snapshot of that many different shapes."""
    shapes = [shape_of(n, h, t) for n in (1, 2, 4, 8, 16) for h in (8, 16, 32, 64, 96) for t in range(1024, 9216, 1024)]
    found = [Champion(H200, s, default_config(s, H200), 1, 600.0, 620.0) for s in shapes[:champions]]
    return Snapshot(SCHEMA, H200, 1, tuple(found))


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    dims, rest = (1, 96, 8192, 96), ("bf16", False, None, True, True, False, "fp32")

    def key() -> tuple[object, ...]:
        N, H, T, HV = dims
        return (0, N, H, T, HV, 128, 128, *rest)

    lines = []
    for champions in (0, 20, 200):
        path = folder / f"{champions}.json"
        path.write_text(json.dumps(dump_snapshot(snapshot(champions))))
        resolver = Resolver(Settings(cache_dir=folder), path)
        known, again = key(), iter(range(1 << 30))
        resolver.resolve_slow(known, SHAPE, H200)
        if champions == 0:
            lines.append(("look-up of a known key", *cost_ns(lambda r=resolver, k=known: r.lookup(k), 200_000)))
            lines.append(("key built and looked up", *cost_ns(lambda r=resolver: r.lookup(key()), 200_000)))
        slow = cost_ns(
            lambda r=resolver, n=again: r.resolve_slow(next(n), replace(SHAPE, T=next(n) % 8000 + 1), H200), 200
        )
        lines.append((f"a new key, {champions} champions known", *slow))
    for what, median_ns, worst_ns in lines:
        sys.stdout.write(f"{what:32} {median_ns:12,.0f} ns   worst of 7 rounds {worst_ns:12,.0f} ns\n")


if __name__ == "__main__":
    main()
