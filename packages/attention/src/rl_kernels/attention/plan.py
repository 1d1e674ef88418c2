"""The packed calls that give a rank of several its results.

The keys of a sequence begin at its first row in each call of queries, so blocks and segments of keys, and a query's
sums over them, are those of one GPU. The gradient of a key is a sum over the rows of its sequence, so a rank computes
those of its own keys from the gathered rows of all ranks. Queries that cannot see a key add nothing, and are left out
in whole blocks of rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch

from rl_kernels.attention.context import Range, context_shards, cumulative, layout_of, row_numbers
from rl_kernels.attention.inputs import UNLIMITED
from rl_kernels.core.torchlib.observed import without_modes

ROWS = 64
"""Rows that are added to the gradients of keys at once: a multiple of those of every kernel."""


class Where(NamedTuple):
    """What a call computes for.

    Attributes:
        lengths: those of the whole sequences.
        rank: this rank.
        ranks: their number.
        window: left and right; right is 0, or both are unlimited.
        group: query heads that share a KV head.
        device: device of the operands.
    """

    lengths: tuple[int, ...]
    rank: int
    ranks: int
    window: tuple[int, int]
    group: int
    device: torch.device

    @property
    def is_causal(self) -> bool:
        """Whether a query does not see all keys of its sequence."""
        return self.window[1] != UNLIMITED

    def units(self) -> Iterator[tuple[int, int, int, list[Range]]]:
        """Yield, of each sequence and part of this rank's rows, what is computed at once.

        That is the sequence's first packed row and its length, the part's first row among this rank's, and its ranges
        of rows of the sequence: one if the mask is causal, else all.
        """
        row = 0
        for start, length in zip(cumulative(self.lengths), self.lengths, strict=False):
            (first, middle), (later, end) = context_shards(length, self.ranks)[self.rank]
            pieces = [(first, end)] if middle == later else [(first, middle), (later, end)]
            held = [piece for piece in pieces if piece[0] < piece[1]]
            for ranges in [[piece] for piece in held] if self.is_causal else [held] if held else []:
                yield start, length, row, ranges
                row += _size(ranges)


class Packed(NamedTuple):
    """One packed call.

    Attributes:
        queries: places of its queries among the gathered rows; None: this rank's rows in their order.
        keys: places of its keys among the gathered rows.
        own: which of its keys are this rank's.
        rows: which of this rank's rows these are.
        cu_seqlens_q: as in ``det_attention``.
        cu_seqlens_k: as in ``det_attention``.
        seqused_q: as in ``det_attention``, or None.
        longest: the largest numbers of queries and of keys of a sequence.
        window: left and right.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor
    own: torch.Tensor
    rows: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None
    longest: tuple[int, int]
    window: tuple[int, int]

    def queries_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of its queries among the gathered rows."""
        return x if self.queries is None else x.index_select(0, self.queries)

    def keys_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of its keys among the gathered rows."""
        return x.index_select(0, self.keys)


class Piece(NamedTuple):
    """A sequence of a packed call, in packed rows of the whole sequences.

    Attributes:
        queries: their range.
        keys: their ranges.
        others: the number of keys, the first ones, that are not this rank's.
        row: the first of this rank's rows that belong to its keys.
        ahead: rows from the last key to the last query.
    """

    queries: Range
    keys: list[Range]
    others: int = 0
    row: int = 0
    ahead: int = 0


@functools.lru_cache(maxsize=16)
def of_queries(where: Where) -> Packed:
    """Return the call of the forward pass and of dq: each part of this rank's queries, and all keys before its end."""
    pieces = []
    for start, length, row, ranges in where.units():
        end = ranges[-1][1] if where.is_causal else length
        pieces.append(Piece((row, row + _size(ranges)), [(start, start + end)]))
    return _packed(where, pieces, where.window)._replace(queries=None)


@functools.lru_cache(maxsize=16)
def of_keys(where: Where) -> list[Packed]:
    """Return the calls of dk and dv: each part of this rank's keys, and the queries that see any of them.

    Queries end a number of rows after keys, which the window of a call makes up for. It is one number in a call: parts
    whose numbers are within a factor of two share one, and get padding that is not used.
    """
    left = where.window[0]
    step = math.lcm(ROWS // math.gcd(ROWS, where.group), max(ROWS // where.group, 1))
    calls: dict[int, list[Piece]] = {}
    for start, length, row, ranges in where.units():
        if where.is_causal:
            ((first, end),) = ranges
            # Whole blocks of rows, counted from the first query of the sequence.
            begin = first // step * step
            last = length if left == UNLIMITED else min(length, end + left)
            keys = [(start + begin, start + end)]
            piece = Piece((start + begin, start + last), keys, first - begin, row, last - end)
        else:
            keys = [(start + first, start + end) for first, end in ranges]
            piece = Piece((start, start + length), keys, row=row)
        calls.setdefault(piece.ahead.bit_length(), []).append(piece)
    plans = []
    for pieces in calls.values():
        most = max(piece.ahead for piece in pieces)
        window = (left if left == UNLIMITED else left - most, most) if where.is_causal else where.window
        plans.append(_packed(where, pieces, window, most))
    return plans


def _packed(where: Where, pieces: list[Piece], window: tuple[int, int], ahead: int = 0) -> Packed:
    """Return the call of some pieces, whose queries are padded so that all end ``ahead`` rows after keys."""
    used = [last - first for (first, last), *_ in pieces]
    queries = [count + ahead - piece.ahead for count, piece in zip(used, pieces, strict=True)]
    keys = [_size(piece.keys) for piece in pieces]
    # Padding may be any rows: nothing reads them.
    with_padding = [
        (piece.queries, (0, total - count)) for piece, count, total in zip(pieces, used, queries, strict=True)
    ]
    own = [
        (start + piece.others, start + count)
        for start, count, piece in zip(cumulative(keys), keys, pieces, strict=False)
    ]
    rows = [(piece.row, piece.row + end - first) for piece, (first, end) in zip(pieces, own, strict=True)]
    device, places = where.device, layout_of(where.lengths, where.ranks, where.device).places
    with without_modes():
        query_rows, key_rows = (
            row_numbers(ranges).to(device)
            for ranges in (chain(*with_padding), chain(*(piece.keys for piece in pieces)))
        )
        cu_seqlens_q, cu_seqlens_k, in_use = (
            torch.tensor(numbers, dtype=torch.int32, device=device)
            for numbers in (cumulative(queries), cumulative(keys), used)
        )
        return Packed(
            queries=places[query_rows],
            keys=places[key_rows],
            own=row_numbers(own).to(device),
            rows=row_numbers(rows).to(device),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=None if used == queries else in_use,
            longest=(max(queries, default=0), max(keys, default=0)),
            window=window,
        )


def _size(ranges: list[Range]) -> int:
    return sum(end - first for first, end in ranges)
