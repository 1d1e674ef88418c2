"""The places of a call's sequences in its tensors."""

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
    """The place of one sequence's queries and keys in the tensors, or of a batch of sequences with one layout.

    Attributes:
        queries: index of the sequence's queries in the leading dims of q.
        rows: number of its queries in use.
        count: number of its queries, used or not; the last one stands at the last key.
        keys: index of its keys in k and v.
        length: number of its keys, dropped ones included.
        missing: mask of keys on pages that do not exist, or None without pages.
        dropped: number of keys before ``keys`` that the cache of a sliding window has dropped, modulo a block.
        items: number of sequences.
    """

    queries: tuple[int | slice, ...]
    rows: int
    count: int
    keys: tuple[torch.Tensor | int | slice, ...]
    length: int
    missing: torch.Tensor | None = None
    dropped: int = 0
    items: int = 1

    def without_padding(self, right: int) -> Place:
        """Drop the first queries if they can see no key because they are padding."""
        first = 0 if right == UNLIMITED else min(max(self.count - self.length - right, 0), self.rows)
        *lead, rows = self.queries
        assert isinstance(rows, slice)
        queries = (*lead, slice(rows.start + first, rows.stop))
        return replace(self, queries=queries, rows=self.rows - first, count=self.count - first)

    def part(self, first: int, end: int) -> Place:
        """Return the place of sequences ``first`` to ``end`` of this batch."""
        lead = self.queries[0]
        assert isinstance(lead, slice)
        sequences = slice(lead.start + first, lead.start + end)
        queries, keys = (sequences, *self.queries[1:]), (sequences, *self.keys[1:])
        return replace(self, queries=queries, keys=keys, items=end - first)


def places(inputs: Inputs) -> Iterator[Place]:
    """Yield the places of the sequences; integers are clamped to their tensors, because they may not be validated."""
    starts_q, starts_k, first, used_q, used_k = (
        None if value is None else value.tolist()
        for value in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.k_start, inputs.seqused_q, inputs.seqused_k)
    )
    if starts_q is starts_k is first is used_q is used_k is None:
        (count, length), every = (x.shape[1] for x in (inputs.q, inputs.k)), slice(0, inputs.batch)
        if inputs.batch:
            yield Place((every, slice(0, count)), count, count, (every, slice(0, length)), length, items=inputs.batch)
        return
    for b in range(inputs.batch):
        lead: tuple[int, ...] = (b,)
        start, count = 0, inputs.q.shape[1]
        if starts_q is not None:
            start, stop = _within(starts_q[b : b + 2], inputs.q.shape[0])
            count, lead = stop - start, ()
        rows = count if used_q is None else min(max(used_q[b], 0), count)
        queries: tuple[int | slice, ...] = (*lead, slice(start, start + rows))
        query_fields = queries, rows, count
        if inputs.block_table is not None:
            assert used_k is not None
            yield Place(*query_fields, *_paged(inputs, b, used_k[b]))
            continue
        if starts_k is not None:
            low, high = _within(starts_k[b : b + 2], inputs.k.shape[0])
            yield Place(*query_fields, (slice(low, high),), high - low)
            continue
        high = inputs.k.shape[1] if used_k is None else min(max(used_k[b], 0), inputs.k.shape[1])
        low = 0 if first is None else min(max(first[b], 0), high)
        dropped = 0 if first is None or inputs.left == UNLIMITED else max(-first[b], 0) % BLOCK
        yield Place(*query_fields, (b, slice(low, high)), dropped + high - low, dropped=dropped)


def _paged(inputs: Inputs, b: int, used: int) -> tuple[tuple[torch.Tensor, torch.Tensor], int, torch.Tensor]:
    """Return the index of keys on pages, the number of keys, and a mask of keys whose page is missing."""
    assert inputs.block_table is not None
    pages, size = inputs.k.shape[:2]
    length = min(max(used, 0), inputs.block_table.shape[1] * size * bool(pages))
    key = torch.arange(length, device=inputs.q.device)
    page = inputs.block_table[b, key // size].long()
    return (page.clamp(0, max(pages - 1, 0)), key % size), length, outside(page, pages)


def _within(bounds: list[int], total: int) -> tuple[int, int]:
    start = min(max(bounds[0], 0), total)
    return start, min(max(bounds[1], start), total)
