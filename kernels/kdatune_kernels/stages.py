"""Which launches a config stands for: their workspace, and all of them as a plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kdatune_kernels import direct
from kdatune_kernels import launch
from kdatune_kernels.space import PAIRS
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig


def workspace(p: launch.Problem, config: LaunchConfig) -> launch.Workspace:
    """What K1 writes and K2 reads, or what says of what types it would be."""
    if config.k2.fused:  # no tile leaves the SM
        return launch.types_only(p.q.shape[2], config.precision, p.q.device)
    return launch.workspace(p.tables, p.heads, p.q.shape[2], config.precision, p.q.device)


def plan(
    p: launch.Problem,
    o: torch.Tensor,
    ht: torch.Tensor | None,
    config: LaunchConfig,
    given: tuple[torch.Tensor | None, ...],
) -> direct.Plan:
    """The launches of a call of this config as a plan, in its precision.

    p: with tables in its steps. given: the tensors that `repeated.attempt` takes, up to cu_seqlens.

    Raises NotPlannedError when they have none.
    """
    q, _, _, _, _, A_log, dt_bias, _, cu_seqlens = given
    ws = workspace(p, config)
    step = p.tables.step
    scratch = [x for x in vars(ws).values() if x.numel()]
    constant = [made for x, made in ((A_log, p.A_log), (dt_bias, p.dt_bias)) if x is None]
    launches: list[Callable[[], Any]] = []
    if cu_seqlens is None:
        assert q is not None  # noqa: S101 - it was called with
        if launch.dense_tables(q.shape[0], q.shape[1], q.device, capturing=False, step=step) is not p.tables:
            raise direct.NotPlannedError("the chunk tables are of this call only")
        constant += p.tables.tensors
    else:
        # As the long way. A copy is none of the call's tensors, so that no plan comes of it.
        tables, lay_out = launch.packed_call(cu_seqlens.contiguous(), p.q.shape[0], step)
        p = replace(p, tables=tables)
        scratch += tables.tensors
        launches.append(lay_out)
    if not config.k2.whole:
        launches.append(launch.k1_call(p, ws, config.k1))
    if config.k2 == PAIRS.k2:
        launches += launch.pairs_calls(p, ws, o, ht)
    elif config.k2.segments > 1:
        passes, buffers = _segmented(p, ws, o, ht, config.k2)
        launches += passes
        scratch += buffers
    else:
        launches.append(launch.k2_call(p, ws, o, ht, config.k2))
    return direct.plan(launches, (*given, o, ht, None), scratch, constant)


def _segmented(
    p: launch.Problem, ws: launch.Workspace, o: torch.Tensor, ht: torch.Tensor | None, config: K2Config
) -> tuple[list[Callable[[], Any]], list[torch.Tensor]]:
    """The passes that `segments.segmented_call` binds into one call, and what passes between them."""
    from kdatune_kernels import segments

    P = config.segments
    buffers = segments.scratch(p.tables.sequences, p.heads, P, p.q.shape[2], p.v.shape[2], o.device)
    passes = segments._passes_sm90 if config.variant == "ws" else segments._passes_triton
    a, b = passes(p, ws, buffers, P)
    cut = replace(p.tables, spans=buffers.spans, sequences=p.tables.sequences * P)
    c = launch.chains_call(replace(p, h0=buffers.starts, tables=cut), ws, o, ht, config)
    return [a, b, c], list(vars(buffers).values())
