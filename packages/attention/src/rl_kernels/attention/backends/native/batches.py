"""Batches of sequences whose rows and keys are padded to one size, and masks of what their rows see."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rl_kernels.attention.backends.native.places import BLOCK, Place, places
from rl_kernels.attention.inputs import UNLIMITED, Inputs

MINUS_INFINITY = -0x800000
"""The bits of -inf in FP32, as an integer."""
SMALL = 1 << 15
"""Most numbers of a mask that is remembered."""
LARGEST = 1 << 19
"""Scores of a batch of several sequences for 64 rows of each: more would leave the CPU's cache."""


@dataclass(frozen=True)
class Seen:
    """The keys from ``begin`` up to ``end``, whole blocks, which include all that a range of rows sees.

    Attributes:
        start: the first key that some row does not see.
        kept: for each sequence, row and key from ``start`` all bits of an integer if the row sees the key, else none;
            None if no row sees those keys.
        lacks_some: whether some row sees no key.
    """

    begin: int
    end: int
    start: int
    kept: torch.Tensor | None
    lacks_some: bool

    def fill_hidden(self, x: torch.Tensor, value: float) -> None:
        """Write 0 or -inf to ``x[items * Hkv, rows, keys]``, FP32, where a row does not see a key."""
        if self.start == self.end:
            return
        part = x[:, :, self.start - self.begin :]
        if self.kept is None:
            part.fill_(value)
            return
        # Integers, because masked_fill_ takes ten times as long.
        bits = part.view(torch.int32).unflatten(0, (len(self.kept), -1)).bitwise_and_(self.kept)
        if value:
            bits.bitwise_or_(~self.kept & MINUS_INFINITY)

    def without_hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x[items * Hkv, rows, keys]`` with -inf where a row does not see a key, or without those keys."""
        if self.kept is None and self.begin < self.start:
            return x if self.start == self.end else x[:, :, : self.start - self.begin]
        self.fill_hidden(x, -torch.inf)
        return x

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return these keys of ``x[items * Hkv, keys, D]``."""
        return x if self.end - self.begin == x.shape[1] else x[:, self.begin : self.end]


