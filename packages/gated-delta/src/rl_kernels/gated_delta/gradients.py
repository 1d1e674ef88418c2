"""The backward pass of gated_delta_rule in PyTorch: the chunks in reverse, in the dtype of sums.

A chunk's rows are computed again from its state, which is kept. A key's gradient adds, in this order: what its own
chunk's products give, then what the states give; one over value heads that share a key ascends.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.gated_delta.chunks import (
    Chunks,
    Rows,
    chunks_of,
    multiply,
    next_state,
    normalized,
    rounded,
    rows_of,
)
from rl_kernels.gated_delta.constants import BLOCK, CHUNK
from rl_kernels.gated_delta.inputs import COUNT, Inputs, state_dtype
from rl_kernels.gated_delta.places import places_of


def backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, g, beta and the initial state."""
    inputs, (grad, grad_state, _) = Inputs(*arguments[:COUNT]), arguments[COUNT:]
    computed = state_dtype(inputs.q.dtype)
    shape = inputs.state_shape
    state = inputs.q.new_zeros(shape, dtype=computed) if inputs.initial_state is None else inputs.initial_state.clone()
    dstate = torch.zeros_like(state) if grad_state is None else grad_state.clone()
    places = places_of(inputs)
    results = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs[:5]]
    if places.parts:
        chunks = chunks_of(inputs, places)
        upstream = places.rows_of(grad, computed).mul_(inputs.scale)
        kept = []
        for part in places.parts:
            sequences = places.sequences[part]
            kept.append(rows_of(chunks, part, state[sequences], None))
            state[sequences] = next_state(chunks, part, kept[-1])
        rows = [torch.empty_like(x) for x in (chunks.q, chunks.k, chunks.v, chunks.decays, chunks.decays)]
        for part in reversed(places.parts):
            sequences = places.sequences[part]
            *parts, dstate[sequences] = _chunk(chunks, part, kept.pop(), upstream[part], dstate[sequences])
            for target, value in zip(rows, parts, strict=True):
                target[part] = value
        for number in (0, 1):
            rows[number] = _over_group(rows[number], inputs.group)
        for target, value in zip(results, rows, strict=True):
            places.put(target, value)
        if inputs.normalize_qk:
            for number, x in ((0, inputs.q), (1, inputs.k)):
                dense = torch.zeros_like(x, dtype=computed, memory_format=torch.contiguous_format)
                places.put(dense, rows[number])
                results[number] = _through_norm(dense, x).to(x.dtype)
    return *results, dstate if inputs.initial_state is not None else dstate.new_empty(0)


def _over_group(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return the sums over value heads that share a key, ``[M, Hk, 64, D]``, in ascending order."""
    heads = x.unflatten(1, (-1, group)).unbind(2)
    total = heads[0]
    for head in heads[1:]:
        total = total + head
    return total


def _through_norm(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x from that of x divided by its norm; 0 where the gradient is 0."""
    unit, inverse = normalized(x)
    result = inverse * (grad - unit * row_sum(unit * grad)[..., None])
    # Padding may hold NaN.
    return torch.where((grad == 0).all(-1, keepdim=True), 0.0, result)


def _chunk(
    chunks: Chunks, part: slice, rows: Rows, grad: torch.Tensor, dstate: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, g, beta and the state of chunks, from those of the output and the next state."""
    dtype, q, k, beta, u = chunks.dtype, chunks.q[part], chunks.k[part], chunks.beta[part], rows.u
    decays = chunks.decays[part]
    last, fading = decays[..., -1:].exp()[..., None], (decays[..., -1:] - decays).exp()[..., None]
    grown = decays.exp()[..., None]
    scores, below = rounded(chunks.scores[part], dtype), rounded(chunks.below[part], dtype)
    from_next = multiply(k, dstate)
    du = multiply(scores.mT, grad, fading * from_next)
    dsides = _solve_transposed(chunks, part, below, beta, du)
    dv = beta * dsides
    is_past = torch.ones((CHUNK, CHUNK), dtype=torch.bool, device=q.device).tril()
    dscores = torch.where(is_past, multiply(grad, u.mT), 0.0)
    dbelow = torch.where(is_past.tril(-1), -multiply(dv, u.mT), 0.0)
    dqk, dkk = chunks.between[part] * dscores, chunks.between[part] * dbelow
    dqueries_state, dkeys_state = grown * grad, -grown * dv
    factor = rounded(rows.state, dtype)
    dq = multiply(dqueries_state, factor.mT, multiply(dqk, k))
    dk = multiply(dkk.mT, k, multiply(dkk, k))
    dk = multiply(dkeys_state, factor.mT, multiply(dqk.mT, q, dk))
    faded = rounded(fading * u, dtype)
    dk = multiply(faded, dstate.mT, dk)
    dbeta = row_sum(dsides * _residuals(rows, below))
    ddecays = row_sum(dqueries_state * rows.queries_state) + row_sum(dkeys_state * rows.keys_state)
    moved = dscores * chunks.scores[part] + dbelow * chunks.below[part]
    ddecays = ddecays + row_sum(moved) - row_sum(moved.mT.contiguous())
    leaving = row_sum(from_next * (fading * u))
    ddecays = ddecays - leaving
    at_last = row_sum(leaving) + row_sum(row_sum(dstate * (last * rows.state)))
    ddecays[..., -1] += at_last
    dprevious = multiply(q.mT, dqueries_state, last * dstate)
    dprevious = multiply(k.mT, dkeys_state, dprevious)
    return dq, dk, dv, _sums_from_end(ddecays), dbeta, dprevious


def _residuals(rows: Rows, below: torch.Tensor) -> torch.Tensor:
    """Return what beta multiplies in the equations of u: the right sides less the rows before in the same block."""
    result = rows.sides.clone()
    for first in range(0, CHUNK, BLOCK):
        block = slice(first, first + BLOCK)
        result[:, :, block] -= multiply(below[:, :, block, block].contiguous(), rows.u[:, :, block].contiguous())
    return result


def _solve_transposed(
    chunks: Chunks, part: slice, below: torch.Tensor, beta: torch.Tensor, du: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the scaled right sides, from that of u: blocks of 16 rows, the last one first."""
    inverse = rounded(chunks.inverse[part], chunks.dtype)
    result, scaled = torch.zeros_like(du), torch.zeros_like(du)
    for block in reversed(range(CHUNK // BLOCK)):
        rows = slice(block * BLOCK, block * BLOCK + BLOCK)
        # Only later blocks: what this block's rows do to each other is part of its inverse.
        side = multiply(-below[:, :, :, rows].mT.contiguous(), scaled, du[:, :, rows].clone(memory_format=torch.contiguous_format))
        result[:, :, rows] = multiply(inverse[:, :, block].mT.contiguous(), side)
        scaled[:, :, rows] = beta[:, :, rows] * result[:, :, rows]
    return result


def _sums_from_end(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of ``x[..., 64]`` from each row to the last one, added from the last row on."""
    result = x.clone()
    for t in reversed(range(CHUNK - 1)):
        result[..., t] += result[..., t + 1]
    return result
