"""The emulation of the kernels' roundings: exact where nothing is rounded, else what the kernels measure."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kdatune_kernels import reference
from kdatune_kernels import samples

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "emulated_errors.py"


@pytest.fixture(scope="module")
def emulation():
    spec = importlib.util.spec_from_file_location("emulated_errors", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("kind", samples.KINDS)
def test_without_rounding_it_is_the_recurrence(emulation, kind):
    sample = samples.make((48,), 2, kind=kind)
    o, state = emulation.run(sample, emulation.EXACT, torch.float64)
    want_o, want_state = reference.recurrence(**sample.tensors(), lengths=[48])
    assert reference.error_ratio(o, want_o) < 1e-12
    assert reference.error_ratio(state, want_state) < 1e-12


# o of T 512, H 2, times 1e-3: the plain Triton kernels in the interpreter, as in test_accuracy.py. For "fast" under strong
# decay it is the card's, since the interpreter gives 3.35 there.
MEASURED = {
    "fp16": {"random": 1.86, "strong": 1.87, "weak": 1.77, "correlated": 1.96, "identical": 2.23},
    "fast": {"random": 2.88, "strong": 2.91, "weak": 3.05, "correlated": 3.28, "identical": 5.20},
    "bf16": {"random": 3.30, "strong": 3.29, "weak": 4.27, "correlated": 4.99, "identical": 7.81},
}


@pytest.mark.parametrize("kind", samples.KINDS)
def test_it_foretells_what_the_kernels_measure(emulation, kind):
    sample = samples.make((512,), 2, kind=kind)
    recipes = {precision: emulation.RECIPES[precision] for precision in MEASURED}
    found = {precision: errors[0] * 1e3 for precision, errors in emulation.errors(sample, recipes).items()}
    assert found == pytest.approx({precision: kinds[kind] for precision, kinds in MEASURED.items()}, rel=0.02)


def test_truncated_and_rounded_tf32_and_pairs(emulation):
    one = 1.0 + torch.tensor([0.0, 2.0**-10, 2.0**-11, 1.5 * 2.0**-11, 2.0**-16])
    assert (emulation.FORMATS["tf32"](one) - 1).tolist() == [0.0, 2.0**-10, 0.0, 0.0, 0.0]
    assert (emulation.FORMATS["tf32 nearest"](-one) + 1).tolist() == [0.0, -(2.0**-10), -(2.0**-10), -(2.0**-10), 0.0]
    assert (emulation.FORMATS["bf16 pair"](one) - 1).tolist() == [0.0, 2.0**-10, 2.0**-11, 1.5 * 2.0**-11, 2.0**-16]


def test_the_table_has_every_kind(emulation):
    lines = emulation.table(32, 1, 1, {"fp16": emulation.FP16})
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {kind}" for kind in samples.KINDS]
    assert all(0.5 < float(line.split(" | ")[1].split(" / ")[0]) < 6 for line in lines[2:])
