"""Figures of the dashboard, as JSON for the chart library. What Optuna draws, Optuna draws: its own plots on a study that is
rebuilt in memory from the stored measurements.

A figure names colours of the style sheet ("--c1"); the page's script puts the theme's own in their place.
"""

import json
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from kdatune_api.pages.sides import flat
from kdatune_api.pages.text import word
from kdatune_kernels.spec import Json
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.dashboard import Trial

if TYPE_CHECKING:
    import optuna

MAX_TRIALS = 2000
"""Trials that a plot draws, the newest."""

MAX_LINES = 250
"""Lines of parallel coordinates: more are a solid block, and take seconds to draw."""

MAX_AXES = 8
"""Parameters that parallel coordinates show: those that matter most."""

_MIN_FOR_IMPORTANCE = 8
_LOCK = threading.Lock()  # warnings.catch_warnings changes the whole process: one thread at a time


def empty(text: str) -> Json:
    """A figure that says why there is nothing to draw."""
    return {"empty": text}


def history(trials: Sequence[Trial], title: str) -> Json:
    """Every trial's time in the order they were taken, with the best so far."""
    study = _study(trials)
    if study is None:
        return empty("No trial ended ok, so there is no time to draw.")
    import optuna.visualization as plots

    figure = _plain(lambda: plots.plot_optimization_history(study, target_name=title))
    looks = ({"marker": {"color": "--c1", "size": 6}}, {"line": {"color": "--c2", "width": 2, "shape": "hv"}})
    for trace, look in zip(figure["data"], looks, strict=False):
        trace.update(look)
    figure["data"][0]["name"] = "trial"
    if len(figure["data"]) > 1:
        figure["data"][1]["name"] = "best so far"
    figure["layout"] = {
        "xaxis": {"title": {"text": "trial"}},
        "yaxis": time_axis(title, [t.value for t in study.trials if t.value is not None]),
        "legend": {"orientation": "h", "y": 1.12},
    }
    return figure


def time_axis(title: str, values: Sequence[float]) -> Json:
    """An axis of times: logarithmic where they are far apart."""
    if max(values) < 3 * min(values):
        return {"title": {"text": title}, "tickformat": ",.4~g"}
    return {"title": {"text": title}, "type": "log", "dtick": "D2", "tickformat": ",.4~g"}


