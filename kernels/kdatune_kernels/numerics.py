"""Small device functions that the plain Triton kernels share, and the constants all kernels agree on.

Triton's interpreter (3.6.0 and 3.9.0) multiplies the raw bits of bf16 in tl.dot and truncates fp32 to bf16; here both are
done as the hardware does them, so that tests on the CPU see the rounding of the card.
"""

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
EPS = tl.constexpr(1e-6)
"""Inside the root of the L2 norm: x * rsqrt(sum x^2 + EPS)."""

AI_SCALE = tl.constexpr(16384.0)
"""fp16 tiles of INV and M are stored times 2^14: both are at most 1, and unscaled their small entries would flush (a test
with tiny key channels had a window error of 0.05 unscaled, 0.002 scaled)."""

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
_INTERPRET = tl.constexpr(INTERPRET)


@triton.jit
def narrow(x, TILE: tl.constexpr):
    """fp32 -> TILE (bf16 or fp16), to nearest even."""
    if _INTERPRET:
        if TILE == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits = bits + 0x7FFF + ((bits >> 16) & 1)
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(TILE)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation; a and b are 16-bit tiles."""
    if _INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def dot32(a, b):
    """a @ b of fp32 tiles on the tf32 tensor cores, which do not look at the last 13 bits of an operand."""
    if _INTERPRET:
        a = (a.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        b = (b.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32")


@triton.jit
def unit_lower_inverse(L, row, col):
    """(I + L)^-1 for a strictly lower 16 x 16 L, by 2x2 block recursion X <- X - X N X.

    Entries stay bounded; the Neumann product with the same number of dots gave NaN on identical keys with weak decay.
    """
    apart = row[:, None] ^ col[None, :]
    below = row[:, None] > col[None, :]
    X = tl.where((apart == 1) & below, -L, tl.where(apart == 0, 1.0, 0.0))
    for level in tl.static_range(1, 4):
        N = tl.where(((apart >> level) == 1) & below, -L, 0.0)
        X += dot32(X, dot32(N, X))
    return X
