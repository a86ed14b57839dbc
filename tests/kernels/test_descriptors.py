"""A launch's descriptors and rows are what Triton and torch would have made of the same tensors, without their checks."""

import weakref

import pytest
import torch

from kdatune_kernels import inputs
from kdatune_kernels import launch
from kdatune_kernels.spec import Precision

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TYPES = (torch.bfloat16, torch.float16)


def _seen_by_triton(descriptor: TensorDescriptor) -> tuple:
    """What a launch reads of it: the base's type and address, and every other field."""
    fields = {name: value for name, value in vars(descriptor).items() if name != "base"}
    fields |= {"shape": list(descriptor.shape), "strides": list(descriptor.strides)}
    return type(descriptor), descriptor.base.dtype, descriptor.base.data_ptr(), fields


@pytest.fixture(autouse=True)
def _none_checked_before(monkeypatch):
    monkeypatch.setattr(launch, "_checked", {})


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("box", [(16, 64), (16, 128), (32, 128)])
def test_every_copy_is_what_triton_makes(dtype, box):
    layout = launch._tile_layout(*box, dtype)
    tensors = [torch.zeros(tokens, heads, 128, dtype=dtype) for tokens, heads in ((48, 2), (7, 1), (64, 5))]
    tensors.append(
        torch.zeros(48, 6, 128, dtype=dtype)[:, :2]
    )  # rows of a larger tensor: heads are packed, rows are not
    for x in (*tensors, torch.zeros(64, 128, dtype=dtype)):
        matrix = x if x.dim() == 2 else launch.flat(x)
        expected = TensorDescriptor.from_tensor(matrix, list(box), layout)
        assert _seen_by_triton(launch.described(x, *box)) == _seen_by_triton(expected)
    assert len(launch._checked) == 1  # the others were copied


def test_the_decays_of_a_workspace_too():
    for tiles in (3, 8):
        dec = torch.zeros(tiles, 128)
        expected = TensorDescriptor.from_tensor(dec, [1, 128], launch._decay_layout())
        assert _seen_by_triton(launch.described_decay(dec)) == _seen_by_triton(expected)


@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(64 * 128 + 1, dtype=torch.bfloat16)[1:].view(64, 128),  # does not start at 16 bytes
        torch.zeros(64, 132, dtype=torch.bfloat16)[:, :128],  # nor do its rows
        torch.zeros(64, 256, dtype=torch.bfloat16)[:, ::2],
        torch.zeros(0, 128, dtype=torch.bfloat16),
    ],
    ids=["base", "rows", "columns", "empty"],
)
def test_what_triton_refuses_is_refused_after_others_were_taken(matrix):
    launch.described(torch.zeros(64, 128, dtype=torch.bfloat16), 16, 64)
    with pytest.raises(AssertionError):
        launch.described(matrix, 16, 64)


def test_the_first_matrix_is_not_kept():
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    gone = weakref.ref(x)
    launch.described(x, 16, 64)
    del x
    assert gone() is None


@pytest.mark.parametrize("precision", ["fp16", "fast", "bf16"])
def test_the_fused_kernel_is_told_the_types_of_a_whole_workspace(precision: Precision):
    device = torch.device("cpu")
    whole = launch.workspace(launch.dense_tables(1, 64, device, capturing=True), 2, 128, precision, device)
    types = launch.types_only(128, precision, device)
    assert (types.half, types.exact) == (whole.half, whole.exact)
    assert [x.dtype for x in vars(types).values()] == [x.dtype for x in vars(whole).values()]
    assert not any(x.numel() for x in vars(types).values())
    assert launch.types_only(128, precision, device) is types


@pytest.mark.parametrize(("batch", "tokens", "heads"), [(1, 1, 1), (1, 5, 2), (2, 1, 3), (3, 4, 1), (2, 3, 4)])
def test_contiguous_rows_are_read_where_they_are(batch, tokens, heads):
    x = torch.randn(batch, tokens, heads, 128)
    # Strides of dimensions of one element say nothing, and may be anything.
    steps = [step if size > 1 else 5 for size, step in zip(x.shape, x.stride(), strict=True)]
    for given in (x, x.as_strided(x.shape, steps)):
        rows = inputs._rows(given)
        assert rows.data_ptr() == x.data_ptr()
        assert rows.shape == (batch * tokens, heads, 128)
        assert rows.stride() == (heads * 128, 128, 1)
        assert torch.equal(rows, x.flatten(0, 1))
    beta = x[..., 0].contiguous()
    assert torch.equal(inputs._beta_rows(beta), beta.flatten(0, 1))
    assert inputs._beta_rows(beta).data_ptr() == beta.data_ptr()


def test_rows_off_a_16_byte_boundary_are_copied():
    x = torch.randn(1 + 2 * 3 * 64)[1:].view(1, 2, 3, 64)
    assert x.is_contiguous()
    rows = inputs._rows(x)
    assert rows.data_ptr() % 16 == 0
    assert torch.equal(rows, x[0])
