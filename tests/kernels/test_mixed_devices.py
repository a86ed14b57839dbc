"""A tensor on another device than q is refused by name before anything is launched. Meta tensors stand for the other device."""

import dataclasses

import pytest
import torch
from kda_calls import call

from kdatune_kernels import samples


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_one_tensor_elsewhere(name, device):
    sample = samples.make((16, 16), 1, device=device)
    elsewhere = dataclasses.replace(sample, **{name: getattr(sample, name).to("meta")})
    with pytest.raises(ValueError, match=rf"{name} is on meta, q is on {device}.*: all tensors must share one device"):
        call(elsewhere)


def test_offsets_elsewhere(device):
    sample = samples.make((16, 16), 1, device=device)
    ends = torch.tensor([0, 16, 32], device="meta")
    with pytest.raises(ValueError, match=f"cu_seqlens is on meta, q is on {device}"):
        call(sample, cu_seqlens=ends)


def test_all_of_them_on_what_is_no_card(device):
    sample = samples.make((16,), 1, device=device)
    elsewhere = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in sample.tensors().items()}
    with pytest.raises(ValueError, match="q is on meta; only CUDA devices are supported"):
        call(dataclasses.replace(sample, **elsewhere))
