"""`kdatune doctor`, `backup` and `restore` as their users meet them, beside a running service."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kdatune_migrations import head
from kdatune_tuner import doctor
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import access
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing

Run = Callable[..., "subprocess.CompletedProcess[str]"]
CHECKS = ["database", "disk", "tokens", "service", "cache", "kernels", "card", "software", "clocks", "counters"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'kdatune.db'}"


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return environment | {"KDATUNE_CACHE_DIR": str(tmp_path / "cache"), "KDATUNE_PORT": "9"}


def states(result: "subprocess.CompletedProcess[str]") -> dict[str, dict[str, str]]:
    document = json.loads(result.stdout)
    assert [one["check"] for one in document["checks"]] == CHECKS
    return {one["check"]: one for one in document["checks"]}


def test_without_a_database_it_says_what_to_do(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.returncode == 1, result.stderr
    found = states(result)
    assert found["database"]["state"] == "problem"
    assert "kdatune db upgrade" in found["database"]["detail"]
    assert found["service"]["state"] == "note"


def test_with_one_all_that_is_needed_to_serve_is_there(run: Run, url: str) -> None:
    upgrade(url)
    found = states(run("doctor", "--json"))
    assert {name: found[name]["state"] for name in ("database", "disk", "tokens", "cache")} == {
        "database": "ok",
        "disk": "ok",
        "tokens": "note",
        "cache": "ok",
    }
    text = run("doctor")
    assert "Traceback" not in text.stderr
    assert f"schema {head()}, generation 0, 0 champions" in text.stdout


def test_an_address_for_strangers_without_a_token_is_a_problem(run: Run, url: str) -> None:
    upgrade(url)
    exposed = {"KDATUNE_HOST": "0.0.0.0"}  # noqa: S104 - nothing is bound to it
    assert states(run("doctor", "--json", **exposed))["tokens"]["state"] == "problem"
    engine = open_engine(url)
    with writing(engine) as s:
        access.create_token(s, "nightly", [access.Scope.RESULTS], access.Caller("a test"))
    engine.dispose()
    assert states(run("doctor", "--json", **exposed))["tokens"]["detail"] == "1 in use: nightly"


def test_a_service_that_is_named_and_gone_is_a_problem(run: Run) -> None:
    found = states(run("doctor", "--json", KDATUNE_URL="http://127.0.0.1:9"))
    assert (found["service"]["state"], "KDATUNE_URL" in found["service"]["remedy"]) == ("problem", True)


def test_a_check_that_fails_by_itself_is_a_finding(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    def fail(*_args: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(doctor.gpu, "clock_state", fail)
    found = {one.check: one for one in doctor.examine(Settings(database_url=url))}
    assert found["clocks"].state == "problem"
    assert "ZeroDivisionError: oh" in found["clocks"].detail


def test_a_slowed_card_is_a_problem(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for reasons, state in (("none", "ok"), ("idle", "ok"), ("sw_thermal+idle", "problem"), ("hw_slowdown", "problem")):
        monkeypatch.setattr(doctor.gpu, "clock_state", lambda reasons=reasons: (1980, reasons))
        (found,) = [one for one in doctor.examine(Settings(database_url=url)) if one.check == "clocks"]
        assert found.state == state


def test_backup_and_restore_beside_a_running_service(run: Run, url: str, environment: dict[str, str]) -> None:
    upgrade(url)
    command = [sys.executable, "-m", "kdatune_tuner.cli", "serve", "--port", "0"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[3]
        assert address.startswith("http://127.0.0.1:")
        made = run("backup", "first.db", "--json")
        assert (made.returncode, json.loads(made.stdout)["generation"]) == (0, 0)
        assert run("backup", "first.db").returncode == 1
        assert run("restore", "first.db").returncode == 2
        assert run("restore", "missing.db", "--yes").returncode == 1
        done = run("restore", "first.db", "--yes")
        assert done.returncode == 0, done.stderr
        assert "before-restore-1" in done.stderr
        # a service that a busy machine keeps from answering for two seconds is a problem, too
        deadline = time.monotonic() + 120
        while states(run("doctor", "--json", KDATUNE_URL=address))["service"]["state"] != "ok":
            assert time.monotonic() < deadline
    finally:
        server.terminate()
        server.wait(120)
        server.stdout.close()
    assert server.returncode in (0, -signal.SIGTERM)
    engine = open_engine(url)
    with reading(engine) as s:
        assert access.page_audit(s)[0].action == "database.restore"
    engine.dispose()
