"""Champions x request: which champion answers, at which level, and when none does."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from kdatune_kernels import match
from kdatune_kernels.match import NEAREST_BOUND
from kdatune_kernels.match import NEAREST_REGRET
from kdatune_kernels.match import Champion
from kdatune_kernels.match import find
from kdatune_kernels.space import FUSED
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.space import k2_configs
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of

H200 = KNOWN_GPUS["NVIDIA H200"]
H100 = KNOWN_GPUS["NVIDIA H100 80GB HBM3"]
H20 = KNOWN_GPUS["NVIDIA H20"]
A100 = KNOWN_GPUS["NVIDIA A100-SXM4-80GB"]
SHAPE = shape_of(1, 96, 8192)
WS_CONFIGS = [LaunchConfig(K1Config(), k2) for k2 in k2_configs() if k2.variant == "ws"]
TOO_DEEP = LaunchConfig(K1Config(), dataclasses.replace(WS_CONFIGS[0].k2, stages_in=8, stages_out=4))


def champion(shape: Shape, gpu: Gpu = H200, number: int = 0, **rest: object) -> Champion:
    """A champion that can be told from others by its config."""
    return Champion(gpu, shape, WS_CONFIGS[number], number + 1, 600.0, 620.0, **rest)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    T = draw(st.integers(0, 1 << 18))
    H = draw(st.sampled_from((1, 8, 32, 64, 96)))
    return Shape(
        N=draw(st.integers(1, 64)),
        H=H,
        T=T,
        HV=H * draw(st.sampled_from((1, 1, 2))),
        dtype=draw(st.sampled_from(("bf16", "bf16", "fp16"))),
        varlen=draw(st.booleans()),
        longest_tokens=draw(st.none() | st.integers(0, T)),
        initial_state=draw(st.booleans()),
        state_v_first=draw(st.booleans()),
        state_dtype=draw(st.sampled_from(("fp32", "bf16"))),
    )


def test_exact() -> None:
    found = find([champion(shape_of(1, 64, 8192), number=1), champion(SHAPE, number=2)], SHAPE, H200)
    assert (found.match, found.gpu_level, found.config) == ("exact", "exact", WS_CONFIGS[2])
    assert found.expected_regret == 1.0
    assert found.champion is not None
    assert found.champion.generation == 3
    assert found.reason == "tuned for this shape"


def test_bucket() -> None:
    found = find([champion(SHAPE, number=1)], shape_of(1, 96, 7000), H200)
    assert (found.match, found.config) == ("bucket", WS_CONFIGS[1])
    assert found.reason == "tuned for N=1,H=96,T=8192, the same bucket"
    assert found.expected_regret == NEAREST_REGRET


def test_nearest_says_how_far() -> None:
    found = find([champion(SHAPE)], shape_of(1, 192, 8192), H200)
    assert (found.match, found.reason) == ("nearest", "tuned for N=1,H=96,T=8192, 1.00 away")


def test_too_far_is_the_default() -> None:
    far = shape_of(1, 8, 8192)
    found = find([champion(SHAPE)], far, H200)
    assert found.match == "default"
    assert found.gpu_level == "exact"
    assert found.config == default_config(far, H200)
    assert found.reason == "no tuned shape is near enough"
    assert found.champion is None


def test_the_nearer_of_two_wins_whatever_their_order() -> None:
    near, far = champion(shape_of(1, 96, 8192), number=1), champion(shape_of(1, 128, 8192), number=2)
    request = shape_of(1, 80, 8192)
    assert find([near, far], request, H200).config == find([far, near], request, H200).config == WS_CONFIGS[1]


def test_of_two_for_one_key_the_first_is_taken() -> None:
    first, second = champion(SHAPE, number=1), champion(SHAPE, number=2)
    assert find([first, second], SHAPE, H200).champion is first
    assert find([second, first], SHAPE, H200).champion is second


@pytest.mark.parametrize("field", ["K", "V"])
def test_another_head_size_never_answers(field: str) -> None:
    other = dataclasses.replace(SHAPE, **{field: 64})
    assert find([champion(SHAPE)], other, H200).match == "default"


def test_another_dtype_never_answers() -> None:
    assert find([champion(SHAPE)], dataclasses.replace(SHAPE, dtype="fp16"), H200).match == "default"


def test_other_state_flags_are_near_but_not_the_same() -> None:
    found = find([champion(SHAPE)], dataclasses.replace(SHAPE, initial_state=False, final_state=False), H200)
    assert (found.match, found.reason) == ("nearest", "tuned for N=1,H=96,T=8192, 0.20 away")


def test_skew_counts() -> None:
    # 96 chains: two kernels where the longest has over 1,873 tokens, and a launch that does not know takes 2,732
    even = shape_of(6, 16, 8192, varlen=True, longest_tokens=2800)
    skewed = shape_of(6, 16, 8192, varlen=True, longest_tokens=5600)
    unknown = shape_of(6, 16, 8192, varlen=True)
    assert find([champion(even)], skewed, H200).match == "nearest"
    assert find([champion(even)], unknown, H200).match == "bucket"
    assert find([champion(even, number=1), champion(skewed, number=2)], skewed, H200).config == WS_CONFIGS[2]


def test_a_champion_of_two_kernels_does_not_answer_where_the_fused_one_is_the_default() -> None:
    """69 chains are two kernels' and 70 the fused one's; so are those of six sequences whose longest is short enough."""
    like = shape_of(6, 16, 8192, varlen=True, longest_tokens=1400)
    for near, request in (
        (shape_of(1, 69, 8192), shape_of(1, 70, 8192)),
        (shape_of(1, 69, 8192), shape_of(1, 128, 8192)),
        (dataclasses.replace(like, longest_tokens=2800), like),
    ):
        assert default_config(near, H200) == split_default(near, H200)
        assert default_config(request, H200) == FUSED
        found = find([champion(near)], request, H200)
        assert (found.match, found.config) == ("default", FUSED)
        assert "it runs in other waves, segments or steps" in found.reason


def test_a_fused_champion_answers_for_another_shape_whose_default_is_fused() -> None:
    fused = Champion(H200, shape_of(8, 96, 8192), FUSED, 1, 520.0, 520.0)
    found = find([fused], shape_of(8, 96, 4096), H200)
    assert (found.match, found.config) == ("nearest", FUSED)


@pytest.mark.parametrize(
    ("name", "level", "served"),
    [
        ("NVIDIA H200", "exact", True),
        ("NVIDIA H200 NVL", "silicon", True),
        ("NVIDIA H100 80GB HBM3", "silicon", True),
        ("NVIDIA H800", "silicon", True),
        ("NVIDIA H100 PCIe", "family", False),
        ("NVIDIA H20", "family", False),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "family", False),
        ("NVIDIA A100-SXM4-80GB", "none", False),
    ],
)
def test_levels_of_sameness(name: str, level: str, served: bool) -> None:
    found = find([champion(SHAPE)], SHAPE, KNOWN_GPUS[name])
    assert found.gpu_level == level
    assert (found.match == "exact") == served
    assert config_ok(found.config, SHAPE, KNOWN_GPUS[name]) is None
    if not served:
        reason = {"family": "only cards of another SM count are tuned", "none": "nothing is tuned for this card"}
        assert found.reason == reason[level]


@pytest.mark.parametrize("name", ["A/B", "", "x" * 500])
def test_a_strange_name_is_no_error(name: str) -> None:
    assert find([champion(SHAPE)], SHAPE, gpu_of(name, "8.6", 80)).gpu_level == "none"
    assert find([champion(SHAPE)], SHAPE, gpu_of(name, "9.0", 132)).gpu_level == "silicon"


def test_the_same_card_goes_before_the_same_silicon() -> None:
    found = find([champion(SHAPE, H100, 1), champion(SHAPE, H200, 2)], SHAPE, H200)
    assert (found.gpu_level, found.config) == ("exact", WS_CONFIGS[2])


def test_an_exact_shape_of_the_same_silicon_goes_before_a_near_shape_of_the_same_card() -> None:
    found = find([champion(SHAPE, H100, 1), champion(shape_of(1, 64, 8192), H200, 2)], SHAPE, H200)
    assert (found.match, found.gpu_level, found.config) == ("exact", "silicon", WS_CONFIGS[1])


def test_a_poisoned_champion_is_passed_over() -> None:
    small = dataclasses.replace(H200, smem_per_block_bytes=101376)
    poisoned = Champion(H200, SHAPE, TOO_DEEP, 9, 1.0, 600.0)
    assert config_ok(TOO_DEEP, SHAPE, small) is not None
    alone = find([poisoned], SHAPE, small)
    assert (alone.match, alone.config) == ("default", default_config(SHAPE, small))
    assert alone.reason.startswith("no tuned shape is near enough; champion of N=1,H=96,T=8192 refused: k2 needs ")
    neighbour = champion(shape_of(1, 80, 8192), small, number=1)  # tuned there, where the fused kernel does not fit
    assert find([poisoned, neighbour], SHAPE, small).config == WS_CONFIGS[1]


def test_nothing_known() -> None:
    found = find([], SHAPE, H200)
    assert (found.match, found.gpu_level, found.reason) == ("default", "none", "nothing is tuned for this card")
    assert found.stale_reason is None


def test_a_stale_champion_answers_and_says_so() -> None:
    found = find([champion(SHAPE, stale_reason="driver 570 -> 580")], SHAPE, H200)
    assert (found.match, found.stale_reason) == ("exact", "driver 570 -> 580")


@settings(deadline=None)
@given(shapes(), shapes())
def test_same_bucket_is_what_bucket_says(a: Shape, b: Shape) -> None:
    def plain(shape: Shape) -> Shape:
        return dataclasses.replace(shape, longest_tokens=None).bucket()

    assert match._same_bucket(a, b) == (plain(a) == plain(b))
    assert match._same_bucket(a, dataclasses.replace(a, longest_tokens=None))


@settings(deadline=None)
@given(shapes(), shapes())
def test_distance_is_symmetric_and_zero_to_itself(a: Shape, b: Shape) -> None:
    assert match.distance(a, b) == pytest.approx(match.distance(b, a))
    assert match.distance(a, a) == 0.0
    assert match.distance(a, b) >= 0.0


@settings(deadline=None)
@given(st.lists(shapes(), max_size=12), shapes(), st.sampled_from([H200, H100, H20, A100]), st.randoms())
def test_every_answer_is_legal_and_does_not_depend_on_the_order(
    known: list[Shape], request: Shape, gpu: Gpu, rng: random.Random
) -> None:
    champions = [champion(shape, H200 if i % 2 else H100, i) for i, shape in enumerate(dict.fromkeys(known))]
    found = find(champions, request, gpu)
    assert config_ok(found.config, request, gpu) is None
    mixed = list(champions)
    rng.shuffle(mixed)
    assert find(mixed, request, gpu) == found
    if gpu in (H20, A100):
        assert found.match == "default"
    if found.match == "nearest":
        assert found.champion is not None
        assert 0 <= match.distance(found.champion.shape, request) <= NEAREST_BOUND  # 0: under a token a chain
    mine = next((c for c in champions if c.shape == request), None)
    if mine is not None and gpu in (H200, H100) and config_ok(mine.config, request, gpu) is None:
        assert found.match == "exact"


@pytest.mark.parametrize("heads", [68, 96])
def test_a_stage_that_kept_its_default_answers_with_the_default_of_the_request(heads: int) -> None:
    """Not with a copy: the K1 default of T 8192 loads by TMA, that of T 1024 by cp.async.

    With 96 heads, where the fused kernel is the default and two stages beat it: with the default of two stages.
    """
    have, want = shape_of(1, heads, 8192), shape_of(1, heads, 4096)
    there, here = split_default(have, H200), split_default(want, H200)
    assert (there.k2, there.k1 == here.k1) == (here.k2, True)
    tuned = dataclasses.replace(there, k2=dataclasses.replace(there.k2, stages_in=6))
    found = find([Champion(H200, have, tuned, 1, 620.0, 628.0)], want, H200)
    assert (found.match, found.config) == ("nearest", tuned)
    want = shape_of(1, heads, 1024)
    here = split_default(want, H200)
    assert there.k1 != here.k1
    assert {default_config(shape, H200) for shape in (have, want)} == ({there, here} if heads == 68 else {FUSED})
    found = find([Champion(H200, have, tuned, 1, 620.0, 628.0)], want, H200)
    assert (found.match, found.config) == ("nearest", dataclasses.replace(tuned, k1=here.k1))
    assert found.reason.endswith("; k1 by this shape's default of two stages")
    found = find([Champion(H200, have, there, 1, 628.0, 628.0)], want, H200)
    assert (found.match, found.config) == ("nearest", here)


@pytest.mark.parametrize("heads", [68, 96])
def test_a_k1_winner_does_not_answer_where_another_k1_is_the_default(heads: int) -> None:
    have, want = shape_of(1, heads, 8192), shape_of(1, heads, 1024)
    there = split_default(have, H200)
    tuned = dataclasses.replace(there, k1=dataclasses.replace(there.k1, swizzle_bytes=64))
    assert find([Champion(H200, have, tuned, 1, 620.0, 628.0)], have, H200).config == tuned
    assert find([Champion(H200, have, tuned, 1, 620.0, 628.0)], want, H200).config == split_default(want, H200)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (shape_of(1, 64, 2048), shape_of(1, 68, 2048)),  # one wave of 64 columns, and more than one
        (shape_of(1, 8, 8192), shape_of(1, 16, 8192)),  # sixteen segments and eight
        (shape_of(1, 66, 2048), shape_of(1, 67, 2048)),  # 132 CTAs and 134
        (shape_of(1, 66, 8192), shape_of(1, 67, 8192)),  # steps of 32 tokens and of 16
        (shape_of(1, 64, 8192), shape_of(1, 64, 2048)),
        (shape_of(1, 64, 8192), shape_of(1, 96, 8192)),  # of 32 tokens, and one kernel
        (shape_of(7, 12, 8192), shape_of(5, 12, 8192)),  # of one bucket: 168 CTAs and 120
    ],
)
def test_no_answer_comes_from_another_number_of_waves_or_segments(have: Shape, want: Shape) -> None:
    assert match.distance(have, want) < NEAREST_BOUND
    for a, b in ((have, want), (want, have)):
        found = find([champion(a)], b, H200)
        assert (found.match, found.config, found.expected_regret) == ("default", default_config(b, H200), None)
        assert found.reason == (
            f"no tuned shape is near enough; champion of {a.key()} refused: it runs in other waves, segments or steps"
        )


def test_what_the_nearest_answer_cost_near_by_is_what_is_expected() -> None:
    want = shape_of(1, 96, 4096)
    assert find([champion(SHAPE)], want, H200).expected_regret == NEAREST_REGRET
    assert find([champion(SHAPE, nearest_regret=1.02)], want, H200).expected_regret == 1.02
    assert find([champion(SHAPE, nearest_regret=1.02)], SHAPE, H200).expected_regret == 1.0


def test_where_the_nearest_answer_cost_more_than_the_default_the_default_answers() -> None:
    want = shape_of(1, 96, 4096)
    champions = [champion(SHAPE, nearest_regret=1.05)]  # there the default costs 620 / 600
    found = find(champions, want, H200)
    assert (found.match, found.config) == ("default", default_config(want, H200))
    assert found.reason.endswith("refused: the nearest answer cost 1.050x there, the default 1.033x")
    assert find(champions, SHAPE, H200).match == "exact"
    # a next one may answer
    further = champion(shape_of(1, 96, 1024), number=3, nearest_regret=1.01)
    assert find([*champions, further], want, H200).champion is further
    # a neighbour that kept its default answers with this shape's: there is nothing to refuse
    kept = Champion(H200, SHAPE, default_config(SHAPE, H200), 1, 600.0, 600.0, nearest_regret=1.02)
    assert find([kept], want, H200).match == "nearest"
    unknown = dataclasses.replace(champions[0], default_us=None)
    assert find([unknown], want, H200).expected_regret == 1.05
    found = find([dataclasses.replace(unknown, nearest_regret=1.06)], want, H200)
    assert found.match == "default"
    assert found.reason.endswith("refused: the nearest answer cost 1.060x there, at most 1.05x is allowed")


def test_what_was_measured_whole_answers_for_sequences_of_like_length_only() -> None:
    """On an H200 32 tokens a step take 1/1.09 at H 8 T 1024, where two stages are the default; at T 256 nobody knows."""
    have = Champion(H200, shape_of(1, 8, 1024), PAIRS, 1, 34.6, 37.6)
    assert find([have], shape_of(1, 8, 1100), H200).config == PAIRS
    for T in (500, 2100):
        want = shape_of(1, 8, T)
        found = find([have], want, H200)
        assert found.config == default_config(want, H200) != PAIRS
