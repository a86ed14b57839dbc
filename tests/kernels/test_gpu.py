"""Which card's clock is read: that of this process, on a host of several."""

import pytest

from kdatune_kernels.errors import UsageError
from kdatune_kernels.gpu import nvml_handle


class Nvml:
    """Three cards as NVML lists them, whatever CUDA_VISIBLE_DEVICES says; handles are what they name."""

    UUIDS = ("GPU-aa11", "GPU-bb22", "GPU-bb33")

    def nvmlDeviceGetCount(self):  # noqa: N802 - NVML's names
        return len(self.UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.UUIDS[index]

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return handle.encode() if handle == "GPU-bb22" else handle  # older bindings give bytes

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):  # noqa: N802
        return f"card of {handle}"


@pytest.mark.parametrize(
    ("visible", "card"),
    [
        (None, "GPU-aa11"),
        ("2", "GPU-bb33"),
        ("1,0", "GPU-bb22"),
        ("GPU-bb22", "GPU-bb22"),
        ("GPU-bb3, GPU-aa11", "GPU-bb33"),
        ("MIG-cc44", "card of MIG-cc44"),
    ],
)
def test_the_card_is_the_first_that_cuda_shows(visible, card):
    assert nvml_handle(Nvml(), visible) == card


def test_a_name_of_no_card_is_said():
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES='GPU-dd' names no card"):
        nvml_handle(Nvml(), "GPU-dd")
