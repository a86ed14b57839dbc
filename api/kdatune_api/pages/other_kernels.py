"""The champions of kernels of others as a table: their shapes and configs have fields of their own."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from kdatune_api.pages import text
from kdatune_api.pages.params import ViewQuery
from kdatune_api.pages.tables import Cell
from kdatune_api.pages.tables import Column
from kdatune_api.pages.tables import ListSource
from kdatune_api.pages.tables import Spec
from kdatune_api.pages.tables import Table
from kdatune_api.pages.tables import make_table
from kdatune_api.pages.tables import shape_cell
from kdatune_kernels.others import OtherChampion
from kdatune_tuner.store.other_champions import marked_others
from kdatune_tuner.store.other_champions import other_champions

SPEC = Spec(
    "others",
    "Champions of other kernels",
    (
        Column("kernel", "Kernel", sortable=True),
        Column("shape", "Shape", kind="key", sortable=True),
        Column("gpu", "GPU model", kind="name", sortable=True),
        Column("config", "Config", kind="key"),
        Column("measured_us", "Champion", "µs", "number", sortable=True, hint="median"),
        Column("default_us", "Default", "µs", "number", sortable=True),
        Column("speedup", "Speed-up", kind="number", sortable=True, hint="default over champion"),
        Column("measured_at", "Measured", sortable=True),
        Column("generation", "Generation", kind="number", sortable=True),
        Column("stale_reason", "Why stale", kind="long"),
    ),
    order="kernel",
)


def others_table(s: Session, gpu_name: str | None, query: ViewQuery) -> Table:
    """The list, of one GPU model or of all."""
    found = [c for c in marked_others(other_champions(s)) if gpu_name in (None, c.gpu.name)]
    keys = {
        "kernel": lambda c: (c.kernel, c.shape.key(), c.gpu.name),
        "shape": lambda c: (c.shape.key(), c.kernel),
        "gpu": lambda c: (c.gpu.name, c.kernel, c.shape.key()),
        "measured_us": lambda c: c.measured_us,
        "default_us": lambda c: c.default_us,
        "speedup": _speedup,
        "measured_at": lambda c: c.measured_at,
        "generation": lambda c: c.generation,
    }
    return make_table(SPEC, query, ListSource(found, _rows, keys))


def _rows(some: Sequence[OtherChampion]) -> list[list[Cell]]:
    return [
        [
            Cell(one.kernel),
            shape_cell(one.shape.key()),
            Cell(one.gpu.name),
            Cell(one.config.text, text.breakable(one.config.text)),
            Cell(one.measured_us, text.us(one.measured_us)),
            Cell(one.default_us, text.us(one.default_us)),
            Cell(_speedup(one), text.speedup(_speedup(one)), mark=text.trend_of(_speedup(one))),
            Cell(one.measured_at),
            Cell(one.generation, text.integer(one.generation)),
            Cell(one.stale_reason, one.stale_reason or ""),
        ]
        for one in some
    ]


def _speedup(champion: OtherChampion) -> float | None:
    return champion.default_us / champion.measured_us if champion.default_us and champion.measured_us else None
