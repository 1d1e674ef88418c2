"""Where the sequences of a call lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.core.rowwise.ids import outside

BLOCK = 64
"""Keys of a block."""


@dataclass(frozen=True)
class Place:
    """Where the queries and keys of one sequence lie, or those of a whole batch of sequences that lie alike.

    Attributes:
        queries: index of its queries in the leading dims of q.
        rows: number of its queries in use.
        count: number of its queries, used or not; the last one stands at the last key.
        keys: index of its keys in k and v.
        length: number of its keys, dropped ones included.
        missing: marks keys on pages that do not exist.
        gone: keys before ``keys`` that the cache of a sliding window has dropped, modulo a block.
        items: number of sequences.
    """

    queries: tuple[int | slice, ...]
    rows: int
    count: int
    keys: tuple[torch.Tensor | int | slice, ...]
    length: int
    missing: torch.Tensor | None = None
    gone: int = 0
    items: int = 1

    def without_padding(self, right: int) -> Place:
        """Return the same without the first queries, if these can see no key because they are padding."""
        first = 0 if right == UNLIMITED else min(max(self.count - self.length - right, 0), self.rows)
        *lead, own = self.queries
        assert isinstance(own, slice)
        queries = (*lead, slice(own.start + first, own.stop))
        return replace(self, queries=queries, rows=self.rows - first, count=self.count - first)

    def part(self, first: int, end: int) -> Place:
        """Return some of these sequences, counted from the first of them."""
        lead = self.queries[0]
        assert isinstance(lead, slice)
        some = slice(lead.start + first, lead.start + end)
        queries, keys = (some, *self.queries[1:]), (some, *self.keys[1:])
        return replace(self, queries=queries, keys=keys, items=end - first)


def places(given: Inputs) -> Iterator[Place]:
    """Yield where the sequences lie; integers are clamped to their tensors, because they may not be validated."""
    starts_q, starts_k, first, used_q, used_k = (
        None if value is None else value.tolist()
        for value in (given.cu_seqlens_q, given.cu_seqlens_k, given.k_start, given.seqused_q, given.seqused_k)
    )
    if starts_q is starts_k is first is used_q is used_k is None:
        (count, length), every = (x.shape[1] for x in (given.q, given.k)), slice(0, given.batch)
        if given.batch:
            yield Place((every, slice(0, count)), count, count, (every, slice(0, length)), length, items=given.batch)
        return
    for b in range(given.batch):
        lead: tuple[int, ...] = (b,)
        start, count = 0, given.q.shape[1]
        if starts_q is not None:
            start, stop = _within(starts_q[b : b + 2], given.q.shape[0])
            count, lead = stop - start, ()
        rows = count if used_q is None else min(max(used_q[b], 0), count)
        queries: tuple[int | slice, ...] = (*lead, slice(start, start + rows))
        of_queries = queries, rows, count
        if given.block_table is not None:
            assert used_k is not None
            yield Place(*of_queries, *_paged(given, b, used_k[b]))
            continue
        if starts_k is not None:
            low, high = _within(starts_k[b : b + 2], given.k.shape[0])
            yield Place(*of_queries, (slice(low, high),), high - low)
            continue
        high = given.k.shape[1] if used_k is None else min(max(used_k[b], 0), given.k.shape[1])
        low = 0 if first is None else min(max(first[b], 0), high)
        gone = 0 if first is None or given.left == UNLIMITED else max(-first[b], 0) % BLOCK
        yield Place(*of_queries, (b, slice(low, high)), gone + high - low, gone=gone)


def _paged(given: Inputs, b: int, used: int) -> tuple[tuple[torch.Tensor, torch.Tensor], int, torch.Tensor]:
    """Return the index of keys on pages, their number, and which of them lie on no page."""
    assert given.block_table is not None
    pages, size = given.k.shape[:2]
    length = min(max(used, 0), given.block_table.shape[1] * size * bool(pages))
    key = torch.arange(length, device=given.q.device)
    page = given.block_table[b, key // size].long()
    return (page.clamp(0, max(pages - 1, 0)), key % size), length, outside(page, pages)


def _within(bounds: list[int], total: int) -> tuple[int, int]:
    start = min(max(bounds[0], 0), total)
    return start, min(max(bounds[1], start), total)
