"""Which champion of another kernel answers: exact, the same bucket, the nearest by the kernel's own places, the default."""

from dataclasses import replace

import pytest

from kdatune_kernels.others import OtherChampion
from kdatune_kernels.others import OtherIndex
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.tunable import Installed
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape

H200 = KNOWN_GPUS["NVIDIA H200"]
NVL = KNOWN_GPUS["NVIDIA H200 NVL"]  # the same silicon
H20 = KNOWN_GPUS["NVIDIA H20"]  # the same family
A100 = KNOWN_GPUS["NVIDIA A100-SXM4-80GB"]


def config(rows: int = 2, block: int = 512, warps: int = 4) -> OtherConfig:
    return OtherConfig({"rows_per_program": rows, "block_columns": block, "num_warps": warps})


def champion(
    rows: int, columns: int, chosen: OtherConfig, dtype: str = "bf16", gpu: Gpu = H200, generation: int = 1
) -> OtherChampion:
    shape = OtherShape({"rows": rows, "columns": columns, "dtype": dtype})
    return OtherChampion("rmsnorm", gpu, shape, chosen, generation, 10.0, 12.0)


def found(
    kernel: Installed | None, champions: list[OtherChampion], key: str, gpu: Gpu = H200
) -> tuple[str, OtherConfig]:
    shape = kernel.parse_shape(key) if kernel else OtherShape({"rows": 4096, "columns": 1000, "dtype": "bf16"})
    match = OtherIndex(champions, gpu, kernel).find(shape)
    assert match is not None
    return match.match, match.config


def test_the_order_of_answers(rmsnorm: Installed) -> None:
    tuned = [
        champion(4096, 1000, config(1)),
        champion(4000, 1000, config(2)),
        champion(4096, 4000, config(4)),
        champion(4096, 1000, config(8), "fp16"),
    ]
    assert found(rmsnorm, tuned, "rows=4096,columns=1000") == ("exact", config(1))
    assert found(rmsnorm, tuned, "rows=4000,columns=999") == ("bucket", config(2))
    assert found(rmsnorm, tuned, "rows=4096,columns=900,dtype=fp16") == ("bucket", config(8))
    # 3,000 is 0.4 steps from 4,000 and 1.6 from 1,000: log2(4000 / 3000), log2(3000 / 1000)
    assert found(rmsnorm, tuned, "rows=8000,columns=3000") == ("nearest", config(4))
    assert found(rmsnorm, tuned, "rows=4096,columns=1000,dtype=fp32")[0] == "default"
    assert found(rmsnorm, tuned, "rows=1,columns=1000")[0] == "default"


def test_the_bound_is_two_steps(rmsnorm: Installed) -> None:
    tuned = [champion(1024, 1024, config())]
    match = OtherIndex(tuned, H200, rmsnorm).find(rmsnorm.parse_shape("rows=2048,columns=2048"))
    assert match is not None
    assert (match.match, match.reason) == ("nearest", "tuned for columns=1024,dtype=bf16,rows=1024, 2.00 away")
    assert found(rmsnorm, tuned, "rows=2049,columns=2048")[0] == "default"


@pytest.mark.parametrize(
    ("gpu", "level", "match"),
    [(H200, "exact", "exact"), (NVL, "silicon", "exact"), (H20, "family", "default"), (A100, "none", "default")],
)
def test_only_the_same_silicon_is_served(rmsnorm: Installed, gpu: Gpu, level: str, match: str) -> None:
    answer = OtherIndex([champion(64, 512, config())], gpu, rmsnorm).find(rmsnorm.parse_shape("rows=64,columns=512"))
    assert answer is not None
    assert (answer.gpu_level, answer.match) == (level, match)


def test_the_same_card_before_the_same_silicon(rmsnorm: Installed) -> None:
    tuned = [champion(64, 512, config(1), gpu=NVL), champion(64, 512, config(2), gpu=H200)]
    assert found(rmsnorm, tuned, "rows=64,columns=512") == ("exact", config(2))


def test_what_the_kernel_refuses_is_passed_over(rmsnorm: Installed) -> None:
    wide = config(1, 2048, 4)
    tuned = [champion(64, 1200, wide), champion(64, 1100, config(2, 256))]
    # 2,048 columns are mostly empty for a row of 700, which is near both
    assert found(rmsnorm, tuned, "rows=64,columns=700") == ("nearest", config(2, 256))
    bad = replace(tuned[0], config=OtherConfig({"rows_per_program": "many"}))
    match = OtherIndex([bad], H200, rmsnorm).find(rmsnorm.parse_shape("rows=64,columns=1200"))
    assert match is not None
    assert match.match == "default"
    assert "refused: a config of rmsnorm has rows_per_program, block_columns, num_warps" in match.reason


def test_a_neighbour_that_kept_its_default_gives_the_default_of_the_shape(rmsnorm: Installed) -> None:
    there = rmsnorm.parse_shape("rows=64,columns=1000")
    tuned = [champion(64, 1000, rmsnorm.default(there, H200))]
    here = rmsnorm.parse_shape("rows=64,columns=2000")
    assert rmsnorm.default(there, H200) != rmsnorm.default(here, H200)
    assert found(rmsnorm, tuned, "rows=64,columns=2000") == ("nearest", rmsnorm.default(here, H200))


def test_without_the_kernel_only_the_very_shape(nothing_installed: None) -> None:
    tuned = [champion(4096, 1000, config(1))]
    assert found(None, tuned, "") == ("exact", config(1))
    near = OtherShape({"rows": 4096, "columns": 1001, "dtype": "bf16"})
    assert OtherIndex(tuned, H200, None).find(near) is None
    assert OtherIndex(tuned, H20, None).find(tuned[0].shape) is None


def test_a_champion_of_other_fields_is_served_for_its_own_shape(rmsnorm: Installed) -> None:
    """The kernel has changed its fields since: the champion has no place any more, and nothing breaks."""
    old = replace(champion(64, 512, config()), shape=OtherShape({"rows": 64, "width": 512}))
    match = OtherIndex([old, champion(64, 512, config(4))], H200, rmsnorm).find(
        rmsnorm.parse_shape("rows=64,columns=512")
    )
    assert match is not None
    assert match.config == config(4)
