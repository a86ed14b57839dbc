"""Offline compile: what a config costs in registers, spills and shared memory, with no GPU at hand.

The same source, constants and specialisation as a launch of `launch.k1_call` / `launch.k2_call` with packed bf16 inputs.
Source: `ptxas -v` for registers and spills; occupancy by the rules of the CUDA occupancy calculator.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kdatune_kernels.errors import MeasurementError
from kdatune_kernels.launch import ensure_compile_cache
from kdatune_kernels.launch import staged_state
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import PAIRS_K2
from kdatune_kernels.spec import CHUNK_TOKENS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import Precision

ensure_compile_cache()

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Resources:
    """What one CTA of a compiled config takes. wgmma_warnings: ptxas' C7510..C7517 lines; must be empty."""

    registers: int
    spill_bytes: int
    smem_bytes: int
    num_warps: int
    wgmma_warnings: tuple[str, ...]

    def ctas_per_sm(self, gpu: Gpu) -> int:
        """How many CTAs an SM of the card holds at once."""
        per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = gpu.registers_per_sm // per_warp // self.num_warps
        by_smem = (gpu.smem_per_block_bytes + 1024) // (self.smem_bytes + 1024)
        return min(by_registers, by_smem, gpu.warps_per_sm // self.num_warps, 32)

    def occupancy_pct(self, gpu: Gpu) -> float:
        """Theoretical occupancy: resident warps over the warps an SM can hold."""
        return 100.0 * self.ctas_per_sm(gpu) * self.num_warps / gpu.warps_per_sm


def compile_config(
    config: K1Config | K2Config,
    *,
    compute_capability: str = "9.0",
    precision: Precision = "fp16",
    group: int = 1,
    initial_state: bool = True,
    final_state: bool = True,
    state_v_first: bool = False,
    state_bf16: bool = False,
    K: int = 128,
    V: int = 128,
    dtype: str = "bf16",
) -> Resources:
    """Compile one config for a head size and an input dtype and read its resources; the Gluon variants are K = 128, bf16.

    Of "pairs" that is its K2; its K1 is `compile_pairs_k1`'s.

    Raises:
        MeasurementError: outcome "compile_error", with the compiler's last line.
    """
    if isinstance(config, K1Config):
        fn, types, constants, options = _k1_source(config, precision, group)
        types |= {name: f"*{dtype}" for name in ("q", "k", "g", "beta") if types[name] == "*bf16"}
    else:
        flags = {
            "HAS_H0": initial_state,
            "STORE_HT": final_state,
            "V_FIRST": state_v_first,
            "SEGMENTED": config.segments > 1,
        }
        # a segment starts from what pass B wrote, which is fp32
        fn, types, constants, options = _k2_source(config, precision, flags, state_bf16 and config.segments == 1)
        types |= {name: f"*{dtype}" for name in ("v", "o") if name in types}
        if "V" in constants:  # the fused kernel has its sizes written in
            constants["V"] = V
    if "K" in constants:
        constants["K"] = K
    return _compiled(fn, types, constants, options, compute_capability)


def compile_pairs_k1(*, group: int = 1) -> Resources:
    """The K1 that "pairs" launches before the kernel of `compile_config`, for its one compute capability and precision.

    Raises:
        MeasurementError: outcome "compile_error", with the compiler's last line.
    """
    from kdatune_kernels import pairs_sm90
    from kdatune_kernels.launch import _plain_layout

    descriptor = f"tensordesc<bf16[{PAIRS.k2.step_tokens}, 128],{_plain_layout(0)!r}>"
    types = {**_K1_TYPES, **dict.fromkeys(("q", "k", "g", "KQ", "KG"), descriptor), "AI": "*fp16"}
    options = {"num_warps": 2, "maxnreg": pairs_sm90.MAXNREG}
    return _compiled(pairs_sm90.prepare_pairs, types, {"GROUP": group}, options, "9.0")


def compile_passes(
    config: K2Config,
    *,
    compute_capability: str = "9.0",
    precision: Precision = "fp16",
    initial_state: bool = True,
    state_v_first: bool = False,
    state_bf16: bool = False,
) -> tuple[Resources, Resources]:
    """Passes A and B that a K2 config by segments runs before the kernel of `compile_config`.

    Raises:
        MeasurementError: outcome "compile_error", with the compiler's last line.
    """
    types, constants, options = _pass_sources(config, precision)
    state = {"HAS_H0": initial_state, "V_FIRST": state_v_first}
    b_types = {**types, "h0": "*bf16" if state_bf16 else "*fp32"}
    if config.variant == "triton":
        from kdatune_kernels import segments

        sizes = {"K": 128, "V": 128, "BT": CHUNK_TOKENS}
        a = _compiled(segments.maps_kernel, types, sizes | constants, options, compute_capability)
        b_constants = sizes | state | {"BV": segments.COLUMNS}
        return a, _compiled(segments.combine_kernel, b_types, b_constants, {"num_warps": 8}, compute_capability)
    from kdatune_kernels import segments_sm90

    a = _compiled(segments_sm90.maps_sm90, types, {"K": 128, "V": 128} | constants, options, compute_capability)
    b_types["maps"] = "*i32"
    b_constants = {"K": 128, "V": 128, "num_warps": 8} | state
    return a, _compiled(segments_sm90.combine_sm90, b_types, b_constants, {"num_warps": 8}, compute_capability)


def compile_recurrent(
    K: int,
    V: int,
    *,
    compute_capability: str = "9.0",
    dtype: str = "bf16",
    state_dtype: str = "fp32",
    state_v_first: bool = False,
    pool: bool = False,
    slots_each_token: bool = False,
    softplus: bool = False,
) -> Resources:
    """Compile the decode step as `recurrent.recurrent_kda` launches it and read its resources.

    Raises:
        MeasurementError: outcome "compile_error", with the compiler's last line.
    """
    from kdatune_kernels import recurrent
    from kdatune_kernels import recurrent_step

    fn = recurrent_step.recurrent_kernel
    block_v, warps = recurrent.PROGRAM[K]
    types: dict[str, str] = dict.fromkeys(fn.arg_names, "i32")
    types |= dict.fromkeys(("q", "k", "v", "g", "beta", "o"), f"*{dtype}")
    types |= dict.fromkeys(("A_log", "dt_bias"), "*fp32") | dict.fromkeys(("cu_seqlens", "slots", "accepted"), "*i32")
    types |= dict.fromkeys(("h0", "ht"), f"*{state_dtype}") | dict.fromkeys(("lower_bound", "scale"), "fp32")
    constants = {
        "K": K, "V": V, "BV": block_v, "GROUP": 1, "VARLEN": pool, "HAS_H0": True, "STORE_HT": True,
        "V_FIRST": state_v_first, "SLOTTED": pool, "IN_PLACE": pool, "EACH_TOKEN": slots_each_token,
        "ACCEPTED": slots_each_token, "L2NORM": True, "SIGMOID": True, "NEG_EIGVAL": False,
        "GATE": recurrent_step.SOFTPLUS if softplus else recurrent_step.BOUNDED,
    }  # fmt: skip
    return _compiled(fn, types, constants, {"num_warps": warps}, compute_capability)


def _compiled(
    fn: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any], compute_capability: str
) -> Resources:
    signature = {name: "constexpr" if name in constants else types[name] for name in fn.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(fn.arg_names)
        if signature[name].startswith("*") or (name.endswith("_stride_t") and not name.startswith("beta"))
    }
    arch = int(compute_capability.replace(".", ""))
    try:
        source = _source(fn, signature, constants, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # the compiler raises what it likes; a config that does not compile is data
        raise MeasurementError(
            "compile_error", str(error).strip().splitlines()[-1][:200] if str(error) else repr(error)
        ) from error
    return _resources(built, "a" if arch >= 90 else "")


def _source(fn: Any, signature: dict[str, str], constants: dict[str, Any], aligned: dict[Any, Any]) -> Any:
    if not fn.is_gluon():
        return ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)


