"""The rules on profiles of a real card: what they say, and when they keep silent."""

import dataclasses

import pytest

from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import shape_of
from kdatune_tuner.ncu.explain import Profiled
from kdatune_tuner.ncu.explain import compare
from kdatune_tuner.ncu.explain import describe
from kdatune_tuner.ncu.metrics import BY_FIELD
from kdatune_tuner.ncu.rules import FACTORS
from kdatune_tuner.ncu.rules import STATES


def by_rule(sentences):
    return {s.rule: s.text for s in sentences}


def but(profile: Profiled, label: str | None = None, **changes: float) -> Profiled:
    """The profile with other counters; of another config, so that it is compared at all."""
    config = dataclasses.replace(profile.config, num_warps=4 if profile.config.num_warps != 4 else 2)
    return Profiled(label or "other", profile.stage, config, profile.counters | changes)


def test_two_warps_against_eight(t8192) -> None:
    said = by_rule(compare(t8192.profiled("two-warp", "k1"), t8192.profiled("eight-warp", "k1")))
    assert list(said) == ["headline", "cause_instructions", "cause_stalls", "against_resident_warps"]
    assert said["headline"].startswith(
        "K1: two-warp takes 2.93x fewer cycles than eight-warp (num_warps 2 instead of 8)"
    )
    assert "issue active 41 % -> 53 %, barrier stall 0.52 -> 0.22 per issue" in said["headline"]
    assert "230.93 M instructions instead of 527.31 M (2.28x fewer)" in said["cause_instructions"]
    assert "waits 5.5 cycles for its next instruction instead of 9.5" in said["cause_stalls"]
    assert "occupancy 25 % -> 19 %, registers 103 -> 168, held by registers" in said["against_resident_warps"]


def test_the_slower_side_is_told_as_slower(t8192) -> None:
    there = compare(t8192.profiled("eight-warp", "k1"), t8192.profiled("two-warp", "k1"))
    back = compare(t8192.profiled("two-warp", "k1"), t8192.profiled("eight-warp", "k1"))
    assert "2.93x more cycles" in there[0].text
    assert [s.rule for s in there] == [s.rule for s in back]
    assert there[0].numbers["cycles_ratio"] * back[0].numbers["cycles_ratio"] == pytest.approx(1.0)


def test_the_published_barrier_stall_is_told_as_the_cause(t1024) -> None:
    """Eight warps of another kernel, as published for this shape: issue active 37.1 %, barrier stall 22.4 per issue."""
    ours = t1024.profiled("two-warp", "k1")
    latency = 5.7 * 50.0 / 37.1 * 4.0
    published = but(
        ours,
        issue_active_pct=37.1,
        barrier_stall_per_issue=22.4,
        latency_per_issue=latency,
        active_warps=latency * 0.371,
        issued_inst=29_994_244.0,
        replay_cycles=ours.counters["replay_cycles"] * 29_994_244.0 / ours.counters["issued_inst"] * 49.9 / 37.1,
    )
    said = by_rule(compare(ours, published))
    assert "issue active 37 % -> 50 %, barrier stall 22.40 -> 0.23 per issue" in said["headline"]
    assert "(22.40 -> 0.23 for the other warps of the CTA at a barrier)" in said["cause_stalls"]
    assert said["against_resident_warps"].startswith("although a scheduler has 2.84 resident warps instead of")
    bound = by_rule(describe(published, t1024.shape, t1024.gpu))["barrier_bound"]
    assert bound.startswith("K1 waits at barriers, 22.4 of 30.7 cycles between instructions: fewer warps")


def test_a_second_wave_is_named_with_the_chains_it_comes_from(t8192) -> None:
    wide, narrow = t8192.profiled("default", "k2"), t8192.profiled("two-warp", "k2")
    said = by_rule(describe(wide, t8192.shape, t8192.gpu))
    assert "it needs a second one from N*HV = 133 on this card (132 SMs, 1 CTA(s) each)" in said["one_wave"]
    said = by_rule(describe(narrow, t8192.shape, t8192.gpu))
    assert said["second_wave"].startswith(
        "K2 runs in 1.45 waves at N*HV = 96: with this config it needs a second wave from"
    )
    assert "N*HV = 67 on this card (132 SMs" in said["second_wave"]
    said = by_rule(compare(wide, narrow))
    assert said["cause_waves"] == "because its CTAs need 1 wave(s) (0.73) instead of 2 (1.45)"
    assert "because" not in by_rule(compare(narrow, wide))["headline"]
    assert "cause_waves" in by_rule(compare(narrow, wide))


def test_two_configs_of_a_real_card_without_a_clear_cause(t1024) -> None:
    """Two K2 that hold the same 96 chains in one wave, one CTA of 128 columns or two of 64 an SM: 81,6xx cycles each."""
    (sentence,) = compare(t1024.profiled("default", "k2"), t1024.profiled("runner-up", "k2"))
    assert sentence.rule == "no_clear_cause"
    assert sentence.text.startswith("K2: no clear cause: default and runner-up (block_v 128 instead of 64, ")
    assert sentence.text.endswith(" take the same cycles: 81,596 and 81,201 cycles under the profiler")


