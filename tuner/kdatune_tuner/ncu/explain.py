"""The why: two profiles of a stage turned into plain sentences with numbers. The rules are data, in `rules`.

The cycles of a stage are, exactly, instructions x latency / resident warps / active SMs, up to a constant of the card. So
the ratio of two configs' cycles splits into four factors; those that are large are the causes, those that work the other
way are said too, and where they do not add up the answer is "no clear cause". Cycles are compared, not replay durations,
so that the clock has no part in it; which config wins is for benchmark times to say.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kdatune_kernels.space import FUSED
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json
from kdatune_tuner.ncu.metrics import BY_FIELD
from kdatune_tuner.ncu.metrics import STALL_FIELDS
from kdatune_tuner.ncu.metrics import Counters
from kdatune_tuner.ncu.metrics import ctas_per_sm
from kdatune_tuner.ncu.metrics import limiters
from kdatune_tuner.ncu.rules import CAUSE_SHARE
from kdatune_tuner.ncu.rules import FACTOR_RATIO
from kdatune_tuner.ncu.rules import FACTORS
from kdatune_tuner.ncu.rules import FEW_WAVES
from kdatune_tuner.ncu.rules import SAME_RATIO
from kdatune_tuner.ncu.rules import STATES
from kdatune_tuner.ncu.rules import SUM_RATIO
from kdatune_tuner.ncu.rules import Factor

NO_CLEAR_CAUSE = "no clear cause"
_TITLES = {"fused": "the fused kernel", "pairs": "K1 with K2 of pairs"}
_NAMED_STALLS = 2
_SMALLEST_STALL = 0.1  # cycles: a change below it is not worth a word


@dataclass(frozen=True)
class Profiled:
    """A profiled stage as the rules see it. label: "champion", "default", ..."""

    label: str
    stage: str
    config: K1Config | K2Config
    counters: Counters

    @property
    def whole(self) -> bool:
        """Whether K1 is part of it, whose counters are in those of K2."""
        return isinstance(self.config, K2Config) and self.config.whole

    @property
    def title(self) -> str:
        """What sentences call it."""
        return _TITLES.get(self.config.variant, self.stage.upper())


@dataclass(frozen=True)
class Sentence:
    """One statement. rule: which rule made it; numbers: what it rests on, by field."""

    rule: str
    text: str
    numbers: Mapping[str, float]

    def to_json(self) -> Json:
        return {"rule": self.rule, "text": self.text, "numbers": dict(self.numbers)}


def facts_of(profile: Profiled, shape: Shape, gpu: Gpu) -> dict[str, Any]:
    """The counters of a profile and what follows from them. What cannot be derived is not there."""
    c = profile.counters
    facts: dict[str, Any] = {**c, "stage": profile.title, "sm_count": gpu.sm_count, "chains": shape.chains}
    latency = c.get("latency_per_issue")
    stalls = {field: c[field] for field in STALL_FIELDS if field in c}
    if latency and stalls:
        top = max(stalls, key=lambda field: stalls[field])
        facts |= {
            "top_stall": stalls[top],
            "top_stall_for": STALL_FIELDS[top],
            "top_stall_share_pct": 100 * stalls[top] / latency,
        }
        if "barrier_stall_per_issue" in c:
            facts["barrier_share_pct"] = 100 * c["barrier_stall_per_issue"] / latency
    if "local_load_inst" in c and "local_store_inst" in c:
        facts["local_inst"] = c["local_load_inst"] + c["local_store_inst"]
    if "waves" in c:
        facts["tail_fill_pct"] = 100 * (c["waves"] - math.floor(c["waves"]))
    holds = ctas_per_sm(c)
    if holds is not None:
        facts |= {"ctas_per_sm": holds, "limiter": " and ".join(limiters(c))}
        # the fused kernel starts no second wave, its CTAs take one chain after another; of pairs the CTAs are K1's, too
        if (
            not profile.whole
            and "grid_ctas" in c
            and c["grid_ctas"] >= shape.chains
            and not c["grid_ctas"] % shape.chains
        ):
            facts["next_wave_chains"] = holds * gpu.sm_count * shape.chains // c["grid_ctas"] + 1
    return facts


def describe(profile: Profiled, shape: Shape, gpu: Gpu) -> list[Sentence]:
    """What one profile says by itself: what bounds the stage, its waves, its occupancy, its spills."""
    facts = facts_of(profile, shape, gpu)
    said: list[Sentence] = []
    groups: set[str] = set()
    for rule in STATES:
        if profile.stage not in rule.stages or rule.group in groups:
            continue
        if not all(field in facts and _holds(facts[field], op, limit) for field, op, limit in rule.when):
            continue
        try:
            text = rule.text.format(**facts)
        except KeyError:
            continue  # a number of the sentence was not measured
        groups |= {rule.group} - {""}
        said.append(Sentence(rule.name, text, {field: facts[field] for field, _, _ in rule.when}))
    return said


def _holds(value: float, op: str, limit: float) -> bool:
    return value >= limit if op == ">=" else value < limit


def compare(ours: Profiled, other: Profiled) -> list[Sentence]:
    """Why our stage takes fewer (or more) cycles than the other's: a headline, then the causes, then what works against."""
    a, b = ours.counters, other.counters
    stage = ours.title
    if ours.config == other.config:
        return [Sentence("same_config", f"{stage} of {ours.label} and {other.label} is the same config", {})]
    wanted = ("replay_cycles", *(factor.field for factor in FACTORS))
    missing = [field for field in wanted if not a.get(field) or not b.get(field)]
    if missing:
        return [_unclear(stage, f"{', '.join(missing)} was not measured for both", {})]
    cycles = a["replay_cycles"] / b["replay_cycles"]
    numbers = {"cycles_ratio": cycles, "replay_cycles": a["replay_cycles"], "other_replay_cycles": b["replay_cycles"]}
    pair = f"{ours.label} and {other.label} ({_config_change(ours.config, other.config)})"
    both = f"{a['replay_cycles']:,.0f} and {b['replay_cycles']:,.0f} cycles under the profiler"
    if max(cycles, 1 / cycles) < SAME_RATIO:
        return [_unclear(stage, f"{pair} take the same cycles: {both}", numbers)]
    effects = {factor.name: (a[factor.field] / b[factor.field]) ** factor.power for factor in FACTORS}
    product = math.prod(effects.values())
    if not 1 / SUM_RATIO < product / cycles < SUM_RATIO:
        reason = f"for {pair} the counters make {product:.2f}x of the cycles where {cycles:.2f}x were seen: {both}"
        return [_unclear(stage, reason, numbers | effects)]
    faster = cycles < 1
    towards = [f for f in FACTORS if (effects[f.name] < 1) == faster and _large(effects[f.name])]
    against = [f for f in FACTORS if (effects[f.name] < 1) != faster and _large(effects[f.name])]
    towards.sort(key=lambda f: -abs(math.log(effects[f.name])))
    waves = _wave_cause(ours, other, faster=faster)
    share = sum(math.log(effects[f.name]) for f in towards) / math.log(cycles)
    if not waves and share < CAUSE_SHARE:
        return [_unclear(stage, f"no counter changed enough between {pair}: {both}", numbers)]
    said = [_headline(ours, other, cycles), *waves]
    for rule, factors, lead in (("cause", towards, "because"), ("against", against, "although")):
        said += [
            Sentence(
                f"{rule}_{f.name}",
                f"{lead} {_factor_text(f, a, b)}",
                {f.field: a[f.field], f"other_{f.field}": b[f.field]},
            )
            for f in factors
        ]
    return said


