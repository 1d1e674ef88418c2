"""Arithmetic with explicit rounding: the compiler cannot fuse it in one kernel and not in another."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.launch import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)

if not _INTERPRETED:
    from triton.language.extra import libdevice


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
