"""det_attention in PyTorch, for any device: blocks of 64 rows and 64 keys, products in FP64, sums in a fixed order.

The reduction order is the contract of this backend. Keys are counted from the first key of their sequence and taken in
blocks of 64. A block's products are FP64 and rounded once to FP32; a row is summed over a block by a tree. Each segment
of 16 blocks has its own state, and states are merged in ascending order. In the backward pass dq adds its blocks in
ascending order. dk and dv add products of 64 rows each in ascending order, counted from the first query that sees a
key. The rows of a KV head are its queries, token by token and within a token by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rl_kernels.attention import sinks as sink
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.core import rowwise

BLOCK = 64
"""Keys of a block, and rows of a block."""
SEGMENT = 1024
"""Keys of a segment."""


def forward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for the arguments of ``Inputs``."""
    given = Inputs(*arguments)  # type: ignore[arg-type]
    out = given.q.new_zeros((*given.q.shape[:-1], given.v.shape[-1]))
    lse = given.q.new_full(given.lse_shape(), -torch.inf, dtype=torch.float32)
    extra = None if given.sinks is None else given.sinks.float().view(-1, given.group)
    for sequence in _sequences(given):
        keys, values = sequence.keys(given.k), sequence.keys(given.v)
        queries = sequence.rows(given.q)
        for first in range(0, queries.shape[1], BLOCK):
            seen = _Seen(given, sequence, first)
            top, total, mixed = _state(given, _block(queries, first), keys, values, seen)
            if extra is not None:
                top, total, mixed = _with_sinks(top, total, mixed, extra[:, seen.rows % given.group])
            found = torch.where(total == 0, 0.0, mixed / torch.where(total == 0, 1.0, total))
            sequence.put(out, first, found)
            sequence.put(lse.movedim(-2, -1)[..., None], first, torch.where(total == 0, -torch.inf, top + total.log()))
    return out, lse


