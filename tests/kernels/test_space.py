"""The config space against what a card really did: every config of a recorded sweep, and the limits of other cards."""

import dataclasses
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from kdatune_kernels import space
from kdatune_kernels.space import FUSED
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.space import k2_configs
from kdatune_kernels.space import k2_smem_bytes
from kdatune_kernels.space import k2_total_warps
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of

H200 = KNOWN_GPUS["NVIDIA H200"]
B200 = KNOWN_GPUS["NVIDIA B200"]
A100 = KNOWN_GPUS["NVIDIA A100-SXM4-80GB"]
L40S = KNOWN_GPUS["NVIDIA L40S"]
SHAPE = shape_of(1, 96, 8192)
WS = K2Config(
    variant="ws",
    block_v=128,
    num_warps=4,
    stages_in=4,
    stages_out=2,
    consumers=2,
    load_warps=1,
    store_warps=1,
    maxnreg=168,
    consumer_regs=232,
    load_regs=24,
    store_regs=24,
)


def recorded() -> list[dict[str, Any]]:
    """Every config of a sweep of an H200: compiled and checked there, or the error."""
    path = Path(__file__).parent.parent / "data" / "checks-h200.jsonl.gz"
    with gzip.open(path, "rt") as file:
        meta, *rows = map(json.loads, file)
    assert meta["gpu"] == "NVIDIA H200"
    return rows


def config_of(row: dict[str, Any]) -> K1Config | K2Config:
    # a field added since then stands at its default: what those kernels did
    return from_json(K1Config if row["kernel"] == "k1" else K2Config, row["config"], strict=False)


def test_config_ok_refuses_exactly_what_the_card_refused() -> None:
    rows = recorded()
    refused = [row for row in rows if config_ok(config_of(row), SHAPE, H200) is not None]
    failed = [row for row in rows if row["outcome"] != "ok"]
    assert len(rows) == 520
    assert len(failed) == 12
    assert refused == failed
    assert all("threads, Required: 512, Hardware limit: 384" in row["detail"] for row in failed)
    # 384 = the warps that 65,536 registers give at 168 each, in whole warpgroups
    reasons = {config_ok(config_of(row), SHAPE, H200) for row in failed}
    assert reasons == {"k2.maxnreg=168 x 16 warps is more than the 65536 registers of an SM"}


def test_warps_are_those_the_card_started() -> None:
    measured = [row for row in recorded() if row.get("effective_num_warps") is not None]
    assert len(measured) == 396
    assert [k2_total_warps(config_of(row)) for row in measured] == [row["effective_num_warps"] for row in measured]


def test_shared_memory_is_a_close_upper_bound_of_what_the_card_gave() -> None:
    measured = [row for row in recorded() if row.get("smem_bytes") is not None]
    over = [k2_smem_bytes(config_of(row), SHAPE) - row["smem_bytes"] for row in measured]
    assert len(over) == 396
    assert min(over) == 116
    assert max(over) == 692


def test_the_search_space_holds_no_config_twice_and_only_legal_ones() -> None:
    k1, k2 = list(space.k1_configs()), list(space.k2_configs())
    assert len({canonical(c) for c in k1}) == len(k1)
    assert len({canonical(c) for c in k2}) == len(k2)
    fields = {**{f"k1.{k}": v for k, v in space.K1_LEGAL.items()}, **{f"k2.{k}": v for k, v in space.K2_LEGAL.items()}}
    for name, configs in (("k1", k1), ("k2", k2)):
        for config in configs:
            for field in dataclasses.fields(config):
                assert getattr(config, field.name) in fields[f"{name}.{field.name}"]
    assert space.space_hash() == space.space_hash()


def test_every_config_field_has_legal_values_and_its_default_is_one() -> None:
    for cls, legal in ((K1Config, space.K1_LEGAL), (K2Config, space.K2_LEGAL)):
        assert [f.name for f in dataclasses.fields(cls)] == list(legal)
        assert all(f.default in legal[f.name] for f in dataclasses.fields(cls))


@pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=KNOWN_GPUS)
def test_legal_spaces_of_the_known_cards(gpu: Gpu) -> None:
    k1, k2 = space.legal_k1(SHAPE, gpu), space.legal_k2(SHAPE, gpu)
    variants = {c.variant for c in (*k1, *k2)}
    assert variants == ({"triton", "cp_async", "tma", "ws"} if gpu.compute_capability == "9.0" else {"triton"})
    assert all(k2_smem_bytes(c, SHAPE) <= gpu.smem_per_block_bytes for c in k2)


def test_the_interpreter_runs_plain_triton_only() -> None:
    assert {c.variant for c in space.legal_k1(SHAPE, None)} == {"triton"}
    assert {c.variant for c in space.legal_k2(SHAPE, None)} == {"triton"}
    assert config_ok(WS, SHAPE, None) == "k2.variant=ws needs a card; the interpreter runs triton only"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_warps": 3}, "k2.num_warps=3 is not one of"),
        ({"num_warps": True}, "k2.num_warps=True is not one of"),
        ({"num_warps": 4.0}, "k2.num_warps=4.0 is not one of"),
        ({"num_warps": [4]}, "k2.num_warps=[4] is not one of"),
        ({"stages_in": 9}, "k2.stages_in=9 is not one of"),
        ({"stages_in": 1}, "stages_in must be >= 2"),
        ({"stages_out": 0}, "stages_out, load_warps and store_warps must be >= 1"),
        ({"load_warps": 0}, "stages_out, load_warps and store_warps must be >= 1"),
        ({"load_regs": None}, "load_regs and store_regs must be set"),
        ({"transposed": True}, "transposed is not read by variant ws"),
        ({"block_v": 64}, "2 x 4 MMA warps cover 128 rows, block_v is 64"),
        ({"consumers": 1}, "1 x 4 MMA warps cover 64 rows, block_v is 128"),
        ({"consumer_regs": None}, "consumer_regs belongs to the second MMA partition"),
        ({"maxnreg": None}, "maxnreg must be set when consumers is 2"),
        ({"load_warps": 4}, "k2.maxnreg=168 x 16 warps is more than the 65536 registers"),
        ({"maxnreg": 10**9}, "k2.maxnreg=1000000000 is not one of"),
        ({"variant": "cuda"}, "k2.variant='cuda' is not one of triton, ws, fused, pairs"),
        ({"variant": "fused"}, "block_v is not read by variant fused and must be"),
    ],
)
def test_config_ok_says_why_not(change: dict[str, Any], says: str) -> None:
    assert config_ok(WS, SHAPE, H200) is None
    reason = config_ok(dataclasses.replace(WS, **change), SHAPE, H200)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (K1Config(num_warps=4, swizzle_bytes=64), "swizzle_bytes is not read by variant triton and must be 0"),
        (K1Config("cp_async", 1, gate_halves=2), "gate_halves is not read by variant cp_async and must be 1"),
        (K1Config("cp_async", 2), "num_warps is not read by variant cp_async and must be 1"),
        (K1Config("tma", 1, load_policy="evict_last"), "load_policy is not read by variant tma and must be 'default'"),
        (K2Config(consumers=2), "consumers is not read by variant triton and must be 1"),
        (K2Config(stages_in=5), "stages_in=5 is outside 1..4"),
        (K2Config(block_v=32, transposed=True), "transposed needs block_v >= 64"),
    ],
)
def test_a_field_that_is_not_read_stands_at_its_default(config: K1Config | K2Config, says: str) -> None:
    reason = config_ok(config, SHAPE, H200)
    assert reason is not None
    assert says in reason


def test_limits_of_other_cards() -> None:
    deep = dataclasses.replace(WS, stages_in=8, stages_out=4, consumers=1, num_warps=8, consumer_regs=None)
    small = dataclasses.replace(H200, name="NVIDIA H small", smem_per_block_bytes=101376)
    assert config_ok(deep, SHAPE, H200) is None
    assert config_ok(deep, SHAPE, small) == (
        "k2 needs 160768 bytes of shared memory, NVIDIA H small gives a block 101376"
    )
    assert config_ok(WS, SHAPE, A100) == ("k2.variant=ws needs compute capability 9.0, NVIDIA A100-SXM4-80GB has 8.0")
    assert config_ok(K2Config(), SHAPE, gpu_of("Tesla V100", "7.0", 80)) == (
        "Tesla V100 has compute capability 7.0; 8.0 is the least that runs these kernels"
    )
    wide = shape_of(1, 8, 64, K=512)
    assert config_ok(K2Config(block_v=128, stages_in=3), wide, A100) is None
    assert config_ok(K2Config(block_v=128, stages_in=4), wide, L40S) == (
        "k2 needs about 168960 bytes of shared memory, NVIDIA L40S gives a block 101376"
    )


