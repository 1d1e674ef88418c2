"""The steps of experts between their products, in Triton: activation, its gradient, sums over slots, bias gradients.

Order of the sums, which is the contract: the gradient of a route's weight adds columns WIDTH at a time in ascending
order, element by element, then Triton's reduction of those; WIDTH follows from F alone. A token's sum takes its slots
in ascending order. The gradient of a bias adds 16 routes at a time. Roundings are explicit (``product``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import product
from rl_kernels.moe import activations, reference

SILU, GELU_TANH, CLAMPED_SWIGLU = (tl.constexpr(number) for number in range(3))
"""Numbers of the activations, in the order of ``activations.NAMES``."""
LIMIT, SLOPE = tl.constexpr(reference.LIMIT), tl.constexpr(reference.SLOPE)
CUBIC, TWICE = tl.constexpr(activations.CUBIC), tl.constexpr(activations.TWICE)
ROUTES_A_STEP = tl.constexpr(16)


@triton.jit
def rounded(x, LIKE):
    """Return FP32 values rounded to the dtype of a pointer."""
    return x.to(LIKE.dtype.element_ty).to(tl.float32)


@triton.jit
def sigmoid(x):
    """Return ``1 / (1 + e^-x)``."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def argument(x, KIND: tl.constexpr):
    """Return the a of ``x sigmoid(a)``, which each activation is."""
    if KIND == GELU_TANH:
        a = TWICE * (x + CUBIC * (x * x * x))
    elif KIND == CLAMPED_SWIGLU:
        a = x * SLOPE
    else:
        a = x
    return a


@triton.jit
def activated(gate, up, LIKE, KIND: tl.constexpr):
    """Return the activation of gate and up; steps are rounded to the dtype of a pointer."""
    if KIND == CLAMPED_SWIGLU:
        gate, up = tl.minimum(gate, LIMIT), tl.clamp(up, -LIMIT, LIMIT)
        inner = rounded(sigmoid(rounded(gate * SLOPE, LIKE)), LIKE)
        result = product(rounded(up + 1.0, LIKE), rounded(product(gate, inner), LIKE))
    else:
        result = product(rounded(product(gate, sigmoid(argument(gate, KIND))), LIKE), up)
    return rounded(result, LIKE)


@triton.jit
def activated_backward(dh, gate, up, KIND: tl.constexpr):
    """Return the gradients of gate and up in FP32."""
    bounded, other = gate, up
    if KIND == CLAMPED_SWIGLU:
        bounded, other = tl.minimum(gate, LIMIT), tl.clamp(up, -LIMIT, LIMIT) + 1.0
    inner = sigmoid(argument(bounded, KIND))
    factor = tl.full(gate.shape, SLOPE if KIND == CLAMPED_SWIGLU else 1.0, tl.float32)
    if KIND == GELU_TANH:
        factor = TWICE * (1.0 + 3.0 * CUBIC * (bounded * bounded))
    dgate = dh * other * (inner + bounded * factor * inner * (1.0 - inner))
    dup = dh * (bounded * inner)
    if KIND == CLAMPED_SWIGLU:
        dgate = tl.where(gate <= LIMIT, dgate, 0.0)
        dup = tl.where(tl.abs(up) <= LIMIT, dup, 0.0)
    return dgate, dup


@triton.jit
def columns_of(first, F, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr):
    """Return columns of the activation, where gate and up of them are in a row of z, and which exist."""
    c = first + tl.arange(0, WIDTH)
    if INTERLEAVED:
        gate, up = 2 * c, 2 * c + 1
    else:
        gate, up = c, F + c
    return c, gate, up, c < F


