"""det_attention in PyTorch, for any device: FP32 products and sums over blocks of 64 keys, in a fixed order.

The reduction order is the contract of this backend. Keys are counted from the first key of their sequence and taken in
blocks of 64. A row's maximum is that of all keys that it sees. Its weights are not rounded; values, and a column of
ones that counts the weights, are multiplied block by block and the products added in ascending order. In the backward
pass dq adds its blocks in the same way. dk and dv add products of 64 rows each in ascending order, counted from the
first query that sees a key. The rows of a KV head are its queries, token by token and within a token by head.

On a CPU ``core.batched`` gives a number of a product the same bits in every batch. So several sequences, and up to
256 rows of each, are computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from rl_kernels.attention import sinks as sink
from rl_kernels.attention.backends.native.batches import LARGEST, Batch, VisibleKeys, batches
from rl_kernels.attention.backends.native.places import BLOCK
from rl_kernels.attention.inputs import Inputs
from rl_kernels.core import batched
from rl_kernels.core.constants import STEP
from rl_kernels.core.rowwise.sums import row_sum

T = TypeVar("T", bound=tuple[torch.Tensor, ...])
ROWS = 256
"""Largest number of rows that are computed at once."""
FEW = 16
"""Largest number of rows for which the products with all blocks of keys are computed in one call, then added."""
FEWEST = 8
"""Rows are padded to a multiple of this in the forward pass, if there are few."""
LEAST = -87.0
"""Smallest exponent of a weight: powers below FP32's normal numbers take up to twenty times as long."""
LOWEST = torch.finfo(torch.float32).min
"""The maximum of a row that sees no key, instead of -inf."""


def forward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for the arguments of ``Inputs``."""
    out, lse = _forward(Inputs(*arguments), with_lse=True)  # type: ignore[arg-type]
    assert lse is not None
    return out, lse


def output(*arguments: object) -> torch.Tensor:
    """Return out alone for the arguments of ``Inputs``."""
    return _forward(Inputs(*arguments), with_lse=False)[0]  # type: ignore[arg-type]


def _forward(inputs: Inputs, *, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = inputs.q.new_zeros(inputs.out_shape())
    lse = inputs.q.new_full(inputs.lse_shape(), -torch.inf, dtype=torch.float32) if with_lse else None
    for batch in batches(inputs, FEWEST, backward=False):
        for part, (out_rows, total, top) in _results(inputs, batch, _attend):
            part.put_rows(out, out_rows)
            if lse is not None:
                part.put_rows(lse.mT[..., None], total.log() + top)
    return out, lse


def _results(inputs: Inputs, batch: Batch, compute: Callable[..., T], *arguments: Any) -> Iterator[tuple[Batch, T]]:
    """Yield results of a batch, or of its sequences one by one.

    A masked key has a weight of 0, but 0 times NaN is NaN: an infinity or NaN may spread to rows that do not see it,
    and then the sum of the first result is not finite. Blocks of 64 rows of one sequence bound this. They are always
    used on a GPU, which would have to wait for that sum.
    """
    if inputs.q.device.type == "cpu":
        result = compute(inputs, batch, _height(batch), *arguments)
        if (batch.rows <= BLOCK and batch.is_single) or math.isfinite(result[0].sum()):
            yield batch, result
            return
    for sequence in batch.one_by_one():
        yield sequence, compute(inputs, sequence, BLOCK, *arguments)


def _attend(inputs: Inputs, batch: Batch, height: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, sum and maximum of the rows of a batch, FP32, computing ``height`` rows of each sequence at once."""
    size, width = inputs.v.shape[-1], _whole_steps(inputs.q.shape[-1])
    queries, keys = batch.rows_of(inputs.q, width), batch.keys_of(inputs.k, width)
    # The column of ones sums the weights.
    values = batch.keys_of(inputs.v, _whole_steps(size + 1), 1.0)
    sinks = None if inputs.sinks is None else batch.per_row(inputs.sinks.float()).split(height, 1)
    blocks = []
    for index, block in enumerate(queries.split(height, 1)):
        visible = batch.visible_keys(index * height, block.shape[1])
        score = _scores(inputs, block, visible.of(keys))
        top = visible.without_hidden(score).amax(2, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks[index])
        top.clamp_(min=LOWEST)
        weights = _weights(score, top, visible)
        mixed, total = _by_blocks(weights, visible.of(values)).tensor_split((size, size + 1), 2)[:2]
        if sinks is not None:
            total = total + (sinks[index] - top).exp()
        out = mixed / total
        if visible.lacks_some:
            out.masked_fill_(total == 0, 0.0)
        blocks.append((out, total, top))
    if len(blocks) == 1:
        return blocks[0]
    outs, totals, tops = (torch.cat(parts, 1) for parts in zip(*blocks, strict=True))
    return outs, totals, tops