def test_a_config_that_fits_one_shape_may_not_fit_another() -> None:
    assert config_ok(WS, SHAPE, H200) is None
    wide = K2Config(block_v=128)
    assert config_ok(wide, dataclasses.replace(SHAPE, V=64), H200) == "k2.block_v=128 does not divide V=64"
    for other in (dataclasses.replace(SHAPE, K=64), dataclasses.replace(SHAPE, V=256)):
        assert config_ok(WS, other, H200) == (
            f"k2.variant=ws needs K = V = 128 and bf16, not K={other.K}, V={other.V} and bf16"
        )
    half = dataclasses.replace(SHAPE, dtype="fp16")
    cp_async = K1Config(variant="cp_async", num_warps=1)
    assert config_ok(cp_async, half, H200) == (
        "k1.variant=cp_async needs K = V = 128 and bf16, not K=128, V=128 and fp16"
    )


@pytest.mark.parametrize("other", [{"dtype": "fp16"}, {"K": 64}, {"V": 64}, {"V": 256}])
def test_the_default_of_other_sizes_on_an_h200_is_plain_triton(other) -> None:
    assert default_config(shape_of(1, 96, 8192, **other), H200) == LaunchConfig(K1Config(), K2Config())


@settings(deadline=None)
@given(
    st.sampled_from([*KNOWN_GPUS.values(), None]),
    st.integers(1, 4096),
    st.sampled_from((1, 2, 8, 32, 96, 128)),
    st.integers(0, 1 << 24),
    st.sampled_from((1, 2, 4)),
    st.booleans(),
)
def test_the_default_is_always_legal(gpu: Gpu | None, N: int, H: int, T: int, group: int, varlen: bool) -> None:
    shape = shape_of(N, H, T, H * group, varlen=varlen)
    assert config_ok(default_config(shape, gpu), shape, gpu) is None


def test_the_default_of_an_h200() -> None:
    few, many = default_config(shape_of(1, 64, 2048), H200), default_config(shape_of(1, 68, 8192), H200)
    assert (few.k2.block_v, few.k2.consumers) == (64, 1)
    assert (many.k2.block_v, many.k2.consumers) == (128, 2)
    assert default_config(shape_of(1, 16, 1024), H200).k1.variant == "cp_async"
    assert many.k1.variant == "tma"
    assert default_config(shape_of(1, 8, 8192), A100).k2 == K2Config(block_v=32, stages_in=3)
    assert default_config(shape_of(1, 96, 8192), A100).k2 == K2Config(block_v=32, stages_in=3)
    assert default_config(shape_of(1, 96, 8192), B200) == LaunchConfig(K1Config(), K2Config())
    assert default_config(shape_of(1, 8, 8192), None) == LaunchConfig(K1Config(), K2Config())


