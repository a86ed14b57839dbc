"""Optuna's side of a search: a config space as parameters, ask a config, tell what became of it.

The study is disposable: everything measured is in our store and is told again when a search resumes.
"""

import math
import random
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.distributions import CategoricalDistribution
from optuna.distributions import IntDistribution
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage
from optuna.storages import JournalStorage
from optuna.storages import RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from kdatune_kernels.errors import StoreError
from kdatune_kernels.values import OtherConfig
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import SearchConfig
from kdatune_tuner.store.address import BUSY_TIMEOUT_S
from kdatune_tuner.store.address import parse_address
from kdatune_tuner.surrogate import Surrogate
from kdatune_tuner.surrogate import Vector
from kdatune_tuner.surrogate import field_names
from kdatune_tuner.surrogate import field_value

# Fields that only make sense together: a tile of 128 rows needs two MMA partitions or eight warps, and then a register
# cap (44 of 48 combinations are illegal); other splits than 1/1 are in the space only with some store orders.
_JOINT: dict[str, tuple[str, ...]] = {
    "tile": ("block_v", "num_warps", "consumers", "maxnreg", "consumer_regs"),
    "order": ("load_warps", "store_warps", "defer_store", "decay_position"),
}
# Configs that are known before the model is asked, where other shapes suggest nothing: drawn at random.
_STARTUP_TRIALS = 5
# Of a larger space a random part is looked at.
_MOST_CONFIGS = 2000


@dataclass(frozen=True)
class _Axis:
    """One parameter: the values that one field, or several fields together, take in the space."""

    name: str
    fields: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]

    @property
    def ordered(self) -> bool:
        return len(self.fields) == 1 and all(type(value) is int for (value,) in self.values)

    @property
    def distribution(self) -> BaseDistribution:
        if self.ordered:
            return IntDistribution(0, len(self.values) - 1)
        return CategoricalDistribution([self.label(value) for value in self.values])

    def label(self, value: tuple[Any, ...]) -> str:
        return ",".join(f"{field}={v}" for field, v in zip(self.fields, value, strict=True))

    def value_of(self, config: SearchConfig) -> tuple[Any, ...]:
        return tuple(field_value(config, field) for field in self.fields)

    def encode(self, config: SearchConfig) -> int | str:
        value = self.value_of(config)
        return self.values.index(value) if self.ordered else self.label(value)


def _variant(config: SearchConfig) -> str:
    """What decides which parameters a config has; configs of another kernel are of one kind."""
    return "" if isinstance(config, OtherConfig) else config.variant


def _axes(configs: Sequence[SearchConfig], prefix: str) -> list[_Axis]:
    fields = [f for f in field_names(configs) if f != "variant" or isinstance(configs[0], OtherConfig)]
    varying = [f for f in fields if len({field_value(c, f) for c in configs}) > 1]
    groups: list[tuple[str, tuple[str, ...]]] = []
    for name, joint in _JOINT.items():
        together = tuple(f for f in joint if f in varying)
        if len(together) > 1:
            groups.append((name, together))
            varying = [f for f in varying if f not in together]
    groups += [(f, (f,)) for f in varying]
    axes = []
    for name, members in groups:
        seen = {tuple(field_value(c, f) for f in members) for c in configs}
        ordered = sorted(
            seen, key=lambda value: [(v is not None, type(v).__name__, v if v is not None else 0) for v in value]
        )
        axes.append(_Axis(f"{prefix}.{name}", members, tuple(ordered)))
    return axes