def importances(trials: Sequence[Trial]) -> Json:
    """How much each parameter matters, by PED-ANOVA."""
    study = _study(trials)
    if study is None or len(study.trials) < _MIN_FOR_IMPORTANCE:
        return empty(f"Parameter importances need {_MIN_FOR_IMPORTANCE} trials that ended ok.")
    if not study.trials[0].distributions:
        return empty("All trials are of one config: no parameter varies.")
    import optuna.visualization as plots
    from optuna.importance import PedAnovaImportanceEvaluator

    figure = _plain(lambda: plots.plot_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))
    for trace in figure["data"]:
        trace["marker"] = {"color": "--c1"}
    figure["layout"] = {
        "xaxis": {"title": {"text": "importance"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": ""}},
        "showlegend": False,
    }
    return figure


def parallel(trials: Sequence[Trial], title: str) -> Json:
    """Parallel coordinates of the parameters that matter most; the fastest trials stand out."""
    study = _study(_fastest_and_others(trials))
    if study is None or len(study.trials) < 2 or not study.trials[0].distributions:
        return empty("Parallel coordinates need two trials of different configs that ended ok.")
    import optuna.visualization as plots

    names = _most_important(study)
    figure = _plain(lambda: plots.plot_parallel_coordinate(study, params=names, target_name=title))
    # one line a trial, then legends of Optuna's own colours, which do not follow the theme
    lines = sorted((trace for trace in figure["data"] if trace["mode"] == "lines"), key=lambda trace: -trace["y"][0])
    for rank, line in enumerate(reversed(lines)):
        line["line"] = _line_of_rank(rank / len(lines))
        line["opacity"] = 1.0
    layout = figure["layout"]
    names = sorted(names)  # as Optuna orders its axes, whose texts it cuts at 20 characters
    layout["annotations"] = _axis_values(study, names, layout["annotations"])
    for shape in layout["shapes"]:
        shape["line"] = {"color": "--line-strong", "width": 1}
    layout["xaxis"] |= {
        "side": "top",
        "tickangle": 0,
        "tickfont": {"size": 11},
        "ticktext": [name.replace("_", " ") for name in layout["xaxis"]["ticktext"]],
    }
    keep = ("annotations", "shapes", "xaxis", "yaxis", "hovermode")
    figure["data"] = lines
    figure["layout"] = {name: layout[name] for name in keep} | {"margin": {"l": 48, "r": 24, "t": 48, "b": 16}}
    return figure


def _axis_values(study: "optuna.Study", names: Sequence[str], notes: Sequence[Json]) -> list[Json]:
    """The values beside the axes: of times without exponents, of whole numbers the values that occur, not every quarter."""
    kept = [note for note in notes if note["x"] == 0 or not _is_whole(study, names[note["x"] - 1])]
    for note in kept:
        if note["x"] == 0:
            note["text"] = f"{float(note['text']):,.0f}"
    sample = next((note for note in notes if note["x"] == 0), {})
    for x, name in enumerate(names, 1):
        if _is_whole(study, name):
            values = sorted({trial.params[name] for trial in study.trials})
            span = (values[-1] - values[0]) or 1
            kept += [sample | {"x": x, "y": (v - values[0]) / span, "text": str(v)} for v in values]
    return [note | {"font": {"color": "--text", "size": 11}} for note in kept]


def _is_whole(study: "optuna.Study", name: str) -> bool:
    return all(type(trial.params[name]) is int for trial in study.trials)


def _line_of_rank(share: float) -> Json:
    """The look of a trial by its rank, 0 the fastest: the best twentieth stands out by width as well as by colour."""
    if share < 0.05:
        return {"color": "--c2", "width": 2.5}
    return {"color": "--c1", "width": 1} if share < 0.3 else {"color": "--line", "width": 1}


def _fastest_and_others(trials: Sequence[Trial]) -> list[Trial]:
    """At most MAX_LINES trials: the fastest half of them, and every n-th of the rest."""
    ok = sorted(
        (t for t in trials if t.outcome == Outcome.OK and t.median_us is not None), key=lambda t: t.median_us or 0
    )
    if len(ok) <= MAX_LINES:
        return ok
    half = MAX_LINES // 2
    rest = ok[half:]
    return [*ok[:half], *rest[:: -(-len(rest) // half)]]


def _most_important(study: "optuna.Study") -> list[str]:
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.importance import get_param_importances

    names = list(study.trials[0].distributions)
    if len(names) <= MAX_AXES or len(study.trials) < _MIN_FOR_IMPORTANCE:
        return names[:MAX_AXES]
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(get_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))[:MAX_AXES]


def varying(configs: Sequence[Json]) -> list[str]:
    """Fields that differ between configs, in the order of the configs' fields."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({json.dumps(config.get(name)) for config in configs}) > 1]


def _study(trials: Sequence[Trial]) -> "optuna.Study | None":
    """The ok trials as a study in memory; None where there is none. Every field that varies is a parameter."""
    ok = [t for t in trials if t.outcome == Outcome.OK and t.median_us is not None][-MAX_TRIALS:]
    if not ok:
        return None
    import optuna

    configs = [flat(json.loads(t.config_json)) for t in ok]
    names = varying(configs)
    distributions = {name: _distribution([config.get(name) for config in configs]) for name in names}
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parts of Optuna that it calls experimental, as long as it does
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="minimize")
        study.add_trials(
            [
                optuna.trial.create_trial(
                    value=trial.median_us,
                    params={name: _parameter(config.get(name)) for name in names},
                    distributions=distributions,
                )
                for trial, config in zip(ok, configs, strict=True)
            ]
        )
    return study


def _distribution(values: Sequence[Any]) -> Any:
    from optuna.distributions import CategoricalDistribution
    from optuna.distributions import IntDistribution

    if all(type(value) is int for value in values):
        return IntDistribution(min(values), max(values))
    distinct = sorted({_parameter(value) for value in values}, key=str)
    return CategoricalDistribution(distinct)


def _parameter(value: Any) -> Any:
    """None and true are words here: the plots print them on their axes."""
    return value if type(value) is int else word(value)


def _plain(draw: Any) -> Json:
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure: Json = json.loads(draw().to_json())
    return figure
