"""Settings come from the environment, and a wrong one is named."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from kdatune_tuner.settings import Settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"KDATUNE_{name.upper()}", raising=False)


def test_the_defaults_are_those_of_the_architecture() -> None:
    settings = Settings()
    assert (settings.database_url, settings.host, settings.port) == ("sqlite:///kdatune.db", "127.0.0.1", 8321)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDATUNE_DATABASE_URL", "postgresql://user@host/kdatune")
    monkeypatch.setenv("KDATUNE_PORT", "9000")
    monkeypatch.setenv("KDATUNE_MIN_GAIN_PCT", "2.5")
    settings = Settings()
    assert (settings.database_url, settings.port) == ("postgresql://user@host/kdatune", 9000)
    assert settings.min_gain_pct == 2.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "http"),
        ("PORT", "70000"),
        ("CONFIDENCE_PCT", "100"),
        ("PAIRED_ROUNDS", "1"),
        ("TRIAL_TIMEOUT_S", "0"),
        ("TRIAL_TIMEOUT_S", "1e300"),
        ("PROFILE_TIMEOUT_S", "inf"),
        ("CLAIM_LEASE_S", "1e18"),
        ("NIGHTLY_BUDGET_S", "inf"),
        ("MAX_AGE_DAYS", "1e300"),
        ("REGRESSION_DAYS", "1e18"),
        ("KEEP_DAYS", "1e300"),
        ("DRIFT_PCT", "inf"),
    ],
)
def test_a_wrong_value_names_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"KDATUNE_{name}", value)
    with pytest.raises(ValidationError, match=name.lower()):
        Settings()


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_settings_do_not_change(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().database_url = f"sqlite:///{tmp_path}/other.db"
