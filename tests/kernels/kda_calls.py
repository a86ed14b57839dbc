"""How the kernel tests call chunk_kda, and the configs they call it with."""

from dataclasses import replace

import torch

from kdatune_kernels import reference
from kdatune_kernels import samples
from kdatune_kernels.kda import chunk_kda
from kdatune_kernels.space import WHOLES
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig

OPTIONS = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
GATE = 0.005
WINDOW_GATE = 0.02

PLAIN = LaunchConfig(K1Config(), K2Config())
TRANSPOSED = LaunchConfig(K1Config(num_warps=4, chunks_per_program=2, head_fast=True), K2Config(transposed=True))
_GLUON = K1Config(variant="cp_async", num_warps=1, transposed_dots=True, fast_reciprocal=True)
_WS = K2Config(
    variant="ws", stages_in=4, stages_out=1, load_warps=1, store_warps=2, load_regs=40, store_regs=40, defer_store=True,
    decay_position=2,
)  # fmt: skip
# 128 columns are stored by TMA, 64 by the threads of the partition, which takes more of them and of their registers
_BY_TMA = replace(_WS, block_v=128, store_warps=1, load_regs=24, store_regs=24, maxnreg=168)
ONE_CONSUMER = LaunchConfig(_GLUON, _WS)
TWO_CONSUMERS = LaunchConfig(replace(_GLUON, variant="tma"), replace(_BY_TMA, consumers=2, consumer_regs=232))
TWO_STORE_WARPS = LaunchConfig(
    replace(_GLUON, transposed_dots=False, head_fast=True, load_policy="evict_last"),
    replace(_BY_TMA, num_warps=8, stages_out=4, store_warps=2, load_warps=2, defer_store=False, decay_position=0),
)
HALVES = LaunchConfig(
    replace(_GLUON, variant="tma", gate_halves=2, swizzle_bytes=64, head_fast=True),
    replace(_WS, stages_in=2, decay_position=1),
)

CONFIGS = [PLAIN, TRANSPOSED] + (
    [ONE_CONSUMER, TWO_CONSUMERS, TWO_STORE_WARPS, HALVES, *WHOLES] if torch.cuda.is_available() else []
)


def name_of(config: LaunchConfig) -> str:
    return (
        f"{config.k1.variant}-{config.k2.variant}{config.k2.block_v}x{config.k2.consumers}d{config.k2.decay_position}"
    )


def call(sample: samples.Sample, **options):
    """chunk_kda on a packed sample; cu_seqlens only when there is more than one sequence."""
    if "cu_seqlens" not in options and len(sample.lengths) != 1:
        options["cu_seqlens"] = torch.tensor([0, *sample.lengths], device=sample.q.device).cumsum(0)
    return chunk_kda(**{"output_final_state": True, **OPTIONS, **sample.tensors(), **options})


def ratios(sample: samples.Sample, o, ht, **options) -> tuple[float, float, float]:
    """(o, final state, worst window) error ratios to the fp64 recurrence."""
    want_o, want_ht = reference.recurrence(**sample.tensors(), lengths=list(sample.lengths), **options)
    return reference.error_ratio(o, want_o), reference.error_ratio(ht, want_ht), reference.worst_window(o, want_o)


def assert_within_gates(sample: samples.Sample, o, ht, **options) -> None:
    o_ratio, state_ratio, window = ratios(sample, o, ht, **options)
    assert torch.isfinite(o).all()
    assert torch.isfinite(ht).all()
    assert o_ratio < GATE
    assert state_ratio < GATE
    assert window < WINDOW_GATE