def no_k1(label: str) -> Sentence:
    """What there is to say of the K1 of a config that has none."""
    return Sentence("whole", f"{label} has no K1 of its own: K1's work is profiled with K2's, as K2", {})


def compare_whole(ours: Sequence[Profiled], other: Sequence[Profiled]) -> Sentence:
    """All cycles of both, as far as they were profiled: their stages cannot be compared.

    Args:
        ours: every profiled stage of a config; of the two configs one has stages and one has none.
    """
    sides = (ours, other)
    names = " and ".join(side[0].label for side in sides)
    start = f"{names} cannot be compared by stages: {next(side[0].title for side in sides if side[0].whole)} has none"
    counted = [[one.counters.get("replay_cycles") for one in side] for side in sides]
    if any(
        None in cycles or len(cycles) < (1 if side[0].whole else 2) for side, cycles in zip(sides, counted, strict=True)
    ):
        return Sentence("whole", f"{start}, and cycles were not counted for all their kernels", {})
    a, b = (sum(one for one in cycles if one is not None) for cycles in counted)
    shown = [f"{cycles:,.0f} ({side[0].label}, {_kernels(side)})" for side, cycles in zip(sides, (a, b), strict=True)]
    text = f"{start}; whole, they take {shown[0]} and {shown[1]} cycles under the profiler, one kernel after another"
    return Sentence("whole", text, {"replay_cycles": a, "other_replay_cycles": b, "cycles_ratio": a / b})