@pytest.mark.parametrize(
    ("N", "H", "T", "rest", "fused"),
    [
        (1, 64, 8192, {}, False),
        (1, 69, 8192, {}, False),  # 0.523 of 132 SMs
        (1, 70, 8192, {}, True),  # 0.530
        (1, 96, 1024, {}, True),
        (1, 96, 8192, {}, True),
        (1, 128, 1024, {}, True),
        (1, 132, 8192, {}, True),
        (1, 133, 8192, {}, False),  # one chain for a second wave
        (1, 139, 8192, {}, False),  # 0.527 of two waves
        (1, 140, 8192, {}, True),
        (2, 96, 8192, {}, True),
        (8, 64, 8192, {}, True),
        (8, 96, 8192, {}, True),
        (64, 96, 65536, {}, True),
        (6, 32, 8192, {"varlen": True, "longest_tokens": 3063}, False),  # 1,986 tokens an SM: 0.519
        (6, 64, 8192, {"varlen": True, "longest_tokens": 3063}, True),  # 3,972: 0.684
        (6, 64, 8192, {"varlen": True, "longest_tokens": 6000}, False),  # 0.525
        (6, 96, 8192, {"varlen": True, "longest_tokens": 3063}, True),
        (8, 96, 8192, {"dtype": "fp16"}, False),
        (8, 96, 8192, {"K": 64}, False),
        (8, 96, 8192, {"V": 256}, False),
    ],
)
def test_the_default_is_fused_where_that_fills_the_sms(N, H, T, rest, fused) -> None:
    shape = shape_of(N, H, T, **rest)
    assert (default_config(shape, H200) == FUSED) is fused
    assert not space.split_default(shape, H200).k2.whole
    assert not any(default_config(shape, gpu).k2.whole for gpu in (None, A100, L40S, B200))


@pytest.mark.parametrize(
    ("N", "H", "T", "rest", "pairs"),
    [
        (1, 64, 8192, {}, True),
        (1, 48, 8192, {}, True),
        (1, 32, 8192, {}, True),
        (1, 64, 4096, {}, True),
        (1, 66, 4096, {}, True),
        (1, 64, 65536, {}, True),
        (2, 32, 8192, {}, True),
        (1, 64, 4095, {}, False),
        (1, 64, 2048, {}, False),
        (1, 67, 8192, {}, False),  # two blocks of 64 rows a chain no longer have an SM each
        (1, 8, 8192, {}, False),  # segments gain more
        (1, 16, 8192, {}, False),
        (4, 16, 8192, {}, False),  # 2,048 tokens each
        (2, 32, 8192, {"varlen": True, "longest_tokens": 4096}, True),
        (6, 11, 8192, {"varlen": True, "longest_tokens": 6000}, True),
        (6, 11, 8192, {"varlen": True}, False),  # how long the longest is, is not known
        (1, 64, 8192, {"dtype": "fp16"}, False),
        (1, 64, 8192, {"K": 64}, False),
        (1, 64, 8192, {"V": 256}, False),
    ],
)
def test_the_default_is_pairs_where_few_chains_are_long(N, H, T, rest, pairs) -> None:
    shape = shape_of(N, H, T, **rest)
    assert (default_config(shape, H200) == PAIRS) is pairs
    assert not space.split_default(shape, H200).k2.whole
    assert not any(default_config(shape, gpu).k2.whole for gpu in (None, A100, L40S, B200))