_K1_TYPES = {
    **dict.fromkeys(("q", "k", "g", "beta"), "*bf16"),
    **dict.fromkeys(("A_log", "dt_bias", "DEC"), "*fp32"),
    **dict.fromkeys(("chunk_token", "chunk_length"), "*i32"),
    **dict.fromkeys(("q_stride_t", "k_stride_t", "g_stride_t", "beta_stride_t", "beta_stride_h", "NC", "H"), "i32"),
    **dict.fromkeys(("lower_bound", "scale"), "fp32"),
}


def _tile_types(precision: Precision) -> tuple[str, str]:
    """Of [kd; qd], and of kr, INV and M."""
    return "fp16" if precision == "fp16" else "bf16", "bf16" if precision == "bf16" else "fp16"


def _k1_source(
    config: K1Config, precision: Precision, group: int
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]:
    kq, tile = _tile_types(precision)
    types = {**_K1_TYPES, "KQ": f"*{kq}", "KG": f"*{tile}", "AI": f"*{tile}"}
    options: dict[str, Any] = {"num_warps": config.num_warps}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    constants: dict[str, Any] = {"GROUP": group, "HEAD_FAST": config.head_fast}
    constants |= _recipe(precision)
    if config.variant == "triton":
        from kdatune_kernels.prepare import prepare_kernel

        constants |= {"K": 128, "BT": CHUNK_TOKENS, "CHUNKS": config.chunks_per_program}
        return prepare_kernel, types, constants, options
    from kdatune_kernels import prepare_sm90

    constants |= {"TRANSPOSED": config.transposed_dots, "FAST_RCP": config.fast_reciprocal}
    if config.variant == "cp_async":
        constants["EVICT_LAST"] = config.load_policy == "evict_last"
        return prepare_sm90.prepare_cp_async, types, constants, options
    from kdatune_kernels.launch import _plain_layout

    descriptor = f"tensordesc<bf16[16, 128],{_plain_layout(config.swizzle_bytes)!r}>"
    types |= dict.fromkeys(("q", "k", "g", "KQ", "KG"), descriptor)
    constants["HALVES"] = config.gate_halves
    return prepare_sm90.prepare_tma, types, constants, options


