"""One side of a comparison: a config of a key with all that is known about it. Shared by the config and compare pages."""

import json
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from kdatune_api.pages import text
from kdatune_api.pages.board import Card
from kdatune_api.pages.board import path_of
from kdatune_api.pages.tables import Cell
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import is_whole
from kdatune_kernels.spec import to_json
from kdatune_tuner.store.dashboard import Key
from kdatune_tuner.store.dashboard import find_problem
from kdatune_tuner.store.dashboard import history
from kdatune_tuner.store.dashboard import newest_measurement
from kdatune_tuner.store.queries import find_build
from kdatune_tuner.store.queries import find_measurement
from kdatune_tuner.store.records import MeasurementRow
from kdatune_tuner.store.records import PromotionRow

STAGES = ("k1", "k2")


def stages_in(config: Json) -> Sequence[str]:
    """The stages that a launch config has: none of its own where K1 is part of K2."""
    return () if is_whole(config.get("k2")) else STAGES


def stages_profiled(config: Json) -> Sequence[str]:
    """What of a launch config is profiled: its stages, or K2 alone where K1 is part of it."""
    return stages_in(config) or ("k2",)


@dataclass(frozen=True)
class Side:
    """A config of a key. absent: why there is none, for people; "" where there is one.

    stages: the newest measurements of its K1 and K2 alone, where there are any.
    """

    label: str
    card: Card
    shape: Shape
    config: Json | None = None
    measurement: MeasurementRow | None = None
    build: Build | None = None
    promotion: PromotionRow | None = None
    stages: dict[str, MeasurementRow] = field(default_factory=dict)
    absent: str = ""

    @property
    def config_json(self) -> str:
        return "" if self.config is None else json.dumps(self.config, indent=2, sort_keys=True)

    @property
    def is_default(self) -> bool:
        """Whether it is the config that runs when nothing is known."""
        return self.config == to_json(default_config(self.shape, self.card.gpu))


class KeyFacts:
    """The store about one shape on one card. Called inside `engine.reading`."""

    def __init__(self, s: Session, card: Card, shape: Shape) -> None:
        self.s = s
        self.card = card
        self.shape = shape
        self.keys: dict[str, Key] = {}
        for kernel in ("kda", *STAGES):
            problem_id = find_problem(s, kernel, shape)
            if problem_id is not None:
                self.keys[kernel] = Key(kernel, card.ids, problem_id)

    @property
    def is_known(self) -> bool:
        """Whether anything is stored about the shape (on this or another card)."""
        return "kda" in self.keys

    def decisions(self, *, serving_only: bool = False, until: datetime | None = None) -> list[PromotionRow]:
        """The history of the key, newest first."""
        key = self.keys.get("kda")
        return [] if key is None else history(self.s, key, serving_only=serving_only, until=until)

    def champion(self, until: datetime | None = None) -> Side:
        """What is served now, or was at that moment."""
        served = self.decisions(serving_only=True, until=until)
        if not served:
            when = "" if until is None else " then"
            return Side("champion", self.card, self.shape, absent=f"nothing was promoted{when}; the default runs")
        return self._promoted("champion", served[0], until)

    def previous(self) -> Side:
        """What was served before the champion, and is another config."""
        served = self.decisions(serving_only=True)
        before = next((p for p in served[1:] if p.config_hash != served[0].config_hash), None)
        if before is None:
            return Side("previous", self.card, self.shape, absent="nothing else was served before")
        return self._promoted("previous", before, None)

    def default(self, until: datetime | None = None) -> Side:
        """The config that runs when nothing is known."""
        config = to_json(default_config(self.shape, self.card.gpu))
        return self._side("default", config, self._newest("kda", digest(config), until), until=until)

    def measured(self, measurement_id: int) -> Side:
        """A config by one of its measurements."""
        found = find_measurement(self.s, measurement_id)
        label = f"measurement {measurement_id}"
        if found is None or found.kernel != "kda":
            return Side(
                label, self.card, self.shape, absent=f"there is no measurement {measurement_id} of a whole launch"
            )
        return self._side(label, json.loads(found.config_json), found)

    def _promoted(self, label: str, promotion: PromotionRow, until: datetime | None) -> Side:
        if promotion.config_json is None:
            config = to_json(default_config(self.shape, self.card.gpu))
            return self._side(label, config, self._newest("kda", digest(config), until), promotion, until)
        measured = None if promotion.measurement_id is None else find_measurement(self.s, promotion.measurement_id)
        if until is not None and promotion.config_hash is not None:
            measured = self._newest("kda", promotion.config_hash, until) or measured
        return self._side(label, json.loads(promotion.config_json), measured, promotion, until)

    def _side(
        self,
        label: str,
        config: Json,
        measurement: MeasurementRow | None,
        promotion: PromotionRow | None = None,
        until: datetime | None = None,
    ) -> Side:
        stages = {
            stage: found
            for stage in stages_in(config)
            if stage in config and (found := self._newest(stage, digest(config[stage]), until)) is not None
        }
        build = None if measurement is None else find_build(self.s, measurement.build_id)
        absent = "" if measurement is not None else "not measured"
        return Side(label, self.card, self.shape, config, measurement, build, promotion, stages, absent)

    def _newest(self, kernel: str, config_hash: str, until: datetime | None) -> MeasurementRow | None:
        key = self.keys.get(kernel)
        return None if key is None else newest_measurement(self.s, key, config_hash, until)


