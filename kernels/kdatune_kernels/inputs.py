"""What chunk_kda takes: every argument checked, then folded into the Problem that the launches read."""

import functools
import itertools
import math
import weakref
from dataclasses import dataclass
from numbers import Real

import torch

from kdatune_kernels import launch
from kdatune_kernels.numerics import INTERPRET
from kdatune_kernels.spec import CHUNK_TOKENS

KEY_SIZES = (64, 128)
VALUE_SIZES = (64, 128, 256)
INPUT_DTYPES = (torch.bfloat16, torch.float16)
_FP32_MAX = torch.finfo(torch.float32).max


def check_options(
    *,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    scale: float | None,
    disable_recompute: bool,
    return_intermediate_states: bool,
    cp_context: object,
) -> None:
    """Raise NotImplementedError, naming the option, for what these kernels do not do; nothing is silently ignored."""
    if not (use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel):
        needed = {
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
            "use_gate_in_kernel": use_gate_in_kernel,
            "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        }
        name = next(name for name, value in needed.items() if not value)
        raise NotImplementedError(f"{name}=False is not supported: pass raw inputs and {name}=True")
    if allow_neg_eigval or disable_recompute or return_intermediate_states or cp_context is not None:
        refused = {
            "allow_neg_eigval": allow_neg_eigval,
            "disable_recompute": disable_recompute,
            "return_intermediate_states": return_intermediate_states,
            "cp_context": cp_context is not None,
        }
        name = next(name for name, value in refused.items() if value)
        raise NotImplementedError(f"{name} is not supported by this inference forward; leave it at its default")
    if lower_bound is None:
        raise NotImplementedError(
            "lower_bound=None (the softplus gate) is not supported; pass a lower_bound in [-5, 0)"
        )
    check_lower_bound(lower_bound)
    check_scale(scale)


def check_scale(scale: float | None) -> None:
    """Raise TypeError for what is no number, ValueError for one that is not finite in fp32."""
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a number or None, not {type(scale).__name__}")
    if not abs(scale) <= _FP32_MAX:
        beyond = ", which fp32 does not hold" if abs(scale) < math.inf else ""
        raise ValueError(f"scale must be finite, not {scale}{beyond}")


def check_lower_bound(lower_bound: float) -> None:
    """Raise TypeError for what is no number, ValueError outside [-5, 0)."""
    try:
        value = float(lower_bound)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"lower_bound must be a number in [-5, 0), not a {type(lower_bound).__name__}") from error
    except OverflowError:
        value = math.nan
    if not -5.0 <= value < 0.0:
        raise ValueError(f"lower_bound must be in [-5, 0), not {lower_bound}: 16 tokens of a stronger decay leave fp32")


def check_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    state_v_first: bool,
    *,
    key_sizes: tuple[int, ...] = KEY_SIZES,
    value_sizes: tuple[int, ...] = VALUE_SIZES,
    gate_dtypes: tuple[torch.dtype, ...] = (),
    state_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    states: int | None = None,
) -> None:
    """Raise TypeError, ValueError or NotImplementedError that names the argument and what it must be.

    g may have gate_dtypes besides q's; initial_state holds `states` states, None: one a sequence.
    """
    present = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if A_log is not None:
        present["A_log"] = A_log
    if dt_bias is not None:
        present["dt_bias"] = dt_bias
    if initial_state is not None:
        present["initial_state"] = initial_state
    if cu_seqlens is not None:
        present["cu_seqlens"] = cu_seqlens
    for name, x in present.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        if x.layout is not torch.strided:
            raise NotImplementedError(f"{name} is {x.layout}; dense tensors are supported")
    if q.dim() != 4:
        raise ValueError(f"q must be [B, T, H, K], not {list(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"v must be [B, T, HV, V], not {list(v.shape)}")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(f"v has HV={HV} heads and q has H={H}: HV must be a multiple of H, both at least 1")
    _shaped("k", k, (B, T, H, K), "[B, T, H, K] as q")
    _shaped("v", v, (B, T, HV, V), "[B, T, HV, V]")
    _shaped("g", g, (B, T, HV, K), "[B, T, HV, K]")
    _shaped("beta", beta, (B, T, HV), "[B, T, HV]")
    if K not in key_sizes:
        raise NotImplementedError(f"q has K={K}; K is supported in {', '.join(map(str, key_sizes))}")
    if V not in value_sizes:
        raise NotImplementedError(f"v has V={V}; V is supported in {', '.join(map(str, value_sizes))}")
    _check_dtypes(q, k, v, g, beta, gate_dtypes)
    if A_log is not None:
        _shaped("A_log", A_log, (HV,), "[HV]")
        _typed("A_log", A_log, torch.float32)
    if dt_bias is not None:
        _typed("dt_bias", dt_bias, torch.float32)
        if dt_bias.shape not in ((HV, K), (HV * K,)):
            raise ValueError(f"dt_bias must be [HV, K] or [HV * K], not {list(dt_bias.shape)} with HV={HV}, K={K}")
    if initial_state is not None:
        sizes, text = ((V, K), "[N, HV, V, K]") if state_v_first else ((K, V), "[N, HV, K, V]")
        _shaped("initial_state", initial_state, (N if states is None else states, HV, *sizes), text)
        _typed("initial_state", initial_state, *state_dtypes)
    check_devices(present)


def _check_dtypes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate_dtypes: tuple[torch.dtype, ...],
) -> None:
    dtype = q.dtype
    for name, x in (("q", dtype), ("k", k.dtype), ("v", v.dtype), ("g", g.dtype)):
        if x is dtype and x in INPUT_DTYPES:
            continue
        if x not in INPUT_DTYPES and not (name == "g" and x in gate_dtypes):
            raise NotImplementedError(f"{name} is {x}; {' and '.join(map(str, INPUT_DTYPES))} are supported")
        if x != dtype and not (name == "g" and x in gate_dtypes):
            raise TypeError(f"{name} is {x}, q is {dtype}: q, k, v and g must share one dtype")
    if beta.dtype not in (dtype, torch.float32):
        raise NotImplementedError(f"beta is {beta.dtype}; q's {dtype} and torch.float32 are supported")


