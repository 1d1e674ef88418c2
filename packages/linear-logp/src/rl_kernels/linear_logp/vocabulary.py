"""How the vocabulary is cut: into units for the softmax states, segments and shards for ranks, pieces for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rl_kernels.core import validate as check
from rl_kernels.core.constants import UNIT

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BLOCK = 256
"""Columns of a block, a tile of the kernels: the states of its rows are merged into those of a unit."""
SEGMENTS = 8
"""Segments of the vocabulary that a shard consists of, and so the most ranks that can share a vocabulary."""
SHARDS = (1, 2, 4, 8)
"""Possible numbers of shards: each holds the segments of a subtree of the balanced tree over eight segments."""


def units(columns: int) -> int:
    """Return the number of units of ``columns`` columns; the last one may be shorter."""
    return -(-columns // UNIT)


def slots(vocab_size: int, n: int) -> int:
    """Return the number of units of a full shard, of ``n``."""
    return units(-(-vocab_size // SEGMENTS)) * (SEGMENTS // n)


def vocab_shards(vocab_size: int, n: int) -> tuple[tuple[int, int], ...]:
    """Return the first column and the one after the last of each of ``n`` shards of a vocabulary.

    A shard holds 8 / n segments of ``1024 ceil(vocab_size / 8192)`` columns, so it begins at a multiple of 1024. The
    last shards may be shorter, or empty. The segments of ``vocab_segments=8`` are ``vocab_shards(vocab_size, 8)``.

    Args:
        vocab_size: columns of the whole vocabulary, >= 1.
        n: number of shards: 1, 2, 4 or 8.

    Raises:
        ValueError: an argument is not as above.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f"vocab_size: expected an integer >= 1, got {vocab_size!r}")
    if isinstance(n, bool) or n not in SHARDS:
        raise ValueError(f"n: expected one of 1, 2, 4, 8, got {n!r}")
    width = slots(vocab_size, n) * UNIT
    return tuple((min(rank * width, vocab_size), min(rank * width + width, vocab_size)) for rank in range(n))


class Shard(NamedTuple):
    """The columns of this process, and how the gradient of hidden is summed.

    Attributes:
        start: the first column.
        size: columns of the whole vocabulary.
        segments: segments of the vocabulary, each a chain of its own: 1 or 8.
        group: ranks that have the other columns; None if this process has all of them.
    """

    start: int
    size: int
    segments: int
    group: ProcessGroup | None = None


def shard_of(columns: int, group: ProcessGroup | None, vocab_size: int | None, vocab_segments: int | None) -> Shard:
    """Return the shard of a weight with ``columns`` rows, or raise if it is not that of this rank.

    Raises:
        TypeError, ValueError: an argument does not fit the others; the message names it.
    """
    for name, value in (("vocab_size", vocab_size), ("vocab_segments", vocab_segments)):
        if value is not None:
            check.integer(name, value)
    if vocab_segments not in (None, 1, SEGMENTS):
        raise ValueError(f"vocab_segments: expected 1 or {SEGMENTS}, got {vocab_segments}")
    if group is None or group.size() == 1:
        if columns == 0:
            raise ValueError("lm_head_weight: expected a vocabulary (first dim) of at least 1, got 0")
        if vocab_size not in (None, columns):
            where = f"{columns} where this process has the whole vocabulary"
            raise ValueError(f"vocab_size: expected {where}, got {vocab_size}; shards need process_group")
        return Shard(0, columns, vocab_segments or (1 if group is None else SEGMENTS))
    ranks = group.size()
    if vocab_segments == 1:
        raise ValueError(f"vocab_segments: expected {SEGMENTS} with a process_group of {ranks} ranks, got 1")
    if vocab_size is None:
        raise ValueError("vocab_size: expected the number of columns of the whole vocabulary with process_group")
    check.integer("vocab_size", vocab_size, least=1)
    start, stop = vocab_shards(vocab_size, ranks)[group.rank()]
    where = f"rank {group.rank()} of vocab_shards({vocab_size}, {ranks}) has columns {start} to {stop}"
    if columns != stop - start:
        multiple = UNIT * SEGMENTS
        raise ValueError(
            f"lm_head_weight: expected {stop - start} rows, got {columns}: {where}; cut the weight by vocab_shards, or "
            f"pad the vocabulary to a multiple of {multiple} ({-(-vocab_size // multiple) * multiple}) and cut it "
            "evenly: leave the pad rows out of lm_head_weight, or count them in vocab_size and mask them by a bias of "
            "-inf"
        )
    return Shard(start, vocab_size, SEGMENTS, group)


class Piece(NamedTuple):
    """Columns of the vocabulary that backward processes at once.

    Attributes:
        columns: counted from the shard's first column.
        continues: whether dH of earlier columns of the segment is continued.
        parts: the columns whose logits are recomputed, and those whose logits are kept, if there are any; and which
            columns of the piece these are.
    """

    columns: slice
    continues: bool
    parts: list[tuple[slice, slice]]


def pieces_of(segment: slice, width: int, first_kept: int) -> list[Piece]:
    """Cut a segment into pieces of ``width`` columns; logits are kept from the column ``first_kept`` on."""
    pieces = []
    for start in range(segment.start, segment.stop, width):
        stop = min(start + width, segment.stop)
        kept = min(max(first_kept, start), stop)
        parts = [
            (slice(first, end), slice(first - start, end - start))
            for first, end in ((start, kept), (kept, stop))
            if first < end
        ]
        pieces.append(Piece(slice(start, stop), start > segment.start, parts))
    return pieces


def segments_of(start: int, columns: int, vocab_size: int, number: int) -> list[slice]:
    """Return the segments, of ``number``, in a shard of ``columns`` from ``start`` on, counted from its first column.

    Empty ones are left out.
    """
    bounds = vocab_shards(vocab_size, number) if number > 1 else ((start, start + columns),)
    parts = [slice(first - start, last - start) for first, last in bounds]
    return [part for part in parts if 0 <= part.start < part.stop <= columns]


def has_empty_segments(vocab_size: int) -> bool:
    """Say whether any of the eight segments of a vocabulary is empty."""
    first, last = vocab_shards(vocab_size, SEGMENTS)[-1]
    return first == last
