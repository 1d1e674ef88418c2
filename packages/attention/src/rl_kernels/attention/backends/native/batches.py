"""Batches of sequences whose rows and keys are padded to one size, and masks of the keys that each row sees."""

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
"""The largest mask that is cached, in elements."""
LARGEST = 1 << 19
"""Most scores of a batch of several sequences, counting 64 rows of each: more do not fit into the CPU's cache."""


@dataclass(frozen=True)
class VisibleKeys:
    """The blocks of keys from ``begin`` up to ``end``: they include every key that a range of rows sees.

    Attributes:
        start: the first key that some row does not see.
        mask: for each sequence, row and key from ``start``, an integer with all bits set if the row sees the key, else
            0; None if no row sees those keys.
        lacks_some: whether some row sees no key.
    """

    begin: int
    end: int
    start: int
    mask: torch.Tensor | None
    lacks_some: bool

    def fill_hidden(self, x: torch.Tensor, value: float) -> None:
        """Write 0 or -inf to ``x[items * Hkv, rows, keys]``, FP32, where a row does not see a key."""
        if self.start == self.end:
            return
        part = x[:, :, self.start - self.begin :]
        if self.mask is None:
            part.fill_(value)
            return
        # Integers, because masked_fill_ takes ten times as long.
        bits = part.view(torch.int32).unflatten(0, (len(self.mask), -1)).bitwise_and_(self.mask)
        if value:
            bits.bitwise_or_(~self.mask & MINUS_INFINITY)

    def without_hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x[items * Hkv, rows, keys]`` with -inf where a row does not see a key, or without those keys."""
        if self.mask is None and self.begin < self.start:
            return x if self.start == self.end else x[:, :, : self.start - self.begin]
        self.fill_hidden(x, -torch.inf)
        return x

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the slice ``begin`` to ``end`` of ``x[items * Hkv, keys, D]``."""
        return x if self.end - self.begin == x.shape[1] else x[:, self.begin : self.end]