@triton.jit(do_not_specialize=["E", "slots"])
def activate_backward(
    DH, Z, WEIGHTS, GRAD, BIAS, DZ, SCALED, DOTS, ROUTES, BOUNDS, E, F, D, slots, KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row of Z, the activation times the route's weight, and the weight's gradient. Grid: rows.

    DH is the FP32 gradient of the activation without the route's weight. With BIAS ``[E, D]`` the weight's gradient
    also has the dot of the bias and the token's GRAD.
    """
    row = tl.program_id(0)
    route = tl.load(ROUTES + row)
    if row >= tl.load(BOUNDS + E):
        tl.store(DOTS + route, 0.0)
        return
    token = (route // slots).to(tl.int64)
    weight = tl.load(WEIGHTS + route).to(tl.float32)
    place = row.to(tl.int64) * F
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, F, WIDTH):
        c, gate, up, inside = columns_of(first, F, INTERLEAVED, WIDTH)
        dh = tl.load(DH + place + c, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(Z + 2 * place + gate, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(Z + 2 * place + up, mask=inside, other=0.0).to(tl.float32)
        h = activated(g, u, Z, KIND)
        total += product(dh, h)
        tl.store(SCALED + place + c, (weight * h).to(SCALED.dtype.element_ty), mask=inside)
        dgate, dup = activated_backward(weight * dh, g, u, KIND)
        tl.store(DZ + 2 * place + gate, dgate.to(DZ.dtype.element_ty), mask=inside)
        tl.store(DZ + 2 * place + up, dup.to(DZ.dtype.element_ty), mask=inside)
    dot = tl.sum(total, 0)
    if BIAS is not None:
        e = tl.arange(0, EXPERTS)
        ends = tl.load(BOUNDS + e + 1, mask=e < E, other=2147483647)
        expert = tl.sum((ends <= row).to(tl.int32), 0).to(tl.int64)
        total = tl.zeros([WIDTH], tl.float32)
        for first in range(0, D, WIDTH):
            c = first + tl.arange(0, WIDTH)
            grad = tl.load(GRAD + token * D + c, mask=c < D, other=0.0).to(tl.float32)
            bias = tl.load(BIAS + expert * D + c, mask=c < D, other=0.0)
            total += product(grad, bias.to(tl.float32))
        dot += tl.sum(total, 0)
    tl.store(DOTS + route, dot)


@triton.jit(do_not_specialize=["E"])
def combine(
    Y, IDS, PLACES, WEIGHTS, SHARED, OUT, E, D, SLOTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write the weighted sum of a token's routes, rows of Y, plus SHARED. Grid: tokens, blocks of columns.

    With PLACES these are the rows of routes, else rows are in the order of tokens and slots. The expert E adds nothing;
    any other id outside [0, E) makes the sum NaN.
    """
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = c < D
    total = tl.zeros([WIDTH], tl.float32)
    for slot in tl.static_range(SLOTS):
        # A block of equal ids: Triton 3.9's interpreter takes no mask made with a scalar.
        expert = tl.zeros([WIDTH], tl.int64) + tl.load(IDS + token * SLOTS + slot)
        is_here = (expert >= 0) & (expert < E)
        place = tl.zeros([WIDTH], tl.int64) + token * SLOTS + slot
        if PLACES is not None:
            place = tl.zeros([WIDTH], tl.int64) + tl.load(PLACES + token * SLOTS + slot)
        y = tl.load(Y + place * D + c, mask=inside & is_here, other=0.0).to(tl.float32)
        if WEIGHTS is not None:
            weight = tl.load(WEIGHTS + token * SLOTS + slot).to(tl.float32)
            y = product(tl.full([WIDTH], 1.0, tl.float32) * weight, y)
        total = tl.where(is_here, total + y, tl.where(expert == E, total, float("nan")))
    if SHARED is not None:
        total += tl.load(SHARED + token * D + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + token * D + c, total.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["slots"])
def bias_gradient(
    X, WEIGHTS, OUT, ROUTES, BOUNDS, N, slots, WIDTH: tl.constexpr
):  # fmt: skip
    """Write the sum of an expert's rows of X to OUT ``[E, N]``. Grid: experts, blocks of columns.

    With WEIGHTS, rows of X are tokens, each times its route's weight; else they are in the order of routes.
    """
    expert = tl.program_id(0)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    end = tl.load(BOUNDS + expert + 1)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(tl.load(BOUNDS + expert), end, ROUTES_A_STEP):
        positions = first + tl.arange(0, ROUTES_A_STEP)
        live = positions < end
        rows = positions.to(tl.int64)
        if WEIGHTS is not None:
            route = tl.load(ROUTES + positions, mask=live, other=0)
            rows = (route // slots).to(tl.int64)
        x = tl.load(X + rows[:, None] * N + c[None, :], mask=live[:, None] & (c < N)[None, :], other=0.0)
        x = x.to(tl.float32)
        if WEIGHTS is not None:
            weight = tl.load(WEIGHTS + route, mask=live, other=0.0).to(tl.float32)
            x = product(x, tl.broadcast_to(weight[:, None], x.shape))
        total += tl.sum(x, 0)
    tl.store(OUT + expert.to(tl.int64) * N + c, total.to(OUT.dtype.element_ty), mask=c < N)