@dataclass(frozen=True)
class Number:
    """One number of a side. lower_is_better: what a difference means; None: neither."""

    key: str
    label: str
    unit: str
    of: Callable[[Side], float | None]
    show: Callable[[float | None], str] = text.short
    lower_is_better: bool | None = None


def _whole(name: str) -> Callable[[Side], Any]:
    return lambda side: None if side.measurement is None else getattr(side.measurement, name)


def _stage(stage: str, name: str) -> Callable[[Side], Any]:
    return lambda side: getattr(side.stages[stage], name) if stage in side.stages else None


def _stage_numbers(stage: str) -> Sequence[Number]:
    title = stage.upper()
    return (
        Number(f"{stage}_median_us", f"{title} alone, median", "µs", _stage(stage, "median_us"), text.us, True),
        Number(f"{stage}_registers", f"{title} registers", "per thread", _stage(stage, "registers")),
        Number(f"{stage}_spills", f"{title} spills", "per thread", _stage(stage, "spills"), text.short, True),
        Number(f"{stage}_smem_bytes", f"{title} shared memory", "bytes", _stage(stage, "smem_bytes"), text.integer),
        Number(f"{stage}_requested_num_warps", f"{title} warps asked for", "", _stage(stage, "requested_num_warps")),
        Number(f"{stage}_effective_num_warps", f"{title} warps started", "", _stage(stage, "effective_num_warps")),
        Number(f"{stage}_occupancy_pct", f"{title} occupancy", "%", _stage(stage, "occupancy_pct")),
    )


NUMBERS: tuple[Number, ...] = (
    Number("median_us", "Median", "µs", _whole("median_us"), text.us, True),
    Number("p20_us", "p20", "µs", _whole("p20_us"), text.us, True),
    Number("p80_us", "p80", "µs", _whole("p80_us"), text.us, True),
    Number("sample_count", "Samples", "", _whole("sample_count")),
    Number("o_error_ratio", "Error of o over its tolerance", "", _whole("o_error_ratio"), text.short, True),
    Number(
        "state_error_ratio", "Error of the state over its tolerance", "", _whole("state_error_ratio"), text.short, True
    ),
    Number("sm_clock_mhz", "SM clock", "MHz", _whole("sm_clock_mhz")),
    *_stage_numbers("k1"),
    *_stage_numbers("k2"),
)


def flat(config: Json | None) -> Json:
    """The fields of a launch config under their paths: k1.num_warps, ..., precision. Without stages only what is read."""
    out: Json = {}
    whole = not stages_in(config or {})
    for name, value in (config or {}).items():
        if whole and name in STAGES:
            out |= {"k2.variant": value["variant"]} if name == "k2" else {}
        elif isinstance(value, dict):
            out |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            out[name] = value
    return out


_FIELD_ORDER = {name: n for n, name in enumerate(flat(to_json(LaunchConfig(K1Config(), K2Config()))))}


def field_rows(sides: Sequence[Side]) -> list[tuple[str, list[Any], bool]]:
    """(field, its value on each side, whether they differ), for every field that any side has."""
    configs = [flat(side.config) for side in sides]
    names = sorted({name for config in configs for name in config}, key=lambda n: (_FIELD_ORDER.get(n, 1000), n))
    known = [config for config in configs if config]
    rows = []
    for name in names:
        values = [config.get(name) for config in configs]
        rows.append((name, values, len({canonical({"value": config.get(name)}) for config in known}) > 1))
    return rows


PROVENANCE = tuple(f.name for f in fields(Build))


def provenance_rows(sides: Sequence[Side]) -> list[tuple[str, list[Cell], bool]]:
    """(what, the cell of each side, whether they differ): the build, the clocks and when it was measured."""
    rows: list[tuple[str, list[Any]]] = [
        (name, [None if side.build is None else getattr(side.build, name) for side in sides]) for name in PROVENANCE
    ]
    rows += [(name, [_whole(name)(side) for side in sides]) for name in ("sm_clock_mhz", "throttle_reasons", "regime")]
    out = [(name, [Cell(value) for value in values], _differ(values)) for name, values in rows]
    measured = [_whole("measured_at")(side) for side in sides]
    out.append(("measured_at", [Cell(m, None if m is None else text.moment(m)) for m in measured], False))
    out.append(("run_id", [_run_cell(side) for side in sides], False))
    return out


def _run_cell(side: Side) -> Cell:
    run_id = _whole("run_id")(side)
    path = path_of("studies", side.card.name, side.shape.key())
    return Cell(run_id, href="" if run_id is None else f"{path}?kernel=kda&run={run_id}")


def _differ(values: Sequence[Any]) -> bool:
    return len({value for value in values if value is not None}) > 1