def _recipe(precision: Precision) -> dict[str, bool]:
    return {"HALF": precision != "bf16", "EXACT": precision != "fast"}


def _k2_source(
    config: K2Config, precision: Precision, flags: dict[str, Any], state_bf16: bool
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]:
    kq, tile = _tile_types(precision)
    state = {"h0": "*bf16" if state_bf16 else "*fp32", "ht": "*fp32"}
    if config.fused:
        return _fused_source(precision, flags, state)
    step = config.step_tokens
    if config == PAIRS.k2:
        config = PAIRS_K2
    constants: dict[str, Any] = {"K": 128, "V": 128, "BV": config.block_v, **flags}
    if config.variant == "triton":
        from kdatune_kernels.recurrence import recurrence_kernel

        types = {
            "KQ": f"*{kq}",
            "KG": f"*{tile}",
            "AI": f"*{tile}",
            "DEC": "*fp32",
            "v": "*bf16",
            "o": "*bf16",
            **state,
        }
        types |= {"spans": "*i32", "v_stride_t": "i32", "NC": "i32", "H": "i32", "segments": "i32"}
        constants |= {"BT": CHUNK_TOKENS, "HALF": precision != "bf16"}
        constants |= {"TRANSPOSED": config.transposed, "STAGES": config.stages_in}
        return recurrence_kernel, types, constants, {"num_warps": config.num_warps}
    from kdatune_kernels.recurrence_sm90 import recurrence_ws

    types = {
        "kq_d": _desc(kq, 2 * step, 128),
        "kr_d": _desc(tile, step, 128),
        "ai_d": _desc(tile, 2 * step, step),
        "dec_d": _desc("fp32", 1, 128),
        "v_d": _desc("bf16", step, config.block_v),
        "o_d": _desc("bf16", step, config.block_v),
        "o_ptr": "*bf16",
        "h0_ptr": state["h0"],
        "ht_ptr": "*fp32",
        "spans": "*i32",
        "NC": "i32",
        "H": "i32",
        "segments": "i32",
    }
    constants |= {
        "STAGES_IN": config.stages_in,
        "STAGES_OUT": config.stages_out,
        "CONSUMERS": config.consumers,
        "LOAD_WARPS": config.load_warps,
        "STORE_WARPS": config.store_warps,
        "CONSUMER_REGS": config.consumer_regs,
        "LOAD_REGS": config.load_regs,
        "STORE_REGS": config.store_regs,
        "DEFER": config.defer_store,
        "DECAY_AT": config.decay_position,
        "num_warps": config.num_warps,
    }
    options: dict[str, Any] = {"num_warps": config.num_warps}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    return recurrence_ws, types, constants, options


