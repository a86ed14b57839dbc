"""Repeated calls of chunk_kda launch what the long way launches, raise what it raises, and leave to it what they cannot do."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from kda_calls import CONFIGS
from kda_calls import ONE_CONSUMER
from kda_calls import call
from kda_calls import name_of

from kdatune_kernels import direct
from kdatune_kernels import repeated
from kdatune_kernels import samples
from kdatune_kernels.space import PAIRS

pytestmark = pytest.mark.skipif(not version("triton").startswith("3.6."), reason="plans follow Triton 3.6 only")


@functools.cache
def seen(part: str) -> dict[str, Any]:
    """What direct_launch.py saw in a process of its own, where kernels are compiled for an H200 and launched into nothing."""
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("direct_launch.py"), part],
        env={**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout)[part]
    return found


def test_the_launcher_in_c_gets_what_it_gets_the_long_way():
    cases = seen("arguments")
    assert len(cases) > 20
    for name, one in cases.items():
        assert one == {"bound": [0, 0], "same": [True, True], "alike": [True, True]}, name


def test_the_parts_of_a_block_lie_apart():
    for name, one in seen("blocks").items():
        assert one["fits"], name
        assert one["aligned"], name
        assert one["parts"] == 4 * (not one["fused"]) + 3 * one["packed"] + 5 * one["segments"], name


def test_every_error_is_raised_by_a_call_that_is_like_planned_ones():
    faults = seen("errors")
    assert len(faults) > 70
    for name, one in faults.items():
        assert one["bound"] == 0, name  # the call before was a repeated one
        assert one["ours"] == one["theirs"], name
        assert one["ours"] is not None, name
        assert one["ours"][2] == "0", name  # nothing was launched


def test_the_launcher_is_asked_once_a_call_and_obeyed():
    found = seen("launcher")
    assert found["bound"] == [3, 2, 0, 0, 0]  # the first of them makes the chunk tables, too
    assert found["counted"] == 5
    assert found["another answer"] == [2, 0, 0]
    assert found["another answer counted"] == 8
    assert found["the first again"] == 0
    assert found["refreshed"] == [2, 0, 0]
    assert found["refreshed counted"] == 3


def test_a_config_that_fails_is_put_in_quarantine_and_another_is_launched():
    found = seen("launcher")
    assert found["quarantined"] == [0, 2, 1]
    assert found["tries"] == 2, "by the plan, then the long way"
    assert found["instead"] == ["cp_async", "triton"]
    assert found["after quarantine"] == [2, 0, 0]
    assert found["tries after"] == 2
    assert found["after quarantine counted"] == 7


def test_what_wants_to_see_launches_and_what_plans_cannot_do_is_left_to_triton():
    found = seen("asks_triton")
    assert found.pop("none") == found.pop("again") == 0
    assert found.pop("streams") == [77]
    assert all(bound >= 2 for bound in found.values()), found
    assert len(found) == 7


def test_the_card_is_that_of_the_tensors_and_a_capture_goes_the_long_way():
    found = seen("cards")
    assert found["card 1"] == [0, 1, 1, 1, 101, [0]]  # the stream of card 1, asked while it was the current one
    assert found["card 0"] == [0, 1, 0, 0, 100, [0]]
    assert found["capturing"] == 1


def test_threads_do_not_mix_their_tensors():
    assert seen("threads") == {"wrong": 0, "k1": 1600, "calls": 1600, "bound": 0}


def test_what_is_kept_is_bounded_and_of_one_process():
    found = seen("bounded")
    assert found["entries"] <= 8
    assert found["bound"] <= 5
    assert found["encoded"] <= 20
    assert max(kept for kept, _ in found["plans"]) == 3
    assert max(plans for _, plans in found["plans"]) == 1  # of equal configs
    assert found["made"] <= 2
    assert found["once after"] <= 4
    assert found["tensors kept"] == 0
    assert found["in a child"] == 0
    assert found["in the parent"] == 0


def test_more_signatures_than_are_kept_do_not_drive_each_other_out():
    found = seen("crowded")
    assert found["kept"] == 8
    assert found["repeated"] > found["calls"] / 2
    assert found["made"] < found["calls"] / 10


def test_two_arguments_in_one_place_make_no_plan_and_take_one():
    assert seen("one_place") == {"alike": [3, 2, 2, 2], "apart": [2, 0], "same": True}


def test_one_tensor_of_other_strides_or_type_is_another_signature():
    found = seen("one_changed")
    assert len(found) == 17 + 5
    for name, one in found.items():
        assert one == {"bound": True, "same": True}, name


def test_a_plan_that_cannot_launch_is_given_up():
    found = seen("refused")
    assert found == {"bound": [2, 2, 2], "tries": 1, "no plan": [2, 2, 2, 2], "made once": 2}  # fails() counts, too


def test_the_interpreter_has_no_plans():
    if os.environ.get("TRITON_INTERPRET") == "1":
        assert not direct.FOLLOWED
        assert not repeated.enabled


SEGMENTS = dataclasses.replace(ONE_CONSUMER, k2=dataclasses.replace(ONE_CONSUMER.k2, segments=2))


def _given(seed: int, device: str = "cuda") -> tuple[samples.Sample, torch.Tensor]:
    return samples.make((100, 28), 2, seed=seed, device=device), torch.tensor([0, 100, 128], device=device)


def _planned(monkeypatch, config=ONE_CONSUMER, device="cuda"):
    """A call of a signature that has a plan, of samples by seed, and the same call the long way."""
    from triton.runtime.jit import JITFunction

    def again(given):
        sample, ends = given
        return call(sample, cu_seqlens=ends, config=config)

    def long_way(given):
        monkeypatch.setattr(repeated, "enabled", False)
        made = again(given)
        monkeypatch.setattr(repeated, "enabled", True)
        return made

    for seed in range(3):
        again(_given(seed, device))
    run, bound = JITFunction.run, []

    def counted(self, *args, **keywords):
        bound.append(self)
        return run(self, *args, **keywords)

    monkeypatch.setattr(JITFunction, "run", counted)
    again(_given(3, device))
    assert not bound, "the plan has launched"
    return again, long_way


def _equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*CONFIGS, SEGMENTS], ids=name_of)
def test_a_plan_computes_the_same_bits(monkeypatch, config):
    again, long_way = _planned(monkeypatch, config)
    for given in map(_given, (4, 5)):
        assert _equal(again(given), long_way(given))


@pytest.mark.gpu
def test_a_plan_launches_on_the_current_stream(monkeypatch):
    again, long_way = _planned(monkeypatch)
    given = _given(4)
    again(given)  # reads cu_seqlens, which waits
    expected = long_way(given)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        made = again(given)
        done = stream.record_event()
    torch.cuda.current_stream().synchronize()
    assert not done.query()  # it waits behind what sleeps on its stream
    done.synchronize()
    assert _equal(made, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [ONE_CONSUMER, PAIRS], ids=name_of)
def test_a_planned_call_can_be_captured(monkeypatch, config):
    again, long_way = _planned(monkeypatch, config)
    given = _given(4)
    expected = long_way(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = again(given)
    again(_given(5))
    graph.replay()
    assert _equal(made, expected)


@pytest.mark.gpu
def test_threads_share_a_plan(monkeypatch):
    again, long_way = _planned(monkeypatch)
    calls = {seed: (_given(seed), long_way(_given(seed))) for seed in range(4, 8)}
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run(seed: int) -> None:
        given, expected = calls[seed]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                made = again(given)
                torch.cuda.current_stream().synchronize()
                if not _equal(made, expected):
                    wrong.append(seed)

    workers = [threading.Thread(target=run, args=(seed,)) for seed in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_each_card_has_its_plan(monkeypatch):
    for device in ("cuda:0", "cuda:1"):
        again, long_way = _planned(monkeypatch, device=device)
        given = _given(4, device)
        made = again(given)
        assert made[0].device == torch.device(device)
        assert _equal(made, long_way(given))
        monkeypatch.undo()
    assert torch.cuda.current_device() == 0
