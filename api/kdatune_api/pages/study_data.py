"""What one search has tried: trials, how they ended, what they cost, and how much of the config space they cover."""

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from kdatune_api.charts import varying
from kdatune_api.pages.board import Card
from kdatune_api.pages.sides import flat
from kdatune_kernels.space import legal_k1
from kdatune_kernels.space import legal_k2
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import to_json
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.dashboard import Key
from kdatune_tuner.store.dashboard import Trial
from kdatune_tuner.store.dashboard import builds_of
from kdatune_tuner.store.dashboard import find_problem
from kdatune_tuner.store.dashboard import trials
from kdatune_tuner.store.dashboard_lists import RunFilter
from kdatune_tuner.store.dashboard_lists import runs
from kdatune_tuner.store.queries import find_build
from kdatune_tuner.store.records import RunRow

KERNELS = ("k2", "k1", "kda")
MAX_RUNS = 200


@dataclass(frozen=True)
class BuildChoice:
    """A build that something of the study was measured with."""

    id: int
    build: Build | None
    count: int

    @property
    def label(self) -> str:
        if self.build is None:
            return f"build {self.id}"
        b = self.build
        return f"kernel {b.kernel_hash[:8]}, Triton {b.triton}, driver {b.driver} ({self.count:,})"


@dataclass(frozen=True)
class Study:
    """A search as the page shows it. trials: what the filters let through, oldest first."""

    card: Card
    shape: Shape
    kernel: str
    trials: Sequence[Trial]
    total: int
    kernels: tuple[str, ...]
    builds: tuple[BuildChoice, ...]
    build_id: int | None
    runs: Sequence[RunRow]

    @property
    def ok(self) -> list[Trial]:
        return [t for t in self.trials if t.outcome == Outcome.OK and t.median_us is not None]

    @property
    def best(self) -> Trial | None:
        return min(self.ok, key=lambda t: t.median_us or 0.0, default=None)

    @property
    def gpu_seconds(self) -> float:
        return sum(run.gpu_seconds or 0.0 for run in self.runs)

    def outcomes(self) -> list[tuple[str, int, str]]:
        """(outcome, trials, what one of them said), the most frequent first."""
        counts = Counter(t.outcome for t in self.trials)
        said = {t.outcome: t.detail for t in self.trials if t.detail}
        return [(outcome, count, said.get(outcome) or "") for outcome, count in counts.most_common()]


@dataclass(frozen=True)
class Coverage:
    """How much of the config space was tried. fields: (field, value, legal configs, tried, best time in us)."""

    legal: int
    tried: int
    outside: int
    fields: Sequence[tuple[str, Any, int, int, float | None]]


def gather(
    s: Session,
    card: Card,
    shape: Shape,
    *,
    kernel: str | None,
    build_id: int | None,
    all_builds: bool,
    run_id: int | None,
    outcome: str | None,
) -> Study:
    """The study of a shape on a card.

    Args:
        kernel: "k1", "k2" or "kda"; the first of K2, K1, pairs that has trials, if None.
        build_id: what was measured with one build; the newest, if None and not all_builds.
    """
    keys: dict[str, Key] = {}
    for name in KERNELS:
        problem_id = find_problem(s, name, shape)
        if problem_id is not None:
            keys[name] = Key(name, card.ids, problem_id)
    found = {name: builds_of(s, key) for name, key in keys.items()}
    kernels = tuple(name for name in KERNELS if found.get(name))
    chosen = kernel or (kernels[0] if kernels else "k2")
    if chosen not in kernels:
        return Study(card, shape, chosen, [], 0, kernels, (), None, [])
    builds = tuple(BuildChoice(one, find_build(s, one), count) for one, count in found[chosen])
    if build_id is None and not all_builds and run_id is None:
        build_id = builds[0].id
    every = trials(s, keys[chosen], build_id=build_id, run_id=run_id)
    shown = every if outcome is None else [t for t in every if t.outcome == outcome]
    wanted = RunFilter(gpu_ids=card.ids, kernel=chosen, problem_ids=tuple(key.problem_id for key in keys.values()))
    return Study(card, shape, chosen, shown, len(every), kernels, builds, build_id, runs(s, wanted, limit=MAX_RUNS))


@functools.lru_cache(maxsize=64)
def _legal(kernel: str, shape: Shape, gpu: Gpu) -> tuple[Sequence[Json], frozenset[str]]:
    """The legal configs of a stage and their hashes: 500 configs take 50 ms, and are the same until the next release."""
    configs = [to_json(config) for config in (legal_k1 if kernel == "k1" else legal_k2)(shape, gpu)]
    return configs, frozenset(digest(config) for config in configs)


def coverage(study: Study) -> Coverage | None:
    """How the trials cover the config space of a stage as it is today; None for pairs, of which only finalists are tried."""
    if study.kernel == "kda":
        return None
    legal, hashes = _legal(study.kernel, study.shape, study.card.gpu)
    best: dict[str, float | None] = {}
    configs: dict[str, Json] = {}
    for trial in study.trials:
        configs.setdefault(trial.config_hash, flat(json.loads(trial.config_json)))
        times = [t for t in (best.get(trial.config_hash), trial.median_us) if t is not None]
        best[trial.config_hash] = min(times, default=None)
    inside = [one for one in configs if one in hashes]
    rows = []
    for name in varying([*legal, *configs.values()]):
        values = {json.dumps(c.get(name)): c.get(name) for c in (*legal, *configs.values())}
        for value in sorted(values.values(), key=lambda v: (type(v).__name__, v if v is not None else 0)):
            tried = [one for one, config in configs.items() if config.get(name) == value]
            times = [t for t in (best[one] for one in tried) if t is not None]
            count = sum(1 for config in legal if config.get(name) == value)
            rows.append((name, value, count, len(tried), min(times, default=None)))
    return Coverage(len(legal), len(inside), len(configs) - len(inside), rows)
