"""Which config a launch of another kernel uses: service -> disk copy -> the kernel's default. Stdlib only."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from typing import Literal
from typing import TypeVar

from kdatune_kernels.client import Feed
from kdatune_kernels.others import OtherIndex
from kdatune_kernels.others import OtherMatch
from kdatune_kernels.snapshot import Snapshot
from kdatune_kernels.spec import Gpu
from kdatune_kernels.tunable import Installed
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape

Layer = Literal["service", "disk", "bundled", "default"]
R = TypeVar("R")


@dataclass(frozen=True)
class OtherAnswer(OtherMatch):
    """An OtherMatch with the layer it came from and that layer's generation (None for the default)."""

    layer: Layer = "default"
    generation: int | None = None


class OtherAnswers:
    """Answers from snapshots; an index is kept for each kernel and card, as long as the snapshot is the newest."""

    def __init__(self) -> None:
        self._indexed: dict[tuple[str, str], tuple[Snapshot, OtherIndex]] = {}

    def answer(
        self, kernel: str, shape: OtherShape, gpu: Gpu, feed: Feed | None, quarantined: Mapping[Hashable, str]
    ) -> OtherAnswer:
        """The answer of what is known now.

        Raises:
            UsageError: no such kernel is installed. ConfigError: nothing answers, and it has no default to be read.
        """
        installed = registry().require(kernel)
        snapshot = None if feed is None else feed.newest
        if feed is None or snapshot is None:
            why = "no snapshot is known" if feed is None or feed.set_aside is None else feed.set_aside
            return default_answer(installed, shape, gpu, why)
        found = self._index(installed, gpu, snapshot).find(shape)
        assert found is not None  # noqa: S101 - the kernel is installed
        if found.champion is None:
            return default_answer(installed, shape, gpu, found.reason)
        refused = quarantined.get((kernel, found.config))
        if refused is not None:
            why = f"config of {found.champion.shape.key()} is in quarantine: {refused}"
            return default_answer(installed, shape, gpu, why)
        layer: Layer = "service" if snapshot is feed.service else "disk"
        values = {name: getattr(found, name) for name in OtherMatch.__dataclass_fields__}
        return OtherAnswer(**values, layer=layer, generation=snapshot.generation)

    def _index(self, kernel: Installed, gpu: Gpu, snapshot: Snapshot) -> OtherIndex:
        known = self._indexed.get((kernel.name, gpu.name))
        if known is None or known[0] is not snapshot:
            mine = [champion for champion in snapshot.others if champion.kernel == kernel.name]
            known = self._indexed[kernel.name, gpu.name] = (snapshot, OtherIndex(mine, gpu, kernel))
        return known[1]


def default_answer(kernel: Installed, shape: OtherShape, gpu: Gpu, reason: str) -> OtherAnswer:
    """The kernel's default, and why it is that."""
    return OtherAnswer("default", "none", kernel.default(shape, gpu), reason)


def launch_resolved(
    kernel: str,
    shape: Mapping[str, Any],
    gpu: Gpu,
    launch: Callable[[OtherConfig], R],
    *,
    capturing: bool = False,
) -> R:
    """Launch another kernel with the config that the launcher gives: `launch(config)`, and its result.

    A config that fails to compile or to run is put in quarantine, reported, and replaced by the kernel's default. Errors of
    `launch` itself, and that of a default which fails too, are raised.

    Args:
        capturing: a CUDA graph is being captured: nothing is started, waited for or locked.

    Raises:
        UsageError, ShapeError, ConfigError: as `Resolver.resolve_kernel`.
    """
    from kdatune_kernels.resolve import launcher

    config = launcher.resolve_kernel(kernel, shape, gpu, capturing=capturing)
    while True:
        try:
            return launch(config)
        except Exception as error:
            from kdatune_kernels.launch import outcome_of

            instead = None
            if outcome_of(error) is not None:
                reason = f"{type(error).__name__}: {error}"
                instead = launcher.quarantine_kernel(kernel, config, shape, gpu, reason)
            if instead is None:
                raise
            config = instead
