"""chunk_kda's arguments: what is refused and how it says so, and the layouts and types that are read right."""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from kda_calls import CONFIGS
from kda_calls import OPTIONS
from kda_calls import assert_within_gates
from kda_calls import call
from kda_calls import name_of

from kdatune_kernels import inputs
from kdatune_kernels import reference
from kdatune_kernels import samples
from kdatune_kernels.errors import ConfigError
from kdatune_kernels.kda import chunk_kda
from kdatune_kernels.kda import on_device_of_q
from kdatune_kernels.space import FUSED
from kdatune_kernels.space import PAIRS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig

every_config = pytest.mark.parametrize("config", CONFIGS, ids=name_of)


@pytest.fixture
def sample(device):
    return samples.make((20, 12), 2, device=device)


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_options_that_must_be_on(option, sample):
    with pytest.raises(NotImplementedError, match=option):
        call(sample, **{option: False})


@pytest.mark.parametrize(
    "option",
    [
        {"allow_neg_eigval": True},
        {"disable_recompute": True},
        {"return_intermediate_states": True},
        {"cp_context": object()},
    ],
)
def test_options_that_are_not_there(option, sample):
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        call(sample, **option)


def test_no_lower_bound(sample):
    with pytest.raises(NotImplementedError, match="lower_bound=None"):
        call(sample, lower_bound=None)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_dtypes_are_named(name, dtype, sample):
    with pytest.raises(NotImplementedError, match=rf"{name} is {dtype}"):
        call(replace(sample, **{name: getattr(sample, name).to(dtype)}))


@pytest.mark.parametrize("name", ["k", "v", "g"])
def test_one_dtype_for_all(name, sample):
    with pytest.raises(TypeError, match=rf"{name} is torch\.float16, q is torch\.bfloat16"):
        call(replace(sample, **{name: getattr(sample, name).half()}))
    with pytest.raises(NotImplementedError, match=r"beta is torch\.float16"):
        call(replace(sample, beta=sample.beta.half()))


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "initial_state"])
def test_parameter_dtypes_are_named(name, sample):
    with pytest.raises(TypeError, match=rf"{name} must be .*float32"):
        call(replace(sample, **{name: getattr(sample, name).double()}))


def test_not_a_tensor(sample):
    with pytest.raises(TypeError, match=r"g must be a torch\.Tensor, not list"):
        call(sample, g=[1.0])


@pytest.mark.parametrize(("K", "V", "text"), [(100, 128, "K=100"), (256, 128, "K=256"), (128, 96, "V=96")])
def test_head_sizes_are_named(K, V, text, device):
    with pytest.raises(NotImplementedError, match=text):
        call(samples.make((16,), 2, size=K, value_size=V, device=device))


@pytest.mark.parametrize(
    ("name", "cut", "error"),
    [
        ("g", lambda x: x[..., 0], r"g must be \[B, T, HV, K\]"),
        ("beta", lambda x: x[:, :-1], r"beta must be \[B, T, HV\]"),
        ("k", lambda x: x[:, :, :1], r"k must be \[B, T, H, K\]"),
        ("v", lambda x: x[0], r"v must be \[B, T, HV, V\]"),
        ("q", lambda x: x[0], r"q must be \[B, T, H, K\]"),
        ("A_log", lambda x: x[:1], r"A_log must be \[HV\]"),
        ("dt_bias", lambda x: x[:, :5], r"dt_bias must be \[HV, K\]"),
        ("initial_state", lambda x: x[:1], r"initial_state must be \[N, HV, K, V\]"),
    ],
)
def test_shapes_are_named(name, cut, error, sample):
    with pytest.raises(ValueError, match=error):
        call(sample, **{name: cut(getattr(sample, name))})