def test_a_memory_bound_k1_says_that_warps_change_little(t8192) -> None:
    said = by_rule(describe(t8192.profiled("default", "k1"), t8192.shape, t8192.gpu))
    assert said["memory_bound"] == (
        "K1 is bound by device memory, at 82 % of its peak: more or fewer warps change little"
    )
    assert "stall_bound" not in said  # of a group only the first applies


@pytest.mark.parametrize("factor", [1.0, 1.02, 0.98])
def test_no_clear_cause_where_the_cycles_are_the_same(t1024, factor: float) -> None:
    ours = t1024.profiled("two-warp", "k1")
    (sentence,) = compare(ours, but(ours, replay_cycles=ours.counters["replay_cycles"] * factor, issued_inst=1e9))
    assert sentence.rule == "no_clear_cause"
    assert sentence.text.startswith(
        "K1: no clear cause: two-warp and other (num_warps 2 instead of 4) take the same cycles: "
    )


def test_no_clear_cause_where_the_counters_do_not_add_up(t1024) -> None:
    ours = t1024.profiled("two-warp", "k1")
    (sentence,) = compare(ours, but(ours, replay_cycles=ours.counters["replay_cycles"] * 2))
    assert "the counters make 1.00x of the cycles where 0.50x were seen" in sentence.text


def test_no_clear_cause_where_no_factor_is_large(t1024) -> None:
    ours = t1024.profiled("two-warp", "k1")
    each = 1.04  # four factors below the threshold make 1.17x
    changes = {f.field: ours.counters[f.field] * each**f.power for f in FACTORS}
    (sentence,) = compare(ours, but(ours, replay_cycles=ours.counters["replay_cycles"] * each**4, **changes))
    assert (
        "no clear cause: no counter changed enough between two-warp and other (num_warps 2 instead of 4): "
        in sentence.text
    )


@pytest.mark.parametrize("field", ["replay_cycles", *(f.field for f in FACTORS)])
def test_no_clear_cause_where_a_counter_was_not_measured(t1024, field: str) -> None:
    ours, other = t1024.profiled("two-warp", "k1"), t1024.profiled("eight-warp", "k1")
    lacking = {name: value for name, value in other.counters.items() if name != field}
    (sentence,) = compare(ours, dataclasses.replace(other, counters=lacking))
    assert sentence.text == f"K1: no clear cause: {field} was not measured for both"


def test_the_same_config_needs_no_explanation(t1024) -> None:
    ours = t1024.profiled("default", "k2")
    (sentence,) = compare(ours, dataclasses.replace(ours, label="runner-up"))
    assert sentence.text == "K2 of default and runner-up is the same config"


def test_spills_are_told_with_their_counts(t1024) -> None:
    spilling = but(t1024.profiled("default", "k2"), local_load_inst=12000.0, local_store_inst=3000.0)
    said = by_rule(describe(spilling, t1024.shape, t1024.gpu))
    assert said["spills"] == "K2 spills registers: 12,000 loads from and 3,000 stores to local memory"
    assert "spills" not in by_rule(describe(t1024.profiled("default", "k2"), t1024.shape, t1024.gpu))


def test_a_profile_without_counters_says_nothing(t1024) -> None:
    assert describe(Profiled("bare", "k1", K1Config(), {}), t1024.shape, t1024.gpu) == []


@pytest.mark.parametrize("label", ["default", "two-warp", "eight-warp"])
def test_every_counter_may_be_missing_without_a_made_up_number(t1024, label: str) -> None:
    for stage in ("k1", "k2"):
        whole = t1024.profiled(label, stage)
        full = {(s.rule, s.text) for s in describe(whole, t1024.shape, t1024.gpu)}
        for field in whole.counters:
            fewer = dataclasses.replace(whole, counters={n: v for n, v in whole.counters.items() if n != field})
            for s in describe(fewer, t1024.shape, t1024.gpu):
                # another reason may lead once the first is gone; nothing may be told of what is missing
                assert (s.rule, s.text) in full or s.rule.endswith("_bound")
                assert field not in s.numbers


def test_the_wave_boundary_follows_the_grid_not_the_config_name(t1024) -> None:
    k2 = t1024.profiled("default", "k2")
    shape = shape_of(2, 96, 2048)
    said = by_rule(describe(but(k2, grid_ctas=192.0, waves=1.4545), shape, t1024.gpu))
    assert "at N*HV = 192: with this config it needs a second wave from N*HV = 133" in said["second_wave"]


def test_the_rules_name_counters_of_the_table_or_derived_ones() -> None:
    derived = {"barrier_share_pct", "top_stall_share_pct", "local_inst", "next_wave_chains", "tail_fill_pct"}
    assert {field for rule in STATES for field, _, _ in rule.when} <= set(BY_FIELD) | derived
    assert {factor.field for factor in FACTORS} <= set(BY_FIELD)
    assert len({(rule.name, rule.stages) for rule in STATES}) == len(STATES)