@pytest.mark.parametrize(
    ("N", "H", "T"), [(1, 96, 8192), (1, 96, 1024), (1, 128, 8192), (1, 160, 8192), (2, 64, 8192), (4, 32, 8192)]
)
def test_packed_sequences_of_like_lengths_have_the_default_of_dense_ones(N: int, H: int, T: int) -> None:
    packed = shape_of(N, H, T, varlen=True, longest_tokens=T // N)
    assert default_config(packed, H200) == default_config(shape_of(N, H, T), H200)


def test_the_default_of_six_sequences_whose_longest_is_not_known() -> None:
    for heads in (24, 64):
        known = shape_of(6, heads, 8192, varlen=True, longest_tokens=3063)
        unknown = shape_of(6, heads, 8192, varlen=True)
        assert default_config(unknown, H200) == default_config(known, H200)
        assert space.split_default(unknown, H200) == space.split_default(known, H200)
        assert space.split_default(unknown, H200).k2.block_v == 64
        assert (default_config(unknown, H200) == FUSED) is (heads == 64)  # 0.71 of the SMs' time, and 0.48


@pytest.mark.parametrize(("whole", "least_smem"), [(FUSED, 226_400), (PAIRS, 175_616)])
def test_a_config_without_stages_is_legal_whole_and_only_whole(whole: LaunchConfig, least_smem: int) -> None:
    assert config_ok(whole, SHAPE, H200) is None
    assert config_ok(whole.k1, SHAPE, H200) is None
    assert "measured whole, not as a stage" in str(config_ok(whole.k2, SHAPE, H200))
    assert whole.k2 not in space.legal_k2(SHAPE, H200)
    other = dataclasses.replace(whole, k1=K1Config(num_warps=4))
    assert "k1 must stand at its defaults" in str(config_ok(other, SHAPE, H200))
    small = dataclasses.replace(H200, name="small", smem_per_block_bytes=least_smem - 1)
    assert config_ok(whole, SHAPE, dataclasses.replace(small, smem_per_block_bytes=least_smem)) is None
    for shape, gpu, why in (
        (SHAPE, None, "the interpreter runs triton only"),
        (SHAPE, A100, "needs compute capability 9.0"),
        (SHAPE, B200, "needs compute capability 9.0"),
        (dataclasses.replace(SHAPE, V=256), H200, "needs K = V = 128 and bf16"),
        (dataclasses.replace(SHAPE, dtype="fp16"), H200, "needs K = V = 128 and bf16"),
        (SHAPE, small, f"small gives a block {least_smem - 1}"),
    ):
        assert why in str(config_ok(whole, shape, gpu))


def test_pairs_have_no_fields_and_one_precision() -> None:
    for change in ({"block_v": 128}, {"segments": 2}, {"stages_in": 5}):
        k2 = dataclasses.replace(PAIRS.k2, **change)
        assert "is not read by variant pairs" in str(config_ok(dataclasses.replace(PAIRS, k2=k2), SHAPE, H200))
    for precision in ("fast", "bf16"):
        assert config_ok(dataclasses.replace(PAIRS, precision=precision), SHAPE, H200) == (
            f"k2.variant=pairs needs precision=fp16, not {precision}"
        )
    assert (PAIRS.k2.step_tokens, FUSED.k2.step_tokens, K2Config().step_tokens) == (32, 16, 16)


@pytest.mark.parametrize("precision", ["fp16", "fast", "bf16"])
def test_every_precision_is_legal_and_no_other(precision) -> None:
    assert config_ok(dataclasses.replace(FUSED, precision=precision), SHAPE, H200) is None
    assert config_ok(dataclasses.replace(FUSED, precision="fp8"), SHAPE, H200) == (
        "precision='fp8' is not one of fp16, fast, bf16"
    )


@settings(deadline=None)
@given(st.data())
def test_config_ok_answers_for_any_config(data: st.DataObject) -> None:
    k1 = K1Config(**{k: data.draw(st.sampled_from(v)) for k, v in space.K1_LEGAL.items()})
    k2 = K2Config(**{k: data.draw(st.sampled_from(v)) for k, v in space.K2_LEGAL.items()})
    gpu = data.draw(st.sampled_from([*KNOWN_GPUS.values(), None]))
    pair = config_ok(LaunchConfig(k1, k2), SHAPE, gpu)
    if k2 not in (FUSED.k2, PAIRS.k2):  # which are legal with one K1 only, and never alone
        assert pair == (config_ok(k1, SHAPE, gpu) or config_ok(k2, SHAPE, gpu))


@pytest.mark.parametrize("gpu", [None, *KNOWN_GPUS.values()], ids=lambda gpu: gpu.name if gpu else "interpreter")
def test_the_default_is_legal_wherever_anything_is(gpu: Gpu | None) -> None:
    calls = itertools.product(
        ((1, 16), (8, 8192), (96, 8192)), (64, 128, 256, 512), (1, 16, 32, 48, 64, 96, 128, 160, 512)
    )
    for (heads, tokens), K, V in calls:
        shape = shape_of(1, heads, tokens, K=K, V=V)
        reason = config_ok(default_config(shape, gpu), shape, gpu)
        any_legal = next((c for c in k2_configs() if config_ok(c, shape, gpu) is None), None)
        assert (reason is None) == (any_legal is not None), (shape.key(), reason)


def test_where_nothing_runs_the_default_says_why() -> None:
    volta = gpu_of("Tesla V100", "7.0", 80)
    assert "8.0 is the least" in str(config_ok(default_config(shape_of(1, 8, 64), volta), shape_of(1, 8, 64), volta))
    odd = shape_of(1, 8, 64, V=48)
    assert "does not divide V=48" in str(config_ok(default_config(odd, H200), odd, H200))
