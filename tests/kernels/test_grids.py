"""Every launch lies along the first grid dimension: the other two hold 65,535 programs, and there are more chains than that."""

from dataclasses import replace

import pytest
import torch
from kda_calls import HALVES
from kda_calls import ONE_CONSUMER
from kda_calls import PLAIN
from kda_calls import TRANSPOSED
from kda_calls import TWO_CONSUMERS
from kda_calls import name_of

from kdatune_kernels import launch
from kdatune_kernels import prepare
from kdatune_kernels import prepare_sm90
from kdatune_kernels import recurrence
from kdatune_kernels import recurrence_sm90
from kdatune_kernels.spec import K1Config

SEQUENCES, HEADS, SIZE = 2050, 32, 128
CHAINS = SEQUENCES * HEADS


class Recorder:
    """Stands for a kernel: keeps the grid that it is given, launches nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return lambda *arguments, **options: None


@pytest.fixture
def problem():
    """2,050 sequences of 16 tokens, 32 heads: 65,600 chains. The tensors have sizes and strides and no memory."""
    tokens = SEQUENCES * 16

    def of(*sizes, dtype=torch.bfloat16):
        return torch.empty(sizes, dtype=dtype, device="meta")

    tables = launch.ChunkTables(
        of(SEQUENCES, 4, dtype=torch.int32), of(SEQUENCES, dtype=torch.int32), of(SEQUENCES, dtype=torch.int32),
        SEQUENCES, SEQUENCES,
    )  # fmt: skip
    q, k, v, g = (of(tokens, HEADS, SIZE) for _ in range(4))
    return launch.Problem(
        q, k, v, g, of(tokens, HEADS), of(HEADS), of(HEADS, SIZE), -5.0, SIZE**-0.5, None, False, tables
    )


@pytest.mark.parametrize("config", [PLAIN, TRANSPOSED, ONE_CONSUMER, TWO_CONSUMERS, HALVES], ids=name_of)
def test_more_chains_than_65535_are_one_long_row(config, problem, monkeypatch):
    k1, k2 = Recorder(), Recorder()
    for module, name, kernel in (
        (prepare, "prepare_kernel", k1),
        (prepare_sm90, "prepare_cp_async", k1),
        (prepare_sm90, "prepare_tma", k1),
        (recurrence, "recurrence_kernel", k2),
        (recurrence_sm90, "recurrence_ws", k2),
    ):
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(launch, "_descriptor", lambda x, box, layout: None)
    ws = launch.workspace(problem.tables, HEADS, SIZE, precision="fp16", device=torch.device("meta"))
    launch.run_k1(problem, ws, config.k1)
    launch.run_k2(problem, ws, torch.empty_like(problem.v), None, config.k2)
    chunks = CHAINS // (config.k1.chunks_per_program if config.k1.variant == "triton" else 1)
    assert (k1.grids, k2.grids) == ([(chunks,)], [(CHAINS * SIZE // config.k2.block_v,)])


def test_chunks_that_do_not_fill_a_program_get_one_more(problem, monkeypatch):
    kernel = Recorder()
    monkeypatch.setattr(prepare, "prepare_kernel", kernel)
    ws = launch.workspace(problem.tables, HEADS, SIZE, precision="fp16", device=torch.device("meta"))
    for count in (1, 2, 4):
        launch.run_k1(problem, ws, replace(K1Config(), chunks_per_program=count))
    assert kernel.grids == [(2050 * 32,), (1025 * 32,), (513 * 32,)]


def test_every_chunk_table_begins_on_16_bytes(device):
    """Triton compiles a kernel for pointers that do and once more for those that do not."""
    packed = ((256, 75), (1,), (16, 17, 0, 5), (300,) * 7)
    made = [launch.packed_tables(torch.tensor([0, *x], device=device).cumsum(0), sum(x)) for x in packed]
    made += [launch.dense_tables(n, tokens, device, capturing=True) for n, tokens in ((1, 16), (3, 20), (5, 170))]
    for tables in made:
        parts = (tables.spans, tables.token, tables.length)
        assert [x.data_ptr() % 16 for x in parts] == [0, 0, 0]
        assert [len(x) for x in parts] == [tables.sequences, tables.chunks, tables.chunks]
