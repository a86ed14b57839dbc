"""The launcher's settings, read from the environment. Stdlib only.

KDATUNE_URL              the service; none is asked without it
KDATUNE_OFFLINE          1: no network; the disk copy is still read
KDATUNE_POLL_SECONDS     300; each poll comes up to a fifth earlier or later
KDATUNE_GENERATION       use served snapshots of this generation only, so that all ranks agree
KDATUNE_CACHE_DIR        where the disk copies lie; else $XDG_CACHE_HOME/kdatune, else ~/.cache/kdatune
KDATUNE_TOKEN            sent as bearer token when set
"""

import contextlib
import logging
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

log = logging.getLogger("kdatune")

POLL_SECONDS = 300.0


@dataclass(frozen=True)
class Settings:
    """Where the service is and how it is asked."""

    url: str | None = None
    cache_dir: Path | None = None
    poll_seconds: float = POLL_SECONDS
    offline: bool = False
    generation: int | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def asks(self) -> bool:
        """Whether there is a service to ask."""
        return self.url is not None and not self.offline


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment. A value that cannot be read costs a warning and takes the safe side."""
    env = {k: v.strip() for k, v in (os.environ if environ is None else environ).items() if k in _READ}
    return Settings(
        url=_url(env.get("KDATUNE_URL", "")),
        cache_dir=_cache_dir(env),
        poll_seconds=_poll_seconds(env.get("KDATUNE_POLL_SECONDS", "")),
        offline=env.get("KDATUNE_OFFLINE", "").lower() not in ("", "0", "false", "no", "off"),
        generation=_generation(env.get("KDATUNE_GENERATION", "")),
        token=_token(env.get("KDATUNE_TOKEN", "")),
    )


_READ = (
    "KDATUNE_URL",
    "KDATUNE_OFFLINE",
    "KDATUNE_POLL_SECONDS",
    "KDATUNE_GENERATION",
    "KDATUNE_CACHE_DIR",
    "KDATUNE_TOKEN",
    "XDG_CACHE_HOME",
    "HOME",
)


def _url(text: str) -> str | None:
    if not text:
        return None
    try:
        parts = urllib.parse.urlsplit(text)
        good = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except ValueError:
        good = False
    if not good or not text.isprintable() or any(c in text for c in " ?#"):
        shown = text.rsplit("@", maxsplit=1)[-1]  # a password may stand before it
        log.warning("KDATUNE_URL (%r) is not an address like http://host:8321; no service is asked", shown)
        return None
    return text.rstrip("/")


def _cache_dir(env: Mapping[str, str]) -> Path | None:
    """None when there is no home."""
    if env.get("KDATUNE_CACHE_DIR"):
        return Path(env["KDATUNE_CACHE_DIR"]).absolute()
    xdg = Path(env.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the XDG specification: a relative path is to be ignored
        return xdg / "kdatune"
    with contextlib.suppress(RuntimeError):
        return Path(env.get("HOME") or Path.home()).absolute() / ".cache" / "kdatune"
    return None


def _poll_seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        seconds = float(text or POLL_SECONDS)
        if 0 < seconds < 1e6:
            return seconds
    log.warning("KDATUNE_POLL_SECONDS (%r) is not a time in seconds; %g is used", text, POLL_SECONDS)
    return POLL_SECONDS


def _generation(text: str) -> int | None:
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text)
    log.warning("KDATUNE_GENERATION (%r) is not a whole number; no served snapshot is used", text)
    return -1


def _token(text: str) -> str | None:
    if text.isascii() and text.isprintable():
        return text or None
    log.warning("KDATUNE_TOKEN holds characters that no header may carry; it is not sent")
    return None
