"""How a batch of sequences is cut into chunks of whole sequences, whose gradients continue one chain over tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from rl_kernels.core import validate as check


class Chunk(NamedTuple):
    """The sequences whose loss is asked for.

    Attributes:
        sequences: their numbers in the batch.
        tokens: their tokens, of all tokens of the batch.
        cu_seqlens: ``[S + 1]``, int32, on the device of hidden: offsets of the S sequences, from 0 on.
        max_seqlen: tokens of the longest one.
    """

    sequences: slice
    tokens: slice
    cu_seqlens: torch.Tensor
    max_seqlen: int


def offsets_of(cu_seqlens: torch.Tensor | Sequence[int] | None, leading: Sequence[int]) -> list[int]:
    """Return the offsets of all sequences; without ``cu_seqlens`` each row of ``leading`` dims ``[B, T]`` is one.

    Raises:
        TypeError, ValueError: they are not offsets of all tokens.
    """
    if cu_seqlens is None:
        if len(leading) != 2:
            raise ValueError("cu_seqlens: expected offsets, or hidden of [B, T, D] without them")
        return [row * leading[1] for row in range(leading[0] + 1)]
    if len(leading) != 1:
        raise ValueError(f"cu_seqlens: expected hidden of [N, D] with offsets, got {len(leading) + 1} dims")
    if isinstance(cu_seqlens, torch.Tensor):
        check.tensor("cu_seqlens", cu_seqlens, check.INTEGERS, ndim=1)
        cu_seqlens = cu_seqlens.tolist()
    elif not isinstance(cu_seqlens, Sequence):
        raise TypeError(f"cu_seqlens: expected a tensor or a sequence of integers, got {type(cu_seqlens).__name__}")
    offsets = list(cu_seqlens)
    for offset in offsets:
        check.integer("cu_seqlens", offset, least=0)
    if not offsets or offsets[0] or offsets[-1] != leading[0] or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"cu_seqlens: expected offsets that rise from 0 to the number of tokens, {leading[0]}")
    return offsets


def chunks_of(
    offsets: Sequence[int], chunk_tokens: int, device: torch.device, length: int | None = None
) -> Iterator[Chunk]:
    """Yield chunks of as many sequences as have at most ``chunk_tokens`` tokens; a longer one is a chunk of its own.

    An empty sequence is in the chunk of a neighbor: a chunk has no tokens only if the batch has none.

    Args:
        offsets: of all sequences.
        chunk_tokens: most tokens of a chunk.
        device: of the chunks' ``cu_seqlens``.
        length: tokens of each sequence if all have as many: then nothing is copied to a GPU.
    """
    first = 0
    while first < len(offsets) - 1:
        last = first + 1
        while last < len(offsets) - 1:
            are_empty = offsets[last] in (offsets[first], offsets[last + 1])
            if not are_empty and offsets[last + 1] - offsets[first] > chunk_tokens:
                break
            last += 1
        own = [offset - offsets[first] for offset in offsets[first : last + 1]]
        longest = max(b - a for a, b in pairwise(own))
        if length is None:
            cu_seqlens = torch.tensor(own, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
        else:
            cu_seqlens = torch.arange(len(own), dtype=torch.int32, device=device) * length
        yield Chunk(slice(first, last), slice(offsets[first], offsets[last]), cu_seqlens, longest)
        first = last


class Rows(NamedTuple):
    """Rows of a chunk's passes: those that the last chunk could not complete are formed again.

    Attributes:
        start: the first row of both passes.
        stop: the end of the rows of the backward pass.
        end: the end of the rows of the forward pass.
    """

    start: int
    stop: int
    end: int

    @classmethod
    def of(cls, chunk: Chunk, total: int, step: int) -> Rows:
        """Return the rows of a chunk of ``total`` tokens, so that backward passes meet at multiples of ``step``."""
        start, end = chunk.tokens.start, chunk.tokens.stop
        return cls(start // step * step, end if end == total else end // step * step, end)
