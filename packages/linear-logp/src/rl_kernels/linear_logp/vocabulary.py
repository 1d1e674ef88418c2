"""How the vocabulary is cut: into units for the softmax states, segments and shards for ranks, pieces for backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


PADDED = 128
"""Rows per rank that a trainer pads by, at most one less (Megatron's default; vLLM pads the whole to 64)."""


class VocabCuts(NamedTuple):
    """Where the shards of a vocabulary begin and end, for cuts that cannot be found from the number of rows.

    Attributes:
        size: columns of the whole vocabulary.
        cuts: ranks + 1 integers that rise from 0 to ``size``, or beyond it if there are pad rows: rank r has the rows
            ``cuts[r]`` to ``cuts[r + 1]``, maybe none.
    """

    size: int
    cuts: Sequence[int]


class Shard(NamedTuple):
    """The columns that this process works on, and how the gradient of hidden is summed.

    Attributes:
        start: the first column.
        size: columns of the whole vocabulary.
        segments: segments of the vocabulary, each a chain of its own: 1 or 8.
        group: ranks that have the other columns; None if this process has all of them.
        cuts: if the rows of the weight are not these columns: rank r has rows ``cuts[r]`` to ``cuts[r + 1]``, then pad
            rows.
    """

    start: int
    size: int
    segments: int
    group: ProcessGroup | None = None
    cuts: tuple[int, ...] | None = None

    @property
    def moved(self) -> tuple[int, ...] | None:
        """The cuts, the same on all ranks, if they are not those of ``vocab_shards``: rows move between ranks."""
        if self.cuts is None:
            return None
        ranks = len(self.cuts) - 1
        return None if self.cuts == _cuts_of(slots(self.size, ranks) * UNIT, self.size, ranks) else self.cuts


def shard_of(
    columns: int, group: ProcessGroup | None, vocab_size: int | VocabCuts | None, vocab_segments: int | None
) -> Shard:
    """Return the shard of a weight with ``columns`` rows, or raise if it cannot be that of this rank.

    Raises:
        TypeError, ValueError: an argument does not fit the others; the message names it.
    """
    cuts = None
    if isinstance(vocab_size, VocabCuts):
        if group is None:
            raise ValueError("vocab_size: expected an integer or None without process_group, got VocabCuts")
        vocab_size, given = vocab_size
        check.integer("vocab_size.size", vocab_size, least=1)
        cuts = _checked_cuts(columns, vocab_size, group.rank(), group.size(), given)
    for name, value in (("vocab_size", vocab_size), ("vocab_segments", vocab_segments)):
        if value is not None:
            check.integer(name, value)
    if vocab_segments not in (None, 1, SEGMENTS):
        raise ValueError(f"vocab_segments: expected 1 or {SEGMENTS}, got {vocab_segments}")
    ranks = 1 if group is None else group.size()
    is_padded = group is not None and isinstance(vocab_size, int) and 0 < vocab_size < columns
    if ranks == 1 and cuts is None and not is_padded:
        if columns == 0:
            raise ValueError("lm_head_weight: expected a vocabulary (first dim) of at least 1, got 0")
        if vocab_size not in (None, columns):
            where = f"{columns} where this process has the whole vocabulary"
            raise ValueError(f"vocab_size: expected {where}, got {vocab_size}; shards need process_group")
        return Shard(0, columns, vocab_segments or (1 if group is None else SEGMENTS))
    assert group is not None
    if vocab_segments == 1 and ranks > 1:
        raise ValueError(f"vocab_segments: expected {SEGMENTS} with a process_group of {ranks} ranks, got 1")
    if vocab_size is None:
        raise ValueError("vocab_size: expected the number of columns of the whole vocabulary with process_group")
    check.integer("vocab_size", vocab_size, least=1)
    if cuts is None:
        cuts = _default_cuts(columns, vocab_size, group.rank(), ranks)
    shards = vocab_shards(vocab_size, ranks)
    start, stop = shards[group.rank()]
    shard = Shard(start, vocab_size, vocab_segments or SEGMENTS, group, cuts)
    return shard._replace(cuts=None) if shard.moved is None and columns == stop - start else shard


def _cuts_of(width: int, vocab_size: int, ranks: int) -> tuple[int, ...]:
    return tuple(min(rank * width, vocab_size) for rank in range(ranks + 1))


def _default_cuts(rows: int, vocab_size: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the cuts of a vocabulary of which a rank has so many rows: those of vocab_shards, or even ones.

    Raises:
        ValueError: no such cut gives the rank these rows, or two cuts do.
    """
    ours, even = slots(vocab_size, ranks) * UNIT, -(-vocab_size // ranks)
    widths = [ours, even, *[rows] * (even <= rows < even + PADDED)]
    cuts = [(width, _cuts_of(width, vocab_size, ranks)) for width in widths]
    fitting = list(dict.fromkeys(one for width, one in cuts if rows in (width, one[rank + 1] - one[rank])))
    if len(fitting) == 1:
        return fitting[0]
    first, last = vocab_shards(vocab_size, ranks)[rank]
    given = f"give vocab_size as VocabCuts({vocab_size}, cuts)"
    if fitting:
        listed = " or ".join(map(str, fitting))
        raise ValueError(f"vocab_size: expected VocabCuts, because {rows} rows on rank {rank} fit {listed}: {given}")
    least, most = max(min(even, vocab_size - rank * even), 0), even + PADDED - 1
    raise ValueError(
        f"lm_head_weight: expected {last - first} rows, those of vocab_shards({vocab_size}, {ranks}) on rank {rank}, "
        f"or {least} to {most} of a vocabulary that is cut evenly, got {rows}: {given}"
    )


def _checked_cuts(rows: int, vocab_size: int, rank: int, ranks: int, given: Sequence[int]) -> tuple[int, ...]:
    """Return the cuts without pad rows.

    Raises:
        TypeError, ValueError: they are no cuts of the vocabulary, or do not give the rank its rows.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"vocab_size.cuts: expected a sequence of integers, got {type(given).__name__}")
    for cut in given:
        check.integer("vocab_size.cuts", cut, least=0)
    cuts = tuple(given)
    if len(cuts) != ranks + 1 or cuts[0] or cuts[-1] < vocab_size or any(a > b for a, b in pairwise(cuts)):
        raise ValueError(
            f"vocab_size.cuts: expected {ranks + 1} numbers that rise from 0 to {vocab_size} or beyond, got {cuts}"
        )
    if rows != cuts[rank + 1] - cuts[rank]:
        expected = f"{cuts[rank + 1] - cuts[rank]} rows, as vocab_size.cuts says of rank {rank}"
        raise ValueError(f"lm_head_weight: expected {expected}, got {rows}")
    return tuple(min(cut, vocab_size) for cut in cuts)


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