def test_heads_must_divide(device):
    sample = samples.make((16,), 2, device=device)
    three = samples.make((16,), 3, device=device)
    with pytest.raises(ValueError, match="HV must be a multiple of H"):
        call(replace(three, q=sample.q, k=sample.k))


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ([0, 20, 31], "must end at T=32"),
        ([0, 20, 40], "must end at T=32"),
        ([1, 20, 32], "must start at 0"),
        ([0, 33, 32], "must not decrease"),
        ([0], "N \\+ 1 >= 2"),
    ],
)
def test_cu_seqlens_are_checked(ends, error, sample, device):
    bad = torch.tensor(ends, device=device)
    with pytest.raises(ValueError, match=f"cu_seqlens {error}|cu_seqlens.*{error}"):
        call(sample, cu_seqlens=bad, initial_state=None)


def test_a_changed_cu_seqlens_is_checked_again(sample, device):
    ends = torch.tensor([0, 20, 32], device=device)
    call(sample, cu_seqlens=ends)
    ends[1] = 40
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        call(sample, cu_seqlens=ends)


def test_cu_seqlens_need_one_row(device):
    sample = samples.make((32,), 2, device=device, initial_state=False)
    two = replace(
        sample,
        **{n: getattr(sample, n).view(2, 16, *getattr(sample, n).shape[2:]) for n in ("q", "k", "v", "g", "beta")},
    )
    with pytest.raises(ValueError, match="B=2; with cu_seqlens"):
        call(two, cu_seqlens=torch.tensor([0, 16], device=device))


def test_cu_seqlens_dtype(sample, device):
    with pytest.raises(TypeError, match=r"cu_seqlens must be torch\.int32 or torch\.int64"):
        call(sample, cu_seqlens=torch.tensor([0.0, 20.0, 32.0], device=device))


def test_max_num_seqs_must_agree(sample):
    with pytest.raises(ValueError, match="max_num_seqs=3"):
        call(sample, max_num_seqs=3)
    call(sample, max_num_seqs=2, use_graph=True)


def test_gradients_are_refused_not_dropped(sample):
    v = sample.v.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="v requires grad"):
        call(sample, v=v)
    with torch.no_grad():
        call(sample, v=v)


@pytest.mark.gpu
def test_cpu_next_to_cuda(sample):
    with pytest.raises(ValueError, match="k is on cpu, q is on cuda"):
        call(sample, k=sample.k.cpu())


def test_a_config_that_may_not_run_is_refused(sample):
    bad = LaunchConfig(K1Config(num_warps=3), K2Config())
    with pytest.raises(ConfigError, match=r"k1\.num_warps=3"):
        call(sample, config=bad)


@every_config
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [True, False])
def test_grouped_heads_and_states(config, state_dtype, v_first, device):
    sample = samples.make((35, 16), 1, 3, device=device, state_dtype=state_dtype, state_v_first=v_first)
    o, ht = call(sample, config=config, state_v_first=v_first)
    assert o.dtype == torch.bfloat16
    assert ht.dtype == torch.float32
    assert_within_gates(sample, o, ht, state_v_first=v_first)


@every_config
@pytest.mark.parametrize("precision", ["fp16", "fast", "bf16"])
def test_no_state_asked_for_and_every_precision(config, precision, device):
    sample = samples.make((50,), 2, device=device, initial_state=False)
    o, ht = call(sample, config=config, precision=precision, output_final_state=False)
    assert ht is None
    want, _ = reference.recurrence(**sample.tensors(), lengths=[50])
    assert reference.error_ratio(o, want) < 0.005


@every_config
def test_strided_inputs_are_read_right(config, device):
    sample = samples.make((33,), 2, device=device)
    want = call(sample, config=config)
    T = 33
    qkvg = torch.cat([getattr(sample, n).reshape(1, T, 256) for n in "qkvg"], dim=-1)
    parts = {n: x.view(1, T, 2, 128) for n, x in zip("qkvg", qkvg.split(256, dim=-1), strict=True)}
    assert parts["k"].stride(1) == 1024
    betas = torch.randn(1, T, 7, device=device).bfloat16()
    betas[..., 2:6:2] = sample.beta
    odd = torch.zeros(1, T, 2, 129, device=device, dtype=torch.bfloat16)
    odd[..., 1:] = sample.g
    swapped = sample.v.transpose(1, 2).contiguous().transpose(1, 2)
    for change in (
        parts,
        {"beta": betas[..., 2:6:2]},
        {"g": odd[..., 1:]},
        {"v": swapped},
        {"dt_bias": sample.dt_bias.reshape(-1)},
        {"beta": sample.beta.float()},
        {"initial_state": sample.initial_state.transpose(-1, -2).contiguous().transpose(-1, -2)},
    ):
        o, ht = call(replace(sample, **change), config=config)
        assert torch.equal(o, want[0]), change.keys()
        assert torch.equal(ht, want[1]), change.keys()


