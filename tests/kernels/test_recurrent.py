"""recurrent_kda, the decode step: against the fp64 recurrence, with pools of states, and with what it must refuse."""

from dataclasses import replace

import pytest
import torch
from kda_calls import call as chunk

from kdatune_kernels import reference
from kdatune_kernels import samples
from kdatune_kernels.recurrent import recurrent_kda

OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}
O_GATE = {torch.bfloat16: 2e-3, torch.float16: 3e-4}
"""The output's own rounding is 1.7e-3 in bf16 and 2.1e-4 in fp16; nothing else may show."""
STATE_GATE = 1e-6


def call(sample, **options):
    if "cu_seqlens" not in options and len(sample.lengths) != 1:
        options["cu_seqlens"] = torch.tensor([0, *sample.lengths], device=sample.q.device).cumsum(0)
    return recurrent_kda(**{**OPTIONS, **sample.tensors(), **options})


def same_states(states, want):
    """To the bit on the CPU; on a card another variant of the kernel may contract other products, so to the last bits."""
    close = {"rtol": 1e-6, "atol": 1e-7} if states.is_cuda and states.dtype == torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(states, want, **close)


def assert_right(sample, o, ht, **options):
    want_o, want_ht = reference.recurrence(**sample.tensors(), lengths=list(sample.lengths), **options)
    assert reference.error_ratio(o, want_o) < O_GATE[sample.q.dtype]
    assert reference.error_ratio(ht, want_ht) < STATE_GATE
    assert reference.worst_window(o, want_o) < 2 * O_GATE[sample.q.dtype]


