"""chunk_kda: check the inputs, resolve the config, launch K1 then K2, or both as one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import ParamSpec
from typing import TypeVar
from typing import get_args

import torch
import triton

from kdatune_kernels import checkpoints as checkpointed
from kdatune_kernels import gpu
from kdatune_kernels import inputs
from kdatune_kernels import launch
from kdatune_kernels import repeated
from kdatune_kernels import stages
from kdatune_kernels.errors import ConfigError
from kdatune_kernels.match import split_of
from kdatune_kernels.resolve import launcher
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import config_ok
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Precision
from kdatune_kernels.spec import Shape

_PRECISIONS = get_args(Precision)
_Tensors = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]
P = ParamSpec("P")
R = TypeVar("R")


def on_device_of_q(call: Callable[P, R]) -> Callable[P, R]:
    """A call that runs on the card of its tensors. Triton and streams go by the current device, which may be another."""

    @functools.wraps(call)
    def on_device(*args: P.args, **kwargs: P.kwargs) -> R:
        q = args[0] if args else kwargs.get("q")
        if isinstance(q, torch.Tensor) and q.is_cuda and q.device.index != torch.cuda.current_device():
            with torch.cuda.device(q.device):
                return call(*args, **kwargs)
        return call(*args, **kwargs)

    return on_device


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,  # noqa: ARG001 - both values mean the same
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,  # noqa: ARG001 - so do these
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
    precision: Precision | None = None,
    final_state_dtype: torch.dtype = torch.float32,
    checkpoints: torch.Tensor | None = None,
    checkpoint_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The KDA forward of one or many sequences: outputs and, when asked for, the final state.

    The signature is flash-linear-attention's `chunk_kda`, so that it drops in; what is not supported raises at once.
    Inputs are never written to. Fit for CUDA-graph capture, also as the very first call; torch.compile breaks its graph here.

    Args:
        q, k: [B, T, H, K] bf16 or fp16, raw; B batch, T tokens, H heads, K 64 or 128. L2-normalised in the kernel.
        v: [B, T, HV, V] as q, V 64, 128 or 256, HV a multiple of H (value head h reads q/k head h // (HV / H)).
        g: [B, T, HV, K] as q, raw gate; log decay lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
        beta: [B, T, HV] as q or fp32, logits, any strides.
        scale: a finite number; default K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; fp32 or bf16; N sequences.
        safe_gate: both values compute the bounded gate, which lower_bound selects.
        lower_bound: in [-5, 0), needed.
        cu_seqlens: [N + 1] int32 or int64 on the device of q; packed sequences, then B is 1.
        cu_seqlens_cpu: the same on the CPU; saves the one sync that checks a new cu_seqlens.
        use_graph, max_num_seqs: packed calls are always laid out on the device and may be replayed with other
            cu_seqlens of the same N; max_num_seqs, where given, must be that N.
        A_log: [HV] fp32 or None (0); dt_bias: [HV, K] or [HV * K] fp32 or None (0).
        config: a launch config to use instead of the resolved one.
        precision: "fp16" (default), "fast" or "bf16"; "fp16" needs |v| and states under 6e4, "fast" |v|. "fast" is up to 10 %
            faster (H200; not for few long chains) and loses the gates below on identical keys; "bf16" takes any range and
            loses them on correlated ones.
        final_state_dtype: fp32, or bf16: then the fp32 state is rounded once, at the end.
        checkpoints: [C, N, HV, K, V] (or [.., V, K]) fp32, contiguous, to write states into: [i] is the state of every
            sequence after (i + 1) * checkpoint_tokens of its tokens, or after all of them where it has fewer.
        checkpoint_tokens: a multiple of 16; needed with checkpoints. Each checkpoint costs a launch of K2.

    Returns:
        o [B, T, HV, V] as v, and the final state, laid out as initial_state is, or None.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name. ConfigError: `config` may not run here.
        NotImplementedError: an option, dtype or head size these kernels do not have, by name.

    Accuracy: RMS error ratio to the fp64 token recurrence under 0.005 for o and the final state, under 0.02 in the
        worst 16-token window; in precision "fp16" under 0.003 on every kind of input that was measured (docs/kda.md).
    """
    options = (
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound,
        scale,
        disable_recompute,
        return_intermediate_states,
        cp_context,
        output_final_state,
        state_v_first,
        max_num_seqs,
        precision,
        final_state_dtype,
        # equal numbers of another type are refused, or may be
        lower_bound.__class__,
        scale.__class__,
    )
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    others = (cu_seqlens, cu_seqlens_cpu, options, config, checkpoints, checkpoint_tokens)
    if torch.compiler.is_compiling():  # Dynamo breaks its graph here; it cannot trace Triton's launches
        call: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = torch.compiler.disable(_called)
        return call(tensors, *others)
    return _called(tensors, *others)