def _weights(score: torch.Tensor, shift: torch.Tensor, visible: VisibleKeys) -> torch.Tensor:
    """Return, in place, ``e^(score - shift)``, and 0 for keys that a row does not see."""
    weights = score.sub_(shift).clamp_(min=LEAST).exp_()
    visible.fill_hidden(weights, 0.0)
    return weights


def _by_blocks(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``weights @ values``: products of 64 keys each, added in ascending order."""
    heads, rows, keys = weights.shape
    if keys == BLOCK:
        return batched.multiply(weights, values)
    if rows <= FEW:
        # One call of the library, because calls take longer than such small products.
        blocks = weights.view(heads, rows, -1, BLOCK).transpose(1, 2).reshape(-1, rows, BLOCK)
        products = batched.multiply(blocks, values.reshape(-1, BLOCK, values.shape[2])).view(
            heads, -1, rows, values.shape[2]
        )
        total, *later_products = products.unbind(1)
        for product in later_products:
            total += product
        return total
    first, *later = zip(weights.split(BLOCK, 2), values.split(BLOCK, 1), strict=True)
    total = batched.multiply(*first)
    for block in later:
        batched.multiply(*block, total)
    return total


def _height(batch: Batch) -> int:
    """Return the number of rows per sequence to compute at once: the rows of 64 queries, if the cache has room."""
    rows = min(BLOCK * batch.group, ROWS) // BLOCK * BLOCK
    return rows if batch.heads * rows * batch.keys <= LARGEST else BLOCK


def backward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv, dsinks) for the arguments of ``Inputs``, out, lse, out's gradient, and what is needed."""
    *fields, out, lse, grad, needs_queries, needs_keys = arguments
    inputs = Inputs(*fields)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert isinstance(grad, torch.Tensor)
    dq = inputs.q.new_zeros(inputs.q.shape if needs_queries else 0)
    dk, dv = (value.new_zeros(value.shape if needs_keys else 0) for value in (inputs.k, inputs.v))
    delta = row_sum(out.float() * grad.float()).movedim(-1, -2)
    for batch in batches(inputs, BLOCK, backward=True):
        for part, (dq_rows, dk_rows, dv_rows) in _results(inputs, batch, _gradients, lse, delta, grad):
            if needs_queries:
                part.put_rows(dq, dq_rows)
            if needs_keys:
                part.put_keys(dk, dk_rows)
                part.put_keys(dv, dv_rows)
    return dq, dk, dv, sink.gradient(inputs.sinks, lse, delta)


def _gradients(
    inputs: Inputs, batch: Batch, height: int, lse: torch.Tensor, delta: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows, keys and values of a batch, FP32."""
    width, width_v = _whole_steps(inputs.q.shape[-1]), _whole_steps(inputs.v.shape[-1])
    queries, upstream = batch.rows_of(inputs.q, width), batch.rows_of(grad, width_v)
    keys, values = batch.keys_of(inputs.k, width), batch.keys_of(inputs.v, width_v)
    row_operands = (queries, upstream, *(batch.rows_of(x.movedim(-2, -1)[..., None], 1) for x in (lse, delta)))
    dq, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)
    for index, (query, upstream_rows, lse_rows, delta_rows) in enumerate(
        zip(*(x.split(height, 1) for x in row_operands), strict=True)
    ):
        visible = batch.visible_keys(index * height, query.shape[1])
        weights = _scores(inputs, query, visible.of(keys))
        slope = 1 - (weights / inputs.softcap).square_() if inputs.softcap else None
        _weights(weights, lse_rows, visible)
        dscore = batched.multiply(upstream_rows, visible.of(values).mT).sub_(delta_rows).mul_(weights)
        if slope is not None:
            dscore.mul_(slope)
        dq.append(_by_blocks(dscore, visible.of(keys)).mul_(inputs.scale))
        blocks = (x.split(BLOCK, 1) for x in (query, upstream_rows, dscore, weights))
        for queries_64, upstream_64, dscore_64, weights_64 in zip(*blocks, strict=True):
            batched.multiply(dscore_64.mT, queries_64, visible.of(dk))
            batched.multiply(weights_64.mT, upstream_64, visible.of(dv))
    return torch.cat(dq, 1), dk.mul_(inputs.scale), dv


def _scores(inputs: Inputs, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the scores ``[items * Hkv, rows, keys]``, soft cap included."""
    score = batched.multiply(queries, keys.mT).mul_(inputs.scale)
    return score.div_(inputs.softcap).tanh_().mul_(inputs.softcap) if inputs.softcap else score


def _whole_steps(size: int) -> int:
    return size + -size % STEP