def _kernels(side: Sequence[Profiled]) -> str:
    return "one kernel" if side[0].config == FUSED.k2 else "K1 + K2"


def _wave_cause(ours: Profiled, other: Profiled, *, faster: bool) -> list[Sentence]:
    """Launches of few waves: the one that needs fewer has less to do one after another."""
    a, b = ours.counters.get("waves"), other.counters.get("waves")
    if not a or not b or min(math.ceil(a), math.ceil(b)) >= FEW_WAVES or (math.ceil(a) < math.ceil(b)) != faster:
        return []
    if math.ceil(a) == math.ceil(b):
        return []
    text = f"because its CTAs need {math.ceil(a)} wave(s) ({a:.2f}) instead of {math.ceil(b)} ({b:.2f})"
    return [Sentence("cause_waves", text, {"waves": a, "other_waves": b})]


def _large(effect: float) -> bool:
    return max(effect, 1 / effect) >= FACTOR_RATIO


def _unclear(stage: str, reason: str, numbers: Mapping[str, float]) -> Sentence:
    return Sentence("no_clear_cause", f"{stage}: {NO_CLEAR_CAUSE}: {reason}", numbers)


_HEADLINE = (
    ("issue_active_pct", "issue active {:.0f} % -> {:.0f} %"),
    ("barrier_stall_per_issue", "barrier stall {:.2f} -> {:.2f} per issue"),
)


def _headline(ours: Profiled, other: Profiled, cycles: float) -> Sentence:
    """Who needs fewer cycles, by what, with which config, and the two numbers that published analyses rest on."""
    a, b = ours.counters, other.counters
    both = [field for field, _ in _HEADLINE if field in a and field in b]
    change = _config_change(ours.config, other.config)
    than = f"{max(cycles, 1 / cycles):.2f}x {'fewer' if cycles < 1 else 'more'} cycles than {other.label}"
    told = ", ".join(text.format(b[field], a[field]) for field, text in _HEADLINE if field in both)
    text = f"{ours.title}: {ours.label} takes {than} ({change}){': ' if told else ''}{told}"
    numbers = {"cycles_ratio": cycles, **{f: a[f] for f in both}, **{f"other_{f}": b[f] for f in both}}
    return Sentence("headline", text, numbers)


def _config_change(ours: K1Config | K2Config, other: K1Config | K2Config) -> str:
    """The fields that differ, in the form `num_warps 2 instead of 8`; only the variant where that differs."""
    a, b = to_json(ours), to_json(other)
    names = ["variant"] if a["variant"] != b["variant"] else [name for name in a if a[name] != b[name]]
    return ", ".join(f"{name} {a[name]} instead of {b[name]}" for name in names)


def _factor_text(factor: Factor, a: Counters, b: Counters) -> str:
    x, y = a[factor.field], b[factor.field]
    text = factor.less if x < y else factor.more
    return text.format(
        a=x,
        b=y,
        a_millions=x / 1e6,
        b_millions=y / 1e6,
        ratio=max(x / y, y / x),
        stalls=_stall_text(a, b, less=x < y),
        limits=_limit_text(a, b),
    )


def _stall_text(a: Counters, b: Counters, *, less: bool) -> str:
    """The stall reasons that changed most in the direction of the whole."""
    changes = {f: a[f] - b[f] for f in STALL_FIELDS if f in a and f in b and (a[f] < b[f]) == less}
    named = sorted(changes, key=lambda f: -abs(changes[f]))[:_NAMED_STALLS]
    told = [f"{b[f]:.2f} -> {a[f]:.2f} for {STALL_FIELDS[f]}" for f in named if abs(changes[f]) >= _SMALLEST_STALL]
    return f" ({'; '.join(told)})" if told else ""


def _limit_text(a: Counters, b: Counters) -> str:
    """Occupancy and registers of both, where measured."""
    told = []
    for field, name in (("theoretical_occupancy_pct", "occupancy"), ("registers", "registers")):
        if field in a and field in b and a[field] != b[field]:
            unit = " %" if BY_FIELD[field].unit == "%" else ""
            told.append(f"{name} {b[field]:.0f}{unit} -> {a[field]:.0f}{unit}")
    held = limiters(a)
    told += [f"held by {' and '.join(held)}"] if held else []
    return f" ({', '.join(told)})" if told else ""