def check_devices(present: dict[str, torch.Tensor]) -> None:
    """Raise unless all tensors are on the device of q, which kernels run on, and none wants a gradient."""
    device = present["q"].device
    grad = torch.is_grad_enabled()
    for name, x in present.items():
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, q is on {device}: all tensors must share one device")
        if grad and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad; this is an inference forward: call it under torch.no_grad()"
            )
    kind = device.type
    if kind == "cpu" and not INTERPRET:
        raise ValueError("q is on the cpu; move the tensors to a CUDA device (or set TRITON_INTERPRET=1 before import)")
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"q is on {device}; only CUDA devices are supported")


def check_checkpoints(
    checkpoints: torch.Tensor | None, tokens: int | None, state_sizes: tuple[int, ...], device: torch.device
) -> None:
    """Raise unless both are absent, or a buffer for states fits its sequences and the step is whole chunks."""
    if checkpoints is None and tokens is None:
        return
    if checkpoints is None or tokens is None:
        raise ValueError("checkpoints and checkpoint_tokens belong together; pass both")
    if not isinstance(checkpoints, torch.Tensor):
        raise TypeError(f"checkpoints must be a torch.Tensor, not {type(checkpoints).__name__}")
    _typed("checkpoints", checkpoints, torch.float32)
    if checkpoints.dim() != 5 or tuple(checkpoints.shape[1:]) != state_sizes or not checkpoints.is_contiguous():
        raise ValueError(
            f"checkpoints must be a contiguous [C, {', '.join(map(str, state_sizes))}], not {list(checkpoints.shape)}"
        )
    if checkpoints.device != device:
        raise ValueError(f"checkpoints is on {checkpoints.device}, q is on {device}: all tensors must share one device")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= 1 << 62 or tokens % CHUNK_TOKENS:
        raise ValueError(f"checkpoint_tokens must be a multiple of {CHUNK_TOKENS} up to 2^62, not {tokens!r}")


