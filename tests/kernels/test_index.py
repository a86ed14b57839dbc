"""The index never answers anything else than `find` does, and looks at few champions."""

from dataclasses import replace

from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from kdatune_kernels import index as index_module
from kdatune_kernels.index import MatchIndex
from kdatune_kernels.match import Champion
from kdatune_kernels.match import find
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of

H200 = KNOWN_GPUS["NVIDIA H200"]
GPUS = [H200, replace(H200, memory_bytes=1 << 37), KNOWN_GPUS["NVIDIA H800"], KNOWN_GPUS["NVIDIA H20"]]
GPUS += [KNOWN_GPUS["NVIDIA A100-SXM4-80GB"], gpu_of("NVIDIA H200", "9.0", 66)]
GOOD = LaunchConfig(K1Config(), K2Config())
REFUSED = LaunchConfig(K1Config(), K2Config(block_v=7))


@st.composite
def shapes(draw):
    N = draw(st.sampled_from([1, 1, 2, 3, 8]))
    T = draw(st.sampled_from([0, 1, 60, 1000, 1024, 4096, 8000, 8192, 8193, 30000]))
    longest = draw(st.sampled_from([None, None, T // 2, T]))
    heads = draw(st.sampled_from([1, 8, 12, 96]))
    return shape_of(
        N, heads, T, heads * draw(st.sampled_from([1, 1, 2])), K=draw(st.sampled_from([128, 128, 64])),
        varlen=draw(st.booleans()), longest_tokens=longest, initial_state=draw(st.booleans()),
    )  # fmt: skip


FOUND = st.lists(st.tuples(st.sampled_from(GPUS), shapes(), st.sampled_from([GOOD, GOOD, GOOD, REFUSED])), max_size=25)


@given(FOUND, shapes(), st.sampled_from(GPUS))
@example([(H200, shape_of(1, 96, 8192), REFUSED), (H200, shape_of(1, 96, 8000), GOOD)], shape_of(1, 96, 8192), H200)
@example([(H200, shape_of(1, 96, 8192), REFUSED)], shape_of(1, 96, 9000), H200)
@settings(max_examples=2000, deadline=None)
def test_it_answers_what_find_answers(found, shape, gpu):
    champions = [Champion(*one, generation=i, measured_us=1.0, default_us=2.0) for i, one in enumerate(found)]
    ours, theirs = MatchIndex(champions, gpu).find(shape), find(champions, shape, gpu)
    assert ours == theirs
    if theirs.champion is not None:
        assert ours.champion is theirs.champion


def test_it_looks_at_few(monkeypatch):
    counted = []

    def counting(champions, shape, gpu):
        champions = list(champions)
        counted.append(len(champions))
        return find(champions, shape, gpu)

    monkeypatch.setattr(index_module, "find", counting)
    known = [shape_of(n, heads, 16 * i) for n in (1, 4) for heads in (8, 64, 96) for i in range(1, 1001)]
    champions = [Champion(H200, s, default_config(s, H200), i, 1.0, 2.0) for i, s in enumerate(known)]
    index = MatchIndex(champions, H200)
    kinds = {}
    for wanted in (known[4000], shape_of(1, 96, 8200, varlen=True), shape_of(2, 48, 5000), shape_of(1, 96, 1 << 24)):
        counted.clear()
        kinds[index.find(wanted).match] = sum(counted)
    assert set(kinds) == {"exact", "nearest", "default"}
    assert max(kinds.values()) < 300