def _state(
    given: Inputs, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: _Seen
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (maximum, sum, accumulator) of 64 rows, the first two ``[Hkv, 64, 1]``, the last ``[Hkv, 64, Dv]``."""
    state = _empty(keys, values.shape[2])
    for segment in range(seen.first // SEGMENT * SEGMENT, seen.end, SEGMENT):
        top, total, mixed = _empty(keys, values.shape[2])
        for key in range(max(segment, seen.first // BLOCK * BLOCK), min(segment + SEGMENT, seen.end), BLOCK):
            score, _ = _scores(given, queries, _block(keys, key))
            score = score.masked_fill(~seen.mask(key), -torch.inf)
            above = torch.maximum(top, score.amax(2, keepdim=True))
            # A finite stand-in while a row has seen nothing.
            base = torch.where(above == -torch.inf, 0.0, above)
            weights, keep = (score - base).exp(), (top - base).exp()
            total = total * keep + rowwise.row_sum(weights)[..., None]
            mixed = mixed * keep + _product(_rounded(weights, given), _block(values, key))
            top = above
        state = _merge(state, (top, total, mixed))
    return state


def _empty(keys: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = keys.shape[0], BLOCK
    zeros = keys.new_zeros((*shape, 1), dtype=torch.float32)
    return torch.full_like(zeros, -torch.inf), zeros, keys.new_zeros((*shape, size), dtype=torch.float32)


def _merge(
    left: tuple[torch.Tensor, torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge the states of two ranges of keys; ``left`` holds the earlier keys."""
    top = torch.maximum(left[0], right[0])
    base = torch.where(top == -torch.inf, 0.0, top)
    a, b = (left[0] - base).exp(), (right[0] - base).exp()
    return top, left[1] * a + right[1] * b, left[2] * a + right[2] * b


def _with_sinks(
    top: torch.Tensor, total: torch.Tensor, mixed: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the sink of each row, ``sinks[Hkv, 64]``, to its state."""
    extra = sinks[..., None]
    above = torch.maximum(top, extra)
    # A finite stand-in for a row without keys whose sink is -inf.
    base = torch.where(above == -torch.inf, 0.0, above)
    keep = (top - base).exp()
    return above, total * keep + (extra - base).exp(), mixed * keep


def backward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv, dsinks) for the arguments of ``Inputs``, out, lse, the gradient of out and ``needs_keys``."""
    *inputs, out, lse, grad, needs_keys = arguments
    given = Inputs(*inputs)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert isinstance(grad, torch.Tensor)
    dq = given.q.new_zeros(given.q.shape)
    dk, dv = (value.new_zeros(value.shape if needs_keys else 0) for value in (given.k, given.v))
    delta = rowwise.row_sum(out.float() * grad.float()).movedim(-1, -2)
    for sequence in _sequences(given):
        _gradients(given, sequence, (lse, delta, grad), dq, (dk, dv) if needs_keys else None)
    return dq, dk, dv, sink.gradient(given.sinks, lse, delta)


def _gradients(
    given: Inputs,
    sequence: _Sequence,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dq: torch.Tensor,
    of_keys: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Write the gradients of one sequence."""
    keys, values, queries = sequence.keys(given.k), sequence.keys(given.v), sequence.rows(given.q)
    lse, delta = (sequence.rows(value.movedim(-2, -1)[..., None]) for value in saved[:2])
    upstream = sequence.rows(saved[2])
    padded = keys.shape[0], -(-keys.shape[1] // BLOCK) * BLOCK
    totals = [keys.new_zeros((*padded, value.shape[2]), dtype=torch.float32) for value in (keys, values)]
    for first in range(sequence.first_query(given.right) * given.group, queries.shape[1], BLOCK):
        seen = _Seen(given, sequence, first)
        rows, above = _block(queries, first), _block(upstream, first)
        total = rows.new_zeros((keys.shape[0], BLOCK, keys.shape[2]), dtype=torch.float32)
        for key in range(seen.first // BLOCK * BLOCK, seen.end, BLOCK):
            block, mixed = _block(keys, key), _block(values, key)
            score, slope = _scores(given, rows, block)
            weights = torch.where(seen.mask(key), (score - _block(lse, first)).exp(), 0.0)
            dscore = weights * (_product(above, mixed.mT) - _block(delta, first))
            dscore = _rounded(dscore if slope is None else dscore * slope, given)
            total += _product(dscore, block)
            part = slice(key, key + BLOCK)
            totals[0][:, part] += _product(dscore.mT, rows)
            totals[1][:, part] += _product(_rounded(weights, given).mT, above)
        sequence.put(dq, first, total * given.scale)
    for place, value in enumerate(of_keys or ()):
        found = totals[place][:, sequence.gone : keys.shape[1]] * (1.0 if place else given.scale)
        value[sequence.places] = found.movedim(0, 1).to(value.dtype)


def _scores(given: Inputs, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scores ``[Hkv, 64, 64]``, and the derivative of the soft cap or None."""
    score = _product(queries, keys.mT) * given.scale
    if not given.softcap:
        return score, None
    bent = (score / given.softcap).tanh()
    return given.softcap * bent, 1 - bent * bent


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b`` for each KV head, in FP64, rounded once to FP32; every call has the same shapes."""
    return torch.bmm(a.double().contiguous(), b.double().contiguous()).float()


def _rounded(x: torch.Tensor, given: Inputs) -> torch.Tensor:
    return x.to(given.q.dtype)


def _block(x: torch.Tensor, first: int) -> torch.Tensor:
    """Return 64 rows of ``x[Hkv, n, D]``, padded with zeros."""
    return rowwise.pad_to(x[:, first : first + BLOCK], 1, BLOCK)


@dataclass(frozen=True)
class _Sequence:
    """Where the queries and keys of one sequence lie.

    Attributes:
        queries: index of its queries in the leading dims of q.
        count: number of its queries, used or not; the last one stands at the last key.
        places: index of its keys in k and v.
        length: number of its keys, dropped ones included.
        missing: marks keys on pages that do not exist.
        group: query heads that share a KV head.
        gone: keys before ``places`` that the cache of a sliding window has dropped, modulo a segment.
    """

    queries: tuple[int | slice, ...]
    count: int
    places: tuple[torch.Tensor | int | slice, ...]
    length: int
    missing: torch.Tensor | None
    group: int
    gone: int = 0

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of its queries in use, ``[Hkv, T * group, D]``, from ``x[..., T, H, D]``."""
        tokens, heads, size = (part := x[self.queries]).shape
        return part.reshape(tokens, heads // self.group, self.group, size).movedim(1, 0).flatten(1, 2)

    def put(self, out: torch.Tensor, first: int, found: torch.Tensor) -> None:
        """Write 64 rows, ``[Hkv, 64, D]`` from row ``first``, to ``out[..., T, H, D]``."""
        part = out[self.queries]
        row = torch.arange(first, min(first + BLOCK, part.shape[0] * self.group), device=out.device)
        heads = torch.arange(found.shape[0], device=out.device)[:, None] * self.group + row % self.group
        part[row // self.group, heads] = found[:, : len(row)].to(out.dtype)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Return its keys or values, ``[Hkv, S, D]``, with zeros for dropped ones."""
        found = x[self.places]
        if self.missing is not None:
            found = found.masked_fill(self.missing[:, None, None], torch.nan)
        return torch.nn.functional.pad(found.movedim(0, 1), (0, 0, self.gone, 0))

    def first_query(self, right: int) -> int:
        """Return the first query that may see a key; queries before it are padding."""
        return 0 if right == UNLIMITED else max(self.count - self.length - right, 0)


class _Seen:
    """The keys that 64 rows from ``first`` see: from ``self.first`` up to ``self.end``, and a mask for each block."""

    def __init__(self, given: Inputs, sequence: _Sequence, first: int) -> None:
        self.rows = torch.arange(first, first + BLOCK, device=given.q.device)
        position = sequence.length - sequence.count + self.rows // given.group
        unlimited = given.left == UNLIMITED
        gone = sequence.gone
        self._low = torch.zeros_like(position) if unlimited else (position - given.left).clamp(min=gone)
        self._high = torch.full_like(position, sequence.length)
        if given.right != UNLIMITED:
            self._high = (position + given.right + 1).clamp(max=sequence.length)
        shift = sequence.length - sequence.count
        last = shift + (first + BLOCK - 1) // given.group
        self.first = 0 if unlimited else max(shift + first // given.group - given.left, gone)
        self.end = sequence.length if given.right == UNLIMITED else min(last + given.right + 1, sequence.length)

    def mask(self, key: int) -> torch.Tensor:
        """Return which of the 64 keys from ``key`` each row sees, ``[64, 64]``."""
        keys = torch.arange(key, key + BLOCK, device=self.rows.device)
        return (keys >= self._low[:, None]) & (keys < self._high[:, None])


def _sequences(given: Inputs) -> Iterator[_Sequence]:
    """Yield the sequences; integers are clamped to their tensors, because they may not be validated."""
    starts_q, starts_k, first, used_q, used_k = (
        None if value is None else value.tolist()
        for value in (given.cu_seqlens_q, given.cu_seqlens_k, given.k_start, given.seqused_q, given.seqused_k)
    )
    for b in range(given.batch):
        lead: tuple[int, ...] = (b,)
        start, count = 0, given.q.shape[1]
        if starts_q is not None:
            start, stop = _within(starts_q[b : b + 2], given.q.shape[0])
            count, lead = stop - start, ()
        rows = count if used_q is None else min(max(used_q[b], 0), count)
        queries: tuple[int | slice, ...] = (*lead, slice(start, start + rows))
        if given.block_table is not None:
            assert used_k is not None
            yield _paged(given, queries, count, b, used_k[b])
            continue
        if starts_k is not None:
            low, high = _within(starts_k[b : b + 2], given.k.shape[0])
            yield _Sequence(queries, count, (slice(low, high),), high - low, None, given.group)
            continue
        high = given.k.shape[1] if used_k is None else min(max(used_k[b], 0), given.k.shape[1])
        low = 0 if first is None else min(max(first[b], 0), high)
        gone = 0 if first is None or given.left == UNLIMITED else max(-first[b], 0) % SEGMENT
        yield _Sequence(queries, count, (b, slice(low, high)), gone + high - low, None, given.group, gone)


def _paged(given: Inputs, queries: tuple[int | slice, ...], count: int, b: int, used: int) -> _Sequence:
    assert given.block_table is not None
    pages, size = given.k.shape[:2]
    length = min(max(used, 0), given.block_table.shape[1] * size * bool(pages))
    key = torch.arange(length, device=given.q.device)
    page = given.block_table[b, key // size].long()
    missing = rowwise.outside(page, pages)
    return _Sequence(queries, count, (page.clamp(0, max(pages - 1, 0)), key % size), length, missing, given.group)


def _within(bounds: list[int], total: int) -> tuple[int, int]:
    start = min(max(bounds[0], 0), total)
    return start, min(max(bounds[1], start), total)
