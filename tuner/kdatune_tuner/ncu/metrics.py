"""THE table of counters: what each is called here and by Nsight Compute, its unit and its meaning.

Everything that is collected, read, stored, explained or shown goes through `METRICS`; no other module names a counter of
Nsight Compute. The set is fixed and small, so that a launch needs few replay passes. Counter names and the absence of more
stall reasons: the metric list of GH100 in Nsight Compute 2025.3.
"""

from dataclasses import dataclass
from typing import Any
from typing import Literal

Counters = dict[str, float]
"""Values by our field names. A counter that was not measured is not there; it is never 0."""


Scales = tuple[tuple[str, float], ...]
Combine = Literal["sum", "time", "active", "issued", "longest"]


@dataclass(frozen=True)
class Metric:
    """One counter.

    field: our name. Times of a replay begin with replay_: they are taken under the profiler and are never benchmark times.
    unit: of the value under that name.
    counter: what Nsight Compute calls it.
    scales: the units that ncu may give it in, each with the factor to ours.
    combine: how the kernels of a stage that launches several (a segmented K2) make one value: their "sum", their mean
        weighted by "time" (cycles), by "active" cycles or by "issued" instructions, or the value of the "longest" kernel.
    """

    field: str
    unit: str
    counter: str
    scales: Scales
    combine: Combine
    meaning: str

    @property
    def source(self) -> str:
        """Where the value comes from, for people."""
        kind = "launch attribute" if self.counter.startswith("launch__") else "hardware counter"
        return f"ncu {self.counter} ({kind})"


# ncu's units (the texts of 2025.3 first, then those of other releases) and the factor from each to ours.
_PCT = (("%", 1.0),)
_BYTES = (("byte", 1.0), ("byte/block", 1.0))
_COUNT = tuple((unit, 1.0) for unit in ("", "inst", "cycle", "register/thread", "thread"))
_CTAS = (("block", 1.0), ("", 1.0))
_RATIO = (("inst", 1.0), ("warp", 1.0), ("", 1.0))
_CLOCK = (("hz", 1e-6), ("cycle/second", 1e-6), ("cycle/nsecond", 1e3))
_TIME = (("ns", 1e-3), ("nsecond", 1e-3))

# Reason in ncu's name, our name, what a warp waits for.
_STALLS = (
    ("barrier", "barrier", "the other warps of the CTA at a barrier"),
    ("branch_resolving", "branch_resolving", "a branch target to be computed"),
    ("dispatch_stall", "dispatch", "the dispatcher, which holds the warp back"),
    ("drain", "drain", "stores to drain after exit"),
    ("gmma", "gmma", "the tensor core's asynchronous matrix product (wgmma)"),
    ("imc_miss", "constant_miss", "the constant cache"),
    ("lg_throttle", "lg_throttle", "room in the queue of global and local memory"),
    ("long_scoreboard", "long_scoreboard", "data from L2 or device memory"),
    ("math_pipe_throttle", "math_pipe_throttle", "a busy arithmetic pipe"),
    ("membar", "membar", "a memory barrier"),
    ("mio_throttle", "mio_throttle", "room in the queue of shared memory and special functions"),
    ("misc", "misc", "something else"),
    ("no_instruction", "no_instruction", "the next instruction to be fetched"),
    ("not_selected", "not_selected", "its turn: it is ready, another warp was picked"),
    ("selected", "selected", "nothing: it issues (1 by definition)"),
    ("short_scoreboard", "short_scoreboard", "data from shared memory or a special function"),
    ("sleeping", "sleeping", "a sleep it asked for"),
    ("tex_throttle", "tex_throttle", "room in the queue of the texture unit"),
    ("wait", "wait", "a fixed latency of its own last instruction"),
)

STALL_FIELDS = {f"{ours}_stall_per_issue": waits_for for _, ours, waits_for in _STALLS if ours != "selected"}
"""Fields of stall reasons and what a stalled warp waits for."""


