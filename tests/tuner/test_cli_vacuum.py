"""`kdatune db vacuum` as a real process, beside a server that answers."""

import json
import os
import subprocess
import sys
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from pathlib import Path

from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import queries
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewMeasurement

OLD = Build("k" * 16, "s" * 16, "1", "3.6.0", "12.9", "2.13.0", "13.0", "570.1")
CONFIG = LaunchConfig(K1Config(), K2Config())


def test_it_says_what_it_would_remove_and_removes_it_while_it_is_served(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kdatune.db'}"
    upgrade(url)
    engine = open_engine(url)
    now = datetime.now(UTC)
    monday = now - timedelta(days=200 + now.weekday())
    with writing(engine) as s:
        gpu_id = writes.put_gpu(s, KNOWN_GPUS["NVIDIA H200"])
        problem_id = writes.put_problem(s, "kda", shape_of(1, 96, 8192))
        build_id = writes.put_build(s, OLD)
        ids = [
            writes.add_measurement(
                s,
                NewMeasurement(
                    run_id=None,
                    kernel="kda",
                    gpu_id=gpu_id,
                    problem_id=problem_id,
                    build_id=build_id,
                    config_json=canonical(CONFIG),
                    config_hash=digest(CONFIG),
                    outcome=Outcome.OK,
                    median_us=600.0 + number,
                    detail="x" * 2000,
                    measured_at=monday + timedelta(minutes=number),
                ),
            )
            for number in range(1000)
        ]
        writes.promote(
            s,
            kernel="kda",
            gpu_id=gpu_id,
            problem_id=problem_id,
            measurement_id=ids[500],
            baseline_measurement_id=None,
            default_us=700.0,
            gain=1.1,
            gain_low=1.0,
            gain_high=1.2,
            decision="promoted",
            reason="a test",
        )

    def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KDATUNE_")}
        return subprocess.run(
            [sys.executable, "-m", "kdatune_tuner.cli", "db", "vacuum", *arguments],
            env=kept | {"KDATUNE_DATABASE_URL": url, "KDATUNE_KEEP_PER_WEEK": "5", "PYTHONWARNINGS": "error"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    dry = call("--dry-run", "--json")
    assert (dry.returncode, dry.stderr) == (0, "")
    told = json.loads(dry.stdout)
    assert told.pop("before_bytes") == told.pop("after_bytes") > 2_000_000
    assert told == {
        "dry_run": True,
        "keep_days": 90.0,
        "keep_per_week": 5,
        "old_count": 1000,
        "kept_counts": {"referred_to": 1, "resumed_from": 1, "best_or_worst": 1, "sample": 5},
        "to_remove_count": 992,
        "removed_count": 0,
    }
    with reading(engine) as s:  # a connection of somebody who reads stays open meanwhile
        assert queries.measured(s, "kda", gpu_id, problem_id, build_id)[digest(CONFIG)].id == ids[-1]
        done = call()
        assert done.returncode == 0, done.stderr
        assert "1,000 measurements are older than 90 days" in done.stdout
        assert "992 are removed" in done.stdout
        assert len(queries.champions(s)) == 1
    with reading(engine) as s:
        assert queries.measured(s, "kda", gpu_id, problem_id, build_id)[digest(CONFIG)].id == ids[-1]
        (champion,) = queries.champions(s)
        assert champion.measured_us == 1100.0
    again = json.loads(call("--json").stdout)
    assert (again["old_count"], again["removed_count"]) == (8, 0)
    assert again["after_bytes"] < 500_000
    engine.dispose()
