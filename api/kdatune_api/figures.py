"""Figures that Optuna has none of: champions over chains with their waves, and medians from night to night."""

import math
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from typing import Any

from kdatune_api.charts import empty
from kdatune_api.charts import time_axis
from kdatune_kernels.spec import Json


@dataclass(frozen=True)
class WavePoint:
    """A champion as the waves chart shows it."""

    chains: int
    tokens_per_chain: int
    median_us: float
    choice: str
    shape_key: str


_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "hexagon")
_COLOURS = ("--c1", "--c2", "--c3", "--c4", "--c5", "--c6")


def waves(points: Sequence[WavePoint], sm_count: int, boundaries: Mapping[str, int]) -> Json:
    """Champion time over independent chains, one line a length, one symbol a K2 choice; where waves begin.

    boundaries: chains at which a second wave starts, by what it is called.
    """
    if not points:
        return empty("No champion fits these filters.")
    choices = {choice: n for n, choice in enumerate(dict.fromkeys(p.choice for p in points))}
    lengths: dict[int, list[WavePoint]] = {}
    for point in sorted(points, key=lambda p: (p.tokens_per_chain, p.chains, p.median_us)):
        lengths.setdefault(point.tokens_per_chain, []).append(point)
    data: list[Json] = []
    for n, (tokens, group) in enumerate(sorted(lengths.items())):
        colour = _COLOURS[n % len(_COLOURS)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{tokens:,} tokens a chain",
                "x": [p.chains for p in group],
                "y": [p.median_us for p in group],
                "text": [f"{p.shape_key}<br>{p.choice}" for p in group],
                "hovertemplate": "%{text}<br>%{x} chains, %{y:.1f} µs<extra></extra>",
                "line": {"color": colour, "width": 1, "dash": "dot"},
                "marker": {
                    "color": colour,
                    "size": 10,
                    "symbol": [_SYMBOLS[choices[p.choice] % len(_SYMBOLS)] for p in group],
                },
            }
        )
    data += [
        {
            "type": "scatter",
            "mode": "markers",
            "name": choice,
            "x": [None],
            "y": [None],
            "marker": {"color": "--text", "size": 10, "symbol": _SYMBOLS[n % len(_SYMBOLS)]},
        }
        for choice, n in choices.items()
    ]
    middle = sorted(p.chains for p in points)[len(points) // 2]
    shapes = [
        _upright(chains, "--down", "solid" if n % 2 == 0 else "dash") for n, chains in enumerate(boundaries.values())
    ]
    notes = [
        {
            "x": math.log10(chains),
            "y": 1 + 0.13 * (n % 2),
            "yref": "paper",
            "text": label.replace(": ", ":<br>"),
            "align": "left",
            "showarrow": False,
            "xanchor": "right" if chains > middle else "left",
            "yanchor": "bottom",
            "font": {"color": "--text", "size": 11},
        }
        for n, (label, chains) in enumerate(boundaries.items())
    ]
    return {
        "data": data,
        "layout": {
            "xaxis": {
                "title": {"text": f"independent chains N*HV ({sm_count} SMs)"},
                **_powers_of_two([*(p.chains for p in points), *boundaries.values()]),
            },
            "yaxis": time_axis("champion, µs", [p.median_us for p in points]),
            "shapes": shapes,
            "annotations": notes,
            "legend": {"orientation": "h", "y": -0.34},
            "margin": {"t": 80},
        },
        "narrow": {"annotations": [], "margin": {"t": 16}},  # no room for words: they are in the table below
    }


def _powers_of_two(values: Sequence[int]) -> Json:
    """A logarithmic axis over the values, with at most nine powers of two on it."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    every = max(1, -(-(high - low + 1) // 9))
    ticks = [2**n for n in range(low, high + 1, every)]
    span = [(low - 0.3) * math.log10(2), (high + 0.3) * math.log10(2)]
    return {"type": "log", "range": span, "tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]}


def _upright(x: Any, colour: str, dash: str) -> Json:
    """A line across the whole height of a chart."""
    line = {"color": colour, "width": 1.5, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


@dataclass(frozen=True)
class NightPoint:
    """One night of a key: the time of what was served, and what changed since the night before."""

    day: str
    median_us: float
    p20_us: float | None
    p80_us: float | None
    change: str


def trend(points: Sequence[NightPoint], steps: Sequence[tuple[str, str]]) -> Json:
    """Median per night with p20 to p80, and a line where something changed.

    steps: (day, what changed).
    """
    if not points:
        return empty("Nothing was measured in this time.")
    days = [p.day for p in points]
    spread = [p for p in points if p.p20_us is not None and p.p80_us is not None]
    data: list[Json] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "served config, median",
            "x": days,
            "y": [p.median_us for p in points],
            "text": [p.change for p in points],
            "hovertemplate": "%{x}<br>%{y:.1f} µs<br>%{text}<extra></extra>",
            "line": {"color": "--c1", "width": 2},
            "marker": {"color": "--c1", "size": 8, "symbol": ["diamond" if p.change else "circle" for p in points]},
        }
    ]
    if spread:
        data[0]["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [(p.p80_us or p.median_us) - p.median_us for p in points],
            "arrayminus": [p.median_us - (p.p20_us or p.median_us) for p in points],
            "color": "--c6",
            "thickness": 1,
        }
    marks = [_upright(day, "--c2", "dash") for day, _ in steps]
    notes = [
        {
            "x": day,
            "y": 1 - 0.08 * (n % 3),
            "yref": "paper",
            "text": what if len(what) < 40 else what[:38] + "…",
            "showarrow": False,
            "xanchor": "right" if day in days and days.index(day) > len(days) / 2 else "left",
            "yanchor": "top",
            "font": {"color": "--text", "size": 11},
        }
        for n, (day, what) in enumerate(steps)
    ]
    return {
        "data": data,
        "layout": {
            "xaxis": {
                "title": {"text": "night (UTC)"},
                "type": "date",
                "tickformat": "%d %b",
                "nticks": 8,
                "range": _around(days),
            },
            "yaxis": {"title": {"text": "median, µs"}},
            "shapes": marks,
            "annotations": notes,
            "showlegend": False,
        },
        "narrow": {"annotations": []},  # no room for words: they are in the table below
    }


def _around(days: Sequence[str]) -> list[str]:
    """The days with half a day on either side. Of itself the library makes room for the words beside the lines, too."""
    half = timedelta(hours=12)
    first, last = (datetime.fromisoformat(day).replace(tzinfo=UTC) for day in (days[0], days[-1]))
    return [(first - half).isoformat()[:16], (last + half).isoformat()[:16]]
