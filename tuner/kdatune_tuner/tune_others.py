"""Tuning a kernel of others: one stage is searched, its best meets what runs now, and the decision is stored.

The search, the paired run and the rules of promotion are those of tune.py; only where seeds and finalists come from differs.
"""

from collections.abc import Callable
from collections.abc import Sequence

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from kdatune_kernels.match import Champion
from kdatune_kernels.others import OtherChampion
from kdatune_kernels.others import OtherIndex
from kdatune_kernels.tunable import Installed
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.objective import Backend
from kdatune_tuner.objective import WholeConfig
from kdatune_tuner.progress import Watch
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.other_champions import other_champions
from kdatune_tuner.tune import Options
from kdatune_tuner.tune import Tuned
from kdatune_tuner.tune import Tuner

_NEIGHBOURS = 3


class OtherTuner(Tuner):
    """As Tuner, for the shapes of one kernel of others; `options.kernel` is its name."""

    def __init__(
        self, engine: Engine, backend: Backend, options: Options, kernel: Installed, watch: Watch | None = None
    ) -> None:
        super().__init__(engine, backend, options, watch)
        self.kernel = kernel

    def _ledger(self, shape: OtherShape, fence: Callable[[Session], None]) -> Ledger:
        return Ledger(self.engine, self.backend, shape, fence, self.kernel.name)

    def _champion(self, ledger: Ledger) -> OtherChampion | None:
        gpu = self.backend.gpu
        return next((c for c in self._champions() if c.shape == ledger.shape and gpu.sameness(c.gpu) == "exact"), None)

    def _champions(self) -> list[OtherChampion]:
        with reading(self.engine) as s:
            return other_champions(s, kernel=self.kernel.name)

    def _seeds(self, ledger: Ledger, shape: OtherShape) -> Sequence[WholeConfig]:  # noqa: ARG002 - as Tuner's
        """The default, the champion, the champions of the nearest shapes."""
        seeds: list[OtherConfig] = [self.kernel.default(shape, self.backend.gpu)]
        left = self._champions()
        for _ in range(_NEIGHBOURS + 1):
            found = OtherIndex(left, self.backend.gpu, self.kernel).find(shape)
            if found is None or found.champion is None:
                break
            seeds.append(found.config)
            left = [c for c in left if c is not found.champion]
        return list(dict.fromkeys(seeds))

    def _default(self, shape: OtherShape, seeds: Sequence[WholeConfig]) -> WholeConfig:  # noqa: ARG002 - as Tuner's
        return seeds[0]

    def _finalists(
        self, tuned: Tuned, champion: Champion | OtherChampion | None, default: WholeConfig, count: int
    ) -> Sequence[WholeConfig]:
        """The default and the champion, then the best that the search has found."""
        (search,) = tuned.stages.values()
        first = [default] if champion is None else [default, champion.config]
        best = [config for config, _ in search.ranked()[:count] if isinstance(config, OtherConfig)]
        return [
            config
            for config in dict.fromkeys([*first, *best])
            if self.backend.measurable(self.kernel.name, tuned.shape, config)
        ]
