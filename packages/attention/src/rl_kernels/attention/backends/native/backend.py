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
from rl_kernels.attention.backends.native.batches import LARGEST, Batch, Seen, batches
from rl_kernels.attention.backends.native.places import BLOCK
from rl_kernels.attention.inputs import Inputs
from rl_kernels.core import batched
from rl_kernels.core.constants import STEP
from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.core.torchlib.ops import as_native

T = TypeVar("T", bound=tuple[torch.Tensor, ...])
ROWS = 256
"""Most rows that are computed at once."""
FEW = 16
"""Most rows whose products with all blocks of keys are computed before they are added."""
FEWEST = 8
"""The multiple to which few rows are padded in the forward pass."""
LEAST = -87.0
"""Smallest exponent of a weight: powers below FP32's normal numbers take up to twenty times as long."""
LOWEST = torch.finfo(torch.float32).min
"""Takes the place of the maximum of a row that sees no key."""


def forward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for the arguments of ``Inputs``."""
    out, lse = _forward(Inputs(*arguments), with_lse=True)  # type: ignore[arg-type]
    assert lse is not None
    return out, lse


class Planned:
    """Calls of one kind in which nobody asks for lse; methods return None for other calls."""

    def forward(self, given: Inputs, *, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return (out, None) unless ``with_lse``."""
        if with_lse or torch.is_autocast_enabled(given.q.device.type):
            return None
        found: tuple[torch.Tensor, None] = as_native(_forward, given, False)
        return found

    def backward(self, *_: object) -> None:
        """Leave backward passes to the op."""


def planned(given: Inputs) -> Planned:
    """Return the plan of calls like this one."""
    return Planned()


