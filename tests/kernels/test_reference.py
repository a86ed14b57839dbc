"""The reference against values worked out by hand, and against a second way to write the same mathematics."""

import math

import pytest
import torch

from kdatune_kernels import reference
from kdatune_kernels import samples


def _one_head(*rows):
    return torch.tensor(rows, dtype=torch.float64)[None, :, None, :]


def test_two_tokens_by_hand():
    """K = 2, V = 1, beta logit 0 (strength 1/2), gate 0 with A_log None: log decay lower_bound / 2 = -1 each token."""
    q, k = _one_head([3.0, 4.0], [1.0, 0.0]), _one_head([1.0, 0.0], [0.0, 2.0])
    v, g = _one_head([2.0], [6.0]), torch.zeros(1, 2, 1, 2, dtype=torch.float64)
    o, S = reference.recurrence(
        q, k, v, g, torch.zeros(1, 2, 1), None, None, -2.0, scale=1.0, initial_state=torch.tensor([[[[4.0], [8.0]]]])
    )
    e = math.exp(-1)
    # token 1: S = (4e, 8e), k = (1, 0): u = (2 - 4e) / 2; token 2: k = (0, 1): u = (6 - 8e^2) / 2
    first = 4 * e + (2 - 4 * e) / 2
    assert float(o[0, 0, 0, 0]) == pytest.approx(0.6 * first + 0.8 * 8 * e, rel=1e-5)
    assert S.flatten().tolist() == pytest.approx([first * e, 8 * e * e + (6 - 8 * e * e) / 2], rel=1e-5)
    assert float(o[0, 1, 0, 0]) == pytest.approx(first * e, rel=1e-5)


def test_a_norm_keeps_its_epsilon_inside_the_root():
    k = _one_head([1e-4, 0.0])
    zero = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
    _, S = reference.recurrence(zero, k, _one_head([1.0]), zero, torch.full((1, 1, 1), 40.0), None, None, -1.0)
    assert float(S[0, 0, 0, 0]) == pytest.approx(1e-4 / math.sqrt(1e-8 + 1e-6), rel=1e-6)


def test_packed_sequences_equal_solo_ones_with_grouped_heads():
    sample = samples.make((5, 0, 3), 1, 2, size=8, state_v_first=True)
    o, S = reference.recurrence(**sample.tensors(), lengths=[5, 0, 3], state_v_first=True)
    start = 0
    for n, length in enumerate((5, 0, 3)):
        part = {x: getattr(sample, x)[:, start : start + length] for x in ("q", "k", "v", "g", "beta")}
        rest = {"A_log": sample.A_log, "dt_bias": sample.dt_bias, "lower_bound": -5.0}
        alone_o, alone_S = reference.recurrence(
            **part, **rest, initial_state=sample.initial_state[n : n + 1], state_v_first=True
        )
        assert torch.equal(o[:, start : start + length], alone_o)
        assert torch.equal(S[n], alone_S[0])
        start += length


def test_it_is_the_matrix_form():
    """S_t = (I - b k k^T) diag(exp a) S_{t-1} + b k v^T."""
    sample = samples.make((6,), 1, size=4)
    o, S = reference.recurrence(**sample.tensors(), scale=1.0, lengths=[6])
    state = sample.initial_state[0, 0].double()
    for t in range(6):
        q, k, v = (getattr(sample, n)[0, t, 0].double() for n in "qkv")
        q, k = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt()
        a = -5.0 * torch.sigmoid(
            sample.A_log[0].double().exp() * (sample.g[0, t, 0].double() + sample.dt_bias[0].double())
        )
        b = torch.sigmoid(sample.beta[0, t, 0].double())
        state = (torch.eye(4, dtype=torch.float64) - b * torch.outer(k, k)) @ (
            a.exp()[:, None] * state
        ) + b * torch.outer(k, v)
        torch.testing.assert_close(o[0, t, 0], state.T @ q)
    torch.testing.assert_close(S[0, 0], state)


def test_error_ratio():
    want = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert reference.error_ratio(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert reference.error_ratio(torch.zeros(2), torch.zeros(2)) == 0.0
    assert reference.error_ratio(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(reference.error_ratio(torch.tensor([math.nan, 4.0]), want))
    assert math.isnan(reference.error_ratio(torch.tensor([math.nan, 0.0]), torch.zeros(2)))


def test_worst_window_finds_a_local_fault():
    want = torch.ones(1, 48, 2, 4, dtype=torch.float64)
    o = want.clone()
    o[0, 16:32, 1] = 1.5
    assert reference.worst_window(o, want) == pytest.approx(0.5)
    assert reference.error_ratio(o, want) == pytest.approx(0.5 * math.sqrt(1 / 6))
    assert reference.worst_window(want[:, :0], want[:, :0]) == 0.0
