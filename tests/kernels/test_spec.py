"""The vocabulary: keys, canonical JSON, the strict reader, GPU sameness."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from kdatune_kernels import space
from kdatune_kernels.errors import ConfigError
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import MAX_DIMENSION
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json

H200 = KNOWN_GPUS["NVIDIA H200"]


@st.composite
def shapes(draw: st.DrawFn, most: int = MAX_DIMENSION) -> Shape:
    H = draw(st.integers(1, 512))
    T = draw(st.integers(0, most))
    return Shape(
        N=draw(st.integers(1, most)),
        H=H,
        T=T,
        HV=H * draw(st.integers(1, 16)),
        K=draw(st.sampled_from((64, 128, 256))),
        V=draw(st.sampled_from((64, 128, 256))),
        dtype=draw(st.sampled_from(("bf16", "fp16"))),
        varlen=draw(st.booleans()),
        longest_tokens=draw(st.none() | st.integers(0, T)),
        initial_state=draw(st.booleans()),
        final_state=draw(st.booleans()),
        state_v_first=draw(st.booleans()),
        state_dtype=draw(st.sampled_from(("fp32", "bf16"))),
    )


@st.composite
def configs(draw: st.DrawFn) -> LaunchConfig:
    """Any config that can be written down, legal or not."""
    k1 = K1Config(**{name: draw(st.sampled_from(values)) for name, values in space.K1_LEGAL.items()})
    k2 = K2Config(**{name: draw(st.sampled_from(values)) for name, values in space.K2_LEGAL.items()})
    return LaunchConfig(k1, k2, draw(st.sampled_from(("fp16", "fast", "bf16"))))


@settings(deadline=None)
@given(shapes())
def test_shape_key_reads_back(shape: Shape) -> None:
    assert parse_shape(shape.key()) == shape
    assert parse_shape(f" {shape.key().replace(',', ' , ')} ") == shape


@settings(deadline=None)
@given(shapes(), shapes())
def test_two_shapes_have_the_same_key_only_when_equal(a: Shape, b: Shape) -> None:
    assert (a.key() == b.key()) == (a == b)


def test_shape_key_is_short_and_says_what_differs() -> None:
    assert shape_of(1, 96, 8192).key() == "N=1,H=96,T=8192"
    ragged = shape_of(6, 64, 8192, varlen=True, longest_tokens=3063)
    assert ragged.key() == "N=6,H=64,T=8192,varlen=true,longest_tokens=3063"
    other = Shape(2, 8, 64, 16, K=64, V=256, dtype="fp16", initial_state=False, final_state=False, state_dtype="bf16")
    assert (
        other.key() == "N=2,H=8,T=64,HV=16,K=64,V=256,dtype=fp16,initial_state=false,final_state=false,state_dtype=bf16"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp16"},
        {"varlen": True},
        {"longest_tokens": 100},
        {"initial_state": False},
        {"final_state": False},
        {"state_v_first": True},
        {"state_dtype": "bf16"},
        {"HV": 192},
    ],
)
def test_requests_that_differ_in_one_field_have_different_keys(change: dict[str, object]) -> None:
    shape = shape_of(1, 96, 8192)
    other = dataclasses.replace(shape, **change)
    assert other.key() != shape.key()
    assert digest(other) != digest(shape)
    assert other.bucket() != shape.bucket()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not key=value"),
        ("N=1,H=2", "lacks T"),
        ("N=1,H=2,T=", "'T=' is not key=value"),
        ("N=1,H=2,T=3,T=3", "'T' is given twice"),
        ("N=1,H=2,T=3,Q=1", "unknown shape key 'Q'"),
        ("N=1,H=2,T=--3", "T must be a whole number"),
        ("N=1,H=2,T=-3", "T must be a whole number >= 0"),
        ("N=0,H=2,T=3", "N must be a whole number >= 1"),
        ("N=1,H=2,T=3.0", "T must be a whole number"),
        ("N=1,H=2,T=1_0", "T must be a whole number"),
        ("N=1,H=2,T=\u0663", "T must be a whole number"),
        ("N=1,H=2,T=1e3", "T must be a whole number"),
        ("N=1,H=2,T=9999999999999999", "T must be at most 2^40, not a number of 16 digits"),
        ("N=1,H=2,T=999999999999999", "T must be at most 2^40, not 999999999999999"),
        ("N=12345678901234567,H=2,T=3", "N must be at most 2^40, not a number of 17 digits"),
        ("N=1,H=2,T=3,HV=3", "HV must be a multiple of H"),
        ("N=1,H=2,T=3,longest_tokens=4", "longest_tokens must be"),
        ("N=1,H=2,T=3,dtype=fp8", "dtype must be one of bf16, fp16"),
        ("N=1,H=2,T=3,varlen=yes", "varlen must be true or false"),
        ("N=1,H=2,T=3,state_dtype=none", "state_dtype must be one of"),
    ],
)
def test_parse_shape_names_what_it_cannot_read(text: str, says: str) -> None:
    with pytest.raises(ShapeError) as caught:
        parse_shape(text)
    assert says in str(caught.value)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_parse_shape_raises_nothing_else(text: str) -> None:
    try:
        shape = parse_shape(text)
    except ShapeError:
        return
    assert parse_shape(shape.key()) == shape


@pytest.mark.parametrize(
    "change",
    [
        {"N": True},
        {"H": 1.0},
        {"T": "8"},
        {"T": True},
        {"longest_tokens": 1.5},
        {"longest_tokens": True},
        {"dtype": "fp32"},
        {"state_dtype": None},
        {"varlen": 1},
        {"initial_state": None},
        {"colour": "red"},
    ],
)
def test_shape_refuses_values_of_the_wrong_kind(change: dict[str, object]) -> None:
    with pytest.raises(ShapeError):
        shape_of(**{"N": 1, "H": 8, "T": 64, **change})


@settings(deadline=None)
@given(shapes())
def test_bucket_is_a_fixed_point_and_never_smaller(shape: Shape) -> None:
    bucket = shape.bucket()
    assert bucket.bucket() == bucket
    assert shape.N <= bucket.N < 2 * shape.N
    assert shape.T <= bucket.T
    assert (bucket.H, bucket.HV, bucket.K, bucket.V) == (shape.H, shape.HV, shape.K, shape.V)


def test_bucket_values() -> None:
    assert shape_of(3, 8, 5000).bucket() == shape_of(4, 8, 8192)
    assert shape_of(4, 8, 8192).bucket() == shape_of(4, 8, 8192)
    assert shape_of(1, 8, 0).bucket() == shape_of(1, 8, 1)
    assert shape_of(6, 64, 8100, varlen=True, longest_tokens=3063).bucket().longest_tokens == 4096
    assert shape_of(1, 8, MAX_DIMENSION).bucket().T == MAX_DIMENSION


def test_derived_sizes() -> None:
    assert shape_of(8, 96, 8192).chains == 768
    assert shape_of(1, 96, 8192).chunk_tiles == 512 * 96
    assert shape_of(1, 96, 8190).chunk_tiles == 512 * 96
    assert shape_of(6, 64, 8192, varlen=True).chunk_tiles == (512 + 6) * 64
    assert shape_of(4, 8, 100).longest == 25
    assert shape_of(4, 8, 100, longest_tokens=90).longest == 90


@settings(deadline=None)
@given(configs())
def test_config_json_is_lossless(config: LaunchConfig) -> None:
    text = canonical(config)
    again = from_json(LaunchConfig, json.loads(text))
    assert again == config
    assert canonical(again) == text
    assert hash(again) == hash(config)


@settings(deadline=None)
@given(configs(), configs())
def test_configs_have_the_same_json_only_when_equal(a: LaunchConfig, b: LaunchConfig) -> None:
    assert (canonical(a) == canonical(b)) == (a == b)
    assert (digest(a) == digest(b)) == (a == b)


@settings(deadline=None)
@given(shapes())
def test_shape_json_is_lossless(shape: Shape) -> None:
    assert from_json(Shape, json.loads(canonical(shape))) == shape


@pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=KNOWN_GPUS)
def test_gpu_json_is_lossless(gpu: Gpu) -> None:
    assert from_json(Gpu, json.loads(canonical(gpu))) == gpu


def test_canonical_form_is_pinned() -> None:
    assert canonical(K1Config(maxnreg=96)) == (
        '{"chunks_per_program":1,"fast_reciprocal":false,"gate_halves":1,"head_fast":false,"load_policy":"default",'
        '"maxnreg":96,"num_warps":2,"swizzle_bytes":0,"transposed_dots":false,"variant":"triton"}'
    )
    assert digest(K1Config(maxnreg=96)) == "3910776d4539367d"
    assert '"maxnreg":null' in canonical(K2Config())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "must be a JSON object, not NoneType"),
        ([], "must be a JSON object, not list"),
        ({"k1": {}, "k2": {}}, "lacks field(s): precision"),
        ({**to_json(LaunchConfig(K1Config(), K2Config())), "x": 1}, "unknown field(s): x"),
        ({**to_json(LaunchConfig(K1Config(), K2Config())), "precision": "fp8"}, "precision cannot be 'fp8'"),
        ({**to_json(LaunchConfig(K1Config(), K2Config())), "k1": "triton"}, "K1Config must be a JSON object"),
    ],
)
def test_from_json_refuses(data: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(LaunchConfig, data)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_warps", True),
        ("num_warps", "4"),
        ("num_warps", 4.0),
        ("num_warps", None),
        ("maxnreg", "None"),
        ("maxnreg", False),
        ("transposed", 0),
        ("transposed", None),
        ("variant", "TRITON"),
        ("variant", ["ws"]),
    ],
)
def test_from_json_takes_no_value_for_another(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"K2Config.{field} cannot be"):
        from_json(K2Config, {**to_json(K2Config()), field: value})


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(K2Config)])
def test_from_json_needs_every_field_unless_told(field: str) -> None:
    data = {k: v for k, v in to_json(K2Config()).items() if k != field}
    with pytest.raises(ConfigError, match=f"lacks field.s.: {field}"):
        from_json(K2Config, data)
    assert from_json(K2Config, data, strict=False) == K2Config()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.sampled_from((Gpu, Shape, K1Config, K2Config, LaunchConfig, Build)), json_values, st.data())
def test_from_json_raises_nothing_but_our_errors(cls: type, junk: object, data: st.DataObject) -> None:
    known = {f.name: data.draw(json_values) for f in dataclasses.fields(cls)}
    for candidate in (junk, known):
        try:
            value = from_json(cls, candidate)
        except KdatuneError:
            continue
        assert from_json(cls, json.loads(canonical(value))) == value


@pytest.mark.parametrize(
    "change",
    [
        {"compute_capability": "sm_90"},
        {"compute_capability": ""},
        {"compute_capability": "9"},
        {"compute_capability": "\u0669.0"},
        {"sm_count": 0},
        {"sm_count": -1},
        {"smem_per_block_bytes": -1},
        {"memory_bytes": 1 << 70},
    ],
)
def test_a_gpu_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        from_json(Gpu, {**to_json(H200), **change})


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("NVIDIA H200", "exact"),
        ("NVIDIA H200 NVL", "silicon"),
        ("NVIDIA H100 80GB HBM3", "silicon"),
        ("NVIDIA H800", "silicon"),
        ("NVIDIA GH200 480GB", "silicon"),
        ("NVIDIA H100 PCIe", "family"),
        ("NVIDIA H20", "family"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "family"),
        ("NVIDIA A100-SXM4-80GB", "none"),
        ("NVIDIA B200", "none"),
    ],
)
def test_how_far_an_h200_result_holds(name: str, level: str) -> None:
    assert KNOWN_GPUS[name].sameness(H200) == level
    assert H200.sameness(KNOWN_GPUS[name]) == level


def test_a_slice_is_not_the_whole_card() -> None:
    whole = gpu_of("NVIDIA H100 80GB HBM3", "9.0", 132)
    part = gpu_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "9.0", 60)
    assert part.mig_profile == "3g.40gb"
    assert whole.mig_profile is None
    assert part.sameness(whole) == "family"
    assert gpu_of("NVIDIA H200", "9.0", 80).sameness(H200) == "family"


@pytest.mark.parametrize("name", ["A/B", "", "x" * 500, "\u0000", "NVIDIA\nH200", "../../etc/passwd"])
def test_a_strange_name_is_a_card_that_nothing_is_tuned_for(name: str) -> None:
    strange = gpu_of(name, "7.5", 40)
    assert strange.sameness(H200) == "none"
    assert from_json(Gpu, json.loads(canonical(strange))) == strange


def test_json_data_is_what_asdict_gives() -> None:
    values = (H200, shape_of(1, 96, 8192), LaunchConfig(K1Config(maxnreg=96), K2Config()), K1Config())
    for value in values:
        assert to_json(value) == dataclasses.asdict(value)
        assert list(to_json(value)) == list(dataclasses.asdict(value))