class Batch:
    """Sequences that are computed together: one place, or several of one sequence each."""

    def __init__(self, given: Inputs, places: Sequence[Place], multiple: int) -> None:
        self.places, self._given, self._multiple = places, given, multiple
        self.kv_heads, self.group = given.k.shape[-2], given.group
        self.items = sum(place.items for place in places)
        self.heads = self.items * self.kv_heads
        self.rows, self.keys = _padded(given, places[0], multiple)
        lead = places[0].queries[0]
        # A dense batch, or a part of it: a range of sequences, then one of queries.
        self._is_whole = len(places[0].queries) == 2 and isinstance(lead, slice)

    def one_by_one(self) -> Iterator[Batch]:
        """Yield batches of one sequence each."""
        for place in self.places:
            parts = [place.part(b, b + 1) for b in range(place.items)] if self._is_whole else [place]
            yield from (Batch(self._given, [part], self._multiple) for part in parts)

    @property
    def is_one(self) -> bool:
        """Whether this is one sequence."""
        return self.items == 1

    def rows_of(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Return the queries in ``x[..., T, H, D]`` as rows, ``[items * Hkv, rows, width]`` in FP32 with zeros."""
        found = []
        for place in self.places:
            own = self._grouped(x, place)
            own = own.reshape(-1, self.kv_heads, place.rows * self.group, own.shape[-1]).float()
            found.append(_pad(own, width, 0, self.rows, 0.0))
        return _joined(found)

    def put_rows(self, out: torch.Tensor, found: torch.Tensor) -> None:
        """Write ``found[items * Hkv, rows, D]`` to the rows of the queries in ``out[..., T, H, D]``."""
        for part, place in self._parts(found.view(self.items, self.kv_heads, self.rows, -1)):
            self._grouped(out, place).copy_(self._tokens(part, place, out.shape[-1]))

    def per_row(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers of query heads ``x[H]`` for each row, ``[items * Hkv, rows, 1]``."""
        row = torch.arange(self.rows, device=x.device) % self.group
        found = x.view(self.kv_heads, self.group)[:, row, None]
        return found.expand(self.items, -1, -1, -1).flatten(0, 1)

    def keys_of(self, x: torch.Tensor, width: int, beside: float = 0.0) -> torch.Tensor:
        """Return keys or values, ``[items * Hkv, keys, width]`` in FP32; what is not theirs is ``beside``."""
        found = []
        for place in self.places:
            own = x if self._is_whole and x.shape[:2] == (place.items, place.length) else x[place.keys]
            if place.missing is not None:
                own = own.masked_fill(place.missing[:, None, None], torch.nan)
            own = own.transpose(-3, -2).float()
            found.append(_pad(own if self._is_whole else own[None], width, place.gone, self.keys, beside))
        return _joined(found)

    def put_keys(self, out: torch.Tensor, found: torch.Tensor) -> None:
        """Write ``found[items * Hkv, keys, width]`` to the keys of the sequences in ``out[..., Hkv, D]``."""
        for part, place in self._parts(found.view(self.items, self.kv_heads, self.keys, -1)):
            out[place.keys] = part[..., place.gone : place.length, : out.shape[-1]].transpose(-3, -2).to(out.dtype)

    def _parts(self, found: torch.Tensor) -> Iterable[tuple[torch.Tensor, Place]]:
        """Return the part of ``found[items, ...]`` of each place; of one sequence without the first dim."""
        return [(found, self.places[0])] if self._is_whole else zip(found, self.places, strict=True)

    def _grouped(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        """Return the queries of a place in ``x[..., T, H, D]`` as ``[..., Hkv, T, group, D]``."""
        if not self._is_whole or x.shape[:2] != (place.items, place.rows):
            x = x[place.queries]
        return x.view(*x.shape[:-2], self.kv_heads, self.group, x.shape[-1]).transpose(-4, -3)

    def _tokens(self, x: torch.Tensor, place: Place, width: int) -> torch.Tensor:
        """Return rows in use, ``[..., Hkv, T, group, width]``."""
        rows = place.rows * self.group
        if rows < self.rows or width < x.shape[-1]:
            x = x[..., :rows, :width]
        return x.view(*x.shape[:-2], place.rows, self.group, width)

    def seen(self, row: int, count: int) -> Seen:
        """Return the keys that ``count`` rows from ``row`` on see."""
        first, last = (self._bounds(at // self.group) for at in (row, row + count - 1))
        begin = min(max(min(low for low, _ in first), 0) // BLOCK * BLOCK, self.keys - BLOCK)
        end = max(high for _, high in last)
        # Ranges of later queries begin and end later, so the shortest is the first or the last.
        lacks_some = any(high <= low for low, high in (*first, *last))
        end = min(-(-max(end, begin + 1) // BLOCK) * BLOCK, self.keys)
        if max(low for low, _ in last) > begin:
            # The window hides keys on the left, too.
            start = begin
        else:
            start = min(max(min(high for _, high in first), begin), end)
            if len({high for _, high in (*first, *last)}) == 1 or start == end:
                return Seen(begin, end, start, None, lacks_some)
        return Seen(begin, end, start, self._kept(range(row, row + count), range(start, end)), lacks_some)

    def _kept(self, rows: range, keys: range) -> torch.Tensor:
        """Return ``Seen.kept``; layers ask for the same again and again.

        On a GPU nothing is remembered: memory of a call that is captured in a CUDA graph is the graph's.
        """
        places = tuple((place.length, place.length - place.count, place.gone) for place in self.places)
        device = self._given.q.device
        is_small = len(places) * len(rows) * len(keys) <= SMALL
        make = _remembered_bits if is_small and device.type == "cpu" else _bits
        return make(rows, self.group, keys, places, (self._given.left, self._given.right), device)

    def _bounds(self, query: int) -> list[tuple[int, int]]:
        """Return the first key that a query sees, and the key after the last one, in each sequence."""
        found = []
        for place in self.places:
            position, low, high = place.length - place.count + query, 0, place.length
            if self._given.left != UNLIMITED:
                low = max(position - self._given.left, place.gone)
            if self._given.right != UNLIMITED:
                high = min(position + self._given.right + 1, place.length)
            found.append((low, high))
        return found


def _pad(x: torch.Tensor, width: int, first: int, rows: int, value: float) -> torch.Tensor:
    """Return ``x[..., n, D]`` with ``rows`` rows, ``first`` of them before it, and ``width`` columns."""
    behind = rows - x.shape[-2] - first
    missing = width - x.shape[-1]
    return (
        torch.constant_pad_nd(x, (0, missing, first, behind), value) if first or behind or missing else x.contiguous()
    )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return parts ``[items, Hkv, n, D]`` as ``[all items * Hkv, n, D]``."""
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found.flatten(0, 1)


def _bits(
    rows: range,
    group: int,
    keys: range,
    places: tuple[tuple[int, int, int], ...],
    window: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """Return ``Seen.kept`` for places of these (length, position of the first query, dropped keys)."""
    key = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=device)
    query = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)[:, None] // group
    # A number stays one: as a tensor it would be copied to a GPU, which waits.
    length, shift, gone = (
        of_all[0] if len(places) == 1 else torch.tensor(of_all, dtype=torch.int32, device=device)[:, None, None]
        for of_all in zip(*places, strict=True)
    )
    left, right = window
    hidden = (key >= length).expand(len(places), len(rows), len(keys))
    if right != UNLIMITED:
        hidden = hidden | (key > query + shift + right)
    if left != UNLIMITED:
        hidden = hidden | (key < gone) | (key < query + shift - left)
    return (hidden.int() - 1)[:, None]


_remembered_bits = functools.lru_cache(maxsize=64)(_bits)


def batches(given: Inputs, multiple: int, *, backward: bool) -> Iterator[Batch]:
    """Yield the sequences in batches of one padded size; without queries that are padding in the backward pass."""
    sizes: dict[tuple[int, int], list[Place]] = {}
    for place in places(given):
        own = place.without_padding(given.right) if backward else place
        if own.rows > 0:
            sizes.setdefault(_padded(given, own, multiple), []).append(own)
    for (rows, keys), found in sizes.items():
        most = max(LARGEST // (given.k.shape[-2] * min(rows, 64) * keys), 1)
        for place in found:
            if place.items > 1:
                for first in range(0, place.items, most):
                    yield Batch(given, [place.part(first, min(first + most, place.items))], multiple)
        alone = [place for place in found if place.items == 1]
        for first in range(0, len(alone), most):
            yield Batch(given, alone[first : first + most], multiple)


def _padded(given: Inputs, place: Place, multiple: int) -> tuple[int, int]:
    rows = place.rows * given.group
    rows += -rows % (multiple if rows <= BLOCK else BLOCK)
    return rows, max(-(-place.length // BLOCK), 1) * BLOCK
