"""Error ratios of rounding recipes, emulated on the CPU: what a change of precision would bring before a card is at hand.

The two kernels in torch, chunk by chunk, with every rounding of the card switchable. A recipe says which format each tile and
operand has; the fp64 run of the same algebra with none is what it is compared with. Prints Markdown tables, times 1e-3: o /
final state / worst 16-token window / o of the worst single head.

    python benchmarks/emulated_errors.py --tokens 512 --heads 4 --seeds 3
    python benchmarks/emulated_errors.py --tokens 65536 --heads 1 --recipes "fp16,fast,D3 fp16 with INV nearest"
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace

import torch

from kdatune_kernels import reference
from kdatune_kernels import samples

BT = 16
LOG2E = 1.4426950408889634
EPS = 1e-6
# The mean of what truncation to 10 bits takes away, over mantissas spread as those of products are: 2^-11 / (2 ln 2).
TRUNCATED = 0.7213 * 2.0**-11


def _masked(x: torch.Tensor, add: int, bits: int = 13) -> torch.Tensor:
    return ((x.contiguous().view(torch.int32) + add) & -(1 << bits)).view(torch.float32)


def _scaled_fp16(x: torch.Tensor) -> torch.Tensor:
    return (x * 2.0**14).half().float() * 2.0**-14


FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exact": lambda x: x,
    "bf16": lambda x: x.bfloat16().float(),
    "fp16": lambda x: x.half().float(),
    "fp16 scaled": _scaled_fp16,  # INV and M, times 2^14
    "tf32": lambda x: _masked(x, 0),  # what mma.sync makes of fp32 bits: it does not look at the last 13
    "tf32 nearest": lambda x: _masked(x, 0x1000),
    "bf16 pair": lambda x: x.bfloat16().float() + (x - x.bfloat16().float()).bfloat16().float(),
}


@dataclass(frozen=True)
class Recipe:
    """The format of every tile and operand; the defaults are the kernels' default precision, "fp16".

    kd_product, qd_product, ki_product: operands of L and M, "stored" for the tile that K2 reads; product_gain: L and M
    are multiplied by 1 + this; kr "rest of ...": the stored kd + a tile, in that format, of what it lacks.
    """

    kd_product: str = "tf32"
    qd_product: str = "tf32"
    ki_product: str = "tf32"
    product_gain: float = 0.0
    inverse: str = "tf32"
    kd: str = "fp16"
    qd: str = "fp16"
    kr: str = "rest of fp16"
    inv: str = "fp16 scaled"
    m: str = "fp16 scaled"
    state: str = "fp16"
    x: str = "fp16"
    u: str = "fp16"
    out: str = "bf16"


EXACT = Recipe(**{f.name: "exact" for f in fields(Recipe) if f.type in (str, "str")})
BF16_PRODUCTS = {"kd_product": "bf16", "qd_product": "bf16", "ki_product": "bf16"}
BF16_READS = {"kd": "bf16", "qd": "bf16", "state": "bf16"}
BF16_TILES = {"inv": "bf16", "m": "bf16", "x": "bf16", "u": "bf16"}
NEAREST = {"kd_product": "tf32 nearest", "qd_product": "tf32 nearest", "ki_product": "tf32 nearest"}
FP16 = Recipe()
FAST = replace(FP16, **BF16_PRODUCTS, **BF16_READS, kr="fp16")
WHOLE_KR = replace(FP16, kr="fp16")
TF32 = replace(WHOLE_KR, **BF16_READS)
# The three precisions first; the rest was considered on the way from "fast" to "fp16" (docs/decisions/0005) and is in no
# kernel. D1 to D3 are the decision's names.
RECIPES = {
    "fp16": FP16,
    "fast": FAST,
    "bf16": replace(FP16, **BF16_READS, **BF16_TILES, kr="rest of bf16"),
    "D1 tf32 products": TF32,
    "D2a and fp16 reads": WHOLE_KR,
    "D3 fp16 with INV nearest": replace(FP16, inverse="tf32 nearest"),
    "D1 nearest": replace(TF32, **NEAREST),
    "D1 gain": replace(TF32, product_gain=2 * TRUNCATED),
    "D1 stored": replace(TF32, kd_product="stored", qd_product="stored"),
    "D1 and kr by rest": replace(TF32, kr="rest of fp16"),
    "D2a stored": replace(WHOLE_KR, kd_product="stored", qd_product="stored"),
    "fp16 nearest": replace(FP16, **NEAREST),
    "fast and fp16 reads": replace(WHOLE_KR, **BF16_PRODUCTS),
    "fast and ki pair": replace(FAST, ki_product="bf16 pair"),
    "fast and all pairs": replace(FAST, kd_product="bf16 pair", qd_product="bf16 pair", ki_product="bf16 pair"),
    "fast and INV exact": replace(FAST, inverse="exact"),
    "fast and tiles exact": replace(FAST, inv="exact", m="exact", kr="exact"),
    "fast in bf16": replace(FAST, **BF16_TILES, kr="bf16"),
    "D1 in bf16": replace(TF32, **BF16_TILES, kr="bf16"),
}


def _rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    return FORMATS[name](x)


def inverse(L: torch.Tensor, name: str) -> torch.Tensor:
    """(I + L)^-1 by the kernels' block recursion, the operands of its products rounded to a format."""
    row, col = torch.arange(BT)[:, None], torch.arange(BT)[None, :]
    apart, below = row ^ col, row > col
    X = torch.where((apart == 1) & below, -L, torch.eye(BT, dtype=L.dtype).expand_as(L))
    for level in range(1, 4):
        N = torch.where(((apart >> level) == 1) & below, -L, torch.zeros((), dtype=L.dtype))
        Xr = _rounded(X, name)
        X = X + Xr @ _rounded(_rounded(N, name) @ Xr, name)
    return X


