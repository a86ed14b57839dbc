"""The plan of a night, made from facts alone: what is due, in which order, and what is left out with which reason."""

from dataclasses import replace
from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest

from kdatune_kernels.match import Champion
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.night_plan import Facts
from kdatune_tuner.night_plan import Planner
from kdatune_tuner.night_report import Item
from kdatune_tuner.store.records import DemandRow
from kdatune_tuner.store.records import QuarantineRow

NOW = datetime(2026, 12, 10, 2, tzinfo=UTC)
H8, H16, H64, H96 = (shape_of(1, H, 8192) for H in (8, 16, 64, 96))


@pytest.fixture(scope="module")
def card() -> ReplayBackend:
    return ReplayBackend.open()


def champion(card: ReplayBackend, shape: Shape, days: float = 1.0, **build: str) -> Champion:
    measured_at = (NOW - timedelta(days=days)).isoformat(timespec="seconds").replace("+00:00", "Z")
    config = split_default(shape, card.gpu)  # which every recording holds
    made_with = replace(card.build, **build)
    return Champion(card.gpu, shape, config, 1, 100.0, 100.0, build=made_with, measured_at=measured_at)


def wanted(shape: Shape, count: int) -> DemandRow:
    return DemandRow(
        id=1, gpu_name="NVIDIA H200", kernel="kda", shape=shape, count=count, first_seen_at=NOW, last_seen_at=NOW
    )


def searched(*shapes: Shape) -> dict[tuple[str, str], int]:
    return {(kernel, shape.key()): 1000 for shape in shapes for kernel in ("k1", "k2")}


def plan(card: ReplayBackend, **facts: object) -> list[Item]:
    nothing = {
        "champions": [],
        "demand": [],
        "refused": [],
        "checked_at": {},
        "measured": {},
        "ended": (),
        "seconds_per_trial": None,
    }
    return Planner(card, Facts(**nothing | {"now": NOW, "trials": 200, "max_age_days": 30.0} | facts)).plan()


def test_nothing_is_due_on_an_empty_database(card: ReplayBackend) -> None:
    assert plan(card) == []


def test_what_launchers_miss_most_comes_first(card: ReplayBackend) -> None:
    items = plan(card, demand=[wanted(H8, 10), wanted(H64, 1000), wanted(H16, 100)])
    assert [(item.kind, item.shape, item.count) for item in items] == [
        ("search", H64, 1000),
        ("search", H16, 100),
        ("search", H8, 10),
    ]
    assert items[0].why == "launchers missed it 1000 times (answered: default)"


def test_a_miss_that_a_neighbour_answers_is_worth_less(card: ReplayBackend) -> None:
    near, bucket = shape_of(1, 64, 4096), shape_of(1, 64, 7000)
    demand = [wanted(shape, 50) for shape in (bucket, near, H8)]
    items = plan(card, champions=[champion(card, H64)], measured=searched(H64), demand=demand)
    worth = {item.shape: (item.value, item.why.partition("answered: ")[2]) for item in items if item.kind == "search"}
    whole = worth[H8][0]
    assert worth == {H8: (whole, "default)"), near: (whole / 2, "nearest)"), bucket: (whole / 4, "bucket)")}


def test_a_shape_that_is_served_already_is_no_demand(card: ReplayBackend) -> None:
    items = plan(card, champions=[champion(card, H64)], measured=searched(H64), demand=[wanted(H64, 1_000_000)])
    assert [(item.kind, item.shape) for item in items] == [("check", H64)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"driver": "590.1"}, "measured with driver 590.1, now 580.159.04"),
        ({"kernel_hash": "0" * 16}, "measured with kernel_hash 0000000000000000, now {kernel_hash}"),
        ({"space_hash": "1"}, "measured with space_hash 1, now {space_hash}"),
        ({"triton": "3.5.0", "ptxas": "V12.4"}, "measured with triton 3.5.0, now 3.6.0; ptxas V12.4, now V12.8.93"),
        ({"protocol": "0"}, "measured with protocol 0, now 1"),
    ],
)
def test_a_stale_champion_is_confirmed_then_searched(card: ReplayBackend, changed: dict[str, str], reason: str) -> None:
    reason = reason.format(kernel_hash=card.build.kernel_hash, space_hash=card.build.space_hash)
    fresh, stale = champion(card, H64), champion(card, H96, **changed)
    items = plan(card, champions=[fresh, stale], measured=searched(H64))
    assert [(item.kind, item.shape) for item in items] == [("check", H64), ("confirm", H96), ("search", H96)]
    assert items[1].why == reason
    assert items[2].why == f"stale: {reason}"


def test_an_old_champion_is_confirmed(card: ReplayBackend) -> None:
    items = plan(card, champions=[champion(card, H64, days=30.5)], measured=searched(H64))
    assert [(item.kind, item.why) for item in items] == [("confirm", "measured 2026-11-09T14:00:00Z, over 30 days ago")]


def test_a_search_that_was_cut_short_goes_on_and_is_reckoned_by_what_is_left(card: ReplayBackend) -> None:
    served = champion(card, H64)
    some = {("k1", H64.key()): 136, ("k2", H64.key()): 147}
    (item,) = [
        item for item in plan(card, champions=[served], measured=some, seconds_per_trial=2.0) if item.kind == "search"
    ]
    assert item.why == "not searched to its end with this build"
    assert item.estimated_seconds == 2.0 * (10 + 12)
    assert [len(card.space(kernel, H64)) for kernel in ("k1", "k2")] == [136, 157], (
        "all of K1 is measured, ten of K2 are not"
    )
    ended = [("k2", H64.key())]
    items = plan(card, champions=[served], measured=some, ended=ended)
    assert [item.kind for item in items] == ["check"], "a search that saw no need for more is not begun again"
    items = plan(card, champions=[served], measured={}, ended=[*ended, ("k1", H64.key())])
    assert [item.kind for item in items] == ["check", "search"], "it was with another build"


def test_what_cannot_be_measured_is_left_out_with_the_reason(card: ReplayBackend) -> None:
    unknown, empty = shape_of(3, 7, 5000), replace(H64, T=0, longest_tokens=0)
    items = plan(card, demand=[wanted(unknown, 10**6), wanted(empty, 10**6), wanted(H8, 1)])
    assert [(item.shape, str(item.state)) for item in items] == [
        (H8, "planned"),
        (unknown, "skipped"),
        (empty, "skipped"),
    ]
    assert f"{unknown.key()} is not in" in str(items[1].result)
    assert items[2].result == "it has no tokens: there is nothing to measure"


def test_what_was_checked_in_the_same_night_is_skipped_unless_launchers_refuse_it(card: ReplayBackend) -> None:
    served = champion(card, H64)
    key = (H64.key(), digest(served.config))
    done = {"champions": [served], "measured": searched(H64), "checked_at": {key: NOW - timedelta(hours=3)}}
    (item,) = plan(card, **done)
    assert (str(item.state), item.result) == ("skipped", "checked at 2026-12-09T23:00:00Z already")
    refused = QuarantineRow(
        id=1, gpu_name=card.gpu.name, kernel="kda", shape=H64, config_hash=digest(served.config), config_json="{}",
        reason="launch failed", count=3, first_seen_at=NOW, last_seen_at=NOW - timedelta(hours=1),
    )  # fmt: skip
    (item,) = plan(card, **done, refused=[refused])
    assert (str(item.state), item.why) == ("planned", "launchers refused it 3 times: launch failed")
    (item,) = plan(card, **done, refused=[replace(refused, last_seen_at=NOW - timedelta(hours=4))])
    assert str(item.state) == "skipped", "they said so before it was looked at"