@every_config
def test_a_batch_equals_its_rows(config, device):
    B, T = 3, 20
    sample = samples.make((B * T,), 2, device=device, initial_state=False)
    rows = {n: getattr(sample, n).view(B, T, *getattr(sample, n).shape[2:]) for n in ("q", "k", "v", "g", "beta")}
    batch = replace(sample, **rows)
    o, ht = call(batch, config=config)
    for b in range(B):
        one = replace(sample, **{n: x[b : b + 1].clone() for n, x in rows.items()}, lengths=(T,))
        alone_o, alone_ht = call(one, config=config)
        assert torch.equal(o[b], alone_o[0])
        assert torch.equal(ht[b], alone_ht[0])
    transposed = replace(batch, v=rows["v"].transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(call(transposed, config=config)[0], o)


def test_missing_gate_parameters_are_zero(device):
    sample = samples.make((20,), 2, device=device)
    zero = replace(sample, A_log=torch.zeros(2, device=device), dt_bias=torch.zeros(2, 128, device=device))
    assert torch.equal(call(sample, A_log=None, dt_bias=None)[0], call(zero)[0])


def test_scale_is_used(device):
    sample = samples.make((20,), 1, device=device)
    o, _ = call(sample, scale=0.5)
    want, _ = reference.recurrence(**sample.tensors(), scale=0.5, lengths=[20])
    assert reference.error_ratio(o, want) < 0.005


def test_cu_seqlens_cpu(sample, device):
    o, ht = call(sample)
    again = call(sample, cu_seqlens_cpu=torch.tensor([0, 20, 32]))
    assert torch.equal(o, again[0])
    assert torch.equal(ht, again[1])
    with pytest.raises(ValueError, match="must end at T=32"):
        call(sample, cu_seqlens_cpu=torch.tensor([0, 20, 31]))
    with pytest.raises(ValueError, match="without cu_seqlens"):
        call(samples.make((8,), 1, device=device), cu_seqlens_cpu=torch.tensor([0, 8]))


@pytest.mark.gpu
def test_first_call_inside_a_capture(device):
    """A shape never seen before, captured: no sync, no tuning, and the replay computes."""
    sample = samples.make((977,), 3, device=device)
    warm = samples.make((33,), 3, device=device)
    call(warm)  # compiles; the tables, the workspace and the config of the captured shape are new
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, ht = call(sample)
    o.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_within_gates(sample, o, ht)


FIRST_OF_ALL = """
import torch
from kda_calls import assert_within_gates, call
from kdatune_kernels import samples
sample = samples.make((977,), 3, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    o, ht = call(sample)
o.fill_(float("nan"))
graph.replay()
torch.cuda.synchronize()
assert_within_gates(sample, o, ht)
"""


@pytest.mark.gpu
def test_the_first_call_of_a_process_inside_a_capture(device, tmp_path):
    """Nothing compiled, nothing loaded, no config resolved."""
    run = subprocess.run(
        [sys.executable, "-c", FIRST_OF_ALL],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, PAIRS])
def test_a_captured_packed_call_follows_its_cu_seqlens(config, device):
    sample = samples.make((100, 28), 2, device=device)
    ends = torch.tensor([0, 100, 128], device=device)
    call(sample, cu_seqlens=ends, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, ht = call(sample, cu_seqlens=ends, config=config)
    ends.copy_(torch.tensor([0, 41, 128], device=device))
    graph.replay()
    torch.cuda.synchronize()
    assert_within_gates(replace(sample, lengths=(41, 87)), o, ht)


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (float("nan"), (ValueError, "scale must be finite, not nan")),
        (float("-inf"), (ValueError, "scale must be finite, not -inf")),
        (10**400, (ValueError, "scale must be finite, not 1000")),
        (1e39, (ValueError, "scale must be finite, not 1e\\+39, which fp32 does not hold")),
        (True, (TypeError, "scale must be a number or None, not bool")),
        ("0.1", (TypeError, "scale must be a number or None, not str")),
        (torch.tensor(0.1), (TypeError, "scale must be a number or None, not Tensor")),
    ],
)
def test_a_scale_that_is_no_number_is_refused(scale, error, sample):
    kind, says = error
    with pytest.raises(kind, match=says):
        call(sample, scale=scale)
    with pytest.raises(kind, match=says):
        inputs.check_scale(scale)
    inputs.check_scale(np.float32(0.1))


