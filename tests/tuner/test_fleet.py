"""`kdatune tune --workers`: real processes on a real database, killed and stopped while they work."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy import update

from kdatune_kernels.spec import parse_shape
from kdatune_tuner.recording import SHIPPED
from kdatune_tuner.store import claims
from kdatune_tuner.store import queries
from kdatune_tuner.store.claims import ClaimModel
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.records import MeasurementRow
from kdatune_tuner.store.records import RunRow

SCRIPT = str(Path(__file__).parent / "slow_fleet.py")
SHAPES = [
    "N=1,H=64,T=1024",
    "N=1,H=16,T=1024",
    "N=1,H=8,T=8192",
    "N=1,H=16,T=8192",
]  # whose best leads by little: timed once
TRIALS = 12
PAUSE = 20  # fewer than one shape has: nobody is done with one when all pause
Process = subprocess.Popen[str]


class Bench:
    """Commands on one database whose workers write down what they measure."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.calls_path = folder / "calls.txt"
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KDATUNE_")}
        self.environment = kept | {
            "KDATUNE_DATABASE_URL": url,
            "KDATUNE_CACHE_DIR": str(folder / "cache"),
            "PYTHONWARNINGS": "error",
            "SLOW_CALLS": str(self.calls_path),
            "SLOW_SWEEP": str(SHIPPED),
        }
        self.processes: list[Process] = []
        self.engine = open_engine(url)

    def start(self, *arguments: str, shapes: list[str] = SHAPES, background: bool = False, **more: str) -> Process:
        """`kdatune tune --json` over the shapes, without a terminal, in a session of its own.

        background: as a shell starts a job with &, which ignores Ctrl-C.
        """
        wanted = [part for shape in shapes for part in ("--shape", shape)]
        command = [sys.executable, SCRIPT, "tune", "--backend", "replay", "--trials", str(TRIALS), "--json", *wanted]
        process = subprocess.Popen(
            [*(["sh", "-c", 'trap "" INT; exec "$@"', "sh"] if background else []), *command, *arguments],
            env=self.environment | more,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def calls(self) -> list[tuple[int, str, str, str]]:
        """Measurements that were begun: process id, kernel, shape, config digest."""
        if not self.calls_path.exists():
            return []
        lines = [line.split() for line in self.calls_path.read_text().splitlines()]
        return [(int(pid), kernel, shape, config) for pid, kernel, shape, config in lines]

    def paused(self, workers: int, count: int = PAUSE) -> list[int]:
        """Wait until so many workers stand in a measurement, since `count` were begun (SLOW_PAUSE); the busiest one first."""
        self.wait(lambda: len({call[0] for call in self.calls()[count - 1 :]}) == workers)
        return [pid for pid, _ in Counter(call[0] for call in self.calls()).most_common()]

    def go(self) -> None:
        """No worker pauses any more."""
        self.calls_path.with_suffix(".go").touch()

    def wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert time.monotonic() < deadline, [p.stderr.read() for p in self.processes if p.poll() is not None]
            time.sleep(0.02)

    def repeated(self) -> int:
        """Measurements that were begun more than once."""
        return sum(count - 1 for count in Counter(call[1:] for call in self.calls()).values())


@pytest.fixture
def bench(database_url: str, tmp_path: Path) -> Iterator[Bench]:
    yield from opened(database_url, tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Bench]:
    """For what does not depend on the database."""
    yield from opened(f"sqlite:///{tmp_path / 'kdatune.db'}", tmp_path)


def opened(url: str, folder: Path) -> Iterator[Bench]:
    upgrade(url)
    bench = Bench(url, folder)
    yield bench
    for process in bench.processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.communicate()
    bench.engine.dispose()


def measurements(bench: Bench) -> list[MeasurementRow]:
    with reading(bench.engine) as s:
        return queries.page_measurements(s, limit=100_000)


def claims_of(bench: Bench) -> list[ClaimModel]:
    with reading(bench.engine) as s:
        return list(s.scalars(select(ClaimModel).order_by(ClaimModel.id)))


def runs_of(bench: Bench) -> list[RunRow]:
    with reading(bench.engine) as s:
        return queries.page_runs(s, limit=1000)


def check_all_done(bench: Bench, shapes: list[str] = SHAPES) -> None:
    """Every shape is tuned once, nothing is measured twice, and each has one champion by one promotion."""
    rows = measurements(bench)
    keys = Counter((row.kernel, row.shape.key(), row.config_hash) for row in rows)
    assert [key for key, count in keys.items() if count > 1] == []
    for shape in shapes:
        stages = Counter(row.kernel for row in rows if row.shape.key() == shape)
        assert set(stages) == {"k1", "k2", "kda"}, shape
        assert max(stages["k1"], stages["k2"]) <= TRIALS, shape
    with reading(bench.engine) as s:
        promotions = [row for row in queries.page_promotions(s, limit=1000) if row.decision == "promoted"]
        assert {champion.shape.key() for champion in queries.champions(s)} == set(shapes)
    assert Counter(row.shape.key() for row in promotions) == dict.fromkeys(shapes, 1)
    found = claims_of(bench)
    assert [claim.state for claim in found] == ["done"] * len(shapes)
    runs = {run.id: run for run in runs_of(bench)}
    assert all((runs[c.run_id].kernel, runs[c.run_id].state) == ("kda", "done") for c in found)


def finished(process: Process, code: int, seconds: float = 200.0) -> tuple[dict, str]:
    """The document and stderr of a command that ended so."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return json.loads(out), err


def test_three_workers_share_the_shapes_and_one_is_killed(bench: Bench) -> None:
    process = bench.start("--workers", "3", SLOW_PAUSE=str(PAUSE))
    victim = bench.paused(3)[0]
    os.kill(victim, signal.SIGKILL)
    bench.go()
    document, err = finished(process, 0)
    check_all_done(bench)
    assert [one["shape"] for one in document["results"]] == SHAPES
    assert {one["state"] for one in document["results"]} == {"done"}
    (crash,) = document["crashes"]
    assert crash["reason"].startswith("ended with signal SIGKILL; it was tuning N=1,H=")
    assert crash["reason"] in err
    assert "goes on where another worker ended" in err
    assert (document["elsewhere"], document["failed"], document["unfinished"]) == ([], [], [])
    # what was in flight when it died is all that was begun twice
    assert bench.repeated() <= 1
    assert len({pid for pid, *_ in bench.calls()}) == 3


def test_hosts_share_the_work_and_one_goes_down(bench: Bench) -> None:
    """Three commands as on three hosts; one is gone with its worker, so that nobody frees what it held but the lease."""
    leases = ("6", "60", "60")  # only the one that goes down is waited for
    parent, *commands = [
        bench.start("--workers", "1", KDATUNE_CLAIM_LEASE_S=lease, SLOW_PAUSE=str(PAUSE)) for lease in leases
    ]
    victim = next(pid for pid in bench.paused(3) if parent_of(pid) == parent.pid)
    bench.wait(lambda: any(c.state == "held" and c.heartbeat_at > c.taken_at for c in claims_of(bench)))
    os.kill(parent.pid, signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    parent.kill()
    bench.go()
    documents = [finished(command, 0)[0] for command in commands]
    check_all_done(bench)
    assert bench.repeated() <= 1
    mine = [[one["shape"] for one in document["results"]] for document in documents]
    assert not set(mine[0]) & set(mine[1])
    for document, shapes in zip(documents, mine, strict=True):
        assert document["crashes"] == []
        assert set(shapes) | {one["shape"] for one in document["elsewhere"]} == set(SHAPES)
    assert max(claim.attempts for claim in claims_of(bench)) == 2


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_worker_that_slept_past_its_lease_writes_nothing_more(local: Bench) -> None:
    # a lease without a heartbeat meanwhile: stopped in the middle of one, it would keep all others from writing
    process = local.start("--workers", "2", shapes=SHAPES[:2], KDATUNE_CLAIM_LEASE_S="600", SLOW_PAUSE=str(PAUSE))
    sleeper = local.paused(2)[0]
    os.kill(sleeper, signal.SIGSTOP)
    end_lease(local, next(call[2] for call in local.calls() if call[0] == sleeper))
    local.go()
    local.wait(lambda: [claim.state for claim in claims_of(local)] == ["done", "done"])
    os.kill(sleeper, signal.SIGCONT)
    document, err = finished(process, 0)
    check_all_done(local, SHAPES[:2])
    assert "lost: another worker has taken over what" in err
    assert len({one["worker"] for one in document["results"]}) == 1
    assert Counter(str(run.state) for run in runs_of(local))["failed"] == 1


def end_lease(bench: Bench, shape: str) -> None:
    """As if the holder of the shape had been silent for its whole lease."""
    with writing(bench.engine) as s:
        problem = select(ProblemModel.id).where(ProblemModel.shape_key == shape, ProblemModel.kernel == "kda")
        past = claims.database_now(s) - timedelta(seconds=1)
        s.execute(update(ClaimModel).where(ClaimModel.problem_id.in_(problem)).values(lease_ends_at=past))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_and_the_same_command_goes_on(local: Bench, number: signal.Signals) -> None:
    process = local.start("--workers", "3", background=number is signal.SIGTERM, SLOW_PAUSE=str(PAUSE))
    local.paused(3)
    process.send_signal(number)
    document, err = finished(process, 130)
    rows = measurements(local)
    assert document["interrupted"] is True
    assert sum(one["measured"] for one in document["results"]) == len(rows)
    assert f"interrupted; {len(rows)} finished trials are stored" in err
    assert "interrupted" in {one["state"] for one in document["results"]}
    assert document["unfinished"] != []
    assert "held" not in {claim.state for claim in claims_of(local)}
    assert {str(run.state) for run in runs_of(local)} <= {"done", "interrupted"}
    assert [pid for pid in {call[0] for call in local.calls()} if alive(pid)] == []
    if number is signal.SIGINT:
        finished(local.start("--workers", "2"), 0)
        check_all_done(local)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_is_starting_is_ended_too(local: Bench, number: signal.Signals) -> None:
    process = local.start("--workers", "1", background=number is signal.SIGTERM, SLOW_START="1")
    local.wait(local.calls_path.with_suffix(".started").exists)
    process.send_signal(number)
    document, _ = finished(process, 130)
    assert [one["reason"] for one in document["crashes"]] == ["ended with signal SIGTERM"]
    assert [one["shape"] for one in document["unfinished"]] == SHAPES


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it goes while it is read
        return False


def test_workers_end_with_a_parent_that_is_killed(local: Bench) -> None:
    process = local.start("--workers", "3", SLOW_PAUSE=str(PAUSE))
    workers = local.paused(3)
    process.kill()
    local.wait(lambda: not any(map(alive, workers)))
    assert "held" not in {claim.state for claim in claims_of(local)}
    assert local.repeated() == 0


def test_a_shape_that_kills_every_worker_does_not_take_all_down(local: Bench) -> None:
    document, err = finished(local.start("--workers", "4", SLOW_DEADLY=SHAPES[1]), 1)
    (failed,) = document["failed"]
    assert (failed["shape"], failed["reason"]) == (SHAPES[1], "ended with exit code 3: this shape is deadly")
    assert [one["shape"] for one in document["results"]] == [s for s in SHAPES if s != SHAPES[1]]
    assert len(document["crashes"]) == 3
    assert document["unfinished"] == []
    assert f"kdatune: {SHAPES[1]} on NVIDIA H200: ended with exit code 3" in err
    assert Counter(claim.state for claim in claims_of(local)) == {"done": len(SHAPES) - 1, "failed": 1}


def test_when_no_worker_is_left_it_says_what_is_not_tuned(local: Bench) -> None:
    document, err = finished(local.start("--workers", "1", SLOW_DEADLY=SHAPES[1]), 1)
    assert [one["shape"] for one in document["results"]] == SHAPES[:1]
    assert [one["shape"] for one in document["unfinished"]] == SHAPES[1:]
    assert f"{SHAPES[3]} on NVIDIA H200: no worker is left" in err


def test_workers_that_cannot_start_are_reported(local: Bench, tmp_path: Path) -> None:
    missing = "no such sweep file; make one with `kdatune record --out FILE`"
    document, _ = finished(local.start("--workers", "2", SLOW_SWEEP=str(tmp_path / "none.gz")), 1)
    assert [one["reason"] for one in document["crashes"]] == [f"{tmp_path / 'none.gz'}: {missing}"] * 2
    assert [one["shape"] for one in document["unfinished"]] == SHAPES


def test_a_second_time_nothing_is_measured(local: Bench) -> None:
    """One shape: several would suggest new configs to each other."""
    first, again = (finished(local.start("--workers", "2", shapes=SHAPES[:1]), 0)[0] for _ in range(2))
    assert [one["measured"] for one in again["results"]] == [0]
    assert [one["best_us"] for one in again["results"]] == [one["best_us"] for one in first["results"]]
    check_all_done(local, SHAPES[:1])
    assert local.repeated() == 0


def test_a_budget_is_shared_out(local: Bench) -> None:
    document, _ = finished(local.start("--workers", "2", "--budget", "1s", SLOW_SECONDS="0.1"), 0)
    assert [one["state"] for one in document["results"]] == ["done"] * len(SHAPES)
    assert all(one["measured"] < 2 * TRIALS for one in document["results"])
    for shape in SHAPES:  # each has at least its default of both stages and the pair
        rows = {row.kernel for row in measurements(local) if row.shape == parse_shape(shape)}
        assert rows == {"k1", "k2", "kda"}


def test_a_budget_does_not_wait_for_others_beyond_its_end(local: Bench) -> None:
    alike = ["--workers", "1", "--kernel", "k2"]
    other = local.start(*alike, shapes=SHAPES[:1], SLOW_PAUSE="2")
    local.paused(1, 2)
    document, _ = finished(local.start(*alike, "--budget", "1s", shapes=SHAPES[:1]), 0)
    (left,) = document["elsewhere"]
    assert left["reason"].endswith(" is at it")
    assert (document["results"], document["unfinished"]) == ([], [])
    other.send_signal(signal.SIGINT)
    finished(other, 130)
    assert local.repeated() == 0


@pytest.fixture
def three_cards(tmp_path: Path) -> dict[str, str]:
    """A host with two cards of one model and one of another, measured on fake_device.py."""
    folder = tmp_path / "fake"
    folder.mkdir()
    program = folder / "nvidia-smi"
    lines = [
        f"GPU {i}: {name} (UUID: GPU-{u})"
        for i, name, u in ((0, "Fake A", "a0"), (1, "Fake B", "b0"), (2, "Fake A", "a1"))
    ]
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "KDATUNE_FAKE": str(folder),
        "KDATUNE_FAKE_SECONDS": "0.01",
        "SLOW_FAKE": "1",
    }


def test_one_worker_a_card_and_each_model_for_itself(local: Bench, three_cards: dict[str, str]) -> None:
    arguments = ["--workers", "all", "--backend", "gpu"]
    document, err = finished(local.start(*arguments, shapes=SHAPES[:3], **three_cards), 0)
    tuned = [(one["shape"], one["gpu"]) for one in document["results"]]
    assert tuned == [(shape, gpu) for shape in SHAPES[:3] for gpu in ("Fake A", "Fake B")]
    workers = {gpu: {one["worker"] for one in document["results"] if one["gpu"] == gpu} for gpu in ("Fake A", "Fake B")}
    assert workers["Fake B"] == {1}
    assert workers["Fake A"] <= {0, 2}
    assert "worker 1 (Fake B GPU-b0)" in err
    rows = [row for row in measurements(local) if not (row.detail or "").startswith("measured again")]
    keys = Counter((row.gpu_id, row.kernel, row.shape.key(), row.config_hash) for row in rows)
    assert {(gpu, shape) for gpu, _, shape, _ in keys} == {(gpu, shape) for gpu in (1, 2) for shape in SHAPES[:3]}
    assert [key for key, count in keys.items() if count > 1 and key[1] != "kda"] == []
    # every measuring process saw its one card
    seen = {line.split()[-1] for line in Path(three_cards["KDATUNE_FAKE"], "calls.txt").read_text().splitlines()}
    assert seen <= {"GPU-a0", "GPU-a1", "GPU-b0"}
    assert "GPU-b0" in seen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "--workers must be all or a number from 1 on"),
        (["--workers", "many"], "--workers must be all or a number from 1 on"),
        (["--workers", "4", "--backend", "gpu"], "only 3 cards are visible here"),
    ],
)
def test_wrong_counts_are_exit_2(local: Bench, three_cards: dict[str, str], arguments: list[str], said: str) -> None:
    process = local.start(*arguments, **three_cards)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert said in err


def test_a_shape_that_is_not_recorded_starts_nothing(local: Bench) -> None:
    process = local.start("--workers", "2", shapes=[SHAPES[0], "N=3,H=96,T=8192"])
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert "N=3,H=96,T=8192 is not in" in err
    assert claims_of(local) == []
