"""`explain` on stored profiles: which configs of a shape have counters, and what tells them apart."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import to_json
from kdatune_tuner.ncu.collect import STAGES
from kdatune_tuner.ncu.explain import Profiled
from kdatune_tuner.ncu.explain import Sentence
from kdatune_tuner.ncu.explain import compare
from kdatune_tuner.ncu.explain import compare_whole
from kdatune_tuner.ncu.explain import describe
from kdatune_tuner.ncu.explain import no_k1
from kdatune_tuner.ncu.metrics import Counters
from kdatune_tuner.ncu.metrics import from_stored
from kdatune_tuner.ncu.profiling import CHAMPION
from kdatune_tuner.ncu.profiling import DEFAULT
from kdatune_tuner.objective import stage_of
from kdatune_tuner.store import queries
from kdatune_tuner.store.profiles import StoredProfile
from kdatune_tuner.store.profiles import newest_profiles


@dataclass(frozen=True)
class Subject:
    """A config of the shape with the newest profile of each of its stages. One without a name goes by its hash."""

    label: str
    config: LaunchConfig
    measured_us: float | None
    counters: dict[str, Counters]
    unavailable: dict[str, str]

    def stage(self, stage: str) -> Profiled | None:
        """The stage as the rules see it; None where it has no counters."""
        if stage not in self.counters:
            return None
        return Profiled(self.label, stage, stage_of(self.config, stage), self.counters[stage])

    def profiled(self) -> list[Profiled]:
        """All that has counters."""
        return [one for one in map(self.stage, STAGES) if one is not None]


@dataclass(frozen=True)
class Why:
    """The explanation of a shape: what bounds the first subject, and why the others differ from it."""

    shape: Shape
    gpu: Gpu
    subjects: tuple[Subject, ...]
    sentences: dict[str, list[Sentence]]

    def to_json(self) -> Json:
        return {
            "shape": self.shape.key(),
            "gpu": self.gpu.name,
            "configs": [
                {
                    "label": one.label,
                    "config": to_json(one.config),
                    "measured_us": one.measured_us,
                    "unavailable": one.unavailable or None,
                }
                for one in self.subjects
            ],
            "explanation": {stage: [s.to_json() for s in said] for stage, said in self.sentences.items()},
        }


def explain_shape(s: Session, gpu: Gpu, shape: Shape) -> Why:
    """Explain the newest profiles of a shape on a card. Called inside `engine.reading`."""
    champion = next((c for c in queries.champions(s, gpu) if c.shape == shape), None)
    subjects = _subjects(
        newest_profiles(s, gpu, shape), champion.config if champion else None, default_config(shape, gpu)
    )
    return Why(shape, gpu, tuple(subjects), {stage: _sentences(subjects, stage, shape, gpu) for stage in STAGES})


def _subjects(profiles: Sequence[StoredProfile], champion: LaunchConfig | None, default: LaunchConfig) -> list[Subject]:
    """One a config: the champion first, then the default, then the others by their benchmark time."""
    by_config: dict[str, list[StoredProfile]] = {}
    for one in profiles:
        by_config.setdefault(one.row.config_json, []).append(one)
    subjects = []
    for text, of_config in by_config.items():
        config = from_json(LaunchConfig, json.loads(text))
        label = CHAMPION if config == champion else DEFAULT if config == default else f"config {digest(config)[:8]}"
        subjects.append(
            Subject(
                label,
                config,
                of_config[0].measured_us,
                {p.row.stage: from_stored(p.row.counters) for p in of_config if p.row.counters is not None},
                {p.row.stage: p.row.unavailable_reason for p in of_config if p.row.unavailable_reason is not None},
            )
        )
    rank = {CHAMPION: 0, DEFAULT: 1}
    return sorted(subjects, key=lambda one: (rank.get(one.label, 2), one.measured_us or 0.0))


def _sentences(subjects: Sequence[Subject], stage: str, shape: Shape, gpu: Gpu) -> list[Sentence]:
    """What the first subject's stage does, and why those of the others differ from it.

    Where one of two has no stages it is said once, beside K2, what can be compared: the whole.
    """
    if stage == "k1" and subjects and subjects[0].config.k2.whole:
        return [no_k1(subjects[0].label)] if subjects[0].counters else []
    profiled = [(subject, one) for subject in subjects if (one := subject.stage(stage)) is not None]
    if not profiled:
        return []
    mine, first = profiled[0]
    said = describe(first, shape, gpu)
    seen = {first.config}
    for subject, other in profiled[1:]:
        if first.whole != other.whole:
            said.append(compare_whole(mine.profiled(), subject.profiled()))
        elif other.config not in seen or other.label == DEFAULT:
            said += compare(first, other)
        seen.add(other.config)
    return said