# field, unit, ncu's name, ncu's units, how kernels combine, meaning
# fmt: off
_ROWS: tuple[tuple[str, str, str, Scales, Combine, str], ...] = (
    ("issue_active_pct", "%", "smsp__issue_active.avg.pct_of_peak_sustained_active", _PCT, "active",
     "Active cycles of a warp scheduler in which it issued an instruction."),
    ("executed_inst", "inst", "smsp__inst_executed.sum", _COUNT, "sum",
     "Warp instructions executed by the whole launch."),
    ("issued_inst", "inst", "smsp__inst_issued.sum", _COUNT, "sum",
     "Warp instructions issued by the whole launch."),
    ("latency_per_issue", "warps/issue", "smsp__average_warps_active_per_issue_active.ratio", _RATIO, "issued",
     "Cycles between two instructions of a warp (resident warps of a scheduler per issue); the stalls add up to it."),
    ("active_warps", "warps", "smsp__warps_active.avg.per_cycle_active", _RATIO, "active",
     "Resident warps of a scheduler in an active cycle."),
    *((f"{ours}_stall_per_issue", "warps/issue", f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio",
       _RATIO, "issued", f"Warps of a scheduler that wait for {waits_for}, on average when it issues an instruction.")
      for reason, ours, waits_for in _STALLS),
    ("sm_active_pct", "%", "sm__cycles_active.avg.pct_of_peak_sustained_elapsed", _PCT, "time",
     "Cycles of the launch in which an SM held at least one warp, over all SMs: below 100 some SMs idle."),
    ("replay_cycles", "cycles", "smsp__cycles_elapsed.max", _COUNT, "sum",
     "SM clock cycles from start to end of a replayed launch: free of the clock's speed."),
    ("replay_duration_us", "us", "gpu__time_duration.sum", _TIME, "sum",
     "Duration of a replayed launch, caches flushed, clocks as they were. Not a benchmark time."),
    ("replay_sm_clock_mhz", "MHz", "gpc__cycles_elapsed.avg.per_second", _CLOCK, "time",
     "SM clock during the replay; the profiler does not change clocks."),
    ("registers", "registers/thread", "launch__registers_per_thread", _COUNT, "longest",
     "Registers of a thread."),
    ("grid_ctas", "CTAs", "launch__grid_size", _COUNT, "longest",
     "CTAs of the launch."),
    ("cta_threads", "threads", "launch__block_size", _COUNT, "longest",
     "Threads of a CTA."),
    ("smem_bytes", "bytes", "launch__shared_mem_per_block", _BYTES, "longest",
     "Shared memory of a CTA: static, dynamic and the driver's own."),
    ("smem_dynamic_bytes", "bytes", "launch__shared_mem_per_block_dynamic", _BYTES, "longest",
     "Dynamic shared memory of a CTA."),
    ("waves", "waves", "launch__waves_per_multiprocessor", _COUNT, "longest",
     "CTAs over what all SMs hold at once; the fraction is the tail wave."),
    ("limit_registers_ctas", "CTAs/SM", "launch__occupancy_limit_registers", _CTAS, "longest",
     "CTAs whose registers fit an SM."),
    ("limit_smem_ctas", "CTAs/SM", "launch__occupancy_limit_shared_mem", _CTAS, "longest",
     "CTAs whose shared memory fits an SM."),
    ("limit_warps_ctas", "CTAs/SM", "launch__occupancy_limit_warps", _CTAS, "longest",
     "CTAs whose warps fit an SM."),
    ("limit_barriers_ctas", "CTAs/SM", "launch__occupancy_limit_barriers", _CTAS, "longest",
     "CTAs whose barriers fit an SM."),
    ("limit_blocks_ctas", "CTAs/SM", "launch__occupancy_limit_blocks", _CTAS, "longest",
     "CTAs an SM may hold at all."),
    ("theoretical_occupancy_pct", "%", "sm__maximum_warps_per_active_cycle_pct", _PCT, "longest",
     "Warps an SM can hold of this launch over the warps it can hold at all."),
    ("achieved_occupancy_pct", "%", "sm__warps_active.avg.pct_of_peak_sustained_active", _PCT, "active",
     "Resident warps of an SM over the warps it can hold, in its active cycles."),
    ("dram_read_bytes", "bytes", "dram__bytes_read.sum", _BYTES, "sum",
     "Bytes read from device memory."),
    ("dram_write_bytes", "bytes", "dram__bytes_write.sum", _BYTES, "sum",
     "Bytes written to device memory."),
    ("dram_throughput_pct", "%", "dram__throughput.avg.pct_of_peak_sustained_elapsed", _PCT, "time",
     "Device memory traffic over its peak, over the whole launch."),
    ("l2_bytes", "bytes", "lts__t_bytes.sum", _BYTES, "sum",
     "Bytes that passed L2."),
    ("l2_throughput_pct", "%", "lts__t_sectors.avg.pct_of_peak_sustained_elapsed", _PCT, "time",
     "L2 sector look-ups over their peak, over the whole launch."),
    ("local_load_inst", "inst", "smsp__inst_executed_op_local_ld.sum", _COUNT, "sum",
     "Loads from local memory: spilled registers that are read back."),
    ("local_store_inst", "inst", "smsp__inst_executed_op_local_st.sum", _COUNT, "sum",
     "Stores to local memory: spilled registers."),
    ("tensor_pipe_active_pct", "%", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", _PCT, "active",
     "Active cycles in which the tensor pipe worked."),
)
# fmt: on

METRICS = tuple(Metric(*row) for row in _ROWS)
BY_FIELD = {metric.field: metric for metric in METRICS}

OCCUPANCY_LIMITS = {
    "limit_registers_ctas": "registers",
    "limit_smem_ctas": "shared memory",
    "limit_warps_ctas": "warps",
    "limit_barriers_ctas": "barriers",
    "limit_blocks_ctas": "CTAs an SM may hold",
}


def stored_form(counters: Counters) -> dict[str, dict[str, Any]]:
    """Counters as the store keeps and the service serves them: {field: {"value": number, "unit": text}}."""
    return {field: {"value": value, "unit": BY_FIELD[field].unit} for field, value in counters.items()}


def from_stored(stored: dict[str, dict[str, Any]]) -> Counters:
    """Counters of a stored profile; a field that this version does not know, or knows in another unit, is left out."""
    return {
        field: float(entry["value"])
        for field, entry in stored.items()
        if field in BY_FIELD and entry.get("unit") == BY_FIELD[field].unit
    }


def ctas_per_sm(counters: Counters) -> float | None:
    """CTAs of the launch that an SM holds at once; None where a limit was not measured."""
    limits = [counters.get(field) for field in OCCUPANCY_LIMITS]
    known = [limit for limit in limits if limit is not None and limit > 0]
    return min(known) if "limit_registers_ctas" in counters and "limit_smem_ctas" in counters and known else None


def limiters(counters: Counters) -> list[str]:
    """What holds the occupancy where it is: the resources whose limit is the least."""
    least = ctas_per_sm(counters)
    return [] if least is None else [name for f, name in OCCUPANCY_LIMITS.items() if counters.get(f) == least]


def table() -> list[dict[str, str]]:
    """The table as data, for documents and pages: field, unit, meaning, source."""
    return [{"field": m.field, "unit": m.unit, "meaning": m.meaning, "source": m.source} for m in METRICS]
