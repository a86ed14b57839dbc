"""Public bug reports on kernels of this family, restated small: each runs with its right value."""

import math
from dataclasses import replace

import pytest
import torch
from kda_calls import CONFIGS
from kda_calls import assert_within_gates
from kda_calls import call
from kda_calls import name_of
from kda_calls import ratios

from kdatune_kernels import launch
from kdatune_kernels import reference
from kdatune_kernels import samples

CARD = torch.cuda.is_available()
every_config = pytest.mark.parametrize("config", CONFIGS, ids=name_of)


@every_config
def test_strong_decay(config, device):
    sample = samples.make((4096 if CARD else 48,), 2, device=device)
    sample = replace(
        sample,
        g=torch.full_like(sample.g, 8.0),
        A_log=torch.zeros(2, device=device),
        dt_bias=torch.zeros(2, 128, device=device),
    )
    assert_within_gates(sample, *call(sample, config=config))


@pytest.mark.parametrize("lower_bound", [-0.01, -1.0, -2.5, -3.0, -5.0])
@pytest.mark.parametrize("gain", [-4.0, 0.0, math.log(16), math.log(72)])
@pytest.mark.parametrize(
    ("gate", "bias"), [(kind, kind) for kind in ("low", "high", "uniform", "wide")] + [("low", "high"), ("wide", "low")]
)
@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp2:RuntimeWarning"
)  # inf, whose reciprocal is the 0 meant
def test_gate_ranges(lower_bound, gain, gate, bias, device):
    sample = samples.make((512 if CARD else 33,), 1, device=device, seed=3)

    def draw(like, kind):
        base = torch.rand_like(like, dtype=torch.float32) * 16 - 8
        wide = torch.randn_like(like, dtype=torch.float32) * 8
        return {"low": torch.full_like(base, -8), "high": torch.full_like(base, 8), "uniform": base, "wide": wide}[kind]

    sample = replace(
        sample, g=draw(sample.g, gate).bfloat16(), dt_bias=draw(sample.dt_bias, bias), lower_bound=lower_bound,
        A_log=torch.full((1,), gain, device=device),
    )  # fmt: skip
    assert_within_gates(sample, *call(sample))


@pytest.mark.parametrize("lower_bound", [-6.0, 0.0, 0.5, float("nan"), float("-inf")])
def test_lower_bound_outside_names_the_range(lower_bound, device):
    sample = replace(samples.make((16,), 1, device=device), lower_bound=lower_bound)
    with pytest.raises(ValueError, match=r"lower_bound must be in \[-5, 0\)"):
        call(sample)


@every_config
@pytest.mark.parametrize("with_state", [True, False])
def test_empty_sequences(config, with_state, device):
    lengths = (0, 128, 0, 128, 0) if CARD else (0, 20, 0, 17, 0)
    sample = samples.make(lengths, 4 if CARD else 2, device=device, initial_state=with_state)
    o, ht = call(sample, config=config)
    start = 0
    for n, length in enumerate(lengths):
        h0 = sample.initial_state[n : n + 1] if with_state else None
        if length == 0:
            assert torch.equal(ht[n], torch.zeros_like(ht[n]) if h0 is None else h0[0])
            continue
        part = _slice(sample, start, length, h0)
        alone_o, alone_ht = call(part, config=config)
        assert torch.equal(o[:, start : start + length], alone_o)
        assert torch.equal(ht[n], alone_ht[0])
        start += length


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
def test_without_tokens_nothing_is_launched(packed, with_state, device, monkeypatch):
    def launched(*_args, **_kwargs):
        raise AssertionError("a launch")

    for name in ("dense_tables", "packed_tables", "run_k1", "run_k2"):
        monkeypatch.setattr(launch, name, launched)
    sample = samples.make((0,), 2, device=device, initial_state=with_state)
    if packed:
        sample = replace(
            sample, lengths=(0, 0), initial_state=None if not with_state else sample.initial_state.repeat(2, 1, 1, 1)
        )
    o, ht = call(sample)
    assert o.shape == sample.v.shape
    assert torch.equal(ht, sample.initial_state if with_state else torch.zeros_like(ht))


