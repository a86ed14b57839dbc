"""chunk_kda beyond K = V = 128 and bf16: head sizes, fp16, the final state's dtype, states at checkpoints."""

from dataclasses import replace

import pytest
import torch
from kda_calls import CONFIGS
from kda_calls import GATE
from kda_calls import PLAIN
from kda_calls import TRANSPOSED
from kda_calls import WINDOW_GATE
from kda_calls import assert_within_gates
from kda_calls import call
from kda_calls import name_of
from kda_calls import ratios

from kdatune_kernels import gpu
from kdatune_kernels import reference
from kdatune_kernels import samples
from kdatune_kernels.checkpoints import cut_spans
from kdatune_kernels.errors import ConfigError
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import shape_of

CARD = torch.cuda.is_available()
every_config = pytest.mark.parametrize("config", CONFIGS, ids=name_of)
NARROW = replace(PLAIN, k2=K2Config(block_v=32))


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("V", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_first", [True, False])
def test_sizes_and_dtypes(K, V, dtype, v_first, device):
    """With the config that is resolved: on Hopper Gluon for K = V = 128 in bf16, plain Triton for the rest."""
    sample = samples.make(
        (512, 75) if CARD else (35, 7), 1, 2, size=K, value_size=V, dtype=dtype, state_v_first=v_first, device=device
    )
    o, ht = call(sample, state_v_first=v_first)
    assert o.dtype == dtype
    assert_within_gates(sample, o, ht, state_v_first=v_first)


@pytest.mark.parametrize("config", [PLAIN, TRANSPOSED, NARROW], ids=lambda c: f"{c.k2.block_v}{c.k2.transposed}")
@pytest.mark.parametrize("precision", ["fp16", "fast", "bf16"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 256), (128, 256)])
def test_plain_configs_of_other_sizes(config, precision, K, V, device):
    if config is TRANSPOSED:
        config = replace(config, k2=replace(config.k2, block_v=64))
    sample = samples.make((21,), 1, size=K, value_size=V, device=device)
    o, ht = call(sample, config=config, precision=precision)
    assert_within_gates(sample, o, ht)


@pytest.mark.parametrize("kind", samples.KINDS)
@pytest.mark.parametrize("T", [512, 2048] if CARD else [64])
def test_every_kind_of_input_in_fp16(kind, T, device):
    sample = samples.make((T,), 4 if CARD else 1, kind=kind, dtype=torch.float16, device=device)
    _assert_kind_holds(kind, sample, *call(sample))


def _assert_kind_holds(kind, sample, o, ht):
    """The gates; on identical keys o passes its own in long sequences (docs/measured-facts.md, "Errors by kind")."""
    o_ratio, state_ratio, window = ratios(sample, o, ht)
    assert o_ratio < (0.0075 if kind == "identical" else GATE)
    assert state_ratio < GATE
    assert window < WINDOW_GATE


@pytest.mark.parametrize("kind", samples.KINDS)
@pytest.mark.parametrize("T", [512, 2048] if CARD else [64])
def test_every_kind_of_input_with_64_keys(kind, T, device):
    sample = samples.make((T,), 4 if CARD else 1, kind=kind, size=64, value_size=64, device=device)
    _assert_kind_holds(kind, sample, *call(sample))


def test_strong_decay_in_fp16_stays_finite(device):
    """16 tokens of the strongest decay: 2^-G is 5.5e34, which fp16 does not hold; the tiles that carry it are bf16."""
    sample = samples.make((48,), 1, dtype=torch.float16, device=device)
    sample = replace(
        sample, g=torch.full_like(sample.g, 30.0), A_log=torch.zeros(1, device=device),
        dt_bias=torch.zeros(1, 128, device=device),
    )  # fmt: skip
    assert_within_gates(sample, *call(sample))


def test_fp16_with_beta_in_both_dtypes(device):
    sample = samples.make((20,), 2, dtype=torch.float16, device=device)
    o, ht = call(sample)
    again = call(replace(sample, beta=sample.beta.float()))
    assert torch.equal(o, again[0])
    assert torch.equal(ht, again[1])


def test_segments_in_fp16(device):
    sample = samples.make((70,), 1, kind="weak", dtype=torch.float16, device=device)
    assert_within_gates(sample, *call(sample, config=replace(PLAIN, k2=K2Config(segments=3))))


