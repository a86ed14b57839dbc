"""`kdatune evaluate` on the sweep of an earlier sketch of the kernels, with more shapes: T 4096, ragged and equal batches.

    python benchmarks/evaluate_sketch.py SWEEP [--seeds 20]

SWEEP: gzipped JSON lines with `check` and `time` rows of the kinds k1, k2ws and k2tl (not the format of `kdatune record`). The
K2 space is that of the sketch's warp-specialised kernel, as the figures published beside it are. The sketch has no segments,
so its default is today's without them, and its K1 is the plain Triton one.
"""

import gzip
import json
import statistics
from pathlib import Path
from typing import Annotated
from typing import Any

import typer

from kdatune_kernels.space import k2_configs
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import shape_of
from kdatune_tuner.cli_evaluate import show
from kdatune_tuner.cli_support import err
from kdatune_tuner.evaluate import Case
from kdatune_tuner.evaluate import evaluate
from kdatune_tuner.objective import SearchConfig

GPU = KNOWN_GPUS["NVIDIA H200"]
STAGES = {"k1": "k1", "k2ws": "k2"}


def main(
    sweep: Annotated[Path, typer.Argument(exists=True, dir_okay=False)], seeds: Annotated[int, typer.Option(min=1)] = 20
) -> None:
    """Print the figures of `kdatune evaluate` for the sweep."""
    show(evaluate(read_cases(sweep), GPU, seeds, say=err().print))


def read_cases(path: Path) -> dict[str, list[Case]]:
    """Both stages on every shape of the sweep."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    checks = {(r["kind"], r["i"]): r for r in rows if r["t"] == "check" and r["kind"] in STAGES}
    times: dict[tuple[str, Shape], dict[SearchConfig, float | None]] = {}
    for row in rows:
        if row["t"] == "time" and row["kind"] in STAGES:
            config = config_of(row["kind"], checks[row["kind"], row["i"]]["config"])
            stage = times.setdefault((STAGES[row["kind"]], shape_of_row(row)), {})
            stage[config] = statistics.median(row["us"])
    for kind, i in checks:
        for (kernel, _), stage in times.items():
            if kernel == STAGES[kind]:
                stage.setdefault(config_of(kind, checks[kind, i]["config"]), None)
    cases: dict[str, list[Case]] = {}
    for (kernel, shape), stage in times.items():
        cases.setdefault(kernel, []).append(Case(kernel, shape, stage, default_of(kernel, shape)))
    return cases


def shape_of_row(row: dict[str, Any]) -> Shape:
    lengths = row["seq_lens"]
    if len(set(lengths)) == 1:
        return shape_of(len(lengths), row["H"], sum(lengths))
    return shape_of(len(lengths), row["H"], sum(lengths), varlen=True, longest_tokens=max(lengths))


def config_of(kind: str, row: dict[str, Any]) -> SearchConfig:
    if kind == "k1":
        return K1Config(
            num_warps=row["num_warps"], head_fast=row["hfast"], chunks_per_program=row["cpp"], maxnreg=row["maxnreg"]
        )
    return K2Config(
        variant="ws",
        block_v=row["BV"],
        num_warps=row["num_warps"],
        stages_in=row["ST"],
        stages_out=row["OST"],
        consumers=row["ncons"],
        load_warps=row["lw"],
        store_warps=row["sw"],
        maxnreg=row["maxnreg"],
        consumer_regs=row.get("cons_regs"),
        load_regs=24,
        store_regs=24,
        defer_store=row["defer"],
        decay_position=row["dpos"],
    )


def default_of(kernel: str, shape: Shape) -> SearchConfig:
    """Today's default tile and depths, as space.py picks them by waves, for chains that are not cut."""
    if kernel == "k1":
        return K1Config()
    tile, depth = ((64, 1, None), 4) if shape.chains * 2 <= GPU.sm_count else ((128, 2, 168), 5)
    return next(
        c
        for c in k2_configs()
        if (c.block_v, c.consumers, c.maxnreg) == tile
        and (c.num_warps, c.stages_in, c.stages_out, c.load_warps, c.store_warps) == (4, depth, 1, 1, 1)
        and (c.variant, c.defer_store, c.decay_position) == ("ws", True, 2)
    )


if __name__ == "__main__":
    typer.run(main)