def _slice(sample, start, length, h0):
    cut = {name: getattr(sample, name)[:, start : start + length].clone() for name in ("q", "k", "v", "g", "beta")}
    return replace(sample, **cut, initial_state=h0, lengths=(length,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_state", [True, False])
def test_nothing_to_do_returns_the_initial_state(dtype, with_state, device):
    sample = samples.make((0,), 4, device=device, initial_state=with_state, state_dtype=dtype)
    ends = torch.zeros(2, dtype=torch.int32, device=device)
    o, ht = call(sample, cu_seqlens=ends)
    assert o.shape == (1, 0, 4, 128)
    assert torch.equal(ht, sample.initial_state.float() if with_state else torch.zeros(1, 4, 128, 128, device=device))


@every_config
def test_short_and_ragged_equal_their_solo_runs(config, device):
    lengths = (*range(1, 16), 16, 17, 31, 33, 97) if CARD else (1, 15, 16, 17, 33)
    sample = samples.make(lengths, 96 if CARD else 1, device=device)
    o, ht = call(sample, config=config)
    assert_within_gates(sample, o, ht)
    start = 0
    for n, length in enumerate(lengths):
        alone_o, alone_ht = call(_slice(sample, start, length, sample.initial_state[n : n + 1]), config=config)
        assert torch.equal(o[:, start : start + length], alone_o), length
        assert torch.equal(ht[n], alone_ht[0]), length
        start += length


@every_config
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("T", [75, 8191] if CARD else [75])
def test_poison_behind_the_end_is_not_read(config, poison, T, device):
    sample = samples.make((T,), 1, device=device)
    clean = call(sample, config=config)

    def padded(x):
        longer = torch.full((1, T + 64, *x.shape[2:]), poison, dtype=x.dtype, device=device)
        longer[:, :T] = x
        return longer[:, :T]

    dirty = replace(sample, **{name: padded(getattr(sample, name)) for name in ("q", "k", "v", "g", "beta")})
    o, ht = call(dirty, config=config)
    assert torch.equal(o, clean[0])
    assert torch.equal(ht, clean[1])


@every_config
@pytest.mark.parametrize("name", ["v", "q", "k", "g", "beta"])
def test_nan_stays_in_its_sequence(config, name, device):
    lengths = (37, 41, 23)
    sample = samples.make(lengths, 2 if CARD else 1, device=device)
    clean_o, clean_ht = call(sample, config=config)
    x = getattr(sample, name).clone()
    x[:, 37:78] = float("nan")
    o, ht = call(replace(sample, **{name: x}), config=config)
    for part in (slice(0, 37), slice(78, 101)):
        assert torch.equal(o[:, part], clean_o[:, part])
    for n in (0, 2):
        assert torch.equal(ht[n], clean_ht[n])


@pytest.mark.gpu
@every_config
def test_more_chains_than_a_grid_dimension_holds(config, device):
    lengths = (16,) * 2050
    sample = samples.make(lengths, 32, device=device)
    o, ht = call(sample, config=config)
    half = 1025
    for first, part in ((0, slice(0, 16 * half)), (half, slice(16 * half, None))):
        cut = {name: getattr(sample, name)[:, part].clone() for name in ("q", "k", "v", "g", "beta")}
        state = sample.initial_state[first : first + half].clone()
        half_o, half_ht = call(replace(sample, **cut, initial_state=state, lengths=lengths[:half]), config=config)
        assert torch.equal(o[:, part], half_o)
        assert torch.equal(ht[first : first + half], half_ht)


@every_config
@pytest.mark.parametrize("v_first", [True, False])
def test_state_layout(config, v_first, device):
    sample = samples.make((16,), 1, device=device)
    i, j = 5, 70
    state = torch.zeros(1, 1, 128, 128, device=device)
    at = (0, 0, j, i) if v_first else (0, 0, i, j)
    state[at] = 1.0
    sample = replace(
        sample, initial_state=state, A_log=torch.full((1,), -20.0, device=device), beta=torch.full_like(sample.beta, -30.0),
        lower_bound=-1e-6,
    )  # fmt: skip
    o, ht = call(sample, config=config, state_v_first=v_first)
    # What is read in one layout and written in the same wrong one would keep its place: outputs tell. o_j = scale * q_i.
    qn = sample.q.double() * torch.rsqrt(sample.q.double().square().sum(-1, keepdim=True) + 1e-6)
    want = torch.zeros_like(o, dtype=torch.float64)
    want[..., j] = 128**-0.5 * qn[..., i]
    assert reference.error_ratio(o, want) < 0.005
    assert float(ht[at]) == pytest.approx(1.0, abs=1e-4)
    ht[at] = 0.0
    assert float(ht.abs().max()) < 1e-6


@every_config
def test_inputs_are_not_written(config, device):
    sample = samples.make((33, 16), 2, device=device)
    before = {name: x.clone() for name, x in sample.tensors().items() if isinstance(x, torch.Tensor)}
    call(sample, config=config)
    for name, x in before.items():
        assert torch.equal(getattr(sample, name), x), name


@every_config
def test_a_thousand_runs_are_bit_equal(config, device):
    sample = samples.make((300, 75), 4, device=device) if CARD else samples.make((20,), 1, device=device)
    o, ht = call(sample, config=config)
    for _ in range(999 if CARD else 3):
        again_o, again_ht = call(sample, config=config)
        assert torch.equal(o, again_o)
        assert torch.equal(ht, again_ht)


@every_config
def test_zero_rows(config, device):
    sample = samples.make((33,), 1, device=device)
    k = sample.k.clone()
    k[:, 3] = 0.0
    k[:, 7] *= 1e-4 / float(k[0, 7].float().norm())
    assert_within_gates(replace(sample, k=k), *call(replace(sample, k=k), config=config))


@every_config
@pytest.mark.parametrize("kind", samples.KINDS)
@pytest.mark.parametrize("T", [512, 2048] if CARD else [64])
def test_every_kind_of_input(config, kind, T, device):
    sample = samples.make((T,), 4 if CARD else 1, kind=kind, device=device)
    assert_within_gates(sample, *call(sample, config=config))


@pytest.mark.gpu
@pytest.mark.slow
def test_weak_decay_long(device):
    sample = samples.make((65536,), 2, kind="weak", device=device)
    o, ht = call(sample)
    o_ratio, state_ratio, window = ratios(sample, o, ht)
    assert torch.isfinite(o).all()
    assert o_ratio < 0.005
    assert state_ratio < 0.005
    assert window < 0.02


@every_config
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fast"])
def test_the_update_sees_a_small_residual_of_large_numbers(config, precision, device):
    """k = (1/2, 1/2, 1/2, 1/2, 0 ...), state rows (8192, 4, 0, 0), v = 4096: S^T k = 4098, so the update must see -2."""
    sample = samples.make((1,), 1, device=device)
    k = torch.zeros_like(sample.k)
    k[..., :4] = 0.5
    state = torch.zeros(1, 1, 128, 128, device=device)
    state[0, 0, 0], state[0, 0, 1] = 8192.0, 4.0
    sample = replace(
        sample, k=k, v=torch.full_like(sample.v, 4096.0), initial_state=state, A_log=torch.full((1,), -20.0, device=device),
        beta=torch.full_like(sample.beta, 20.0), lower_bound=-1e-6,
    )  # fmt: skip
    _, ht = call(sample, config=config, precision=precision)
    want = reference.recurrence(**sample.tensors(), lengths=[1])[1]
    assert float(ht[0, 0, 2, 0]) == pytest.approx(-1.0, abs=0.01)
    assert float((ht - want).abs().max()) < 0.05