def prepare(sample: samples.Sample, recipe: Recipe, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """K1: the tiles of every chunk, [chunks, heads, 16, size]."""
    tokens, heads = sample.v.shape[1:3]
    if tokens % BT or sample.q.shape[2] != heads:
        raise ValueError(f"the emulation takes whole chunks of {BT} tokens and as many value heads as heads")

    def chunks(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).reshape(tokens // BT, BT, heads, -1).transpose(1, 2)

    q, k, v, g = (chunks(x) for x in (sample.q, sample.k, sample.v, sample.g))
    b = torch.sigmoid(chunks(sample.beta))
    kn = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + EPS)
    qn = q * (torch.rsqrt((q * q).sum(-1, keepdim=True) + EPS) * q.shape[-1] ** -0.5)
    gate = torch.exp(sample.A_log.to(dtype))[:, None, None] * (g + sample.dt_bias.to(dtype)[:, None])
    G = (sample.lower_bound * LOG2E * torch.sigmoid(gate)).cumsum(-2)
    grown, decay = torch.exp2(G), torch.exp2(G[..., -1:, :])
    kd, qd, ki = kn * grown, qn * grown, kn / grown
    stored_kd, stored_qd = _rounded(kd, recipe.kd), _rounded(qd, recipe.qd)
    left = stored_kd if recipe.kd_product == "stored" else _rounded(kd, recipe.kd_product)
    query = stored_qd if recipe.qd_product == "stored" else _rounded(qd, recipe.qd_product)
    right = _rounded(ki, recipe.ki_product).transpose(-1, -2) * (1.0 + recipe.product_gain)
    L, M = (left @ right).tril(-1) * b, (query @ right).tril()
    X = inverse(L, recipe.inverse) * b.transpose(-1, -2)
    kr = ki * decay
    of_rest = recipe.kr.removeprefix("rest of ")
    kr = _rounded(kr, recipe.kr) if of_rest == recipe.kr else stored_kd + _rounded(kr - stored_kd, of_rest)
    tiles = {"kd": stored_kd, "qd": stored_qd, "kr": kr, "decay": decay, "v": v}
    return tiles | {"inv": _rounded(X, recipe.inv), "m": _rounded(M, recipe.m)}


def run(
    sample: samples.Sample, recipe: Recipe, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [1, T, heads, V] and the final state [1, heads, K, V] of one sequence with an initial state, key-first."""
    if len(sample.lengths) != 1 or sample.initial_state is None:
        raise ValueError("the emulation takes one sequence with an initial state")
    tiles = prepare(sample, recipe, dtype)
    S = sample.initial_state[0].to(dtype)
    o = torch.empty_like(tiles["v"])
    for c in range(len(o)):
        kd, qd, kr, decay, v, inv, m = (tiles[name][c] for name in ("kd", "qd", "kr", "decay", "v", "inv", "m"))
        Sb = _rounded(S, recipe.state)
        u = _rounded(inv @ _rounded(v - kd @ Sb, recipe.x), recipe.u)
        o[c] = qd @ Sb + m @ u
        S = S * decay.transpose(-1, -2) + kr.transpose(-1, -2) @ u
    return _rounded(o, recipe.out).transpose(1, 2).reshape(sample.v.shape), S[None]


def errors(sample: samples.Sample, recipes: dict[str, Recipe]) -> dict[str, list[float]]:
    """By recipe: error ratios of o, of the final state, of the worst window, and of o of the worst single head."""
    want_o, want_state = run(sample, EXACT, torch.float64)
    found = {}
    for name, recipe in recipes.items():
        o, state = run(sample, recipe)
        heads = [reference.error_ratio(o[:, :, h], want_o[:, :, h]) for h in range(o.shape[2])]
        found[name] = [
            reference.error_ratio(o, want_o),
            reference.error_ratio(state, want_state),
            reference.worst_window(o, want_o),
            max(heads, key=lambda x: float("inf") if x != x else x),
        ]
    return found


def table(
    tokens: int, heads: int, seeds: int, recipes: dict[str, Recipe], size: int = 128, value_scale: float = 1.0
) -> list[str]:
    """The lines of one table: a kind a row, a recipe a column; the worst of all seeds."""
    lines = [f"| T = {tokens}, H = {heads}, {seeds} seeds | {' | '.join(recipes)} |", "|---|" + "---|" * len(recipes)]
    for kind in samples.KINDS:
        worst: dict[str, list[float]] = {name: [0.0] * 4 for name in recipes}
        for seed in range(seeds):
            sample = samples.make((tokens,), heads, kind=kind, seed=seed, size=size)
            if value_scale != 1.0 and sample.initial_state is not None:
                v = (sample.v.float() * value_scale).to(sample.v.dtype)
                sample = replace(sample, v=v, initial_state=sample.initial_state * value_scale)
            for name, found in errors(sample, recipes).items():
                worst[name] = [b if b != b or b > a else a for a, b in zip(worst[name], found, strict=True)]
        cells = (" / ".join(f"{x * 1e3:.3g}" for x in worst[name]) for name in recipes)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--key-size", type=int, choices=(64, 128), default=128, help="K, and V with it")
    parser.add_argument("--value-scale", type=float, default=1.0, help="v and the initial state times this")
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=list(RECIPES), help=", ".join(RECIPES))
    options = parser.parse_args()
    if unknown := [name for name in options.recipes if name not in RECIPES]:
        parser.error(f"no recipe {', '.join(unknown)}: there are {', '.join(RECIPES)}")
    torch.set_grad_enabled(False)
    recipes = {name: RECIPES[name] for name in options.recipes}
    lines = table(options.tokens, options.heads, options.seeds, recipes, options.key_size, options.value_scale)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
