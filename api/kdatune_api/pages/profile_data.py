"""The profiles of one key as the page shows them: which configs have counters, and what the rules say about two of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

from sqlalchemy.orm import Session

from kdatune_api.pages.board import Card
from kdatune_api.pages.sides import STAGES
from kdatune_api.pages.sides import KeyFacts
from kdatune_api.pages.sides import stages_in
from kdatune_api.pages.sides import stages_profiled
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.spec import WHOLE_WORDS
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import from_json
from kdatune_tuner.ncu.explain import Profiled
from kdatune_tuner.ncu.explain import compare
from kdatune_tuner.ncu.explain import compare_whole
from kdatune_tuner.ncu.explain import describe
from kdatune_tuner.ncu.explain import no_k1
from kdatune_tuner.ncu.metrics import Counters
from kdatune_tuner.ncu.metrics import from_stored
from kdatune_tuner.store.profiles import StoredProfile
from kdatune_tuner.store.profiles import newest_profiles
from kdatune_tuner.store.records import rfc3339

CHAMPION, DEFAULT, PREVIOUS = "champion", "default", "previous"
_STAGE_CONFIGS: dict[str, type[K1Config] | type[K2Config]] = {"k1": K1Config, "k2": K2Config}


@dataclass(frozen=True)
class Subject:
    """A config with the newest profile of each of its stages, its own or that of an equal stage of another config."""

    label: str
    config: Json
    config_hash: str
    measured_us: float | None
    profiles: dict[str, StoredProfile] = field(default_factory=dict)

    def counters(self, stage: str) -> Counters:
        """What was measured of a stage; empty where nothing was."""
        found = self.profiles.get(stage)
        return {} if found is None or found.row.counters is None else from_stored(found.row.counters)

    def unavailable(self, stage: str) -> str:
        """Why a stage has no counters; "" where it has some, or there is no such stage."""
        if stage not in self.stages:
            return ""
        found = self.profiles.get(stage)
        if found is None:
            return "not profiled"
        return found.row.unavailable_reason or ""

    @property
    def stages(self) -> Sequence[str]:
        """What of it is profiled: K1 and K2, or K2 alone where K1 is part of it."""
        return stages_profiled(self.config)

    @property
    def taken(self) -> str:
        """With what the profiles were taken, for people."""
        rows = [one.row for one in self.profiles.values() if one.row.counters is not None]
        said = [
            f"Nsight Compute {r.ncu_version or '?'}, driver {r.driver or '?'}, {rfc3339(r.profiled_at)}" for r in rows
        ]
        return "; ".join(dict.fromkeys(said))

    @property
    def reports(self) -> dict[str, int]:
        """The kept reports by name, with the id of a profile that leads to each."""
        return {one.row.report_file: one.row.id for one in self.profiles.values() if one.row.report_file}

    def profiled(self, stage: str) -> Profiled | None:
        """The stage as the rules see it; None where it has no counters, or is a config that this code cannot read."""
        counters = self.counters(stage)
        if not counters:
            return None
        try:
            config = from_json(_STAGE_CONFIGS[stage], self.config.get(stage), strict=False)
        except KdatuneError:
            return None
        return Profiled(self.label, stage, config, counters)

    def all_profiled(self) -> list[Profiled]:
        """Every stage that has counters."""
        return [one for one in map(self.profiled, self.stages) if one is not None]


@dataclass(frozen=True)
class KeyProfiles:
    """All subjects of a key, the one that is looked at and the one that it is compared with."""

    card: Card
    shape: Shape
    subjects: Sequence[Subject]
    ours: Subject | None
    other: Subject | None

    @property
    def has_counters(self) -> bool:
        """Whether anything was measured of the two."""
        sides = [one for one in (self.ours, self.other) if one is not None]
        return any(one.counters(stage) for one in sides for stage in STAGES)

    def sentences(self, stage: str) -> list[str]:
        """What the rules say about a stage: what bounds it, and why it differs from the other's."""
        ours = None if self.ours is None else self.ours.profiled(stage)
        if ours is None:
            has_none = self.ours is not None and stage not in self.ours.stages
            return [no_k1(self.ours.label).text] if self.ours is not None and has_none else []
        said = describe(ours, self.shape, self.card.gpu)
        other = None if self.other is None else self.other.profiled(stage)
        if self.ours is not None and self.other is not None and other is not None:
            alike = ours.whole == other.whole
            whole = [] if alike else [compare_whole(self.ours.all_profiled(), self.other.all_profiled())]
            said = [*(whole or compare(ours, other)), *said]
        return [sentence.text for sentence in said]


def gather(s: Session, card: Card, shape: Shape, config: str | None, against: str | None) -> KeyProfiles:
    """The profiles of a key.

    Args:
        config: hash of the config that is looked at; the champion's where it is profiled, if None.
        against: hash of the one it is compared with; the default's, if None.
    """
    facts = KeyFacts(s, card, shape)
    subjects = _subjects(newest_profiles(s, card.gpu, shape), _labels(facts))
    by_hash = {subject.config_hash: subject for subject in subjects}
    ours = by_hash.get(config or "") or next(iter(subjects), None)
    others = [subject for subject in subjects if subject is not ours]
    other = by_hash.get(against or "") if against != config else None
    if other is None or other is ours:
        other = next((one for one in others if one.label == DEFAULT), others[0] if others else None)
    return KeyProfiles(card, shape, subjects, ours, other)


def _labels(facts: KeyFacts) -> dict[str, str]:
    """What configs are called, by their hash. The champion's name goes before the others'."""
    labels: dict[str, str] = {}
    for name, side in ((CHAMPION, facts.champion()), (DEFAULT, facts.default()), (PREVIOUS, facts.previous())):
        if side.config is not None:
            labels.setdefault(digest(side.config), name)
    return labels


def _subjects(profiles: Sequence[StoredProfile], labels: dict[str, str]) -> list[Subject]:
    by_stage: dict[tuple[str, str], StoredProfile] = {}
    for one in profiles:
        stage_config = one.config.get(one.row.stage)
        if one.row.counters is not None:
            by_stage.setdefault((one.row.stage, canonical(stage_config)), one)
    own: dict[str, list[StoredProfile]] = {}
    for one in profiles:
        own.setdefault(one.row.config_json, []).append(one)
    subjects = []
    for text, of_config in own.items():
        config = json.loads(text)
        config_hash = digest(config)
        found: dict[str, StoredProfile] = {}
        for stage in stages_profiled(config):
            mine = next((p for p in of_config if p.row.stage == stage and p.row.counters is not None), None)
            mine = mine or by_stage.get((stage, canonical(config.get(stage))))
            mine = mine or next((p for p in of_config if p.row.stage == stage), None)
            if mine is not None:
                found[stage] = mine
        label = labels.get(config_hash) or _name(config)
        subjects.append(Subject(label, config, config_hash, of_config[0].measured_us, found))
    rank = {CHAMPION: 0, DEFAULT: 1, PREVIOUS: 2}
    return sorted(subjects, key=lambda one: (rank.get(one.label, 3), one.measured_us or 0.0))


def _name(config: Json) -> str:
    """A config that has no name, in a few words."""
    k1, k2 = config.get("k1", {}), config.get("k2", {})
    if not stages_in(config):
        return WHOLE_WORDS[k2["variant"]]
    return (
        f"K1 {k1.get('variant')} {k1.get('num_warps')} warps, K2 {k2.get('variant')} {k2.get('block_v')} columns "
        f"{k2.get('stages_in')} in {k2.get('stages_out')} out"
    )