def _shaped(name: str, x: torch.Tensor, shape: tuple[int, ...], text: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must be {text}, here {list(shape)}, not {list(x.shape)}")


def _typed(name: str, x: torch.Tensor, *dtypes: torch.dtype) -> None:
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, not {x.dtype}")


def packed_lengths(
    cu_seqlens: torch.Tensor,
    cu_seqlens_cpu: torch.Tensor | None,
    B: int,
    T: int,
    capturing: bool,
) -> tuple[int, ...] | None:
    """Lengths of packed sequences, checked; None during a capture without cu_seqlens_cpu, where no sync may happen.

    Read from cu_seqlens_cpu where given, else from the device once per version of the tensor.

    Raises:
        TypeError: not int32 or int64.
        ValueError: B > 1, not 1-D with at least two entries, not starting at 0, decreasing, or not ending at T.
    """
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if x is not None:
            check_ends(name, x, B)
    if cu_seqlens_cpu is not None:
        if cu_seqlens_cpu.device.type != "cpu" or cu_seqlens_cpu.shape != cu_seqlens.shape:
            raise ValueError("cu_seqlens_cpu must be a CPU tensor of the shape of cu_seqlens")
        return _lengths(tuple(cu_seqlens_cpu.tolist()), T)
    return None if capturing else _lengths(_values(cu_seqlens), T)


def check_ends(name: str, ends: torch.Tensor, B: int) -> None:
    """Raise TypeError or ValueError for a cu_seqlens of the wrong type or form; its entries are not read."""
    if not isinstance(ends, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(ends).__name__}")
    _typed(name, ends, torch.int32, torch.int64)
    if ends.dim() != 1 or ends.numel() < 2:
        raise ValueError(f"{name} must be 1-D with N + 1 >= 2 entries, not {list(ends.shape)}")
    if B != 1:
        raise ValueError(f"q has B={B}; with cu_seqlens the sequences are packed and B must be 1")


@functools.lru_cache(maxsize=64)
def _lengths(ends: tuple[int, ...], T: int) -> tuple[int, ...]:
    lengths = tuple(b - a for a, b in itertools.pairwise(ends))
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, not {ends[0]}")
    if min(lengths) < 0:
        raise ValueError(f"cu_seqlens must not decrease; entry {lengths.index(min(lengths)) + 1} does")
    if ends[-1] != T:
        raise ValueError(f"cu_seqlens must end at T={T}, not {ends[-1]}")
    return lengths


@dataclass(frozen=True)
class _Seen:
    """The entries of a version of a tensor on the host, and by token count, once it was checked, the longest sequence."""

    tensor: "weakref.ref[torch.Tensor]"
    version: int
    values: tuple[int, ...]
    longest: dict[int, int]


_seen_by_id: dict[int, _Seen] = {}


def _values(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """The entries on the host. One sync per tensor and version: a serving step that reuses its tensor pays none."""
    if cu_seqlens.is_inference():  # carries no version counter, so a later change would not show
        return tuple(cu_seqlens.tolist())
    known = _seen(cu_seqlens)
    if known is not None:
        return known.values
    version = int(cu_seqlens._version)
    values = tuple(cu_seqlens.tolist())
    if len(_seen_by_id) >= 64:
        for key in [key for key, entry in _seen_by_id.items() if entry.tensor() is None] or list(_seen_by_id)[:32]:
            _seen_by_id.pop(key, None)
    _seen_by_id[id(cu_seqlens)] = _Seen(weakref.ref(cu_seqlens), version, values, {})
    return values


def _seen(cu_seqlens: torch.Tensor) -> _Seen | None:
    known = _seen_by_id.get(id(cu_seqlens))
    if known is None:
        return None
    same: bool = known.tensor() is cu_seqlens
    return known if same and known.version == cu_seqlens._version else None


def longest_packed(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, T: int) -> int:
    """The longest of the lengths that `packed_lengths` checks, of tensors whose types and forms have passed it before."""
    if cu_seqlens_cpu is not None:
        return max(_lengths(tuple(cu_seqlens_cpu.tolist()), T))
    known = _seen(cu_seqlens)
    longest = None if known is None else known.longest.get(T)
    if longest is None:
        values = _values(cu_seqlens)
        longest = max(_lengths(values, T))
        known = _seen(cu_seqlens)
        if known is not None and known.values is values:
            known.longest[T] = longest
    return longest


def fold(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float,
    scale: float | None,
    initial_state: torch.Tensor | None,
    state_v_first: bool,
    tables: launch.ChunkTables,
) -> launch.Problem:
    """The Problem of checked tensors. A layout the kernels read as it is stays; any other is copied, never misread."""
    HV, K = g.shape[2:]
    return launch.Problem(
        q=_rows(q),
        k=_rows(k),
        v=_rows(v),
        g=_rows(g),
        beta=_beta_rows(beta),
        A_log=zeros(HV, q.device) if A_log is None else A_log.contiguous(),
        dt_bias=zeros(HV * K, q.device) if dt_bias is None else dt_bias.contiguous(),
        lower_bound=float(lower_bound),
        scale=float(K**-0.5 if scale is None else scale),
        h0=None if initial_state is None else initial_state.contiguous(),
        state_v_first=state_v_first,
        tables=tables,
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, T, heads, size] as [B * T, heads, size] with packed heads and rows the kernels can read 16 bytes at a time."""
    B, T, heads, size = x.shape
    aligned = x.data_ptr() % 16 == 0
    if aligned and x.is_contiguous():
        return x.view(B * T, heads, size)
    sb, st, sh, se = x.stride()
    # A stride of a dimension of one element says nothing.
    st = heads * size if T == 1 else st
    readable = se == 1 and (heads == 1 or sh == size) and (B == 1 or sb == T * st)
    if not readable or st % 16 or st < heads * size or not aligned:
        copied = x.contiguous() if aligned else x.clone(memory_format=torch.contiguous_format)
        return copied.view(B * T, heads, size)
    return x.as_strided((B * T, heads, size), (st, size, 1))


def _beta_rows(beta: torch.Tensor) -> torch.Tensor:
    B, T, heads = beta.shape
    if beta.is_contiguous():
        return beta.view(B * T, heads)
    sb, st, sh = beta.stride()
    if B > 1 and sb != T * st:
        return beta.contiguous().view(B * T, heads)
    return beta.as_strided((B * T, heads), (st, sh))


def zeros(size: int, device: torch.device) -> torch.Tensor:
    """What a missing A_log or dt_bias stands for; never written to."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.float32, device=device)  # filled by the graph only, so not for others
    return _kept_zeros(size, device)


@functools.lru_cache(maxsize=32)
def _kept_zeros(size: int, device: torch.device) -> torch.Tensor:
    made = torch.zeros(size, dtype=torch.float32, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # once: another stream may be the next to read them
    return made
