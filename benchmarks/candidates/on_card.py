"""One candidate beside the shipped kernels on a card: JSON lines on stdout.

    on_card.py check PACKAGE [CASE...]
    on_card.py time PACKAGE SHAPE...

judge.py starts it in a process of its own with a time limit: a candidate may crash, or never end. `check` also runs in
Triton's interpreter, where only the plain Triton kernels are served.
"""

import importlib
import json
import statistics
import sys
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from kdatune_kernels import bench
from kdatune_kernels import compare
from kdatune_kernels import reference
from kdatune_kernels import samples
from kdatune_kernels.spec import parse_shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATE, WINDOW_GATE = 0.003, 0.02
ROUNDS = 15
# Where the shipped kernels miss a gate themselves, a candidate must not be worse by more than this.
SLACK = 1.02
_OPTIONS = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


@dataclass(frozen=True)
class Case:
    """Inputs to be right on. spoilt: the sequence whose q, k, v, g and beta are NaN; only the others are compared."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 4
    value_heads: int | None = None
    kind: samples.Kind = "random"
    initial_state: bool = True
    state_v_first: bool = True
    state_dtype: torch.dtype = torch.float32
    spoilt: int | None = None


CASES = (
    *(Case(kind, (2048,), kind=kind) for kind in samples.KINDS),
    *(Case(f"T {tokens}", (tokens,)) for tokens in (1, 15, 16, 17, 31, 75)),
    Case("ragged", (256, 75, 1, 17, 300, 16, 15)),
    Case("ragged, many heads", (1300, 547, 963, 271, 17), heads=96),
    Case("empty among others", (0, 40, 0, 33, 0)),
    Case("no initial state", (331,), initial_state=False),
    Case("state key-first", (256, 75), state_v_first=False),
    Case("state in bf16", (256, 75), state_dtype=torch.bfloat16),
    Case("value heads", (256, 75), heads=2, value_heads=6),
    Case("NaN beside", (37, 41, 23, 16), spoilt=1),
)


@dataclass(frozen=True)
class Package:
    """A kernel package: the modules that the steps need, and the card as it knows it (None: Triton's interpreter)."""

    compare: Any
    kda: Any
    launch: Any
    space: Any
    spec: Any
    card: Any

    @classmethod
    def of(cls, name: str) -> "Package":
        modules = [importlib.import_module(f"{name}.{m}") for m in ("compare", "kda", "launch", "space", "spec")]
        return cls(*modules, importlib.import_module(f"{name}.gpu").current() if DEVICE == "cuda" else None)

    def default(self, key: str) -> Any:
        return self.space.default_config(self.spec.parse_shape(key), self.card)

    def split(self, key: str) -> Any:
        """The default of a shape as two stages, which can be timed."""
        return self.space.split_default(self.spec.parse_shape(key), self.card)

    def configs(self, key: str) -> dict[str, Any]:
        """The default of two stages and what has none, in every precision, and one config of every K2 tile, whole and cut."""
        shape = self.spec.parse_shape(key)
        k1 = {
            v: self.spec.K1Config(variant=v, num_warps=1, transposed_dots=True, fast_reciprocal=True)
            for v in ("cp_async", "tma")
        }
        tiles = {
            "64": ("cp_async", self.space._ws("64", 4, 1, True, 2)),
            "64r128": ("tma", self.space._ws("64r128", 4, 1, True, 2)),
            "128w8": ("cp_async", self.space._ws("128w8", 4, 1, True, 2)),
            "128c2": ("tma", self.space._ws("128c2", 5, 1, True, 2)),
            "64, 2 out, not deferred": ("cp_async", self.space._ws("64", 4, 2, False, 0)),
            "128c2, 4 out, not deferred": ("cp_async", self.space._ws("128c2", 3, 4, False, 1)),
            "64 by 4 segments": ("cp_async", replace(self.space._ws("64", 4, 1, True, 2), segments=4)),
            "128c2 by 2 segments": ("tma", replace(self.space._ws("128c2", 5, 1, True, 2), segments=2)),
        }
        found = {}
        wholes = {"fused": self.space.FUSED, "pairs": self.space.PAIRS}
        for name, config in {"default": self.split(key), **wholes}.items():
            found |= {name: config, f"{name}, fast": replace(config, precision="fast")}
            found[f"{name}, bf16 tiles"] = replace(config, precision="bf16")
        found |= {name: self.spec.LaunchConfig(k1[variant], k2) for name, (variant, k2) in tiles.items()}
        return {name: c for name, c in found.items() if self.space.config_ok(c, shape, self.card) is None}


def _say(step: str, **found: Any) -> None:
    sys.stdout.write(json.dumps({"step": step, **found}) + "\n")
    sys.stdout.flush()


def _key(case: Case) -> str:
    HV = case.value_heads or case.heads
    rest = "" if len(case.lengths) == 1 else f",varlen=true,longest_tokens={max(case.lengths)}"
    return f"N={len(case.lengths)},H={case.heads},HV={HV},T={sum(case.lengths)}{rest}"


def _sample(case: Case) -> samples.Sample:
    return samples.make(
        case.lengths, case.heads, case.value_heads, kind=case.kind, device=DEVICE, initial_state=case.initial_state,
        state_v_first=case.state_v_first, state_dtype=case.state_dtype,
    )  # fmt: skip


def _kept(case: Case) -> tuple[list[int], list[int]]:
    """Tokens and sequences that are compared."""
    tokens, start = [], 0
    for n, length in enumerate(case.lengths):
        tokens += range(start, start + length) if n != case.spoilt else ()
        start += length
    return tokens, [n for n in range(len(case.lengths)) if n != case.spoilt]


def _spoilt(case: Case, sample: samples.Sample) -> samples.Sample:
    if case.spoilt is None:
        return sample
    start = sum(case.lengths[: case.spoilt])
    part = slice(start, start + case.lengths[case.spoilt])
    dirty = {name: getattr(sample, name).clone() for name in ("q", "k", "v", "g", "beta")}
    for x in dirty.values():
        x[:, part] = float("nan")
    return replace(sample, **dirty)


def _run(package: Any, case: Case, sample: samples.Sample, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ends = None
    if len(case.lengths) != 1:
        ends = torch.tensor([0, *case.lengths], device=DEVICE).cumsum(0)
    o, final = package.kda.chunk_kda(
        **sample.tensors(), **_OPTIONS, cu_seqlens=ends, output_final_state=True, state_v_first=case.state_v_first,
        config=config,
    )  # fmt: skip
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return o, final


def _ratios(case: Case, o: torch.Tensor, final: torch.Tensor, want: compare.Outputs) -> dict[str, float]:
    tokens, sequences = _kept(case)
    o, want_o = o[:, tokens], want[0][:, tokens]
    return {
        "o": reference.error_ratio(o, want_o),
        "state": reference.error_ratio(final[sequences], want[1][sequences]),
        "window": reference.worst_window(o, want_o),
    }


def _fault(found: dict[str, float], shipped: dict[str, float] | None) -> str | None:
    """Why a result is wrong, or None. A NaN is over every gate."""
    for name, gate in (("o", GATE), ("state", GATE), ("window", WINDOW_GATE)):
        allowed = max(gate, shipped[name] * SLACK) if shipped and shipped[name] == shipped[name] else gate
        if not found[name] <= allowed:
            return f"{name} {found[name]:.3g} is over {allowed:.3g}"
    return None


def check(shipped: Package, candidate: Package, cases: tuple[Case, ...] = CASES) -> bool:
    """Every case with every config of the candidate that may run it; False once anything was wrong."""
    right = True
    for case in cases:
        clean = _sample(case)
        want = reference.recurrence(**clean.tensors(), lengths=list(case.lengths), state_v_first=case.state_v_first)
        sample = _spoilt(case, clean)
        usual = shipped.configs(_key(case))
        for name, config in candidate.configs(_key(case)).items():
            mine = usual.get(name, usual["default"])
            base = _ratios(case, *_run(shipped, case, sample, mine), want)
            o, final = _run(candidate, case, sample, config)
            found = _ratios(case, o, final, want)
            why = _fault(found, base)
            again = _run(candidate, case, sample, config)
            tokens, sequences = _kept(case)
            same = torch.equal(o[:, tokens], again[0][:, tokens]) and torch.equal(final[sequences], again[1][sequences])
            if why is None and not same:
                why = "two runs on the same input differ"
            right = right and why is None
            _say("check", case=case.name, config=name, shipped=base, candidate=found, fault=why)
    return right


def _whole(package: Any, key: str, a: compare.Arguments) -> Callable[[], Any]:
    call: Callable[[], Any] = package.compare.ours(package.default(key))(a)
    return call


def _medians(runs: dict[str, Callable[[], float]]) -> dict[str, float]:
    times = dict(zip(runs, bench.interleave(list(runs.values()), ROUNDS), strict=True))
    found = {}
    for name, each in times.items():
        ordered = sorted(each)
        found[f"{name}_us"] = round(statistics.median(each), 2)
        found[f"{name}_p20_us"] = round(ordered[len(each) // 5], 2)
        found[f"{name}_p80_us"] = round(ordered[-1 - len(each) // 5], 2)
    ratios = [a / b for a, b in zip(times["shipped"], times["candidate"], strict=True)]
    return found | {"speedup": round(statistics.median(ratios), 4)}


def time_whole(shipped: Package, candidate: Package, key: str) -> None:
    """Whole calls, each with the default config of its package, after a check of the first heads against fp64."""
    shape = parse_shape(key)
    a, sample = compare.arguments(shape)
    heads = min(4, shape.HV)
    want = compare.expected(sample, heads)
    calls = {name: _whole(package, key, a) for name, package in (("shipped", shipped), ("candidate", candidate))}
    errors = {}
    for name, call in calls.items():
        o, final = call()
        torch.cuda.synchronize()
        mine = o[:, :, :heads].reshape(want[0].shape)
        errors[name] = {
            "o": reference.error_ratio(mine, want[0]),
            "state": reference.error_ratio(final[:, :heads], want[1]),
            "window": reference.worst_window(mine, want[0]),
            "finite": bool(o.isfinite().all() and final.isfinite().all()),
        }
    why = _fault(errors["candidate"], errors["shipped"])
    if why is None and not errors["candidate"]["finite"]:
        why = "a NaN or an infinity"
    configs = {n: p.spec.to_json(p.default(key)) for n, p in (("shipped", shipped), ("candidate", candidate))}
    found: dict[str, Any] = {"shape": key, "stage": "kda", "errors": errors, "fault": why, "configs": configs}
    if why is None:
        found |= _medians({n: bench.capture(lambda _, c=c: c, 1).replay_us for n, c in calls.items()})
    _say("time", **found)


def _workspaces(package: Package, problem: bench.Problem, config: Any) -> list[Any]:
    """A package's own, after its own K1: a candidate may keep other tiles of other types."""
    made = []
    for p in problem.copies:
        made.append(package.launch.workspace(p.tables, p.heads, p.q.shape[2], config.precision, p.q.device))
        package.launch.run_k1(p, made[-1], config.k1)
    return made


def time_stages(shipped: Package, candidate: Package, key: str) -> None:
    """K1 and K2 alone, L2 cold, on one set of tensors, the default of two stages even where the default has none."""
    problem = bench.open_problem(parse_shape(key))
    configs = {"shipped": shipped.split(key), "candidate": candidate.split(key)}
    packages = {"shipped": shipped, "candidate": candidate}
    spaces = {name: _workspaces(packages[name], problem, config) for name, config in configs.items()}
    for stage in ("k1", "k2"):

        def bound(name: str, i: int, stage: str = stage) -> Callable[[], Any]:
            p, ws, (o, ht) = problem.copies[i], spaces[name][i], problem.outputs[i]
            launch, config = packages[name].launch, getattr(configs[name], stage)
            return launch.k1_call(p, ws, config) if stage == "k1" else launch.k2_call(p, ws, o, ht, config)

        runs = {}
        for name in configs:
            runs[name] = bench.capture(lambda i, n=name: bound(n, i), len(problem.copies)).replay_us
        _say("time", shape=key, stage=stage, fault=None, **_medians(runs))


def _steps(what: str, package: str, keys: list[str]) -> Iterator[Callable[[], object]]:
    shipped, candidate = Package.of("kdatune_kernels"), Package.of(package)
    if what == "check":
        cases = tuple(case for case in CASES if not keys or case.name in keys)
        yield lambda: _say("checked", right=check(shipped, candidate, cases))
        return
    yield bench.warm_up
    for step in (time_whole, time_stages):
        for key in keys:
            yield lambda s=step, k=key: s(shipped, candidate, k)
            yield torch.cuda.empty_cache


def main() -> None:
    for step in _steps(sys.argv[1], sys.argv[2], sys.argv[3:]):
        step()


if __name__ == "__main__":
    main()
