"""Values as people read them. One form for each unit on every page; what is not known is a dash, never a zero."""

import re
from datetime import UTC
from datetime import datetime

from markupsafe import Markup
from markupsafe import escape

from kdatune_tuner.store.records import rfc3339

NONE = "-"
SAME_BELOW = 0.005
"""A speed-up nearer to 1 than this is shown as equal: half a percent is what a promotion must gain at least."""

_SECONDS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def number(value: float | None, digits: int = 1) -> str:
    """A number with thin separators and a fixed number of decimals."""
    return NONE if value is None else f"{value:,.{digits}f}"


def integer(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def us(value: float | None) -> str:
    """A time in microseconds, to a tenth; large ones without decimals."""
    return number(value, 0 if value is not None and value >= 10_000 else 1)


def speedup(value: float | None) -> str:
    """A speed-up: 1.234x."""
    return NONE if value is None else f"{value:.3f}x"


def signed_pct(ratio: float | None) -> str:
    """How far a ratio is from 1, in percent with its sign."""
    return NONE if ratio is None else f"{(ratio - 1.0) * 100.0:+.1f} %"


def short(value: float | None) -> str:
    """A number of unknown size in at most five digits."""
    if value is None:
        return NONE
    if value == int(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def ago(moment: datetime, now: datetime | None = None) -> str:
    """The age of a moment in its largest unit: "3 h ago"."""
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    for size, unit in _SECONDS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now" if seconds >= 0 else "in the future"


def moment(value: datetime) -> Markup:
    """A moment to the minute, with the exact time for machines."""
    exact = rfc3339(value)
    return Markup('<time datetime="{}">{}</time>').format(exact, exact[:16].replace("T", " "))


def trend_of(ratio: float | None) -> str:
    """What a speed-up means: "better", "worse", "same", or "" when it is not known."""
    if ratio is None:
        return ""
    if abs(ratio - 1.0) < SAME_BELOW:
        return "same"
    return "better" if ratio > 1.0 else "worse"


def breakable(key: str) -> Markup:
    """A shape key or another long word that may break after commas and underscores."""
    return Markup(re.sub(r"([,_/])", r"\1<wbr>", str(escape(key))))  # noqa: S704 - escaped in the line itself


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def word(value: object) -> str:
    """A field of a config: none, true and false in small letters, as the command line has them."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
