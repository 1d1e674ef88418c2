"""The rows of sequences that each rank holds, and functions that cut whole tensors and join those of ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden, without_modes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Range = tuple[int, int]


def context_shards(length: int, ranks: int) -> tuple[tuple[Range, Range], ...]:
    """Return the rows of a sequence that each rank holds: the first row and the one after the last of two pieces.

    Piece i of 2 ranks goes from row ``i length // (2 ranks)`` up to that of piece i + 1. Rank r holds pieces r and
    2 ranks - 1 - r, so that under a causal mask all ranks have the same work. Pieces of a short sequence may be empty.

    Args:
        length: rows of the whole sequence, >= 0.
        ranks: number of ranks, >= 1.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    check.integer("length", length, least=0)
    check.integer("ranks", ranks, least=1)
    pieces = list(pairwise(i * length // (2 * ranks) for i in range(2 * ranks + 1)))
    return tuple((pieces[rank], pieces[-1 - rank]) for rank in range(ranks))


def cut_context(
    x: torch.Tensor, process_group: ProcessGroup | DeviceMesh, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's rows of a tensor of whole sequences: token ids, positions, masks or hidden states.

    Args:
        x: ``[B, T, ...]``; the number of ranks divides T. With ``cu_seqlens`` ``[total, ...]``, of any lengths.
        process_group: ranks that share the sequences: a ``ProcessGroup``, or one dim of a ``DeviceMesh``.
        cu_seqlens: ``[sequences + 1]``, int32 or int64: the bounds of packed sequences; reading it from a GPU syncs.

    Returns:
        ``[B, T / ranks, ...]`` or ``[rows, ...]``: of each sequence the rows of ``context_shards``, in ascending order.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    ranks, rank = _place(process_group)
    batch = _batch_of(x, cu_seqlens)
    rows = x if batch is None else x.flatten(0, 1)
    if batch is not None and x.shape[1] % ranks:
        raise ValueError(f"x: expected dim 1 to divide by {ranks} ranks, got shape {tuple(x.shape)}; or pack it")
    lengths = (x.shape[1],) * x.shape[0] if cu_seqlens is None else lengths_of(cu_seqlens)
    if sum(lengths) != rows.shape[0]:
        raise ValueError(f"x: expected {sum(lengths)} rows (dim 0), the end of cu_seqlens, got shape {tuple(x.shape)}")
    own = rows.index_select(0, layout_of(lengths, ranks, x.device).rows[rank])
    return own if batch is None else own.unflatten(0, (batch, x.shape[1] // ranks))


def join_context(
    x: torch.Tensor, process_group: ProcessGroup | DeviceMesh, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the tensor of whole sequences of which each rank holds the rows that ``cut_context`` returns.

    It is an all-gather. Its gradient is that of this rank's rows, for a loss that every rank computes alike.

    Args:
        x: ``[B, T, ...]``, the same shape on all ranks; with ``cu_seqlens`` ``[rows, ...]``.
        process_group: as in ``cut_context``.
        cu_seqlens: as in ``cut_context``: the bounds of whole sequences.

    Returns:
        ``[B, ranks T, ...]``, or ``[total, ...]``.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    from rl_kernels.core.distributed import all_gather, group_of

    ranks, rank = _place(process_group)
    batch = _batch_of(x, cu_seqlens)
    lengths = (ranks * x.shape[1],) * x.shape[0] if cu_seqlens is None else lengths_of(cu_seqlens)
    layout = layout_of(lengths, ranks, x.device)
    rows = layout.padded("x", x if batch is None else x.flatten(0, 1), rank)
    whole = all_gather(rows, group_of(process_group, sizes=None)).index_select(0, layout.places)
    return whole if batch is None else whole.unflatten(0, (batch, ranks * x.shape[1]))


class Layout(NamedTuple):
    """The rows of sequences, packed one after the other, on all ranks.

    Attributes:
        rows: for each rank the rows that it holds, in its order.
        most: the largest number of rows of a rank; ranks exchange as many.
        places: for each row its place among the exchanged rows of all ranks.
    """

    rows: tuple[torch.Tensor, ...]
    most: int
    places: torch.Tensor

    def padded(self, name: str, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the rows ``x[rows, ...]`` of a rank, padded with zeros to ``most``; an error names ``x``."""
        count = self.rows[rank].shape[0]
        if x.shape[0] != count:
            raise ValueError(
                f"{name}: expected {count} rows, those of context_shards on rank {rank} of {len(self.rows)}, "
                f"got {x.shape[0]}"
            )
        return x if count == self.most else F.pad(x, (0, 0) * (x.ndim - 1) + (0, self.most - count))


@functools.lru_cache(maxsize=64)
def layout_of(lengths: tuple[int, ...], ranks: int, device: torch.device) -> Layout:
    """Return where the rows of sequences of these lengths are."""
    with without_modes():
        held = [row_numbers(ranges_of(lengths, rank, ranks)) for rank in range(ranks)]
        most, places = max(map(len, held)), torch.empty(sum(lengths), dtype=torch.int64, device="cpu")
        for rank, rows in enumerate(held):
            places[rows] = torch.arange(rank * most, rank * most + len(rows), device="cpu")
        return Layout(tuple(rows.to(device) for rows in held), most, places.to(device))


def ranges_of(lengths: tuple[int, ...], rank: int, ranks: int) -> list[Range]:
    """Return the ranges of packed rows that a rank holds, in its order: two for each sequence."""
    pieces = {length: context_shards(length, ranks)[rank] for length in set(lengths)}
    starts = cumulative(lengths)
    return [
        (start + first, start + end)
        for start, length in zip(starts, lengths, strict=False)
        for first, end in pieces[length]
    ]


def row_numbers(ranges: Iterable[Range]) -> torch.Tensor:
    """Return the numbers of the rows in some ranges, one range after the other."""
    parts = [torch.arange(first, end, device="cpu") for first, end in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def cumulative(lengths: Iterable[int]) -> list[int]:
    """Return the sums of the first 0, 1, 2, ... lengths."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def lengths_of(cu_seqlens: torch.Tensor, name: str = "cu_seqlens") -> tuple[int, ...]:
    """Return the lengths of packed sequences; reads the tensor, which syncs with a GPU.

    Raises:
        TypeError, ValueError: the tensor does not have bounds of sequences, or cannot be read now.
    """
    check.tensor(name, cu_seqlens, check.INTEGERS, ndim=1)
    if values_hidden(cu_seqlens):
        raise ValueError(f"{name}: expected a tensor on the CPU while a CUDA graph is captured")
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or any(end < first for first, end in pairwise(bounds)):
        raise ValueError(f"{name}: expected numbers that ascend from 0, got {bounds[:8]}")
    return tuple(end - first for first, end in pairwise(bounds))


def _place(process_group: ProcessGroup | DeviceMesh) -> tuple[int, int]:
    """Return the number of ranks, and the rank of this process."""
    # Imported here: PyTorch may be built without torch.distributed.
    from rl_kernels.core.distributed import group_of, group_rank, group_size

    group = group_of(process_group, sizes=None)
    return group_size(group), group_rank(group)


def _batch_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int | None:
    """Return the number of sequences in ``x[B, T, ...]``, or None of a packed tensor."""
    least = 2 if cu_seqlens is None else 1
    if not isinstance(x, torch.Tensor) or x.ndim < least:
        raise ValueError(f"x: expected a tensor of at least {least} dims, got {getattr(x, 'shape', x)!r}")
    return x.shape[0] if cu_seqlens is None else None
