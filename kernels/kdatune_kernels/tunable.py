"""Kernels of others: what one says about itself, and which ones are installed. Stdlib only.

A distribution registers a kernel by an entry point of the group `kdatune.kernels` (docs/kernels-of-others.md). Entry points
are code of installed packages, chosen by whoever installs them; nothing that comes over a network is imported. One that
cannot be used is left out, said once in the log with its distribution, and named when its kernel is asked for.
"""

import functools
import importlib.metadata
import logging
import math
import re
import sys
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from itertools import islice
from pathlib import Path
from typing import Any
from typing import Protocol
from typing import runtime_checkable

from kdatune_kernels.errors import ConfigError
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.identity import hash_of_sources
from kdatune_kernels.spec import Gpu
from kdatune_kernels.values import KERNEL_NAME
from kdatune_kernels.values import OUR_KERNELS
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_kernels.values import ShapeValue
from kdatune_kernels.values import is_other
from kdatune_kernels.values import parse_other_shape

log = logging.getLogger("kdatune")

GROUP = "kdatune.kernels"
MAX_CONFIGS = 100_000
"""Of one shape's config space; more is no space that can be searched, or has no end."""

Place = tuple[Hashable, tuple[float, ...]]

_ANY_FAULT = (Exception, SystemExit)  # code of another team that ends the process ends no launcher and no service


@runtime_checkable
class TunableKernel(Protocol):
    """What a kernel says about itself without torch: a service loads it too. One object a kernel, without state.

    gpu is spec.INTERPRETER where there is no card.
    """

    name: str
    """[a-z][a-z0-9-]{0,30}, that of its entry point; never k1, k2 or kda."""
    shape_fields: Mapping[str, Any]
    """Of a problem shape, each field's type (int, bool, str) or its default: {"rows": int, "dtype": "bf16"}."""
    device: str
    """Import string of the module that needs torch (TunableDevice); only the process that measures imports it."""

    def configs(self, shape: Mapping[str, Any], gpu: Gpu) -> Iterable[Mapping[str, Any]]:
        """The config space of a shape, in a fixed order. What config_ok refuses is passed over."""

    def config_ok(self, config: Mapping[str, Any], shape: Mapping[str, Any], gpu: Gpu) -> str | None:
        """None when the config may be launched, else the reason why not. It is asked about configs of any origin."""

    def default(self, shape: Mapping[str, Any], gpu: Gpu) -> Mapping[str, Any]:
        """What runs when nothing measured is known: passes config_ok wherever anything does."""

    def place(self, shape: Mapping[str, Any]) -> Place:
        """Where a shape lies: what must be equal for a neighbour's config to do, and log2 coordinates of the rest."""

    def source_files(self) -> Sequence[Path]:
        """The files that decide what is launched; a change of their code makes what was measured stale."""


class TunableDevice(Protocol):
    """The module that `TunableKernel.device` names: the part of a kernel that needs torch."""

    def inputs(self, shape: Mapping[str, Any], seed: int, device: str) -> Any:
        """Tensors of a shape on a torch device, equal for equal seeds, with room for the outputs."""

    def launch(self, inputs: Any, config: Mapping[str, Any]) -> Any:
        """Launch once, without waiting; returns the outputs, tensors or a tuple or list of them."""

    def check(self, inputs: Any, outputs: Any) -> Mapping[str, float]:
        """The error ratios of outputs, by name: error over tolerance, 1 is the limit."""


