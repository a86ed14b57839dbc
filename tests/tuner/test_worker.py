"""The child process: a fault kills only the trial it fell into."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kdatune_kernels.space import k1_configs
from kdatune_kernels.space import k2_configs
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.backend_gpu import GpuBackend
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.promote import Policy
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuner
from kdatune_tuner.worker import DeviceError
from kdatune_tuner.worker import DeviceModules
from kdatune_tuner.worker import Worker

SHAPE = parse_shape("N=1,H=4,T=1024")
K2S = [c for c in k2_configs() if c.variant == "triton"]
GOOD, BAD = K2S[0], K2S[1]


def ask(worker: Worker, config: K1Config | K2Config, timeout_s: float = 20.0) -> dict:
    kernel = "k1" if isinstance(config, K1Config) else "k2"
    request = {"op": "measure", "kernel": kernel, "shape": SHAPE.key(), "config": to_json(config), "samples": 5}
    return worker.call(request, timeout_s)


def test_the_child_says_what_card_it_has(fake_device) -> None:
    hello = fake_device.worker().hello()
    assert (hello["gpu"]["name"], hello["gpu"]["compute_capability"]) == ("Fake A100", "8.0")
    assert hello["build"]["kernel_hash"] == "fake"
    assert hello["regime"] == "protocol 1"


def test_a_good_config_is_checked_then_timed(fake_device) -> None:
    fake_device.fate(GOOD, us=50.0)
    reply = ask(fake_device.worker(), GOOD)
    assert reply["outcome"] == "ok"
    assert reply["samples_us"] == pytest.approx([50.0, 50.05, 50.1, 50.15, 50.2])
    assert (reply["registers"], reply["sm_clock_mhz"], reply["throttle_reasons"]) == (96, 1410, "none")
    assert reply["gpu_seconds"] >= 0


@pytest.mark.parametrize(
    ("fate", "outcome", "detail"),
    [
        ({"check": "abort"}, "abort", "the process ended with signal SIGABRT: LLVM ERROR: cannot select"),
        ({"check": "incorrect"}, "incorrect", "told to be incorrect"),
        ({"check": "compile_error"}, "compile_error", "told to be compile_error"),
        ({"check": "resource"}, "resource", "told to be resource"),
        ({"time": "illegal_access"}, "illegal_access", "told to fail when timed"),
        ({"time": "launch_error"}, "launch_error", "told to fail when timed"),
    ],
)
def test_a_failure_is_typed_and_the_next_trial_is_good(fake_device, fate: dict, outcome: str, detail: str) -> None:
    fake_device.fate(BAD, **fate)
    worker = fake_device.worker()
    reply = ask(worker, BAD)
    assert (reply["outcome"], reply["detail"]) == (outcome, detail)
    assert ask(worker, GOOD)["outcome"] == "ok"
    # a context that has faulted is not used again
    assert worker.starts == (2 if outcome in ("abort", "illegal_access", "launch_error") else 1)


def test_a_trial_that_never_ends_is_killed(fake_device) -> None:
    fake_device.fate(BAD, check="hang")
    worker = fake_device.worker()
    worker.hello()
    reply = ask(worker, BAD, timeout_s=1.0)
    assert (reply["outcome"], reply["detail"]) == ("timeout", "no answer within 1 s; killed")
    assert ask(worker, GOOD)["outcome"] == "ok"


def test_what_a_compiler_prints_does_not_disturb_the_answers(fake_device) -> None:
    fake_device.fate(GOOD, check="print")
    assert ask(fake_device.worker(), GOOD)["outcome"] == "ok"


def test_a_mistake_of_ours_is_raised_with_its_traceback(fake_device) -> None:
    fake_device.fate(BAD, check="mistake")
    with pytest.raises(RuntimeError, match=r"(?s)measuring process failed on .*KeyError: 'a mistake of ours'"):
        ask(fake_device.worker(), BAD)


def test_a_problem_too_large_for_the_card_costs_no_restart(fake_device) -> None:
    worker = fake_device.worker()
    request = {"op": "measure", "kernel": "k2", "shape": "N=1,H=4,T=4294967296", "config": to_json(GOOD), "samples": 5}
    for _ in range(3):
        assert worker.call(request, 20.0)["outcome"] == "launch_error"
    assert ask(worker, GOOD)["outcome"] == "ok"
    assert worker.starts == 1


def test_a_check_is_made_once_a_process(fake_device) -> None:
    worker = fake_device.worker()
    for _ in range(3):
        ask(worker, GOOD)
    assert (len(fake_device.calls("check")), len(fake_device.calls("time"))) == (1, 3)


def test_a_missing_device_module_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match=r"No module named 'nothing_here': pip install -e '\.\[gpu\]'"):
        Worker(DeviceModules("nothing_here", "nothing_here")).hello()


@pytest.mark.parametrize("takes", ["", "os.closerange(3, 64); time.sleep(2)"], ids=["at once", "its pipe first"])
def test_a_child_that_dies_at_its_start_is_a_device_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: str
) -> None:
    (tmp_path / "dies.py").write_text(
        f"import os, sys, time\nsys.stderr.write('no such driver\\n')\nsys.stderr.flush()\n{takes}\nos._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DeviceError, match="did not start: exit code 3: no such driver"):
        Worker(DeviceModules("dies", "dies")).hello()


def test_without_a_card_the_real_module_says_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    worker = Worker()
    with pytest.raises(DeviceError, match=r"no CUDA device is visible.*can replay a recording"):
        worker.hello()
    worker.close()


def test_ctrl_c_in_the_terminal_does_not_reach_the_child(fake_device) -> None:
    worker = fake_device.worker()
    worker.hello()
    os.kill(worker._child._process.pid, signal.SIGINT)
    assert ask(worker, GOOD)["outcome"] == "ok"
    assert worker.starts == 1


def test_the_child_does_not_outlive_a_killed_parent(fake_device, tmp_path: Path) -> None:
    """The parent is killed while the child hangs in a trial: the card must not stay held."""
    fake_device.fate(BAD, check="hang")
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        from kdatune_tuner.worker import DeviceModules, Worker
        worker = Worker(DeviceModules("fake_device", "fake_device"))
        worker.hello()
        print(worker._child._process.pid, flush=True)
        worker.call({{"op": "check", "kernel": "k2", "config": {to_json(BAD)!r}}}, 600)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    deadline = time.monotonic() + 60
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it goes while it is read
        return False


class TwelveConfigs(GpuBackend):
    """A space of twelve: six K1, six K2."""

    def space(self, kernel: str, shape: Shape) -> list[K1Config | K2Config]:
        return super().space(kernel, shape)[:6]


def test_lethal_trials(fake_device, tmp_path: Path) -> None:
    """Twelve trials: an out-of-bounds store, an endless kernel, an abort in the compiler, too much shared memory, and the
    fastest one wrong. The study ends, each is typed, the wrong one is never promoted.
    """  # fmt: skip
    url = f"sqlite:///{tmp_path / 'k.db'}"
    upgrade(url)
    engine = open_engine(url)
    # the endless one costs all of the time-out, which the others must not reach on a busy machine
    backend = TwelveConfigs(fake_device.worker(), trial_timeout_s=8.0, paired_rounds=9)
    k1s, k2s = backend.space("k1", SHAPE), backend.space("k2", SHAPE)
    fake_device.fate(k1s[1], check="abort")
    fake_device.fate(k1s[2], check="incorrect", us=0.001)
    fake_device.fate(k2s[1], time="illegal_access")
    fake_device.fate(k2s[2], check="hang")
    fake_device.fate(k2s[3], check="resource")
    fake_device.fate(k1s[4], us=90.0)
    fake_device.fate(k2s[5], us=80.0)
    tuned = Tuner(engine, backend, Options(trials=12, policy=Policy())).tune(SHAPE)
    assert tuned.state == "done"
    with reading(engine) as s:
        rows = {row.config_hash: row for row in queries.page_measurements(s, limit=1000) if row.kernel != "kda"}
        champion = queries.champions(s)[0]
    engine.dispose()
    fates = {k1s[1]: Outcome.ABORT, k1s[2]: Outcome.INCORRECT, k2s[1]: Outcome.ILLEGAL_ACCESS,
             k2s[2]: Outcome.TIMEOUT, k2s[3]: Outcome.RESOURCE}  # fmt: skip
    for config in (*k1s, *k2s):
        assert rows[digest(config)].outcome == fates.get(config, Outcome.OK), config
    assert champion.config == LaunchConfig(k1s[4], k2s[5]) == tuned.best
    assert champion.measured_us == pytest.approx(170.0, rel=0.1)
    assert rows[digest(k1s[2])].o_error_ratio == 0.5
    # the device is usable afterwards
    assert backend.measure("k2", SHAPE, k2s[5]).ok


def test_a_pair_meets_the_champion_round_by_round(fake_device) -> None:
    """The fake clock drifts by a tenth within the run; the rounds cancel it."""
    backend = fake_device.backend()
    k1, (a, b) = next(c for c in k1_configs() if c.variant == "triton"), K2S[:2]
    fake_device.fate(k1, us=10.0)
    fake_device.fate(a, us=90.0)
    fake_device.fate(b, us=92.0)
    result = backend.measure_pair(SHAPE, LaunchConfig(k1, a), LaunchConfig(k1, b))
    assert result.paired
    assert len(result.samples_us) == len(result.against_us) == 9
    assert [y / x for x, y in zip(result.samples_us, result.against_us, strict=True)] == pytest.approx([1.02] * 9)
    assert result.o_error_ratio == 0.001


def test_a_paired_run_promotes_a_gain_that_the_drift_would_hide(fake_device, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'k.db'}"
    upgrade(url)
    engine = open_engine(url)
    backend = TwelveConfigs(fake_device.worker(), paired_rounds=9)
    best = backend.space("k2", SHAPE)[3]
    fake_device.fate(best, us=90.0)
    tuned = Tuner(engine, backend, Options(trials=12, policy=Policy())).tune(SHAPE)
    with reading(engine) as s:
        pairs = queries.page_measurements(s, kernel="kda", limit=100)
    engine.dispose()
    assert tuned.best.k2 == best
    assert tuned.promotion.decision == "promoted"
    assert tuned.promotion.gain_low > 1.0
    assert tuned.promotion.gain_high - tuned.promotion.gain_low < 1e-6
    # the finalists once each, then the two of the paired run again
    assert sum(row.config_hash == digest(tuned.best) for row in pairs) == 2
