"""Arithmetic with explicit rounding: the compiler cannot fuse it in one kernel and not in another."""

from __future__ import annotations

from contextlib import suppress

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.launch import INTERPRETED as _INTERPRETED

_KNOWS_TARGET = False
if not _INTERPRETED:
    # A stand-in for Triton, which launches nothing, has neither.
    with suppress(ImportError):
        from triton.language.extra import libdevice
        from triton.language.target_info import cuda_capability_geq

        _KNOWS_TARGET = True

INTERPRETED = tl.constexpr(_INTERPRETED)
KNOWS_TARGET = tl.constexpr(_KNOWS_TARGET)
"""Whether a kernel can ask which GPU it is compiled for; in Triton 3.4 it cannot."""


@triton.jit
def fma(x, y, z):
    """Return ``x y + z`` in FP32, rounded once; Triton's own fma rounds twice in the interpreter."""
    if INTERPRETED:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def product(x, y):
    """Return ``x y``, rounded before anything is added to it: a compiler may fuse a plain product with an addition."""
    return fma(x, y, tl.zeros_like(x))


@triton.jit
def sigmoid_parts(x):
    """Return ``1 + exp(-x)``, with the exponential of CUDA's library: ``x`` divided by it is silu."""
    if INTERPRETED:
        return 1.0 + tl.exp(-x)
    else:
        return 1.0 + libdevice.exp(-x)


PAIR = tl.constexpr(
    "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"
)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Return FP32 numbers rounded to a dtype, as FP32: two at a time if BF16, which is much faster than one by one."""
    if not KNOWS_TARGET:
        return x.to(dtype).to(tl.float32)
    elif dtype == tl.bfloat16 and cuda_capability_geq(8):
        return tl.inline_asm_elementwise(PAIR, "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return x.to(dtype).to(tl.float32)