@pytest.mark.parametrize("lower_bound", ["x", [-5.0], -5 + 0j, torch.tensor([-5.0, -5.0])])
def test_a_lower_bound_that_is_no_number_is_refused_by_name(lower_bound, sample):
    with pytest.raises(TypeError, match="lower_bound must be a number"):
        call(sample, lower_bound=lower_bound)


@pytest.mark.parametrize("ends", [[0, 20, 32], "x", 5])
def test_cu_seqlens_cpu_must_be_a_tensor(ends, sample):
    with pytest.raises(TypeError, match=r"cu_seqlens_cpu must be a torch.Tensor"):
        call(sample, cu_seqlens_cpu=ends)


@pytest.mark.parametrize("name", ["q", "v", "beta", "A_log", "initial_state", "cu_seqlens"])
def test_a_sparse_tensor_is_refused_by_name(name, sample):
    x = sample.tensors().get(name, torch.tensor([0, 20, 32]))
    with pytest.raises(NotImplementedError, match=rf"{name} is torch.sparse_coo"):
        call(sample, **{name: x.to_sparse()})


# torch 2.11 itself calls what it deprecates when its inductor is imported first here
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_caller_breaks_its_graph_at_the_call(sample):
    """Dynamo used to trace into Triton's launch path, and failed there."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda sample: call(sample)[0] * 2, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(sample), call(sample)[0] * 2)
        assert torch.equal(compiled(sample), call(sample)[0] * 2)


class OnCard(torch.Tensor):
    """A tensor that says it is on the second card, for what must be known without one."""

    is_cuda = True
    device = torch.device("cuda", 1)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_call_runs_on_the_card_of_its_tensors(by_name, monkeypatch):
    """Whatever is given comes through as it is; on the card that is current already nothing is changed."""
    q = torch.Tensor._make_subclass(OnCard, torch.zeros(1))
    current = [0]

    @contextmanager
    def device(wanted):
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)

    @on_device_of_q
    def call_on(q, k=None, *, scale=None, checkpoints=None):
        return list(current), q, k, scale, checkpoints

    given = {"k": 2, "scale": 0.5, "checkpoints": [3]}
    for expected in ([0, 1], [1]):
        if expected == [1]:
            current[:] = [1]
        answer = call_on(q=q, **given) if by_name else call_on(q, **given)
        assert answer == (expected, q, 2, 0.5, [3])
    with pytest.raises(TypeError):
        call_on()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_the_tensors_device_decides():
    sample = samples.make((64,), 2, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_within_gates(sample, *call(sample))


def test_signature_is_flash_linear_attentions():
    import inspect

    names = list(inspect.signature(chunk_kda).parameters)
    assert names[:22] == [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound",
        "disable_recompute", "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "cp_context",
        "use_graph", "max_num_seqs",
    ]  # fmt: skip


@pytest.mark.parametrize("precision", ["BF16", "half", "", torch.bfloat16, ["fast"], True])
def test_an_unknown_precision_is_refused(precision, device):
    for tokens in (16, 0):
        with pytest.raises(ValueError, match="fp16, fast, bf16 are supported"):
            call(samples.make((tokens,), 1, device=device), precision=precision)


@pytest.mark.parametrize("config", [{}, "fused", FUSED.k2])
def test_a_config_that_is_none_is_refused(config, device):
    with pytest.raises(TypeError, match="not a LaunchConfig"):
        call(samples.make((16,), 1, device=device), config=config)
