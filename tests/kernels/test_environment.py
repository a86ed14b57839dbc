"""The KDATUNE_ variables of the launcher: each read, and each bad value said once."""

import dataclasses
from pathlib import Path

import pytest
from loopback_service import lines

from kdatune_kernels.environment import POLL_SECONDS
from kdatune_kernels.environment import Settings
from kdatune_kernels.environment import from_environment


def test_settings_of_an_empty_environment() -> None:
    home = Path.home() / ".cache" / "kdatune"
    assert from_environment({}) == Settings(None, home, POLL_SECONDS, False, None, None)
    assert not from_environment({}).asks


def test_settings_are_read() -> None:
    settings = from_environment(
        {
            "KDATUNE_URL": " https://tune.example:8321/base/ ",
            "KDATUNE_OFFLINE": "0",
            "KDATUNE_POLL_SECONDS": "30",
            "KDATUNE_GENERATION": "12",
            "KDATUNE_CACHE_DIR": "/var/cache/kdatune",
            "KDATUNE_TOKEN": "abc\n",
        }
    )
    assert settings == Settings("https://tune.example:8321/base", Path("/var/cache/kdatune"), 30.0, False, 12, "abc")
    assert settings.asks
    assert not dataclasses.replace(settings, offline=True).asks


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/kdatune"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/x"}, "/x/kdatune"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "relative"}, "/home/u/.cache/kdatune"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/x", "KDATUNE_CACHE_DIR": "/k"}, "/k"),
    ],
)
def test_where_the_copies_lie(environment: dict[str, str], directory: str) -> None:
    assert from_environment(environment).cache_dir == Path(directory)


@pytest.mark.parametrize(
    ("name", "value", "field", "taken"),
    [
        ("KDATUNE_URL", "127.0.0.1:8321", "url", None),
        ("KDATUNE_URL", "file:///etc/passwd", "url", None),
        ("KDATUNE_URL", "http://", "url", None),
        ("KDATUNE_URL", "http://host:99999", "url", None),
        ("KDATUNE_URL", "http://host:0", "url", None),
        ("KDATUNE_URL", "http://[::1", "url", None),
        ("KDATUNE_URL", "http://a b/", "url", None),
        ("KDATUNE_URL", "http://host/?x=1", "url", None),
        ("KDATUNE_URL", "http://user:s3cret@host", "url", None),
        ("KDATUNE_POLL_SECONDS", "soon", "poll_seconds", POLL_SECONDS),
        ("KDATUNE_POLL_SECONDS", "0", "poll_seconds", POLL_SECONDS),
        ("KDATUNE_POLL_SECONDS", "nan", "poll_seconds", POLL_SECONDS),
        ("KDATUNE_POLL_SECONDS", "inf", "poll_seconds", POLL_SECONDS),
        ("KDATUNE_GENERATION", "latest", "generation", -1),
        ("KDATUNE_GENERATION", "-5", "generation", -1),
        ("KDATUNE_TOKEN", "s3cret\r\nX: y", "token", None),
    ],
)
def test_a_setting_that_cannot_be_read_costs_one_warning(
    name: str, value: str, field: str, taken: object, caplog: pytest.LogCaptureFixture
) -> None:
    settings = from_environment({name: value})
    assert getattr(settings, field) == taken
    (line,) = lines(caplog)
    assert line.startswith(f"WARNING {name}")
    assert "s3cret" not in line


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("true", True), ("yes", True), ("", False), ("No", False)])
def test_offline_is_read(value: str, offline: bool) -> None:
    assert from_environment({"KDATUNE_OFFLINE": value}).offline is offline
