"""The kernels of the Triton backend of causal_conv1d.

A program has a slot, at most CHUNK tokens of one sequence, and COLUMNS channels. Chunks begin at multiples of CHUNK of
their own sequence. Sums over the taps are chains of fused multiply-adds on top of the bias, the oldest input first.
Gradients of weight and bias, of which the order is the contract: a chain over the tokens of a chunk, the last first;
then the chunks of all sequences in ascending order. Slots without tokens add zeros.

| layout | slots |
|---|---|
| batch | ``ceil(T / CHUNK)`` for each sequence, at least one |
| left padding | ``T // CHUNK + 2`` for each: chunks of padding come first |
| packed | sequence s has those from ``cu_seqlens[s] // CHUNK + s`` up to the next one's |
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma, product, sigmoid_parts

TAPS = tl.constexpr(4)
PAST = tl.constexpr(3)


@triton.jit
def place(slot, CU_SEQLENS, START, tokens, slots, sequences, steps, CHUNK: tl.constexpr):
    """Return (row of the batch, sequence, its first token in the row, its length, first position of the slot)."""
    if CU_SEQLENS is not None:
        s = 0
        for step in range(steps):
            # The sequences before ``further`` have slots up to its own first one.
            further = s + (1 << (steps - 1 - step))
            begin = tl.load(CU_SEQLENS + tl.minimum(further, sequences - 1)).to(tl.int32)
            s = tl.where((further < sequences) & (begin // CHUNK + further <= slot), further, s)
        begin = tl.load(CU_SEQLENS + s).to(tl.int32)
        end = tl.load(CU_SEQLENS + s + 1).to(tl.int32)
        first = tl.minimum(tl.maximum(begin, 0), tokens)
        length = tl.maximum(tl.minimum(end, tokens) - first, 0)
        row, position = s * 0, (slot - begin // CHUNK - s) * CHUNK
    else:
        row = slot // slots
        s, first, position = row, 0, slot % slots * CHUNK
        if START is not None:
            first = tl.minimum(tl.maximum(tl.load(START + row).to(tl.int32), 0), tokens)
            position -= (first // CHUNK + 1) * CHUNK
        length = tokens - first
    return row, s, first, length, position


@triton.jit
def inputs(X, STATE, s, first, length, position, d, stride, D: tl.constexpr):
    """Return the inputs at a position, or at positions ``[R, 1]``, in channels ``[1, C]``: of X, of the state, or 0."""
    inside = d < D
    # A block for each condition: Triton 3.9's interpreter has no masks of a block and a scalar.
    at = position + 0 * d
    here = (at >= 0) & (at < length)
    x = tl.load(X + (first + position).to(tl.int64) * stride + d, mask=here & inside, other=0.0).to(tl.float32)
    if STATE is not None:
        before = (at < 0) & (at >= -PAST)
        state = STATE + (s.to(tl.int64) * PAST + PAST + position) * D + d
        x = tl.where(before & inside, tl.load(state, mask=before & inside, other=0.0).to(tl.float32), x)
    return x


@triton.jit
def tap(WEIGHT, d, number: tl.constexpr, D: tl.constexpr):
    """Load the weights ``[1, C]`` of a tap as FP32."""
    return tl.load(WEIGHT + d * TAPS + number, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def bias_of(BIAS, d, D: tl.constexpr):
    """Load the bias ``[1, C]`` as FP32, zeros if there is none."""
    bias = tl.zeros(d.shape, tl.float32)
    if BIAS is not None:
        bias = tl.load(BIAS + d, mask=d < D, other=0.0).to(tl.float32)
    return bias


@triton.jit(do_not_specialize=("tokens", "slots", "sequences", "steps"))
def forward(
    X, WEIGHT, BIAS, STATE, CU_SEQLENS, START, Y, LAST, tokens, slots, sequences, steps, x_row, x_token,
    D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a slot, ROWS in a step, and with the last chunk the last inputs. Grid: slots, channels."""
    row, s, first, length, begin = place(tl.program_id(0), CU_SEQLENS, START, tokens, slots, sequences, steps, CHUNK)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = d < D
    x, y = X + row.to(tl.int64) * x_row, Y + row.to(tl.int64) * tokens * D
    w0, w1, w2, w3 = tap(WEIGHT, d, 0, D), tap(WEIGHT, d, 1, D), tap(WEIGHT, d, 2, D), tap(WEIGHT, d, 3, D)
    bias = bias_of(BIAS, d, D)
    x0 = inputs(x, STATE, s, first, length, begin - 3, d, x_token, D)
    x1 = inputs(x, STATE, s, first, length, begin - 2, d, x_token, D)
    x2 = inputs(x, STATE, s, first, length, begin - 1, d, x_token, D)
    for group in tl.range(0, tl.cdiv(tl.minimum(CHUNK, length - begin), ROWS), num_stages=STAGES):
        for i in tl.static_range(ROWS):
            position = begin + group * ROWS + i
            x3 = inputs(x, STATE, s, first, length, position, d, x_token, D)
            z = fma(x3, w3, fma(x2, w2, fma(x1, w1, fma(x0, w0, bias))))
            if SILU:
                z = tl.div_rn(z, sigmoid_parts(z))
            z = tl.where(position >= 0, z, 0.0)
            at = position + 0 * d
            mask = (first + at >= 0) & (at < length) & inside
            tl.store(y + (first + position).to(tl.int64) * D + d, z.to(Y.dtype.element_ty), mask=mask)
            x0, x1, x2 = x1, x2, x3
    if LAST is not None:
        newest = tl.maximum(length - 1, 0)
        if (begin <= newest) & (newest < begin + CHUNK) & (begin >= 0):
            number = tl.arange(0, TAPS)[:, None]
            value = inputs(x, STATE, s, first, length, length - PAST + number, d, x_token, D)
            mask = (number < PAST) & (d < D)
            tl.store(LAST + (s.to(tl.int64) * PAST + number) * D + d, value.to(LAST.dtype.element_ty), mask=mask)