def test_poison_behind_the_end_is_not_read_in_other_sizes(device):
    sample = samples.make((21,), 1, size=64, value_size=256, dtype=torch.float16, device=device)
    clean = call(sample)

    def padded(x):
        longer = torch.full((1, 85, *x.shape[2:]), float("nan"), dtype=x.dtype, device=device)
        longer[:, :21] = x
        return longer[:, :21]

    dirty = replace(sample, **{name: padded(getattr(sample, name)) for name in ("q", "k", "v", "g", "beta")})
    o, ht = call(dirty)
    assert torch.equal(o, clean[0])
    assert torch.equal(ht, clean[1])


@every_config
@pytest.mark.parametrize("v_first", [True, False])
def test_a_final_state_in_bf16(config, v_first, device):
    sample = samples.make((35,), 1, state_v_first=v_first, device=device)
    _, ht = call(sample, config=config, state_v_first=v_first)
    o, rounded = call(sample, config=config, state_v_first=v_first, final_state_dtype=torch.bfloat16)
    assert torch.equal(rounded, ht.bfloat16())
    assert_within_gates(sample, o, rounded, state_v_first=v_first)
    empty = samples.make((0,), 1, device=device)
    _, kept = call(empty, cu_seqlens=torch.zeros(2, dtype=torch.int32, device=device), final_state_dtype=torch.bfloat16)
    assert torch.equal(kept, empty.initial_state.bfloat16())


def test_other_final_state_dtypes_are_named(device):
    with pytest.raises(NotImplementedError, match=r"final_state_dtype is torch\.float16"):
        call(samples.make((16,), 1, device=device), final_state_dtype=torch.float16)


def test_a_gluon_config_for_what_gluon_does_not_read_is_refused(device):
    config = replace(PLAIN, k1=replace(PLAIN.k1, variant="cp_async", num_warps=1))
    with pytest.raises(ConfigError, match=r"needs a card|needs K = V = 128 and bf16"):
        call(samples.make((16,), 1, dtype=torch.float16, device=device), config=config)


@pytest.mark.parametrize("config", [config for config in CONFIGS if config != PAIRS], ids=name_of)
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("v_first", [True, False])
def test_checkpoints_are_the_states_of_the_prefixes(config, with_state, v_first, device):
    """Bit for bit, for ragged sequences of 53, 0, 16 and 5 tokens and a checkpoint every 16; outputs do not change."""
    lengths = (53, 0, 16, 5)
    sample = samples.make(lengths, 1, initial_state=with_state, state_v_first=v_first, device=device)
    options = {"config": config, "state_v_first": v_first}
    want_o, want_ht = call(sample, **options)
    states = torch.full((3, 4, 1, 128, 128), float("nan"), device=device)
    o, ht = call(sample, checkpoints=states, checkpoint_tokens=16, **options)
    assert torch.equal(o, want_o)
    assert torch.equal(ht, want_ht)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    for i in range(3):
        cut = [min(length, 16 * (i + 1)) for length in lengths]
        rows = torch.cat([torch.arange(int(a), int(a) + n) for a, n in zip(ends, cut, strict=False)]).to(device)
        prefix = {name: getattr(sample, name)[:, rows].clone() for name in ("q", "k", "v", "g", "beta")}
        _, state = call(replace(sample, **prefix, lengths=tuple(cut)), **options)
        assert torch.equal(states[i], state)


@pytest.mark.gpu
def test_what_pairs_lack_runs_in_steps_of_16_tokens(device):
    """By the default of two stages: checkpoints, and the other precisions, called often enough for a plan."""
    sample = samples.make((100, 28), 2, device=device)
    split = split_default(shape_of(2, 2, 128, varlen=True, longest_tokens=100), gpu.current())
    states = [torch.empty(2, 2, 2, 128, 128, device=device) for _ in range(2)]
    for config, made in zip((PAIRS, split), states, strict=True):
        call(sample, config=config, checkpoints=made, checkpoint_tokens=48)
    assert torch.equal(*states)
    for precision in ("fast", "bf16"):
        want = call(sample, config=split, precision=precision)
        for _ in range(4):
            got = call(sample, config=PAIRS, precision=precision)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_checkpoints_of_a_dense_batch_without_a_final_state(device):
    sample = samples.make((96,), 1, device=device, initial_state=False)
    rows = {n: getattr(sample, n).view(2, 48, *getattr(sample, n).shape[2:]) for n in ("q", "k", "v", "g", "beta")}
    batch = replace(sample, **rows)
    states = torch.full((1, 2, 1, 128, 128), float("nan"), device=device)
    o, ht = call(batch, output_final_state=False, checkpoints=states, checkpoint_tokens=32)
    assert ht is None
    for b in range(2):
        one = replace(sample, **{n: x[b : b + 1, :32].clone() for n, x in rows.items()}, lengths=(32,))
        want_o, want = reference.recurrence(**one.tensors(), lengths=[32])
        assert reference.error_ratio(states[0, b : b + 1], want) < 0.005
        assert reference.error_ratio(o[b : b + 1, :32], want_o) < 0.005