def _storage(where: str | None) -> BaseStorage | None:
    """Optuna's storage. It may be kdatune's own database: the tables do not meet, nor do the version tables."""
    if not where:
        return None
    try:
        if "://" not in where:
            return JournalStorage(JournalFileBackend(where))
        address = parse_address(where)
        arguments = {"connect_args": {"timeout": BUSY_TIMEOUT_S}} if address.drivername == "sqlite" else {}
        return RDBStorage(address.render_as_string(hide_password=False), engine_kwargs=arguments)
    except (OSError, SQLAlchemyError, StorageInternalError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StoreError(f"Optuna's storage (KDATUNE_OPTUNA_STORAGE) cannot be opened: {reason}") from error


class _Chosen(optuna.samplers.BaseSampler):
    """Answers with the parameters of the config that was chosen."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        return {}

    def sample_relative(
        self,
        study: optuna.Study,  # noqa: ARG002 - Optuna's interface
        trial: FrozenTrial,  # noqa: ARG002
        search_space: dict[str, BaseDistribution],  # noqa: ARG002
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self,
        study: optuna.Study,  # noqa: ARG002 - Optuna's interface
        trial: FrozenTrial,  # noqa: ARG002
        param_name: str,
        param_distribution: BaseDistribution,  # noqa: ARG002
    ) -> Any:
        return self.params[param_name]


class Proposer:
    """What to measure next of a space of configs, as an Optuna study: the largest expected gain by surrogate.py.

    Args:
        space: every config that may be proposed.
        seed: equal seeds and equal answers give equal proposals.
        guess: what other shapes suggest (guess.py).
        storage: a journal file or a database URL where the study can be looked at; None: in memory.
        study_name: what it is called there.

    Raises:
        StoreError: the storage is a URL that kdatune does not work with.
    """

    sampler_name = "gp"

    def __init__(
        self,
        space: Sequence[SearchConfig],
        seed: int,
        guess: Vector | None = None,
        storage: str | None = None,
        study_name: str | None = None,
    ) -> None:
        self._space = frozenset(space)
        # in random order: of equal gains the first is taken, and what is drawn at random is the first that is left
        order = random.Random(seed).sample(range(len(space)), min(len(space), _MOST_CONFIGS))  # noqa: S311 - a search
        self._configs = [space[i] for i in order]
        self._guess = None if guess is None else guess[order]
        self._surrogate = Surrogate(self._configs, self._guess)
        self._told: dict[SearchConfig, float | None] = {}
        self._axes: dict[str, list[_Axis]] = {}
        for variant in sorted({_variant(c) for c in space}):
            self._axes[variant] = _axes([c for c in space if _variant(c) == variant], variant)
        self._sampler = _Chosen()
        # without `load_if_exists` RDBStorage and create_study log at INFO, to stderr
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = _storage(storage)
        self._study = optuna.create_study(
            sampler=self._sampler, direction="minimize", storage=self._storage, study_name=study_name
        )

    def close(self) -> None:
        """Let go of the storage's connections."""
        if isinstance(self._storage, RDBStorage):
            self._storage.remove_session()
            self._storage.engine.dispose()

    def holds(self, config: SearchConfig) -> bool:
        """Whether the config is of the space: only then can it be told."""
        return config in self._space

    def params(self, config: SearchConfig) -> dict[str, Any]:
        """The config as Optuna parameters."""
        variant = _variant(config)
        axes = self._axes[variant]
        return {"variant": variant} | {axis.name: axis.encode(config) for axis in axes}

    def choose(self) -> tuple[SearchConfig, float] | None:
        """What to measure next, never one that was told, and the gain expected of it (a share of the best time).

        At the start, where nothing is suggested, it is drawn at random and the gain is infinite. None: all were told.
        """
        if not self._surrogate.left:
            return None
        if self._guess is None and len(self._told) < _STARTUP_TRIALS:
            return next(c for c in self._configs if c not in self._told), math.inf
        gains = self._surrogate.gains()
        best = int(gains.argmax())
        return self._configs[best], float(gains[best])

    def ask(self, config: SearchConfig) -> optuna.Trial:
        """Begin a trial of the config in the study."""
        self._sampler.params = self.params(config)
        trial = self._study.ask()
        for name, distribution in self._distributions(config).items():
            match distribution:
                case IntDistribution(low=low, high=high):
                    trial.suggest_int(name, low, high)
                case CategoricalDistribution(choices=choices):
                    trial.suggest_categorical(name, choices)
        return trial

    def tell(self, trial: optuna.Trial, config: SearchConfig, result: Result) -> None:
        """What became of a trial. A failure is infeasible."""
        self._learn(config, result)
        if result.median_us is not None:
            self._study.tell(trial, result.median_us)
            return
        trial.set_constraint("runs", 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def know(self, config: SearchConfig, result: Result) -> None:
        """Tell a result that was not asked for: a seed, or a trial of an earlier run."""
        self._learn(config, result)
        failed = result.median_us is None
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.PRUNED if failed else TrialState.COMPLETE,
                value=result.median_us,
                params=self.params(config),
                distributions=self._distributions(config),
                constraints={"runs": 1.0} if failed else None,
            )
        )

    def correct(self, results: Mapping[SearchConfig, Result]) -> None:
        """Learn anew where a config was measured again since it was told. The study keeps what it was told first."""
        again = {c: results[c].median_us for c, told in self._told.items() if results[c].median_us != told}
        if again:
            self._told.update(again)
            self._surrogate = Surrogate(self._configs, self._guess)
            for config, median_us in self._told.items():
                self._surrogate.tell(config, median_us)

    def _learn(self, config: SearchConfig, result: Result) -> None:
        self._told[config] = result.median_us
        self._surrogate.tell(config, result.median_us)

    @property
    def variants(self) -> list[str]:
        """The choices of the parameter "variant", which says what others there are."""
        return list(self._axes)

    def distributions(self, variant: str) -> dict[str, BaseDistribution]:
        """The other parameters of a variant."""
        return {axis.name: axis.distribution for axis in self._axes[variant]}

    def _distributions(self, config: SearchConfig) -> dict[str, BaseDistribution]:
        variants: dict[str, BaseDistribution] = {"variant": CategoricalDistribution(self.variants)}
        return variants | self.distributions(_variant(config))
