"""Champions of other kernels x request -> exact / bucket / nearest / default: what match.py and index.py are for KDA.

ONE piece, called by launcher and service alike. Stdlib only. How far apart two shapes are is for their kernel to say
(`TunableKernel.place`); where that is not installed, a champion answers for its own shape and for no other.
"""

import logging
import math
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.match import NEAREST_BOUND
from kdatune_kernels.match import MatchKind
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import GpuLevel
from kdatune_kernels.tunable import Installed
from kdatune_kernels.tunable import Place
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape

log = logging.getLogger("kdatune")

_LEVELS: tuple[GpuLevel, ...] = ("exact", "silicon", "family", "none")


@dataclass(frozen=True)
class OtherChampion:
    """The served best of one (kernel, GPU model, problem shape), with where it comes from."""

    kernel: str
    gpu: Gpu
    shape: OtherShape
    config: OtherConfig
    generation: int
    measured_us: float | None
    default_us: float | None
    build: Build | None = None
    measured_at: str | None = None
    stale_reason: str | None = None


@dataclass(frozen=True)
class OtherMatch:
    """The answer to a request: a config, and how it was found."""

    match: MatchKind
    gpu_level: GpuLevel
    config: OtherConfig
    reason: str
    champion: OtherChampion | None = None
    expected_regret: float | None = None

    @property
    def stale_reason(self) -> str | None:
        return self.champion.stale_reason if self.champion else None


class OtherIndex:
    """The champions of one kernel that may be served to one card. Immutable.

    Args:
        champions: of this kernel, of any cards; only those of the same card or the same silicon are served.
        kernel: None where it is not installed.
    """

    def __init__(self, champions: Iterable[OtherChampion], gpu: Gpu, kernel: Installed | None) -> None:
        self.gpu = gpu
        self.kernel = kernel
        self.level: GpuLevel = "none"
        self._exact: dict[OtherShape, list[OtherChampion]] = {}
        self._tiles: dict[object, list[tuple[tuple[float, ...], OtherChampion]]] = {}
        unplaced = ""
        for champion in champions:
            level = gpu.sameness(champion.gpu)
            self.level = min(self.level, level, key=_LEVELS.index)
            if level not in ("exact", "silicon"):
                continue
            self._exact.setdefault(champion.shape, []).append(champion)
            try:
                place = None if kernel is None else _placed(kernel, champion.shape)
            except KdatuneError as error:
                unplaced = str(error)
                continue
            if place is not None:
                self._tiles.setdefault(place[0], []).append((place[1], champion))
        if unplaced:
            log.warning("kdatune serves a champion for its own shape only: %s", unplaced)

    def find(self, shape: OtherShape) -> OtherMatch | None:
        """The best answer; None where the kernel is not installed and the very shape is not tuned for the card.

        Raises:
            ConfigError: nothing answers, and the kernel has no default that can be read.
        """
        if self.kernel is None:
            exact = self._nearest_card(self._exact.get(shape, ()))
            return None if exact is None else self._found("exact", 0.0, exact, shape)
        refused = ""
        for kind, distance, champion in self._candidates(shape):
            reason = self.kernel.config_ok(champion.config, shape, self.gpu)
            if reason is None:
                return self._found(kind, distance, champion, shape)
            refused = refused or f"; champion of {champion.shape.key()} refused: {reason}"
        why = {"family": "only cards of another SM count are tuned", "none": "nothing is tuned for this card"}
        reason = why.get(self.level, "no tuned shape is near enough") + refused
        return OtherMatch("default", self.level, self.kernel.default(shape, self.gpu), reason)

    def _candidates(self, shape: OtherShape) -> Iterator[tuple[MatchKind, float, OtherChampion]]:
        """Best first: the very shape, the same bucket, then by distance; of equals the same card, then the shape key."""
        for champion in sorted(self._exact.get(shape, ()), key=self._card_order):
            yield "exact", 0.0, champion
        assert self.kernel is not None  # noqa: S101 - find has returned
        tile, here = _placed(self.kernel, shape)
        found: list[tuple[int, int, float, str, OtherChampion]] = []
        for there, champion in self._tiles.get(tile, ()):
            if champion.shape == shape or len(there) != len(here):
                continue
            distance = sum(abs(a - b) for a, b in zip(here, there, strict=True))
            same_bucket = all(math.ceil(a) == math.ceil(b) for a, b in zip(here, there, strict=True))
            if same_bucket or distance <= NEAREST_BOUND:
                rank = 0 if same_bucket else 1
                found.append((rank, self._card_order(champion), distance, champion.shape.key(), champion))
        for rank, _, distance, _, champion in sorted(found, key=lambda one: one[:4]):
            yield ("bucket" if rank == 0 else "nearest"), distance, champion

    def _found(self, kind: MatchKind, distance: float, champion: OtherChampion, shape: OtherShape) -> OtherMatch:
        key = champion.shape.key()
        reason = {
            "exact": "tuned for this shape",
            "bucket": f"tuned for {key}, the same bucket",
            "nearest": f"tuned for {key}, {distance:.2f} away",
        }[kind]
        config = champion.config
        if kind != "exact" and self.kernel is not None and self._kept_default(champion):
            # the default follows the shape, a copy of another shape's default does not
            config = self.kernel.default(shape, self.gpu)
            reason = f"{reason}; nothing beat the default there, so this shape's default"
        regret = 1.0 if kind == "exact" else None
        return OtherMatch(kind, self.gpu.sameness(champion.gpu), config, reason, champion, regret)

    def _kept_default(self, champion: OtherChampion) -> bool:
        assert self.kernel is not None  # noqa: S101 - the caller has looked
        try:
            return self.kernel.default(champion.shape, champion.gpu) == champion.config
        except KdatuneError:
            return False

    def _card_order(self, champion: OtherChampion) -> int:
        return _LEVELS.index(self.gpu.sameness(champion.gpu))

    def _nearest_card(self, champions: Sequence[OtherChampion]) -> OtherChampion | None:
        return min(champions, key=self._card_order, default=None)


def _placed(kernel: Installed, shape: OtherShape) -> Place:
    """The place of a shape that has the fields of the kernel as it is now. Raises ShapeError."""
    return kernel.place(kernel.shape(shape))