def _fused_source(
    precision: Precision, flags: dict[str, Any], state: dict[str, str]
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]:
    import torch

    from kdatune_kernels import fused_sm90

    kind = torch.float32 if state["h0"] == "*fp32" else torch.bfloat16
    staged = flags["HAS_H0"] and staged_state(kind, flags["V_FIRST"])
    types = {
        **dict.fromkeys(("q_d", "k_d"), _desc("bf16", 16, 64)),
        **dict.fromkeys(("g_d", "v_d", "o_d"), _desc("bf16", 16, 128)),
        "h0_d": _desc("fp32", 128, 32) if staged else _desc("bf16", 16, 128),
        **dict.fromkeys(("o_ptr", "beta"), "*bf16"),
        **dict.fromkeys(("A_log", "dt_bias"), "*fp32"),
        "h0_ptr": state["h0"],
        "ht_ptr": state["ht"],
        "spans": "*i32",
        **dict.fromkeys(("beta_stride_t", "beta_stride_h", "H", "chains", "ctas"), "i32"),
        **dict.fromkeys(("bound2", "scale"), "fp32"),
    }
    constants: dict[str, Any] = {name: flags[name] for name in ("HAS_H0", "STORE_HT", "V_FIRST")}
    constants |= {"GROUP": 1, "STAGED": staged} | _recipe(precision)
    return fused_sm90.kda_fused, types, constants, {"num_warps": 4, "maxnreg": fused_sm90.MAXNREG}


def _pass_sources(config: K2Config, precision: Precision) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """Argument types of both passes, and the constants and options of pass A."""
    from kdatune_kernels import segments

    kq, tile = _tile_types(precision)
    types = dict.fromkeys(("diagonals", "ends", "starts", "DEC"), "*fp32")
    types |= dict.fromkeys(("spans", "segment_spans"), "*i32")
    types |= dict.fromkeys(("v_stride_t", "NC", "H", "segments"), "i32")
    types |= {"maps": "*fp16", "KQ": f"*{kq}", "KG": f"*{tile}", "AI": f"*{tile}", "v": "*bf16"}
    if config.variant == "triton":
        constants = {"BR": segments.ROWS, "HALF": precision != "bf16", "STAGES": segments.STAGES}
        return types, constants, {"num_warps": 4}
    types |= {
        "kd_d": _desc(kq, 16, 128),
        "kr_d": _desc(tile, 16, 128),
        "inv_d": _desc(tile, 16, 16),
        "dec_d": _desc("fp32", 1, 128),
        "v_d": _desc("bf16", 16, 128),
    }
    return types, {"STAGES": segments.STAGES_SM90, "num_warps": 4}, {"num_warps": 4, "maxnreg": segments.REGISTERS_SM90}


def _desc(kind: str, rows: int, columns: int) -> str:
    """The type of a TMA descriptor; one row: of decays."""
    import torch

    from kdatune_kernels.launch import _decay_layout
    from kdatune_kernels.launch import _tile_layout

    layout = _decay_layout()
    if rows > 1:
        layout = _tile_layout(rows, columns, {"fp16": torch.float16, "fp32": torch.float32}.get(kind, torch.bfloat16))
    return f"tensordesc<{kind}[{rows}, {columns}],{layout!r}>"


def _resources(built: Any, suffix: str) -> Resources:
    arch = f"sm_{built.metadata.target.arch}{suffix}"
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(built.asm["ptx"])
        log = ""
        for tool in ("ptxas", "ptxas-blackwell"):  # newer Triton writes PTX that only its second ptxas reads
            if not (_TOOLS / tool).exists():
                continue
            run = subprocess.run(
                [str(_TOOLS / tool), "-v", f"--gpu-name={arch}", str(ptx), "-o", str(Path(folder, "kernel.o"))],
                capture_output=True,
                text=True,
                check=False,
            )
            log = run.stdout + run.stderr
            if run.returncode == 0:
                break
    used = re.search(r"Used (\d+) registers", log)
    if used is None:
        raise MeasurementError("compile_error", f"ptxas gave no register count: {log.strip()[-160:]}")
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    warnings = tuple(sorted(set(re.findall(r"C75\d\d[^\n]*|Potential Performance Loss[^\n]*", log))))
    return Resources(int(used.group(1)), spills, built.metadata.shared, built.metadata.num_warps, warnings)