def _forward(given: Inputs, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = given.q.new_zeros((*given.q.shape[:-1], given.v.shape[-1]))
    lse = given.q.new_full(given.lse_shape(), -torch.inf, dtype=torch.float32) if with_lse else None
    for batch in batches(given, FEWEST, backward=False):
        for part, (of_rows, total, top) in _results(given, batch, _attend):
            part.put_rows(out, of_rows)
            if lse is not None:
                part.put_rows(lse.mT[..., None], total.log() + top)
    return out, lse


def _results(given: Inputs, batch: Batch, compute: Callable[..., T], *arguments: Any) -> Iterator[tuple[Batch, T]]:
    """Yield results of a batch, or of its sequences one by one.

    A masked key has a weight of 0, but 0 times NaN is NaN: what is not finite may spread to rows that do not see it,
    and shows in the first result. Blocks of 64 rows of one sequence bound this. A GPU, which would wait for the look
    at the result, always takes those.
    """
    if given.q.device.type == "cpu":
        found = compute(given, batch, _height(batch), *arguments)
        if (batch.rows <= BLOCK and batch.is_one) or math.isfinite(found[0].sum()):
            yield batch, found
            return
    for one in batch.one_by_one():
        yield one, compute(given, one, BLOCK, *arguments)


def _attend(given: Inputs, batch: Batch, height: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, sum and maximum of the rows of a batch, FP32, computing ``height`` rows of each sequence at once."""
    size, width = given.v.shape[-1], _whole_steps(given.q.shape[-1])
    queries, keys = batch.rows_of(given.q, width), batch.keys_of(given.k, width)
    # The column of ones sums the weights.
    values = batch.keys_of(given.v, _whole_steps(size + 1), 1.0)
    sinks = None if given.sinks is None else batch.per_row(given.sinks.float()).split(height, 1)
    found = []
    for place, block in enumerate(queries.split(height, 1)):
        seen = batch.seen(place * height, block.shape[1])
        score = _scores(given, block, seen.of(keys))
        top = seen.without_hidden(score).amax(2, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks[place])
        top.clamp_(min=LOWEST)
        weights = _weights(score, top, seen)
        mixed, total = _by_blocks(weights, seen.of(values)).tensor_split((size, size + 1), 2)[:2]
        if sinks is not None:
            total = total + (sinks[place] - top).exp()
        out = mixed / total
        if seen.lacks_some:
            out.masked_fill_(total == 0, 0.0)
        found.append((out, total, top))
    if len(found) == 1:
        return found[0]
    outs, totals, tops = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return outs, totals, tops


def _weights(score: torch.Tensor, shift: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Return, in place, ``e^(score - shift)``, and 0 for keys that a row does not see."""
    weights = score.sub_(shift).clamp_(min=LEAST).exp_()
    seen.fill_hidden(weights, 0.0)
    return weights


def _by_blocks(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``weights @ values``: products of 64 keys each, added in ascending order."""
    heads, rows, keys = weights.shape
    if keys == BLOCK:
        return batched.multiply(weights, values)
    if rows <= FEW:
        # One call of the library, because calls take longer than such small products.
        blocks = weights.view(heads, rows, -1, BLOCK).transpose(1, 2).reshape(-1, rows, BLOCK)
        found = batched.multiply(blocks, values.reshape(-1, BLOCK, values.shape[2])).view(
            heads, -1, rows, values.shape[2]
        )
        total, *others = found.unbind(1)
        for product in others:
            total += product
        return total
    first, *later = zip(weights.split(BLOCK, 2), values.split(BLOCK, 1), strict=True)
    total = batched.multiply(*first)
    for block in later:
        batched.multiply(*block, total)
    return total


def _height(batch: Batch) -> int:
    """Return how many rows of each sequence to compute at once: those of 64 queries, if the cache has room."""
    rows = min(BLOCK * batch.group, ROWS) // BLOCK * BLOCK
    return rows if batch.heads * rows * batch.keys <= LARGEST else BLOCK


def backward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv, dsinks) for the arguments of ``Inputs``, out, lse, the gradient of out and ``needs_keys``."""
    *inputs, out, lse, grad, needs_keys = arguments
    given = Inputs(*inputs)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert isinstance(grad, torch.Tensor)
    dq = given.q.new_zeros(given.q.shape)
    dk, dv = (value.new_zeros(value.shape if needs_keys else 0) for value in (given.k, given.v))
    delta = row_sum(out.float() * grad.float()).movedim(-1, -2)
    for batch in batches(given, BLOCK, backward=True):
        for part, (of_rows, of_keys, of_values) in _results(given, batch, _gradients, lse, delta, grad):
            part.put_rows(dq, of_rows)
            if needs_keys:
                part.put_keys(dk, of_keys)
                part.put_keys(dv, of_values)
    return dq, dk, dv, sink.gradient(given.sinks, lse, delta)


def _gradients(
    given: Inputs, batch: Batch, height: int, lse: torch.Tensor, delta: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows, keys and values of a batch, FP32."""
    width, width_v = _whole_steps(given.q.shape[-1]), _whole_steps(given.v.shape[-1])
    queries, upstream = batch.rows_of(given.q, width), batch.rows_of(grad, width_v)
    keys, values = batch.keys_of(given.k, width), batch.keys_of(given.v, width_v)
    of_rows = (queries, upstream, *(batch.rows_of(x.movedim(-2, -1)[..., None], 1) for x in (lse, delta)))
    dq, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)
    for place, (query, above, log, mean) in enumerate(zip(*(x.split(height, 1) for x in of_rows), strict=True)):
        seen = batch.seen(place * height, query.shape[1])
        weights = _scores(given, query, seen.of(keys))
        slope = 1 - (weights / given.softcap).square_() if given.softcap else None
        _weights(weights, log, seen)
        dscore = batched.multiply(above, seen.of(values).mT).sub_(mean).mul_(weights)
        if slope is not None:
            dscore.mul_(slope)
        dq.append(_by_blocks(dscore, seen.of(keys)).mul_(given.scale))
        blocks = (x.split(BLOCK, 1) for x in (query, above, dscore, weights))
        for one_query, one_above, one_dscore, one_weights in zip(*blocks, strict=True):
            batched.multiply(one_dscore.mT, one_query, seen.of(dk))
            batched.multiply(one_weights.mT, one_above, seen.of(dv))
    return torch.cat(dq, 1), dk.mul_(given.scale), dv


def _scores(given: Inputs, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the scores ``[items * Hkv, rows, keys]``, soft cap included."""
    score = batched.multiply(queries, keys.mT).mul_(given.scale)
    return score.div_(given.softcap).tanh_().mul_(given.softcap) if given.softcap else score


def _whole_steps(size: int) -> int:
    return size + -size % STEP
