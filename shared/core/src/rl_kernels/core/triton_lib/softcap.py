"""Capped logits: ``y = softcap tanh(rate x)``, and dy/dx for the backward pass.

With ``u = rate x``: for ``|u| < 0.5`` tanh(u) is a polynomial, fitted for the least relative error; elsewhere it is
``(1 - p) / (1 + p)`` with ``p = e^(-2 |u|)``, and the sign of u. Both are within 4e-7 relative of the exact value, on
every GPU and in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma, product

NEAR = tl.constexpr(0.5)
"""Below this ``|u|`` the quotient would cancel."""
TWICE_LOG2E = tl.constexpr(2.8853900817779268)
C3, C5 = tl.constexpr(-0.333331435918808), tl.constexpr(0.13325878977775574)
C7, C9 = tl.constexpr(-0.05304548516869545), tl.constexpr(0.017241476103663445)


@triton.jit
def _number(x):
    """Return a number as an FP32 scalar, which the interpreter would leave a Python float."""
    return tl.full((), x, tl.float32)


@triton.jit
def _polynomial(square):
    value = fma(square, _number(C9), _number(C7))
    value = fma(value, square, _number(C5))
    return fma(value, square, _number(C3))


@triton.jit
def capped(x, softcap, rate):
    """Return ``softcap tanh(rate x)``."""
    u = product(x, _number(rate))
    square = product(u, u)
    near = fma(product(u, square), _polynomial(square), u)
    power = tl.exp2(product(tl.abs(u), _number(-TWICE_LOG2E)))
    far = (1.0 - power) / (1.0 + power)
    return product(tl.where(tl.abs(u) < NEAR, near, tl.where(u < 0, -far, far)), _number(softcap))


@triton.jit
def slope(y, softcap, rate):
    """Return dy/dx, where ``y = softcap tanh(rate x)``."""
    t = y / softcap
    return product(fma(-t, t, _number(1.0)), _number(softcap * rate))