def test_a_segmented_config_gives_the_same_checkpoints(device):
    sample = samples.make((64,), 1, kind="weak", device=device)  # else the map of a segment is 0
    states = torch.empty(2, 1, 1, 128, 128, device=device)
    again = torch.empty_like(states)
    call(sample, config=PLAIN, checkpoints=states, checkpoint_tokens=32)
    call(sample, config=replace(PLAIN, k2=K2Config(segments=2)), checkpoints=again, checkpoint_tokens=32)
    assert torch.equal(states, again)


def test_checkpoints_where_there_is_nothing_to_do(device):
    sample = samples.make((0,), 1, device=device)
    states = torch.full((2, 1, 1, 128, 128), float("nan"), device=device)
    call(sample, cu_seqlens=torch.zeros(2, dtype=torch.int32, device=device), checkpoints=states, checkpoint_tokens=16)
    assert torch.equal(states, sample.initial_state.expand_as(states))
    none = torch.empty(0, 1, 1, 128, 128, device=device)
    one = samples.make((20,), 1, device=device)
    want = call(one)
    got = call(one, checkpoints=none, checkpoint_tokens=16)
    assert torch.equal(want[0], got[0])
    assert torch.equal(want[1], got[1])


def test_cut_spans():
    spans = torch.tensor([[0, 37, 0, 3], [37, 37, 3, 3], [37, 90, 3, 7]], dtype=torch.int32)
    assert cut_spans(spans, 2, 32).tolist() == [
        [[0, 32, 0, 2], [37, 37, 3, 3], [37, 69, 3, 5]],
        [[32, 37, 2, 3], [37, 37, 3, 3], [69, 90, 5, 7]],
        [[37, 37, 3, 3], [37, 37, 3, 3], [90, 90, 7, 7]],
    ]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"checkpoints": torch.zeros(1, 1, 1, 128, 128)}, ValueError, "checkpoints and checkpoint_tokens belong"),
        ({"checkpoint_tokens": 16}, ValueError, "checkpoints and checkpoint_tokens belong"),
        ({"checkpoints": torch.zeros(1, 1, 1, 128, 128), "checkpoint_tokens": 24}, ValueError, "must be a multiple of 16"),
        ({"checkpoints": torch.zeros(1, 1, 1, 128, 128), "checkpoint_tokens": 0}, ValueError, "must be a multiple of 16"),
        ({"checkpoints": torch.zeros(1, 1, 1, 128, 128), "checkpoint_tokens": 1 << 70}, ValueError, r"16 up to 2\^62"),
        ({"checkpoints": torch.zeros(1, 2, 1, 128, 128), "checkpoint_tokens": 16}, ValueError, "checkpoints must be a cont"),
        ({"checkpoints": torch.zeros(1, 1, 1, 128, 128).half(), "checkpoint_tokens": 16}, TypeError, "checkpoints must be"),
        ({"checkpoints": [1], "checkpoint_tokens": 16}, TypeError, r"checkpoints must be a torch\.Tensor"),
    ],
)  # fmt: skip
def test_checkpoint_arguments_are_checked(options, error, text, device):
    moved = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    with pytest.raises(error, match=text):
        call(samples.make((16,), 1, device=device), **moved)


@pytest.mark.gpu
def test_checkpoints_inside_a_capture(device):
    sample = samples.make((977, 40), 3, device=device)
    states = torch.empty(3, 2, 3, 128, 128, device=device)
    call(sample, checkpoints=states, checkpoint_tokens=256)
    want = states.clone()
    ends = torch.tensor([0, 977, 1017], device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(sample, cu_seqlens=ends, checkpoints=states, checkpoint_tokens=256)
    states.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(states, want)
