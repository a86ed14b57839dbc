"""`kdatune token` and what `kdatune serve` does without one, as real processes."""

import json
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kdatune_tuner.store import access
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade

Run = Callable[..., "subprocess.CompletedProcess[str]"]
TOKEN = re.compile(r"kdt_[0-9a-f]{12}_[A-Za-z0-9_-]{43}\n")


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'kdatune.db'}"
    upgrade(url)
    return url


@pytest.fixture
def environment(environment: dict[str, str], url: str) -> dict[str, str]:
    return environment | {"KDATUNE_DATABASE_URL": url}


def test_a_token_is_made_listed_and_revoked(run: Run, url: str) -> None:
    made = run("token", "create", "nightly-h200", "--scope", "results:write", "--scope", "promotions:write")
    assert made.returncode == 0, made.stderr
    assert TOKEN.fullmatch(made.stdout)
    token = made.stdout.strip()
    prefix = token.split("_")[1]
    assert token not in made.stderr
    engine = open_engine(url)
    with reading(engine) as s:
        found = access.find_token(s, token)
        assert found is not None
        assert (found.name, found.scopes) == ("nightly-h200", {"results:write", "promotions:write"})
        assert access.page_audit(s)[0].actor.startswith("command line, user ")
    listed = run("token", "list")
    assert re.search(rf"{prefix} +nightly-h200 +in use +promotions:write results:write", listed.stdout)
    assert token not in listed.stdout
    assert run("token", "revoke", prefix).returncode == 0
    (row,) = json.loads(run("token", "list", "--json").stdout)["tokens"]
    assert (row["prefix"], row["state"], row["expires_at"]) == (prefix, "revoked", None)
    again = run("token", "revoke", prefix)
    assert (again.returncode, again.stdout) == (1, "")
    assert "revoked already" in again.stderr
    with reading(engine) as s:
        assert access.find_token(s, token) is None
    engine.dispose()


def test_a_token_can_go_to_a_file_and_be_made_once(run: Run, tmp_path: Path) -> None:
    arguments = ("token", "create", "compose", "--scope", "demand:write", "--keep")
    made = run(*arguments, "--out", "token", "--days", "30", "--json")
    assert made.returncode == 0, made.stderr
    document = json.loads(made.stdout)
    assert "token" not in document
    assert document["expires_at"] > document["created_at"]
    file = tmp_path / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert TOKEN.fullmatch(file.read_text())
    for again in (run(*arguments), run(*arguments, "--out", "token")):  # a step that runs again finds both
        assert (again.returncode, again.stdout) == (0, "")
    assert run("token", "create", "other", "--scope", "demand:write", "--out", "token").returncode == 2
    assert len(json.loads(run("token", "list", "--json").stdout)["tokens"]) == 1
    # one that may do less is not taken for it
    assert run("token", "create", "compose", "--scope", "results:write", "--keep").stdout != ""


def test_a_wrong_scope_or_file_makes_no_token(run: Run) -> None:
    wrong = run("token", "create", "a", "--scope", "everything")
    assert wrong.returncode == 2
    assert "results:write" in wrong.stderr
    nowhere = run("token", "create", "a", "--scope", "results:write", "--out", "no/such/folder")
    assert nowhere.returncode == 1
    assert "no token is made" in nowhere.stderr
    assert json.loads(run("token", "list", "--json").stdout) == {"tokens": []}


def test_the_service_is_not_started_for_strangers_without_a_token(run: Run) -> None:
    refused = run("serve", "--host", "0.0.0.0", "--port", "0")  # noqa: S104 - it must refuse
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no token is configured" in refused.stderr
    assert "Traceback" not in refused.stderr