@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("V", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_first", [True, False])
def test_sizes_dtypes_and_layouts(K, V, dtype, v_first, device):
    sample = samples.make((3,), 1, 2, size=K, value_size=V, dtype=dtype, state_v_first=v_first, device=device)
    o, ht = call(sample, state_v_first=v_first)
    assert o.dtype == dtype
    assert ht.dtype == torch.float32
    assert_right(sample, o, ht, state_v_first=v_first)


@pytest.mark.parametrize("kind", samples.KINDS)
def test_every_kind_of_input(kind, device):
    sample = samples.make((16,), 2, kind=kind, device=device)
    assert_right(sample, *call(sample))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dtypes(state_dtype, device):
    sample = samples.make((2, 1), 2, state_dtype=state_dtype, device=device)
    assert_right(sample, *call(sample))


def test_softplus_gate(device):
    sample = samples.make((5,), 2, device=device)
    g = sample.g.clone()
    g[:, 1], g[:, 2] = 30.0, -30.0
    sample = replace(sample, g=g, lower_bound=None)
    assert_right(sample, *call(sample), gate="softplus")


def test_a_tiny_softplus_is_not_lost(device):
    """log(1 + e^x) at x = -20 is 2e-9, and 1 + 2e-9 is 1 in fp32."""
    sample = samples.make((1,), 1, device=device)
    sample = replace(
        sample, g=torch.full_like(sample.g, -20.0), A_log=torch.full((1,), 20.0, device=device), dt_bias=None,
        lower_bound=None, k=torch.zeros_like(sample.k),
    )  # fmt: skip
    _, ht = call(sample)
    assert float((ht / sample.initial_state).mean()) == pytest.approx(0.36788, rel=1e-4)  # e^20 * e^-20 = 1


def test_a_log_decay_of_its_own_and_no_norm(device):
    sample = samples.make((4,), 2, device=device)
    log_decay = -torch.rand(sample.g.shape, device=device)
    strength = torch.rand(sample.beta.shape, device=device)
    unit = {n: torch.nn.functional.normalize(getattr(sample, n).float(), dim=-1).bfloat16() for n in "qk"}
    plain = {**unit, "g": log_decay, "beta": strength, "A_log": None, "dt_bias": None, "lower_bound": None}
    off = {"use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "use_beta_sigmoid_in_kernel": False}
    assert_right(
        replace(sample, **plain), *call(sample, **plain, **off), gate="log", qk_l2norm=False, beta_sigmoid=False
    )


def test_negative_eigenvalues(device):
    sample = samples.make((4,), 1, device=device)
    assert_right(sample, *call(sample, allow_neg_eigval=True), neg_eigval=True)


@pytest.mark.parametrize("gate", [-60000.0, -88.0, 0.0, 88.0, 60000.0])
@pytest.mark.parametrize("lower_bound", [-5.0, -1e-6])
def test_extreme_gates_and_logits(gate, lower_bound, device):
    sample = samples.make((3,), 1, device=device)
    sample = replace(
        sample, g=torch.full_like(sample.g, gate), beta=torch.full_like(sample.beta, gate), lower_bound=lower_bound,
        A_log=torch.full((1,), 4.0, device=device),
    )  # fmt: skip
    assert_right(sample, *call(sample))


def test_scale_and_missing_parameters(device):
    sample = samples.make((3,), 2, device=device, initial_state=False)
    o, ht = call(sample, scale=0.5, A_log=None, dt_bias=None)
    assert_right(replace(sample, A_log=None, dt_bias=None), o, ht, scale=0.5)
    assert call(sample, output_final_state=False)[1] is None


def test_the_update_sees_a_small_residual_of_large_numbers(device):
    sample = samples.make((1,), 1, device=device)
    k = torch.zeros_like(sample.k)
    k[..., :4] = 0.5
    state = torch.zeros(1, 1, 128, 128, device=device)
    state[0, 0, 0], state[0, 0, 1] = 8192.0, 4.0
    sample = replace(
        sample, k=k, v=torch.full_like(sample.v, 4096.0), initial_state=state, A_log=torch.full((1,), -20.0, device=device),
        beta=torch.full_like(sample.beta, 20.0), lower_bound=-1e-6,
    )  # fmt: skip
    _, ht = call(sample)
    assert float(ht[0, 0, 2, 0]) == pytest.approx(-1.0, abs=0.01)


def test_packed_empty_and_ragged_equal_their_solo_runs(device):
    lengths = (0, 1, 3, 0, 5, 0)
    sample = samples.make(lengths, 2, device=device)
    o, ht = call(sample)
    start = 0
    for n, length in enumerate(lengths):
        cut = {x: getattr(sample, x)[:, start : start + length] for x in ("q", "k", "v", "g", "beta")}
        alone = replace(sample, **cut, initial_state=sample.initial_state[n : n + 1], lengths=(length,))
        alone_o, alone_ht = call(alone)
        assert torch.equal(o[:, start : start + length], alone_o)
        assert torch.equal(ht[n], alone_ht[0])
        start += length
    assert torch.equal(ht[0], sample.initial_state[0])


def test_single_steps_equal_one_call(device):
    sample = samples.make((4,), 1, device=device)
    o, ht = call(sample)
    state = sample.initial_state.clone()
    for t in range(4):
        cut = {x: getattr(sample, x)[:, t : t + 1] for x in ("q", "k", "v", "g", "beta")}
        step, kept = call(replace(sample, **cut, lengths=(1,)), initial_state=state, inplace_final_state=True)
        assert kept is state
        assert torch.equal(step, o[:, t : t + 1])
    assert torch.equal(state, ht)


def test_decode_goes_on_where_a_prefill_ended(device):
    sample = samples.make((35,), 1, device=device)
    want_o, want_ht = reference.recurrence(**sample.tensors(), lengths=[35])
    first = {x: getattr(sample, x)[:, :32] for x in ("q", "k", "v", "g", "beta")}
    rest = {x: getattr(sample, x)[:, 32:] for x in ("q", "k", "v", "g", "beta")}
    _, state = chunk(replace(sample, **first, lengths=(32,)))
    o, ht = call(replace(sample, **rest, lengths=(3,)), initial_state=state)
    assert reference.error_ratio(o, want_o[:, 32:]) < 0.005
    assert reference.error_ratio(ht, want_ht) < 0.005


def _pool(sample, slots, gap=0):
    """A pool of `slots` states filled with NaN, with `gap` unused elements between two states."""
    each = sample.initial_state[0].numel()
    flat = torch.full((slots, each + gap), float("nan"), dtype=sample.initial_state.dtype, device=sample.q.device)
    return flat.as_strided((slots, *sample.initial_state.shape[1:]), (each + gap, *sample.initial_state.stride()[1:]))


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_a_pool_of_states_is_updated_in_place(v_first, state_dtype, index_dtype, device):
    sample = samples.make((1, 2, 1), 2, state_v_first=v_first, state_dtype=state_dtype, device=device)
    want_o, want_ht = call(sample, state_v_first=v_first)
    pool = _pool(sample, 6, gap=24)
    where = torch.tensor([4, 0, 2], device=device, dtype=index_dtype)
    pool[where.long()] = sample.initial_state
    o, kept = call(sample, initial_state=pool, ssm_state_indices=where, inplace_final_state=True, state_v_first=v_first)
    assert kept is pool
    assert torch.equal(o, want_o)
    same_states(pool[where.long()], want_ht.to(state_dtype))
    assert pool[[1, 3, 5]].isnan().all()


def test_a_pool_that_is_only_read(device):
    sample = samples.make((1, 2), 1, device=device)
    pool = _pool(sample, 4)
    pool[[3, 1]] = sample.initial_state
    before = pool.clone()
    o, ht = call(sample, initial_state=pool, ssm_state_indices=torch.tensor([3, 1], device=device))
    want_o, want_ht = call(sample)
    assert torch.equal(o, want_o)
    assert torch.equal(ht, want_ht)
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("null", [-1, -7, 0])
def test_padding_slots_touch_nothing(null, device):
    """What CUDA-graph padding sends: sequences without a state. Slot -1 must not wrap around to the last one."""
    sample = samples.make((1, 1, 1), 2, device=device)
    pool = _pool(sample, 4)
    pool[[2, 3]] = sample.initial_state[[0, 2]]
    kept = pool.clone()
    where = torch.tensor([2, null, 3], device=device)
    o, _ = call(
        sample, initial_state=pool, ssm_state_indices=where, inplace_final_state=True, null_slot=0 if null == 0 else None
    )  # fmt: skip
    assert torch.equal(o[:, 1], torch.zeros_like(o[:, 1]))
    assert not torch.equal(pool[3], kept[3])
    assert pool[:2].isnan().all()
    assert torch.isfinite(o).all()


def test_a_slot_past_the_pool_is_nan_and_touches_nothing(device):
    sample = samples.make((1, 2), 1, device=device)
    pool = _pool(sample, 2)
    pool[0] = sample.initial_state[0]
    where = torch.tensor([0, 2], device=device)
    o, _ = call(sample, initial_state=pool, ssm_state_indices=where, inplace_final_state=True)
    assert torch.isfinite(o[:, 0]).all()
    assert o[:, 1:].isnan().all()
    assert pool[1].isnan().all()
    _, ht = call(sample, initial_state=pool, ssm_state_indices=where)
    assert torch.isfinite(ht[0]).all()
    assert ht[1].isnan().all()


def test_states_of_every_token_and_accepted_tokens(device):
    """Two rounds of speculative decoding: every drafted token leaves its state, the next round starts at the accepted one."""
    sample = samples.make((3, 3), 2, device=device)
    pool = _pool(sample, 8)
    where = torch.tensor([[5, 0, 2], [1, 7, 4]], device=device, dtype=torch.int32)
    pool[[5, 1]] = sample.initial_state
    o, _ = call(sample, initial_state=pool, ssm_state_indices=where, inplace_final_state=True)
    assert_right(sample, o, pool[[2, 4]])
    for t in range(3):
        cut = {
            x: getattr(sample, x).unflatten(1, (2, 3))[:, :, : t + 1].flatten(1, 2)
            for x in ("q", "k", "v", "g", "beta")
        }
        _, after = call(replace(sample, **cut, lengths=(t + 1, t + 1)))
        same_states(pool[where[:, t].long()], after)
    assert pool[[3, 6]].isnan().all()
    fresh = samples.make((3, 3), 2, seed=1, device=device)
    fresh = replace(fresh, A_log=sample.A_log, dt_bias=sample.dt_bias, initial_state=pool[[0, 4]].clone())
    accepted = torch.tensor([2, 3], device=device)
    want_o, want_ht = call(fresh)
    o, _ = call(
        fresh, initial_state=pool, ssm_state_indices=where, inplace_final_state=True, num_accepted_tokens=accepted
    )
    assert torch.equal(o, want_o)
    same_states(pool[[2, 4]], want_ht)


@pytest.mark.parametrize("accepted", [0, -3, 9])
def test_a_wrong_accepted_count_stays_in_its_row(accepted, device):
    sample = samples.make((2,), 1, device=device)
    pool = _pool(sample, 3)
    where = torch.tensor([[1, 0]], device=device)
    pool[:2] = sample.initial_state
    o, _ = call(
        sample, initial_state=pool, ssm_state_indices=where, inplace_final_state=True,
        num_accepted_tokens=torch.tensor([accepted], device=device),
    )  # fmt: skip
    assert torch.isfinite(o).all()
    assert pool[2].isnan().all()


def test_padding_in_a_row_of_slots_keeps_the_states_before_it(device):
    sample = samples.make((3,), 1, device=device)
    pool = _pool(sample, 2)
    pool[0] = sample.initial_state[0]
    where = torch.tensor([[0, -1, 99]], device=device)
    o, _ = call(sample, initial_state=pool, ssm_state_indices=where, inplace_final_state=True)
    assert torch.isfinite(o).all()
    assert torch.isfinite(pool[0]).all()
    assert pool[1].isnan().all()


@pytest.mark.parametrize("ends", [[0, 2, 4], [1, 2, 3], [4, 2, 0], [-5, 2, 99], [2, 2, 2]])
def test_whatever_cu_seqlens_holds_no_access_leaves_the_tokens(ends, device):
    """It stays on the device, so it cannot be refused; a padded batch ends before T. Canaries lie around the outputs."""
    sample = samples.make((5,), 1, device=device, initial_state=False)
    canary = torch.full((3, 5, 1, 128), 7.0, dtype=torch.bfloat16, device=device)
    cu = torch.tensor(ends, device=device)
    o, _ = call(sample, cu_seqlens=cu, out=canary[1:2])
    assert bool((canary[0] == 7).all())
    assert bool((canary[2] == 7).all())
    assert torch.isfinite(o).all()
    last = max(0, min(5, ends[-1]))
    if ends == sorted(ends):
        assert bool((o[:, last:] == 0).all())
        assert bool((o[:, : max(0, ends[0])] == 0).all())


def test_nan_stays_in_its_sequence(device):
    sample = samples.make((2, 2, 2), 2, device=device)
    want_o, want_ht = call(sample)
    for name in ("q", "k", "v", "g", "beta"):
        x = getattr(sample, name).clone()
        x[:, 2:4] = float("nan")
        o, ht = call(replace(sample, **{name: x}))
        assert torch.equal(o[:, :2], want_o[:, :2])
        assert torch.equal(o[:, 4:], want_o[:, 4:])
        assert torch.equal(ht[[0, 2]], want_ht[[0, 2]])
        assert o[:, 2:4].isnan().any()


def test_batches_strides_and_out(device):
    """One token for each of B sequences, cut out of a fused projection: read where it lies, no copy needed."""
    B = 3
    sample = samples.make((B,), 2, device=device, initial_state=False)
    rows = {x: getattr(sample, x).transpose(0, 1) for x in ("q", "k", "v", "g", "beta")}
    fused = torch.cat([rows[n].reshape(B, 1, 256) for n in "qkvg"], -1)
    parts = {n: x.view(B, 1, 2, 128) for n, x in zip("qkvg", fused.split(256, -1), strict=True)}
    assert parts["k"].stride(0) == 1024
    dense = {x: rows[x].contiguous() for x in rows}
    want_o, want_ht = call(replace(sample, **dense))
    out = torch.full_like(want_o, float("nan"))
    o, ht = call(replace(sample, **parts, beta=rows["beta"]), out=out)
    assert o is out
    assert torch.equal(o, want_o)
    assert torch.equal(ht, want_ht)
    packed_o, packed_ht = call(sample, cu_seqlens=torch.arange(B + 1, device=device))
    assert torch.equal(packed_o[0], want_o[:, 0])
    assert torch.equal(packed_ht, want_ht)
    odd = torch.zeros(B, 1, 2, 129, device=device, dtype=torch.bfloat16)
    odd[..., 1:] = dense["g"]
    gaps = torch.zeros(B, 1, 2, 256, device=device, dtype=torch.bfloat16)
    gaps[..., ::2] = dense["v"]
    o, ht = call(replace(sample, **{**dense, "g": odd[..., 1:], "v": gaps[..., ::2]}))
    assert torch.equal(o, want_o)
    assert torch.equal(ht, want_ht)


def test_inputs_are_not_written(device):
    sample = samples.make((2, 1), 2, device=device)
    before = {name: x.clone() for name, x in sample.tensors().items() if isinstance(x, torch.Tensor)}
    call(sample)
    for name, x in before.items():
        assert torch.equal(getattr(sample, name), x), name


def test_nothing_to_do(device):
    sample = samples.make((0,), 2, device=device)
    o, ht = call(sample)
    assert o.shape == (1, 0, 2, 128)
    assert torch.equal(ht, sample.initial_state)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lower_bound": -6.0}, ValueError, r"lower_bound must be in \[-5, 0\)"),
        ({"lower_bound": float("nan")}, ValueError, r"lower_bound must be in"),
        ({"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}, ValueError, "allow_neg_eigval needs"),
        ({"use_gate_in_kernel": False}, ValueError, "A_log is read with use_gate_in_kernel=True only"),
        ({"inplace_final_state": True, "initial_state": None}, ValueError, "inplace_final_state needs an initial_state"),
        ({"num_accepted_tokens": torch.ones(1, dtype=torch.int32)}, ValueError, "num_accepted_tokens needs"),
        ({"scale": float("inf")}, ValueError, "scale must be finite"),
        ({"scale": "1"}, TypeError, "scale must be a number"),
        ({"null_slot": 0}, ValueError, "null_slot needs ssm_state_indices"),
        ({"initial_state": torch.zeros(1, 2, 64, 128)}, ValueError, "initial_state must be"),
        ({"initial_state": torch.zeros(1, 2, 128, 128).double()}, TypeError, "initial_state must be .*float32"),
        ({"out": torch.zeros(1, 2, 2, 128)}, ValueError, "out must be a contiguous"),
        ({"out": [1]}, TypeError, r"out must be a torch\.Tensor"),
        ({"cu_seqlens": torch.tensor([0.0, 2.0])}, TypeError, "cu_seqlens must be torch.int32"),
        ({"cu_seqlens": torch.tensor([0]), "initial_state": None}, ValueError, r"N \+ 1 >= 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(options, error, text, device):
    sample = samples.make((2,), 2, device=device)
    moved = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    with pytest.raises(error, match=text):
        call(sample, **moved)


@pytest.mark.parametrize(
    ("slots", "options", "error", "text"),
    [
        (torch.zeros(2), {}, TypeError, "ssm_state_indices must be torch.int32 or torch.int64"),
        ([0, 1], {}, TypeError, "ssm_state_indices must be a torch.Tensor, not list"),
        (torch.zeros(3, dtype=torch.int32), {}, ValueError, r"ssm_state_indices must be \[N\] or \[N, S\], here N=2"),
        (torch.zeros(2, 0, dtype=torch.int32), {}, ValueError, "ssm_state_indices must be"),
        (torch.zeros(2, 1, dtype=torch.int32), {}, ValueError, "1 slots a sequence for T=2 tokens"),
        (torch.zeros(2, 2, dtype=torch.int32), {"inplace_final_state": False}, ValueError, "needs inplace_final_state"),
        (torch.zeros(2, dtype=torch.int32), {"null_slot": 0.0}, TypeError, "null_slot must be a whole number"),
        (torch.zeros(2, dtype=torch.int32), {"num_accepted_tokens": torch.ones(2, dtype=torch.int32)}, ValueError,
         r"num_accepted_tokens needs ssm_state_indices \[N, S\]"),
        (torch.zeros(2, 2, dtype=torch.int32), {"num_accepted_tokens": torch.ones(3, dtype=torch.int32)}, ValueError,
         r"num_accepted_tokens must be \[N\]"),
        (torch.zeros(2, dtype=torch.int32), {"initial_state": torch.zeros(4, 1, 128, 128).transpose(2, 3)}, ValueError,
         "initial_state must be contiguous within a state"),
    ],
)  # fmt: skip
def test_slots_are_checked(slots, options, error, text, device):
    sample = samples.make((4,), 1, device=device, initial_state=False)
    rows = {x: getattr(sample, x).unflatten(1, (2, 2))[0] for x in ("q", "k", "v", "g", "beta")}
    given = {"initial_state": torch.zeros(4, 1, 128, 128), "inplace_final_state": True, **options}
    moved = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    where = slots.to(device) if isinstance(slots, torch.Tensor) else slots
    with pytest.raises(error, match=text):
        call(replace(sample, **rows), ssm_state_indices=where, **moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_input_dtypes_are_named(dtype, device):
    sample = samples.make((2,), 1, device=device)
    with pytest.raises(NotImplementedError, match=f"v is {dtype}"):
        call(replace(sample, v=sample.v.to(dtype)))
    with pytest.raises(TypeError, match=r"k is torch\.float16, q is torch\.bfloat16"):
        call(replace(sample, k=sample.k.half()))
    with pytest.raises(NotImplementedError, match="K is supported in 64, 128, 256"):
        call(samples.make((2,), 1, size=32, device=device))


def test_more_than_a_chunk_is_refused(device):
    with pytest.raises(ValueError, match="recurrent_kda takes at most 16 tokens a sequence, use chunk_kda"):
        call(samples.make((17,), 1, device=device))


def test_a_gradient_is_refused(device):
    sample = samples.make((1,), 1, device=device)
    with pytest.raises(NotImplementedError, match="initial_state requires grad"):
        call(sample, initial_state=sample.initial_state.clone().requires_grad_())


def test_the_package_exports_both_calls():
    import kdatune_kernels
    from kdatune_kernels.kda import chunk_kda

    assert kdatune_kernels.recurrent_kda is recurrent_kda
    assert kdatune_kernels.chunk_kda is chunk_kda
    with pytest.raises(AttributeError, match="no attribute 'recurrent_gda'"):
        _ = kdatune_kernels.recurrent_gda


@pytest.mark.gpu
def test_a_captured_step_follows_its_slots(device):
    """First call of its shape inside a capture; slots, accepted counts and inputs change between replays."""
    sample = samples.make((1, 1), 3, device=device)
    pool = _pool(sample, 4)
    where = torch.tensor([1, -1], device=device)
    ends = torch.tensor([0, 1, 2], device=device)
    options = {"ssm_state_indices": where, "inplace_final_state": True, "initial_state": pool, "cu_seqlens": ends}
    call(samples.make((1, 1), 3, seed=9, device=device), **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = call(sample, **options)
    where.copy_(torch.tensor([3, 0], device=device))
    pool[[3, 0]] = sample.initial_state
    graph.replay()
    torch.cuda.synchronize()
    assert_right(sample, o, pool[[3, 0]])
