"""Optuna's side of a search: a config space as parameters, ask a config, tell what became of it.

The study is disposable: everything measured is in our store and is told again when a search resumes.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.distributions import CategoricalDistribution
from optuna.distributions import IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage
from optuna.storages import JournalStorage
from optuna.storages import RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from kdatune_kernels.errors import StoreError
from kdatune_kernels.values import OtherConfig
from kdatune_tuner.objective import Result
from kdatune_tuner.objective import SearchConfig
from kdatune_tuner.store.address import BUSY_TIMEOUT_S
from kdatune_tuner.store.address import parse_address

# Fields that only make sense together: a tile of 128 rows needs two MMA partitions or eight warps, and then a register
# cap (44 of 48 combinations are illegal); other splits than 1/1 are in the space only with some store orders.
_JOINT: dict[str, tuple[str, ...]] = {
    "tile": ("block_v", "num_warps", "consumers", "maxnreg", "consumer_regs"),
    "order": ("load_warps", "store_warps", "defer_store", "decay_position"),
}
STARTUP_TRIALS = 20
"""Configs drawn at random from the space before TPE proposes. H200 sweep, K2, 60 trials, ten shapes x three seeds, worst
distance from the best: 2.6 % with 20, 4.3 % with 30, 6.2 % with 15; 4.3 % for random search."""


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
        return tuple(_value(config, field) for field in self.fields)

    def encode(self, config: SearchConfig) -> int | str:
        value = self.value_of(config)
        return self.values.index(value) if self.ordered else self.label(value)


def _value(config: SearchConfig, field: str) -> Any:
    return config.get(field) if isinstance(config, OtherConfig) else getattr(config, field)


def _fields(configs: Sequence[SearchConfig]) -> list[str]:
    """The names of the fields, in a fixed order. Configs of another kernel need not all have the same."""
    first = configs[0]
    if isinstance(first, OtherConfig):
        return sorted({name for config in configs if isinstance(config, OtherConfig) for name in config})
    return list(first.__dataclass_fields__)


def _variant(config: SearchConfig) -> str:
    """What decides which parameters a config has; configs of another kernel are of one kind."""
    return "" if isinstance(config, OtherConfig) else config.variant


def _axes(configs: Sequence[SearchConfig], prefix: str) -> list[_Axis]:
    fields = [f for f in _fields(configs) if f != "variant" or isinstance(configs[0], OtherConfig)]
    varying = [f for f in fields if len({_value(c, f) for c in configs}) > 1]
    groups: list[tuple[str, tuple[str, ...]]] = []
    for name, joint in _JOINT.items():
        together = tuple(f for f in joint if f in varying)
        if len(together) > 1:
            groups.append((name, together))
            varying = [f for f in varying if f not in together]
    groups += [(f, (f,)) for f in varying]
    axes = []
    for name, members in groups:
        seen = {tuple(_value(c, f) for f in members) for c in configs}
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


class Proposer:
    """TPE (multivariate) over a space of configs. Ordered integers are ordered parameters, the rest are categories.

    Args:
        space: every config that may be proposed.
        seed: equal seeds and equal answers give equal proposals.
        storage: a journal file or a database URL where the study can be looked at; None: in memory.
        study_name: what it is called there.

    Raises:
        StoreError: the storage is a URL that kdatune does not work with.
    """

    sampler_name = "tpe"

    def __init__(
        self, space: Sequence[SearchConfig], seed: int, storage: str | None = None, study_name: str | None = None
    ) -> None:
        self._space = frozenset(space)
        self._by_params: dict[tuple[tuple[str, Any], ...], SearchConfig] = {}
        self._axes: dict[str, list[_Axis]] = {}
        for variant in sorted({_variant(c) for c in space}):
            self._axes[variant] = _axes([c for c in space if _variant(c) == variant], variant)
        for config in space:
            self._by_params[tuple(self.params(config).items())] = config
        with warnings.catch_warnings():
            # `group` keeps each variant's parameters a joint distribution of their own; it is experimental since 2.8
            warnings.simplefilter("ignore", ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=1)
            # without `load_if_exists` RDBStorage and create_study log at INFO, to stderr
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self._storage = _storage(storage)
            self._study = optuna.create_study(
                sampler=sampler, direction="minimize", storage=self._storage, study_name=study_name
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

    def ask(self) -> tuple[optuna.Trial, SearchConfig | None]:
        """The next proposal; None where the parameters name no config of the space."""
        trial = self._study.ask()
        variant = trial.suggest_categorical("variant", list(self._axes))
        params: dict[str, Any] = {"variant": variant}
        for axis in self._axes[variant]:
            match axis.distribution:
                case IntDistribution(low=low, high=high):
                    params[axis.name] = trial.suggest_int(axis.name, low, high)
                case CategoricalDistribution(choices=choices):
                    params[axis.name] = trial.suggest_categorical(axis.name, choices)
        return trial, self._by_params.get(tuple(params.items()))

    def tell(self, trial: optuna.Trial, result: Result | None) -> None:
        """What became of a proposal. None: it names no config. A failure is infeasible, so that TPE keeps away from it."""
        if result is not None and result.median_us is not None:
            self._study.tell(trial, result.median_us)
            return
        trial.set_constraint("runs", 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def know(self, config: SearchConfig, result: Result) -> None:
        """Tell a result that was not asked for: a seed, or a trial of an earlier run."""
        params = self.params(config)
        distributions: dict[str, BaseDistribution] = {"variant": CategoricalDistribution(list(self._axes))}
        distributions |= {axis.name: axis.distribution for axis in self._axes[_variant(config)]}
        failed = result.median_us is None
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.PRUNED if failed else TrialState.COMPLETE,
                value=result.median_us,
                params=params,
                distributions=distributions,
                constraints={"runs": 1.0} if failed else None,
            )
        )
