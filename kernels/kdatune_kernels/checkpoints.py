"""States at checkpoints, from the kernels as they are: K1 once, K2 anew from every checkpoint to the next; fused, both anew.

K2 starts any number of chunks at any chunk of a sequence (its spans say which), and its start and end states are fp32: a run
that is cut gives the same bits as one that is not.
"""

from dataclasses import replace

import torch

from kdatune_kernels import launch
from kdatune_kernels.spec import CHUNK_TOKENS
from kdatune_kernels.spec import K2Config


def run_k2(
    problem: launch.Problem,
    ws: launch.Workspace,
    o: torch.Tensor,
    ht: torch.Tensor | None,
    config: K2Config,
    checkpoints: torch.Tensor,
    every_tokens: int,
) -> None:
    """As `launch.run_k2`, and write the states after every `every_tokens` tokens into checkpoints [C, N, HV, ...].

    No sync. A config by segments runs without: the parts are short, and a segment's start is no checkpoint.
    """
    serial = replace(config, segments=1)
    parts = cut_spans(problem.tables.spans, len(checkpoints), every_tokens)
    h0 = problem.h0
    for i, spans in enumerate(parts):
        last = i == len(checkpoints)
        part = replace(problem, h0=h0, tables=replace(problem.tables, spans=spans))
        launch.run_k2(part, ws, o, ht if last else checkpoints[i], serial)
        if not last:
            h0 = checkpoints[i]


def cut_spans(spans: torch.Tensor, cuts: int, every_tokens: int) -> torch.Tensor:
    """[cuts + 1, N, 4] int32: the spans of every part, the last one up to the end; past a sequence's end they are empty."""
    token, end_token, chunk, end_chunk = spans.unbind(1)
    step = torch.arange(cuts + 1, device=spans.device, dtype=torch.int64)[:, None]

    def ends(first: torch.Tensor, end: torch.Tensor, each: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.minimum(first + step * each, end.long())
        return starts, torch.cat([starts[1:], end.long()[None]])

    t0, t1 = ends(token, end_token, every_tokens)
    c0, c1 = ends(chunk, end_chunk, every_tokens // CHUNK_TOKENS)
    return torch.stack([t0, t1, c0, c1], -1).to(torch.int32)