class Batch:
    """Sequences that are computed together: one place, or several of one sequence each."""

    def __init__(self, inputs: Inputs, places: Sequence[Place], multiple: int) -> None:
        self.places, self._inputs, self._multiple = places, inputs, multiple
        self.kv_heads, self.group = inputs.k.shape[-2], inputs.group
        self.items = sum(place.items for place in places)
        self.heads = self.items * self.kv_heads
        self.rows, self.keys = _padded_sizes(inputs, places[0], multiple)
        lead = places[0].queries[0]
        # A dense batch, or a part of it: a range of sequences, then one of queries.
        self._is_whole = len(places[0].queries) == 2 and isinstance(lead, slice)

    def one_by_one(self) -> Iterator[Batch]:
        """Yield batches of one sequence each."""
        for place in self.places:
            parts = [place.part(b, b + 1) for b in range(place.items)] if self._is_whole else [place]
            yield from (Batch(self._inputs, [part], self._multiple) for part in parts)

    @property
    def is_single(self) -> bool:
        """Whether this is one sequence."""
        return self.items == 1

    def rows_of(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Return the queries in ``x[..., T, H, D]`` as FP32 rows ``[items * Hkv, rows, width]``, padded with zeros."""
        parts = []
        for place in self.places:
            queries = self._grouped(x, place)
            queries = queries.reshape(-1, self.kv_heads, place.rows * self.group, queries.shape[-1]).float()
            parts.append(_pad(queries, width, 0, self.rows, 0.0))
        return _concatenated(parts)

    def put_rows(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the rows ``[items * Hkv, rows, D]`` to the queries in ``out[..., T, H, D]``."""
        for part, place in self._parts(rows.view(self.items, self.kv_heads, self.rows, -1)):
            self._grouped(out, place).copy_(self._tokens(part, place, out.shape[-1]))

    def per_row(self, x: torch.Tensor) -> torch.Tensor:
        """Expand one number per query head, ``x[H]``, to one per row, ``[items * Hkv, rows, 1]``."""
        row = torch.arange(self.rows, device=x.device) % self.group
        values = x.view(self.kv_heads, self.group)[:, row, None]
        return values.expand(self.items, -1, -1, -1).flatten(0, 1)

    def keys_of(self, x: torch.Tensor, width: int, fill: float = 0.0) -> torch.Tensor:
        """Return keys or values, ``[items * Hkv, keys, width]`` in FP32, padded with ``fill``."""
        parts = []
        for place in self.places:
            keys = x if self._is_whole and x.shape[:2] == (place.items, place.length) else x[place.keys]
            if place.missing is not None:
                keys = keys.masked_fill(place.missing[:, None, None], torch.nan)
            keys = keys.transpose(-3, -2).float()
            parts.append(_pad(keys if self._is_whole else keys[None], width, place.dropped, self.keys, fill))
        return _concatenated(parts)

    def put_keys(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """Write the values ``[items * Hkv, keys, width]`` to the keys of the sequences in ``out[..., Hkv, D]``."""
        for part, place in self._parts(values.view(self.items, self.kv_heads, self.keys, -1)):
            out[place.keys] = part[..., place.dropped : place.length, : out.shape[-1]].transpose(-3, -2).to(out.dtype)

    def _parts(self, values: torch.Tensor) -> Iterable[tuple[torch.Tensor, Place]]:
        """Split ``values[items, ...]`` by place; the part of a single sequence has no first dim."""
        return [(values, self.places[0])] if self._is_whole else zip(values, self.places, strict=True)

    def _grouped(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        """Return the queries of a place in ``x[..., T, H, D]`` as ``[..., Hkv, T, group, D]``."""
        if not self._is_whole or x.shape[:2] != (place.items, place.rows):
            x = x[place.queries]
        return x.view(*x.shape[:-2], self.kv_heads, self.group, x.shape[-1]).transpose(-4, -3)

    def _tokens(self, x: torch.Tensor, place: Place, width: int) -> torch.Tensor:
        """Return the rows in use as ``[..., Hkv, T, group, width]``."""
        rows = place.rows * self.group
        if rows < self.rows or width < x.shape[-1]:
            x = x[..., :rows, :width]
        return x.view(*x.shape[:-2], place.rows, self.group, width)

    def visible_keys(self, row: int, count: int) -> VisibleKeys:
        """Return the keys that rows ``row`` to ``row + count`` see."""
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
                return VisibleKeys(begin, end, start, None, lacks_some)
        return VisibleKeys(begin, end, start, self._mask(range(row, row + count), range(start, end)), lacks_some)

    def _mask(self, rows: range, keys: range) -> torch.Tensor:
        """Return ``VisibleKeys.mask``; small ones are cached, because every layer of a model asks for the same.

        On a GPU nothing is cached: memory of a call that is captured in a CUDA graph is the graph's.
        """
        places = tuple((place.length, place.length - place.count, place.dropped) for place in self.places)
        device = self._inputs.q.device
        is_small = len(places) * len(rows) * len(keys) <= SMALL
        make = _cached_mask_bits if is_small and device.type == "cpu" else _mask_bits
        return make(rows, self.group, keys, places, (self._inputs.left, self._inputs.right), device)

    def _bounds(self, query: int) -> list[tuple[int, int]]:
        """Return the first key that a query sees, and the key after the last one, in each sequence."""
        bounds = []
        for place in self.places:
            position, low, high = place.length - place.count + query, 0, place.length
            if self._inputs.left != UNLIMITED:
                low = max(position - self._inputs.left, place.dropped)
            if self._inputs.right != UNLIMITED:
                high = min(position + self._inputs.right + 1, place.length)
            bounds.append((low, high))
        return bounds


def _pad(x: torch.Tensor, width: int, first: int, rows: int, value: float) -> torch.Tensor:
    """Pad ``x[..., n, D]`` to ``rows`` rows, ``first`` of them in front, and ``width`` columns."""
    after = rows - x.shape[-2] - first
    missing = width - x.shape[-1]
    return torch.constant_pad_nd(x, (0, missing, first, after), value) if first or after or missing else x.contiguous()


def _concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return parts ``[items, Hkv, n, D]`` as ``[all items * Hkv, n, D]``."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.flatten(0, 1)


def _mask_bits(
    rows: range,
    group: int,
    keys: range,
    places: tuple[tuple[int, int, int], ...],
    window: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """Return ``VisibleKeys.mask``; a place is (length, position of the first query, dropped keys)."""
    key = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=device)
    query = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)[:, None] // group
    # A number stays one: as a tensor it would be copied to a GPU, which waits.
    length, shift, dropped = (
        values[0] if len(places) == 1 else torch.tensor(values, dtype=torch.int32, device=device)[:, None, None]
        for values in zip(*places, strict=True)
    )
    left, right = window
    hidden = (key >= length).expand(len(places), len(rows), len(keys))
    if right != UNLIMITED:
        hidden = hidden | (key > query + shift + right)
    if left != UNLIMITED:
        hidden = hidden | (key < dropped) | (key < query + shift - left)
    return (hidden.int() - 1)[:, None]


_cached_mask_bits = functools.lru_cache(maxsize=64)(_mask_bits)


def batches(inputs: Inputs, multiple: int, *, backward: bool) -> Iterator[Batch]:
    """Yield the sequences in batches of one padded size; in the backward pass, leave out queries that are padding."""
    sizes: dict[tuple[int, int], list[Place]] = {}
    for place in places(inputs):
        used = place.without_padding(inputs.right) if backward else place
        if used.rows > 0:
            sizes.setdefault(_padded_sizes(inputs, used, multiple), []).append(used)
    for (rows, keys), group in sizes.items():
        most = max(LARGEST // (inputs.k.shape[-2] * min(rows, 64) * keys), 1)
        for place in group:
            if place.items > 1:
                for first in range(0, place.items, most):
                    yield Batch(inputs, [place.part(first, min(first + most, place.items))], multiple)
        alone = [place for place in group if place.items == 1]
        for first in range(0, len(alone), most):
            yield Batch(inputs, alone[first : first + most], multiple)


def _padded_sizes(inputs: Inputs, place: Place, multiple: int) -> tuple[int, int]:
    rows = place.rows * inputs.group
    rows += -rows % (multiple if rows <= BLOCK else BLOCK)
    return rows, max(-(-place.length // BLOCK), 1) * BLOCK