def _called(
    tensors: _Tensors,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    options: tuple[Any, ...],
    config: LaunchConfig | None,
    checkpoints: torch.Tensor | None,
    checkpoint_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tried = repeated.NOTHING
    if repeated.enabled and checkpoints is None and checkpoint_tokens is None:
        done = repeated.attempt(launcher, config, options, *tensors, cu_seqlens, cu_seqlens_cpu)
        if isinstance(done, tuple):
            return done
        tried = done
    return _checked(*tensors, cu_seqlens, cu_seqlens_cpu, options, config, checkpoints, checkpoint_tokens, tried)


@on_device_of_q
def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    options: tuple[Any, ...],
    config: LaunchConfig | None,
    checkpoints: torch.Tensor | None,
    checkpoint_tokens: int | None,
    tried: repeated.Tried,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_kda from its checks on; options: as it makes them of the others of its arguments."""
    use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, *others = options
    lower_bound, scale, disable_recompute, return_intermediate_states, cp_context, *others = others
    output_final_state, state_v_first, max_num_seqs, precision, final_state_dtype, *_ = others
    inputs.check_options(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        scale=scale,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        cp_context=cp_context,
    )
    inputs.check_tensors(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, state_v_first)
    if final_state_dtype not in (torch.float32, torch.bfloat16):
        raise NotImplementedError(
            f"final_state_dtype is {final_state_dtype}; torch.float32 and torch.bfloat16 are supported"
        )
    if precision is not None and precision not in _PRECISIONS:
        raise ValueError(f"precision is {precision!r}; {', '.join(_PRECISIONS)} are supported")
    if config is not None and not isinstance(config, LaunchConfig):
        raise TypeError(f"config is a {type(config).__name__}, not a LaunchConfig")
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    lengths: tuple[int, ...] | None = None
    N = B
    if cu_seqlens is not None:
        lengths = inputs.packed_lengths(cu_seqlens, cu_seqlens_cpu, B, T, capturing)
        N = cu_seqlens.numel() - 1
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu is given without cu_seqlens; pass both")
    if max_num_seqs is not None and max_num_seqs != N:
        raise ValueError(f"max_num_seqs={max_num_seqs} must be the number of sequences, here {N}")
    o = torch.empty(B, T, HV, V, dtype=v.dtype, device=v.device)
    ht = None
    state_sizes = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    if output_final_state:
        ht = torch.empty(state_sizes, dtype=torch.float32, device=v.device)
    inputs.check_checkpoints(checkpoints, checkpoint_tokens, state_sizes, q.device)
    if B * T == 0:
        for state in (x for x in (ht, checkpoints) if x is not None):
            state.zero_() if initial_state is None else state.copy_(initial_state)
        return o, ht if ht is None else ht.to(final_state_dtype)
    if cu_seqlens is None:
        tables = functools.partial(launch.dense_tables, N, T, q.device, capturing)
    else:
        tables = functools.partial(launch.packed_tables, cu_seqlens.contiguous(), T)
    fold = functools.partial(
        inputs.fold, q, k, v, g, beta, A_log, dt_bias, float(lower_bound or 0.0), scale, initial_state, state_v_first
    )
    longest = max(lengths) if cu_seqlens is not None and lengths else None
    state = None if initial_state is None else initial_state.dtype
    key = (
        q.device,
        N,
        q.shape[2],
        HV,
        K,
        V,
        q.dtype,
        B * T,
        cu_seqlens is not None,
        longest,
        state,
        output_final_state,
        state_v_first,
    )
    call = _Call(key, tables, fold, o.view(B * T, HV, V), ht, precision, checkpoints, checkpoint_tokens)
    if config is not None:
        ran = _launch_given(call, config)
        served = config
    else:
        served, ran = _launch_resolved(call, capturing, tried.config)
    if tried.signature is not None and not capturing:
        given = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
        make = functools.partial(stages.plan, ran.problem, call.o, ht, ran.config, given)
        repeated.remember(tried, options, served, config is not None, key, given, o, ht, final_state_dtype, make)
    return o, ht if ht is None else ht.to(final_state_dtype)


@dataclass(frozen=True)
class _Call:
    """A checked call.

    Attributes:
        key: the launcher's.
        tables: makes its chunk tables in steps of so many tokens, which the config says.
        fold: makes its problem of them.
    """

    key: tuple[Any, ...]
    tables: Callable[..., launch.ChunkTables]
    fold: Callable[[launch.ChunkTables], launch.Problem]
    o: torch.Tensor
    ht: torch.Tensor | None
    precision: Precision | None
    checkpoints: torch.Tensor | None
    checkpoint_tokens: int | None


@dataclass(frozen=True)
class _Ran:
    """What was launched: the problem with its tables, and the config, in the call's precision."""

    problem: launch.Problem
    config: LaunchConfig


def _launch_given(call: _Call, config: LaunchConfig) -> _Ran:
    shape = _shape(*call.key[1:])
    reason = config_ok(config, shape, _gpu(call.key[0]))
    if reason:
        raise ConfigError(f"config may not run for {shape.key()} here: {reason}")
    return _run(call, config)


def _launch_resolved(call: _Call, capturing: bool, config: LaunchConfig | None = None) -> tuple[LaunchConfig, _Ran]:
    """Launch with the resolved config; one that fails is quarantined and the next safer one runs in its place.

    config: what the launcher has answered for this call already. Returns the config that was served, and what it ran as.
    """
    key = call.key
    if config is None:
        config = launcher.lookup(key)
    if config is None:
        config = launcher.resolve_slow(key, _shape(*key[1:]), _gpu(key[0]), capturing=capturing)
    while True:
        try:
            return config, _run(call, config)
        except Exception as error:
            card = _gpu(key[0])
            instead = None
            if card is not None and launch.outcome_of(error) is not None:
                reason = f"{type(error).__name__}: {error}"
                instead = launcher.quarantine(config, _shape(*key[1:]), card, reason)
            if instead is None:
                raise
            config = instead


def _shape(
    N: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    tokens: int,
    varlen: bool,
    longest: int | None,
    state: torch.dtype | None,
    final_state: bool,
    state_v_first: bool,
) -> Shape:
    return Shape(
        N=N,
        H=H,
        T=tokens,
        HV=HV,
        K=K,
        V=V,
        dtype="fp16" if dtype == torch.float16 else "bf16",
        varlen=varlen,
        longest_tokens=longest,
        initial_state=state is not None,
        final_state=final_state,
        state_v_first=state_v_first,
        state_dtype="bf16" if state == torch.bfloat16 else "fp32",
    )


def _run(call: _Call, config: LaunchConfig) -> _Ran:
    config = _as_launched(call, config)
    p = call.fold(call.tables(step=config.k2.step_tokens))
    ws = stages.workspace(p, config)
    if not config.k2.whole:
        launch.run_k1(p, ws, config.k1)
    if call.checkpoints is None or call.checkpoint_tokens is None:
        launch.run_k2(p, ws, call.o, call.ht, config.k2)
    else:
        checkpointed.run_k2(p, ws, call.o, call.ht, config.k2, call.checkpoints, call.checkpoint_tokens)
    return _Ran(p, config)


PAIRS_COMPILE = triton.__version__.startswith("3.6.")
"""Whether this Triton compiles the K1 of 32 tokens: 3.9.0 refuses views of shared memory that are larger than their source."""


def _as_launched(call: _Call, config: LaunchConfig) -> LaunchConfig:
    """The config in the precision of the call, and in steps of 16 tokens where those of 32 do not serve it."""
    precision = config.precision if call.precision is None else call.precision
    served = PAIRS_COMPILE and precision == PAIRS.precision and call.checkpoints is None
    if config.k2 == PAIRS.k2 and not served:
        config = split_of(_shape(*call.key[1:]), _gpu(call.key[0]))
    return config if config.precision == precision else replace(config, precision=precision)


def _gpu(device: torch.device) -> Gpu | None:
    return None if device.type == "cpu" else gpu.of_device(device.index or 0)