@triton.jit
def upstream(GRAD, z, first, length, position, d, stride, D: tl.constexpr, SILU: tl.constexpr):
    """Return the gradient of the sums z ``[1, C]`` at a position: zeros outside of the sequence."""
    at = position + 0 * d
    mask = (at >= 0) & (at < length) & (d < D)
    grad = tl.load(GRAD + (first + position).to(tl.int64) * stride + d, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        one = tl.full(z.shape, 1.0, tl.float32)
        sigmoid = tl.div_rn(one, sigmoid_parts(z))
        grad = product(grad, product(sigmoid, fma(z, one - sigmoid, one)))
    return tl.where(mask, grad, 0.0)


@triton.jit
def pulled(GRAD_LAST, dz, dz1, dz2, dz3, w0, w1, w2, w3, s, length, position, d, D: tl.constexpr):
    """Return the gradient of the input at a position, for those of its own sum and of the three after it."""
    dx = fma(w3, dz, fma(w2, dz1, fma(w1, dz2, product(w0, dz3))))
    if GRAD_LAST is not None:
        number = position - length + PAST + 0 * d
        place = GRAD_LAST + (s.to(tl.int64) * PAST + number) * D + d
        dx += tl.load(place, mask=(number >= 0) & (number < PAST) & (d < D), other=0.0).to(tl.float32)
    return dx


@triton.jit(do_not_specialize=("tokens", "slots", "sequences", "steps"))
def backward(
    X, WEIGHT, BIAS, STATE, CU_SEQLENS, START, GRAD, GRAD_LAST, DX, DSTATE, PARTS,
    tokens, slots, sequences, steps, x_row, x_token, grad_row, grad_token,
    D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx of a slot, dstate with the first chunk, and terms of dweight and dbias. Grid: slots, channels.

    Positions descend, from three behind the chunk: the gradient of an input needs those of the three tokens after it.
    A step takes TAPS of them, so that all it hands on is computed in it: a value handed on twice would keep Triton from
    loading ahead, and one that stays what it or another name was before the loop is taken for a constant.
    """
    slot = tl.program_id(0)
    row, s, first, length, begin = place(slot, CU_SEQLENS, START, tokens, slots, sequences, steps, CHUNK)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = d < D
    x, grads = X + row.to(tl.int64) * x_row, GRAD + row.to(tl.int64) * grad_row
    w0, w1, w2, w3 = tap(WEIGHT, d, 0, D), tap(WEIGHT, d, 1, D), tap(WEIGHT, d, 2, D), tap(WEIGHT, d, 3, D)
    bias = bias_of(BIAS, d, D)
    zero = tl.zeros([1, COLUMNS], tl.float32)
    sum0, sum1, sum2, sum3, sum_bias = zero, zero, zero, zero, zero
    dz1, dz2, dz3 = zero, zero, zero
    end = tl.minimum(begin + CHUNK, length)
    groups = tl.cdiv(tl.maximum(end - begin, 0), TAPS)
    behind = begin + groups * TAPS
    x1 = inputs(x, STATE, s, first, length, behind, d, x_token, D)
    x2 = inputs(x, STATE, s, first, length, behind + 1, d, x_token, D)
    x3 = inputs(x, STATE, s, first, length, behind + 2, d, x_token, D)
    for i in tl.static_range(PAST):
        position = behind + PAST - 1 - i
        x0 = inputs(x, STATE, s, first, length, position - PAST, d, x_token, D)
        z = fma(x3, w3, fma(x2, w2, fma(x1, w1, fma(x0, w0, bias))))
        dz1, dz2, dz3 = upstream(grads, z, first, length, position, d, grad_token, D, SILU), dz1, dz2
        x1, x2, x3 = x0, x1, x2
    for group in tl.range(0, groups, num_stages=STAGES):
        for i in tl.static_range(TAPS):
            position = behind - 1 - group * TAPS - i
            x0 = inputs(x, STATE, s, first, length, position - PAST, d, x_token, D)
            z = fma(x3, w3, fma(x2, w2, fma(x1, w1, fma(x0, w0, bias))))
            dz = upstream(grads, z, first, length, position, d, grad_token, D, SILU)
            dx = pulled(GRAD_LAST, dz, dz1, dz2, dz3, w0, w1, w2, w3, s, length, position, d, D)
            of_token = (row.to(tl.int64) * tokens + first + position) * D + d
            at = position + 0 * d
            mask = (first + at >= 0) & (at < end) & inside
            tl.store(DX + of_token, tl.where(position >= 0, dx, 0.0).to(DX.dtype.element_ty), mask=mask)
            if PARTS is not None:
                sum0, sum1, sum2, sum3 = fma(dz, x0, sum0), fma(dz, x1, sum1), fma(dz, x2, sum2), fma(dz, x3, sum3)
                sum_bias += dz
            dz1, dz2, dz3 = dz, dz1, dz2
            x1, x2, x3 = x0, x1, x2
    if DSTATE is not None:
        for i in tl.static_range(PAST):
            dx = pulled(GRAD_LAST, zero, dz1, dz2, dz3, w0, w1, w2, w3, s, length, -1 - i, d, D)
            of_state = DSTATE + (s.to(tl.int64) * PAST + PAST - 1 - i) * D + d
            tl.store(of_state, dx.to(DSTATE.dtype.element_ty), mask=inside & (begin + 0 * d == 0))
            dz1, dz2, dz3 = zero, dz1, dz2
    if PARTS is not None:
        part = PARTS + slot.to(tl.int64) * (TAPS + 1) * D + d
        tl.store(part, sum0, mask=inside)
        tl.store(part + D, sum1, mask=inside)
        tl.store(part + 2 * D, sum2, mask=inside)
        tl.store(part + 3 * D, sum3, mask=inside)
        tl.store(part + 4 * D, sum_bias, mask=inside)


@triton.jit(do_not_specialize=("count",))
def chain(PARTS, DWEIGHT, DBIAS, count, D: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr):
    """Add PARTS ``[count, 5, D]`` in ascending order: to DWEIGHT ``[D, 4]`` and DBIAS. Grid: channels, 5.

    AHEAD parts are loaded at once, so that their latencies overlap.
    """
    d, number = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    inside = d < D
    # Columns beyond the last one read the last one, so the loads need no mask.
    place = PARTS + number * D + tl.minimum(d, D - 1)
    total = tl.zeros([COLUMNS], tl.float32)
    full = count // AHEAD
    for _ in range(full):
        for _ in tl.static_range(AHEAD):
            total += tl.load(place)
            place += (TAPS + 1) * D
    for _ in range(full * AHEAD, count):
        total += tl.load(place)
        place += (TAPS + 1) * D
    if DWEIGHT is not None:
        tl.store(DWEIGHT + d * TAPS + number, total, mask=inside & (number + 0 * d < TAPS))
    if DBIAS is not None:
        tl.store(DBIAS + d, total, mask=inside & (number + 0 * d == TAPS))
