"""The fused Triton kernels. Rotary embedding and gates round exactly where PyTorch's kernels do."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import INTERPRETED, fma, product, sigmoid_parts

if not INTERPRETED.value:
    from triton.language.extra import libdevice

AT_ONCE = tl.constexpr(16)
"""Rows that are loaded before the first one is added."""


@triton.jit
def rounded_product(x, y, LIKE):
    """Return ``x * y`` rounded to LIKE's dtype, as FP32."""
    return product(x, y).to(LIKE.dtype.element_ty).to(tl.float32)


@triton.jit
def rotate_heads(
    X, OUT, c, s, c_, s_, x_head, out_head, d, inside,
    HEADS: tl.constexpr, PART: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, ROOM: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of one token, PART at a time; c and s are for the first half, c_ and s_ for the second.

    The REST numbers behind both halves are copied.
    """
    for first in tl.static_range(0, HEADS, PART):
        heads = first + tl.arange(0, PART)
        mask = (heads < HEADS)[:, None] & inside[None, :]
        place = heads.to(tl.int64)[:, None] * x_head + d[None, :]
        a = tl.load(X + place, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(X + place + HALF, mask=mask, other=0.0).to(tl.float32)
        like = a
        c1, s1 = tl.broadcast_to(c[None, :], like.shape), tl.broadcast_to(s[None, :], like.shape)
        c2, s2 = tl.broadcast_to(c_[None, :], like.shape), tl.broadcast_to(s_[None, :], like.shape)
        if BACK:
            y = rounded_product(a, c1, OUT) + rounded_product(b, s2, OUT)
            z = rounded_product(b, c2, OUT) - rounded_product(a, s1, OUT)
        else:
            y = rounded_product(a, c1, OUT) - rounded_product(b, s1, OUT)
            z = rounded_product(b, c2, OUT) + rounded_product(a, s2, OUT)
        place = heads.to(tl.int64)[:, None] * out_head + d[None, :]
        tl.store(OUT + place, y.to(OUT.dtype.element_ty), mask=mask)
        tl.store(OUT + place + HALF, z.to(OUT.dtype.element_ty), mask=mask)
        if REST:
            e = tl.arange(0, ROOM)
            mask = (heads < HEADS)[:, None] & (e < REST)[None, :]
            place = heads.to(tl.int64)[:, None] * x_head + (2 * HALF + e)[None, :]
            rest = tl.load(X + place, mask=mask, other=0.0)
            place = heads.to(tl.int64)[:, None] * out_head + (2 * HALF + e)[None, :]
            tl.store(OUT + place, rest.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("tokens",))
def rotate(
    Q, K, COS, SIN, Q_OUT, K_OUT, PLACES, tokens,
    q_batch, q_head, q_token, k_batch, k_head, k_token, cos_batch, cos_token,
    q_out_batch, q_out_head, q_out_token, k_out_batch, k_out_head, k_out_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    ROOM: tl.constexpr, PART: tl.constexpr, BACK: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 HALF numbers of ``Q, K[B, H, T, 2 HALF + REST]`` by ``COS, SIN[B, T, 2 HALF]``. Grid: tokens.

    BACK: gradients.

    PLACED: by the rows ``PLACES[B T]`` of ``COS, SIN[P, 2 HALF]``.
    """
    b, t = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < HALF
    row = t
    if PLACED:
        row = tl.load(PLACES + tl.program_id(0)).to(tl.int64)
    place = b * cos_batch + row * cos_token + d
    c, s = tl.load(COS + place, mask=inside).to(tl.float32), tl.load(SIN + place, mask=inside).to(tl.float32)
    place += HALF
    c_, s_ = tl.load(COS + place, mask=inside).to(tl.float32), tl.load(SIN + place, mask=inside).to(tl.float32)
    q, q_out = Q + b * q_batch + t * q_token, Q_OUT + b * q_out_batch + t * q_out_token
    k, k_out = K + b * k_batch + t * k_token, K_OUT + b * k_out_batch + t * k_out_token
    rotate_heads(q, q_out, c, s, c_, s_, q_head, q_out_head, d, inside, Q_HEADS, PART, HALF, REST, ROOM, BACK)
    rotate_heads(k, k_out, c, s, c_, s_, k_head, k_out_head, d, inside, K_HEADS, PART, HALF, REST, ROOM, BACK)


@triton.jit
def silu_product(gate, up):
    """Return ``silu(gate) * up``; silu is rounded before the product."""
    x = gate.to(tl.float32)
    silu = tl.div_rn(x, sigmoid_parts(x)).to(gate.dtype).to(tl.float32)
    return product(silu, up.to(tl.float32)).to(gate.dtype)


@triton.jit
def gate_forward(GATE, UP, OUT, count, BLOCK: tl.constexpr):
    """Write ``silu(GATE) * UP``. Grid: blocks."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    gate, up = tl.load(GATE + at, mask=mask, other=0.0), tl.load(UP + at, mask=mask, other=0.0)
    tl.store(OUT + at, silu_product(gate, up), mask=mask)


@triton.jit
def gate_of_halves(X, OUT, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``silu(X[:, :WIDTH]) * X[:, WIDTH:]``, ``count`` numbers. Grid: blocks."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    place = at + at // WIDTH * WIDTH
    gate, up = tl.load(X + place, mask=mask, other=0.0), tl.load(X + place + WIDTH, mask=mask, other=0.0)
    tl.store(OUT + at, silu_product(gate, up), mask=mask)


@triton.jit
def gate_backward(GRAD, GATE, UP, D_GATE, D_UP, count, BLOCK: tl.constexpr):
    """Write the gradients of both factors. Grid: blocks."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    grad = tl.load(GRAD + at, mask=mask, other=0.0).to(tl.float32)
    gate, up = tl.load(GATE + at, mask=mask, other=0.0), tl.load(UP + at, mask=mask, other=0.0)
    x = gate.to(tl.float32)
    parts = sigmoid_parts(x)
    silu = tl.div_rn(x, parts).to(gate.dtype).to(tl.float32)
    tl.store(D_UP + at, product(grad, silu).to(gate.dtype), mask=mask)
    of_silu = product(grad, up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    one = tl.full([BLOCK], 1.0, tl.float32)
    sigmoid = tl.div_rn(one, parts)
    slope = fma(x, one - sigmoid, one)
    tl.store(D_GATE + at, product(product(of_silu, sigmoid), slope).to(gate.dtype), mask=mask)


@triton.jit(do_not_specialize=("padding",))
def sum_rows(GRAD, IDS, ORDER, ENDS, OUT, padding, size, COLUMNS: tl.constexpr):
    """Write to ``OUT[V, size]`` the sum of the rows ``GRAD[ORDER]`` of each id, except padding, in ascending order.

    IDS are sorted; ENDS holds the end of each id's range of places. Grid: places x columns; only an id's first place
    works.
    """
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(IDS + place)
    previous = tl.load(IDS + place - 1, mask=place > 0, other=-1)
    if token == previous:
        return
    if token == padding:
        return
    end = tl.load(ENDS + place)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(place, end, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            there = first + step < end
            row = tl.load(ORDER + first + step, mask=there, other=0).to(tl.int64)
            total += tl.load(GRAD + row * size + d, mask=there & (d < size), other=0.0).to(tl.float32)
    tl.store(OUT + token.to(tl.int64) * size + d, total.to(OUT.dtype.element_ty), mask=d < size)


@triton.jit
def store_rows(
    KEY, VALUE, CACHE, SLOTS, key_row, key_head, value_row, value_head,
    SIZE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write rows ``KEY, VALUE[T, WIDTH]``, heads of HEAD numbers, to ``CACHE[pages, 2, SIZE, WIDTH]``. Grid: slots."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + row).to(tl.int64)
    if slot < 0:
        return
    d = tl.arange(0, ROOM)
    inside = d < WIDTH
    head, column = (d // HEAD).to(tl.int64), d % HEAD
    place = (slot // SIZE * 2 * SIZE + slot % SIZE) * WIDTH + d
    key = tl.load(KEY + row * key_row + head * key_head + column, mask=inside)
    value = tl.load(VALUE + row * value_row + head * value_head + column, mask=inside)
    tl.store(CACHE + place, key, mask=inside)
    tl.store(CACHE + place + SIZE * WIDTH, value, mask=inside)


@triton.jit
def score_tokens(
    LOGITS, NORM, IDS, LOGPS, RANKS, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the log-prob of each row's token, if there is NORM, and how many logits are not below its. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(IDS + row).to(tl.int64)
    logits = LOGITS + row * row_stride
    chosen = tl.load(logits + token, mask=(token >= 0) & (token < VOCAB), other=float("nan"))
    if NORM is not None:
        logp = chosen - tl.load(NORM + 2 * row) - tl.load(NORM + 2 * row + 1)
        # Not a minimum, which may drop NaN.
        tl.store(LOGPS + row, tl.where(logp > 0, 0.0, logp))
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < VOCAB
        counts += (inside & (tl.load(logits + at, mask=inside, other=0.0) >= chosen)).to(tl.int32)
    tl.store(RANKS + row, tl.sum(counts).to(tl.int64))


@triton.jit
def softplus(x):
    """Return ``log(1 + exp(x))`` in FP32, with the bits of PyTorch's on a GPU."""
    if INTERPRETED:
        # The interpreter has no log1p: the quotient corrects the rounding of the sum below the logarithm.
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e
        return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, product(tl.log(u), tl.div_rn(e, u - 1.0)))
    else:
        e = libdevice.exp(x)
        # As Triton compiles it, log1p returns 0 for subnormal numbers; below 2^-26 its result is its argument.
        return tl.where(x > 20.0, x, tl.where(e < 1e-9, e, libdevice.log1p(e)))


@triton.jit
def exponential(x):
    """Return ``exp(x)``, by CUDA's library on a GPU."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def delta_gate_parts(A_LOG, DT_BIAS, a, head, mask):
    """Return ``a + DT_BIAS`` and ``-exp(A_LOG)`` of elements, in FP32."""
    x = a.to(tl.float32) + tl.load(DT_BIAS + head, mask=mask, other=0.0).to(tl.float32)
    return x, -exponential(tl.load(A_LOG + head, mask=mask, other=0.0).to(tl.float32))


@triton.jit(do_not_specialize=("count",))
def delta_gates_forward(A, B, A_LOG, DT_BIAS, DECAYS, STRENGTHS, count, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``-exp(A_LOG) softplus(A + DT_BIAS)`` and ``sigmoid(B)``. Grid: blocks."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    a, b = tl.load(A + at, mask=mask, other=0.0), tl.load(B + at, mask=mask, other=0.0)
    x, rate = delta_gate_parts(A_LOG, DT_BIAS, a, at % HEADS, mask)
    tl.store(DECAYS + at, product(rate, softplus(x)), mask=mask)
    one = tl.full([BLOCK], 1.0, tl.float32)
    tl.store(STRENGTHS + at, tl.div_rn(one, sigmoid_parts(b.to(tl.float32))), mask=mask)


@triton.jit(do_not_specialize=("rows",))
def delta_gates_backward(
    A, B, A_LOG, DT_BIAS, GRAD_DECAYS, GRAD_STRENGTHS, GRAD_A, GRAD_B, SUMS, rows,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of A and B, and sums over a step's ROWS tokens for A_LOG and DT_BIAS. Grid: steps."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.arange(0, WIDTH)[None, :]
    mask, at = (row < rows) & (head < HEADS), row * HEADS + head
    a, b = tl.load(A + at, mask=mask, other=0.0), tl.load(B + at, mask=mask, other=0.0)
    x, rate = delta_gate_parts(A_LOG, DT_BIAS, a, head, head < HEADS)
    grad = tl.load(GRAD_DECAYS + at, mask=mask, other=0.0)
    one = tl.full([ROWS, WIDTH], 1.0, tl.float32)
    grad_x = product(product(tl.broadcast_to(rate, grad.shape), tl.div_rn(one, sigmoid_parts(x))), grad)
    tl.store(GRAD_A + at, grad_x.to(GRAD_A.dtype.element_ty), mask=mask)
    strength = tl.div_rn(one, sigmoid_parts(b.to(tl.float32)))
    grad_b = product(product(tl.load(GRAD_STRENGTHS + at, mask=mask, other=0.0), strength), one - strength)
    tl.store(GRAD_B + at, grad_b.to(GRAD_B.dtype.element_ty), mask=mask)
    # The derivative of a decay by A_LOG is the decay itself.
    of_log = product(grad, product(tl.broadcast_to(rate, grad.shape), softplus(x)))
    column = tl.arange(0, WIDTH)
    place = SUMS + tl.program_id(0).to(tl.int64) * 2 * HEADS + column
    tl.store(place, tl.sum(of_log, 0), mask=column < HEADS)
    tl.store(place + HEADS, tl.sum(grad_x, 0), mask=column < HEADS)


@triton.jit(do_not_specialize=("steps",))
def delta_gates_sums(SUMS, TOTALS, steps, HEADS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add ``SUMS[steps, 2, HEADS]`` in ascending order, after AT_ONCE loads that wait for no sum. Grid: 2."""
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, steps, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            place = ((first + i) * 2 + tl.program_id(0).to(tl.int64)) * HEADS + column
            total += tl.load(SUMS + place, mask=(first + i < steps) & (column < HEADS), other=0.0)
    tl.store(TOTALS + tl.program_id(0) * HEADS + column, total, mask=column < HEADS)
