"""The rules that turn counters into sentences, as data. `explain` applies them; thresholds are all here.

A rule's text is filled with the counters of its profile and with what `explain.facts_of` derives from them; a rule that
needs a number that was not measured does not apply.
"""

from dataclasses import dataclass

SAME_RATIO = 1.03
"""Cycles nearer than this are the same: launches of one config differ by up to 3.4 % in a report (H200, three launches)."""

FACTOR_RATIO = 1.05
"""A factor that changes the cycles by less is not named."""

SUM_RATIO = 1.10
"""The factors must multiply up to the measured ratio within this, else they explain nothing."""

FEW_WAVES = 3
"""A launch of up to this many waves is told apart by how many it needs; of more, the last one hardly counts."""

CAUSE_SHARE = 0.25
"""Together the named causes must account for at least this part of the difference (of its logarithm)."""


@dataclass(frozen=True)
class Factor:
    """One factor of a stage's cycles: cycles = instructions x latency / resident warps / active SMs (x a constant).

    field, power: the cycles go with this counter to this power.
    less, more: how a lower and a higher value than the other config's reads; {a} is ours, {b} the other's, {ratio} >= 1.
    """

    name: str
    field: str
    power: int
    less: str
    more: str


FACTORS = (
    Factor(
        "instructions",
        "issued_inst",
        1,
        "it executes {a_millions:.2f} M instructions instead of {b_millions:.2f} M ({ratio:.2f}x fewer)",
        "it executes {a_millions:.2f} M instructions instead of {b_millions:.2f} M ({ratio:.2f}x as many)",
    ),
    Factor(
        "stalls",
        "latency_per_issue",
        1,
        "a warp waits {a:.1f} cycles for its next instruction instead of {b:.1f}{stalls}",
        "a warp waits {a:.1f} cycles for its next instruction instead of {b:.1f}{stalls}",
    ),
    Factor(
        "resident_warps",
        "active_warps",
        -1,
        "a scheduler has {a:.2f} resident warps instead of {b:.2f}{limits}",
        "a scheduler has {a:.2f} resident warps instead of {b:.2f}{limits}",
    ),
    Factor(
        "idle_sms",
        "sm_active_pct",
        -1,
        "SMs work {a:.0f} % of the time instead of {b:.0f} %",
        "SMs work {a:.0f} % of the time instead of {b:.0f} %",
    ),
)


@dataclass(frozen=True)
class State:
    """A sentence about one profile. It applies when every condition holds; of a `group` only the first that applies.

    when: (field, "<" | ">=", threshold).
    """

    name: str
    stages: tuple[str, ...]
    when: tuple[tuple[str, str, float], ...]
    text: str
    group: str = ""


BOTH = ("k1", "k2")
STATES = (
    State(
        "memory_bound",
        BOTH,
        (("dram_throughput_pct", ">=", 70.0),),
        "{stage} is bound by device memory, at {dram_throughput_pct:.0f} % of its peak: more or fewer warps change little",
        "bound",
    ),
    State(
        "l2_bound",
        BOTH,
        (("l2_throughput_pct", ">=", 70.0),),
        "{stage} is bound by L2, at {l2_throughput_pct:.0f} % of its peak",
        "bound",
    ),
    State(
        "tensor_bound",
        BOTH,
        (("tensor_pipe_active_pct", ">=", 70.0),),
        "{stage} keeps the tensor pipe {tensor_pipe_active_pct:.0f} % busy: less arithmetic would help, not more warps",
        "bound",
    ),
    State(
        "issue_bound",
        BOTH,
        (("issue_active_pct", ">=", 80.0),),
        "{stage} issues in {issue_active_pct:.0f} % of the cycles: only fewer instructions would help",
        "bound",
    ),
    State(
        "barrier_bound",
        ("k1",),
        (("barrier_stall_per_issue", ">=", 1.0), ("barrier_share_pct", ">=", 25.0)),
        "{stage} waits at barriers, {barrier_stall_per_issue:.1f} of {latency_per_issue:.1f} cycles between instructions: "
        "fewer warps a CTA come first",
        "bound",
    ),
    State(
        "barrier_bound",
        ("k2",),
        (("barrier_stall_per_issue", ">=", 1.0), ("barrier_share_pct", ">=", 25.0)),
        "{stage} waits at barriers, {barrier_stall_per_issue:.1f} of {latency_per_issue:.1f} cycles between instructions: "
        "its warps wait for one another",
        "bound",
    ),
    State(
        "stall_bound",
        BOTH,
        (("top_stall_share_pct", ">=", 40.0),),
        "{stage} waits most for {top_stall_for}: {top_stall:.1f} of {latency_per_issue:.1f} cycles between instructions",
        "bound",
    ),
    State(
        "spills",
        BOTH,
        (("local_inst", ">=", 1.0),),
        "{stage} spills registers: {local_load_inst:,.0f} loads from and {local_store_inst:,.0f} stores to local memory",
    ),
    State(
        "one_wave",
        ("k2",),
        (("next_wave_chains", ">=", 1.0), ("waves", "<", 1.0001)),
        "all {grid_ctas:.0f} CTAs of K2 fit one wave; it needs a second one from N*HV = {next_wave_chains:.0f} on this card "
        "({sm_count:.0f} SMs, {ctas_per_sm:.0f} CTA(s) each)",
        "waves",
    ),
    State(
        "second_wave",
        ("k2",),
        (("next_wave_chains", ">=", 1.0), ("waves", ">=", 1.0001)),
        "K2 runs in {waves:.2f} waves at N*HV = {chains:.0f}: with this config it needs a second wave from "
        "N*HV = {next_wave_chains:.0f} on this card ({sm_count:.0f} SMs, {ctas_per_sm:.0f} CTA(s) each)",
        "waves",
    ),
    State(
        "tail",
        ("k1",),
        (("waves", ">=", 1.0001), ("waves", "<", 6.0), ("tail_fill_pct", "<", 60.0), ("tail_fill_pct", ">=", 0.01)),
        "the last of {waves:.2f} waves of K1 fills {tail_fill_pct:.0f} % of the card",
    ),
    State(
        "occupancy",
        BOTH,
        (("theoretical_occupancy_pct", "<", 100.0),),
        "occupancy of {stage} is {theoretical_occupancy_pct:.0f} % ({achieved_occupancy_pct:.0f} % achieved), "
        "held by {limiter}: {registers:.0f} registers a thread, {smem_bytes:,.0f} bytes of shared memory a CTA",
    ),
)
