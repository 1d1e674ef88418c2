"""How the vocabulary is cut: into units of columns for the softmax states, into segments and shards for ranks."""

from __future__ import annotations

from rl_kernels.core.constants import UNIT

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