@dataclass(frozen=True)
class Installed:
    """A kernel that is installed, asked with care: whatever its methods raise or return, what comes out is typed.

    `kernel` is code of another team; a fault of it is a ConfigError or ShapeError here, which names the distribution.
    """

    kernel: TunableKernel
    distribution: str
    fields: Mapping[str, type] = field(compare=False)
    defaults: Mapping[str, ShapeValue] = field(compare=False)

    @property
    def name(self) -> str:
        return self.kernel.name

    def shape(self, values: Any) -> OtherShape:
        """A problem shape: every field of the kernel, those with a default filled in. Raises ShapeError by field."""
        if not isinstance(values, Mapping):
            raise ShapeError(f"a shape of {self.name} is an object, not {type(values).__name__}")
        unknown = sorted(str(name) for name in values if name not in self.fields)
        if unknown:
            raise ShapeError(f"{self.name} has no shape field {', '.join(unknown)}; it has {', '.join(self.fields)}")
        missing = [name for name in self.fields if name not in values and name not in self.defaults]
        if missing:
            raise ShapeError(f"the shape of {self.name} lacks {', '.join(missing)}")
        for name, value in values.items():
            if type(value) is not self.fields[name]:
                raise ShapeError(f"{name} of {self.name} must be {_KINDS[self.fields[name]]}, not {value!r}")
        shape = OtherShape({**self.defaults, **values})
        self.place(shape)
        return shape

    def parse_shape(self, text: str) -> OtherShape:
        """A shape from its key; fields with a default may be left out. Raises ShapeError."""
        return self.shape(parse_other_shape(text))

    def config_ok(self, config: OtherConfig, shape: OtherShape, gpu: Gpu) -> str | None:
        """None when the config may be launched, else the reason; a fault of the kernel's own is a reason, too."""
        try:
            reason = self.kernel.config_ok(config, shape, gpu)
        except _ANY_FAULT as error:  # a config it cannot judge is one it must not launch
            return f"config_ok of {self._whose()} failed: {_told(error)}"
        return None if reason is None else str(reason)[:500]

    def default(self, shape: OtherShape, gpu: Gpu) -> OtherConfig:
        """The default config. Raises ConfigError when the kernel gives none that can be read."""
        try:
            return OtherConfig(self.kernel.default(shape, gpu))
        except _ANY_FAULT as error:
            raise ConfigError(f"default of {self._whose()} failed for {shape.key()}: {_told(error)}") from error

    def configs(self, shape: OtherShape, gpu: Gpu) -> list[OtherConfig]:
        """The config space: what config_ok lets through, in the kernel's order, once each. Raises ConfigError."""
        try:
            found = dict.fromkeys(map(OtherConfig, islice(self.kernel.configs(shape, gpu), MAX_CONFIGS + 1)))
        except _ANY_FAULT as error:
            raise ConfigError(f"configs of {self._whose()} failed for {shape.key()}: {_told(error)}") from error
        if len(found) > MAX_CONFIGS:
            raise ConfigError(f"configs of {self._whose()} gives more than {MAX_CONFIGS} for {shape.key()}")
        kinds: dict[str, type] = {}
        for config in found:
            for name, value in config.items():
                if value is not None and kinds.setdefault(name, type(value)) is not type(value):
                    raise ConfigError(f"configs of {self._whose()} mixes kinds of values in {name}; use one, or null")
        return [config for config in found if self.config_ok(config, shape, gpu) is None]

    def place(self, shape: OtherShape) -> Place:
        """Where a shape lies. Raises ShapeError when the kernel cannot say."""
        try:
            tile, coordinates = self.kernel.place(shape)
            hash(tile)
            where = tuple(float(x) for x in coordinates)
        except _ANY_FAULT as error:
            raise ShapeError(f"{self._whose()} cannot place {shape.key()}: {_told(error)}") from error
        if not all(math.isfinite(x) for x in where):
            raise ShapeError(f"{self._whose()} places {shape.key()} at {where}, which is nowhere")
        return tile, where

    def kernel_hash(self) -> str:
        """Identity of the code that is launched. Raises ConfigError when its files cannot be read."""
        return self._hash("source_files")

    def space_hash(self) -> str:
        """Identity of the config space: the code of the module that says it."""
        return self._hash("configs")

    def _hash(self, what: str) -> str:
        try:
            if what == "source_files":
                return hash_of_sources([Path(path) for path in self.kernel.source_files()])
            file = sys.modules[type(self.kernel).__module__].__file__
            return hash_of_sources([Path(str(file))])
        except _ANY_FAULT as error:
            raise ConfigError(f"the code of {self._whose()} cannot be read ({what}): {_told(error)}") from error

    def _whose(self) -> str:
        return f"kernel {self.name} ({self.distribution})"


