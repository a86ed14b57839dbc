"""Counters of served configs in a night: which are due, or why there can be none; and taking them."""

from collections.abc import Iterable

from sqlalchemy import Engine

from kdatune_tuner.ncu.preflight import counters_unavailable
from kdatune_tuner.ncu.profiling import CHAMPION
from kdatune_tuner.ncu.profiling import DEFAULT
from kdatune_tuner.ncu.profiling import How
from kdatune_tuner.ncu.profiling import profile_shape
from kdatune_tuner.night_plan import PROFILE
from kdatune_tuner.night_plan import Planner
from kdatune_tuner.night_report import Item
from kdatune_tuner.night_report import ItemState
from kdatune_tuner.objective import Backend
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.profiles import champions_without_counters

# Codes of ncu/unavailable.py that are of one profile alone; any other would come again for the next one.
_OF_THE_SHAPE = ("config_failed", "timeout", "target_failed", "no_kernels", "bad_report")


def due(engine: Engine, backend: Backend, how: How, planner: Planner) -> list[Item]:
    """An item for each served config that has no counters since it was measured, or one line why there can be none."""
    with reading(engine) as s:
        wanting = champions_without_counters(s, backend.gpu)
    if not wanting:
        return []
    why_not = None if backend.name == "gpu" else f"the {backend.name} backend has no card to profile"
    if why_not is None and (told := counters_unavailable(how.ncu)) is not None:
        why_not = told.text()
    if why_not is None:
        return [planner.profile(champion.shape) for champion in wanting]
    why = f"{len(wanting)} served configs have no counters since they were measured"
    return [Item(PROFILE, None, why, 0.0, 0.0, state=ItemState.SKIPPED, result=why_not)]


def take(engine: Engine, backend: Backend, item: Item, how: How, plan: Iterable[Item]) -> None:
    """Profile the champion and the default of the item's shape. What fails by the machine's fault skips the rest of the plan.

    Raises:
        KdatuneError: no card, or the database refuses.
    """
    assert item.shape is not None  # noqa: S101 - only skipped items have none
    failures = profile_shape(engine, backend, item.shape, (CHAMPION, DEFAULT), how).failures()
    item.result = "; ".join(failure.text() for failure in failures) or "counters stored"
    of_machine = next((failure for failure in failures if failure.code not in _OF_THE_SHAPE), None)
    for other in plan:
        if of_machine is not None and other.kind == PROFILE and other.state is ItemState.PLANNED and other is not item:
            other.state, other.result = ItemState.SKIPPED, of_machine.text()
