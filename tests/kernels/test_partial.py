"""Part of a card: the SMs of the current context, and a process that is confined to some."""

import contextlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kdatune_kernels import gpu
from kdatune_kernels import partial
from kdatune_kernels.errors import UsageError

# cuda.h 13.0: a CUdevResource is its type, 92 bytes of padding, then what the type says, smCount first.
DRIVER = """
#include <string.h>
struct resource { int type; unsigned char padding[92]; union { struct { unsigned count, rest[3]; } sm; char all[48]; } of; };
int cuCtxGetCurrent(void **context) { *context = (void *)CONTEXT; return 0; }
#ifdef KNOWS
int cuCtxGetDevResource(void *context, struct resource *found, int type) {
    if (type != 1 || context != (void *)CONTEXT) return 1;
    memset(found, 0xff, sizeof *found);
    found->type = 1;
    found->of.sm.count = 80;
    return RESULT;
}
#endif
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Makes a library that answers as a driver would."""

    def make(**macros: int) -> str:
        folder = tmp_path_factory.mktemp("driver")
        (folder / "driver.c").write_text(DRIVER)
        defined = [f"-D{name}={value}" for name, value in macros.items()]
        command = ["gcc", "-shared", "-fPIC", *defined, "-o", folder / "libdriver.so", folder / "driver.c"]
        subprocess.run(command, check=True, timeout=60)
        return str(folder / "libdriver.so")

    return make


def test_the_sms_of_the_current_context(driver):
    assert partial.context_sms(driver(KNOWS=1, CONTEXT=64, RESULT=0)) == 80


@pytest.mark.parametrize(
    "macros",
    [{"CONTEXT": 0, "KNOWS": 1, "RESULT": 0}, {"CONTEXT": 64}, {"CONTEXT": 64, "KNOWS": 1, "RESULT": 801}],
    ids=["no context", "a driver older than 12.4", "a refusal"],
)
def test_a_driver_that_does_not_say(driver, macros):
    assert partial.context_sms(driver(**macros)) is None


def test_no_driver():
    assert partial.context_sms("libno-such-driver.so.1") is None


def test_nothing_set_is_the_whole_card(monkeypatch):
    monkeypatch.delenv("KDATUNE_SMS", raising=False)
    assert partial.wanted_sms() is None
    assert partial.enter.__wrapped__() is None
    monkeypatch.setenv("KDATUNE_SMS", "80")
    assert partial.wanted_sms() == 80


@pytest.mark.parametrize("text", ["0", "-8", "eighty", "8.5", "\u0668", "4294967304", "9" * 5000])
def test_no_number_is_said(monkeypatch, text):
    monkeypatch.setenv("KDATUNE_SMS", text)
    with pytest.raises(UsageError, match="is no number of SMs"):
        partial.enter.__wrapped__()


def test_a_capture_asks_the_driver_nothing_and_leaves_no_answer(monkeypatch):
    card = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37, L2_cache_size=60 << 20
    )
    capturing = [True]
    monkeypatch.setattr(gpu, "_known", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: card)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "device", lambda _index: contextlib.nullcontext())
    monkeypatch.setattr(partial, "context_sms", lambda: 80)
    assert gpu.of_device(0).sm_count == 132
    capturing[0] = False
    assert gpu.of_device(0).sm_count == 80
    monkeypatch.setattr(partial, "context_sms", lambda: 64)
    assert gpu.of_device(0).sm_count == 80


ON_CARD = """
import json, torch
from kdatune_kernels import gpu, samples, reference
from kdatune_kernels.kda import chunk_kda
from kdatune_kernels.space import FUSED
whole = torch.cuda.get_device_properties(0).multi_processor_count
card = gpu.current()
sample = samples.make((64, 64), 60, device="cuda")
found = {"whole": whole, "sms": card.sm_count}
for name, config in {"default": None, "fused": FUSED if card.compute_capability == "9.0" else None}.items():
    o, ht = chunk_kda(**sample.tensors(), cu_seqlens=torch.tensor([0, 64, 128], device="cuda"), config=config,
                      use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                      output_final_state=True)
    want, _ = reference.recurrence(**sample.tensors(), lengths=[64, 64])
    found[name] = float(reference.error_ratio(o, want))
print(json.dumps(found))
"""


@pytest.mark.gpu
def test_a_confined_process_is_a_card_of_its_own(device):
    done = subprocess.run(
        [sys.executable, "-c", ON_CARD],
        env={**os.environ, "KDATUNE_SMS": "80"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["whole"] > found["sms"] == 80
    assert max(found["default"], found["fused"]) < 0.005


@pytest.mark.gpu
def test_more_sms_than_the_card_has_are_refused(device):
    done = subprocess.run(
        [sys.executable, "-c", "from kdatune_kernels import gpu; gpu.current()"],
        env={**os.environ, "KDATUNE_SMS": "4096"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "UsageError: KDATUNE_SMS=4096: no green context" in done.stderr