@dataclass(frozen=True)
class Registry:
    """The kernels of others that are installed, by name, and why some that are registered are not among them."""

    kernels: Mapping[str, Installed]
    faults: Mapping[str, str]

    def get(self, name: str) -> Installed | None:
        """The kernel of that name, None when it is not installed or cannot be used."""
        return self.kernels.get(name)

    def require(self, name: str) -> Installed:
        """The kernel of that name. Raises UsageError saying why there is none, and which ones there are."""
        found = self.kernels.get(name)
        if found is not None:
            return found
        known = ", ".join([*OUR_KERNELS, *sorted(self.kernels)])
        why = self.faults.get(name, f"no installed package registers it under {GROUP}")
        raise UsageError(f"no kernel {name[:80]!r}: {why}; known: {known}")


@functools.cache
def registry() -> Registry:
    """The kernels of others in this process, looked for once. Never raises."""
    found = read_registry(importlib.metadata.entry_points(group=GROUP))
    for fault in found.faults.values():
        log.warning("kdatune leaves a kernel out: %s", fault)
    return found


def read_registry(points: Iterable[importlib.metadata.EntryPoint]) -> Registry:
    """The kernels of entry points. Of two of the same name neither is taken: nobody can say which is meant."""
    by_name: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in points:
        by_name.setdefault(point.name, []).append(point)
    kernels: dict[str, Installed] = {}
    faults: dict[str, str] = {}
    for name, same in sorted(by_name.items()):
        whose = sorted(_distribution(point) for point in same)
        if len(same) > 1:
            faults[name] = f"{' and '.join(whose)} both register a kernel {name!r}; uninstall one"
            continue
        try:
            kernels[name] = _load(same[0], whose[0])
        except KdatuneError as error:
            faults[name] = str(error)
    return Registry(kernels, faults)


def parse_shape_of(kernel: str, text: str) -> OtherShape:
    """A shape key of another kernel: read by the kernel where it is installed, else as it stands.

    Raises:
        ShapeError: it cannot be read, or has other fields than the installed kernel.
    """
    installed = registry().get(kernel)
    return parse_other_shape(text) if installed is None else installed.parse_shape(text)


def _load(point: importlib.metadata.EntryPoint, whose: str) -> Installed:
    """Raises ConfigError, which names the entry point and its distribution."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"entry point {point.name!r} ({point.value}) of {whose}: {why}")

    if not is_other(point.name):
        raise refuse(f"a kernel's name is {KERNEL_NAME} and none of {', '.join(OUR_KERNELS)}")
    try:
        kernel = point.load()
    except _ANY_FAULT as error:
        raise refuse(f"it cannot be loaded: {_told(error)}") from error
    if isinstance(kernel, type) or not isinstance(kernel, TunableKernel):
        lacks = [name for name in _members() if not hasattr(kernel, name)]
        what = f"lacks {', '.join(lacks)}" if lacks else "is a class; make it an object"
        raise refuse(f"it is no TunableKernel: {type(kernel).__name__} {what}")
    if kernel.name != point.name:
        raise refuse(f"the kernel calls itself {kernel.name!r}; both must be the same")
    if not isinstance(kernel.device, str) or not re.fullmatch(r"[A-Za-z_][\w.]*", kernel.device):
        raise refuse(f"device must be the import string of a module, not {kernel.device!r}")
    fields = kernel.shape_fields
    if not isinstance(fields, Mapping) or not 1 <= len(fields) <= 16:
        raise refuse("shape_fields must map 1 to 16 names to int, bool, str or a default")
    types = {name: kind if isinstance(kind, type) else type(kind) for name, kind in fields.items()}
    defaults = {name: kind for name, kind in fields.items() if not isinstance(kind, type)}
    try:
        OtherShape({name: defaults.get(name, _SAMPLES.get(kind)) for name, kind in types.items()})
    except ShapeError as error:
        raise refuse(f"shape_fields: {error}") from error
    return Installed(kernel, whose, types, defaults)


_KINDS: dict[type, str] = {int: "a whole number", bool: "true or false", str: "a word"}
_SAMPLES: dict[type, ShapeValue] = {int: 1, bool: False, str: "word"}


def _members() -> list[str]:
    methods = ["configs", "config_ok", "default", "place", "source_files"]
    return ["name", "shape_fields", "device", *methods]


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    """Name and version, for people; an entry point that was made by hand has none."""
    dist = point.dist
    return "an unknown distribution" if dist is None else f"{dist.name} {dist.version}"


def _told(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
