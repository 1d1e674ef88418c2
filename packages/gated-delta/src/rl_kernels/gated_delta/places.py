"""The chunks of all sequences of a call: which token each of their rows has."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import Inputs


class Places(NamedTuple):
    """The chunks of a call, in order of their number in the sequence, then of the sequence.

    Attributes:
        sequences: ``[M]``: the sequence of each chunk.
        tokens: ``[M, 64]``: the token of each row, counted over the whole batch; B T for a row without one.
        opened: ``[M]``: rows that the cache holds, ahead of the first token.
        used: ``[M]``: rows of the cache and tokens together; later rows are empty.
        parts: the chunks with the same number, which are computed at once.
    """

    sequences: torch.Tensor
    tokens: torch.Tensor
    opened: torch.Tensor
    used: torch.Tensor
    parts: list[slice]

    def rows_of(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of ``x[B, T, H, ...]`` as ``[M, H, 64, ...]``, zeros for those without a token."""
        flat = x.reshape(-1, *x.shape[2:]).to(dtype)
        return torch.cat((flat, flat.new_zeros((1, *flat.shape[1:]))))[self.tokens].transpose(1, 2).contiguous()

    def put(self, out: torch.Tensor, rows: torch.Tensor, part: slice = slice(None)) -> None:
        """Write rows ``[m, H, 64, ...]`` of the chunks in ``part`` to a contiguous ``out[B, T, H, ...]``."""
        tokens = self.tokens[part]
        flat = out.view(-1, *out.shape[2:])
        is_token = tokens < len(flat)
        flat[tokens[is_token]] = rows.transpose(1, 2)[is_token].to(out.dtype)


def places_of(inputs: Inputs, lengths: torch.Tensor | None = None) -> Places:
    """Return the chunks of a call; ``lengths`` are those of a cache."""
    q, device = inputs.q, inputs.q.device
    batch, count = q.shape[:2]
    if inputs.cu_seqlens is not None:
        bounds = inputs.cu_seqlens.clamp(0, count).tolist()
        spans = list(pairwise(bounds))
    else:
        starts = [0] * batch if inputs.start is None else inputs.start.clamp(0, count).tolist()
        spans = [(b * count + start, (b + 1) * count) for b, start in enumerate(starts)]
    opened = [0] * len(spans) if lengths is None else (lengths % CHUNK).tolist()
    ends = [rows + end - begin if end > begin else 0 for rows, (begin, end) in zip(opened, spans, strict=True)]
    chunks: list[tuple[int, int]] = []
    parts: list[slice] = []
    for first in range(0, max(ends, default=0), CHUNK):
        before = len(chunks)
        chunks += [(b, first) for b, end in enumerate(ends) if end > first]
        parts.append(slice(before, len(chunks)))
    sequence = torch.tensor([b for b, _ in chunks], dtype=torch.long, device=device)
    row = torch.tensor([first for _, first in chunks], dtype=torch.long, device=device)[:, None]
    row = row + torch.arange(CHUNK, device=device)
    ahead, end, begin = (
        torch.tensor([values[b] for b, _ in chunks], dtype=torch.long, device=device)[:, None]
        for values in (opened, ends, [begin for begin, _ in spans])
    )
    tokens = torch.where((row >= ahead) & (row < end), begin + row - ahead, batch * count)
    return Places(
        sequence, tokens, (ahead - row[:, :1]).clamp(min=0)[:, 0], (end - row[:, :1])[:, 0].clamp(max=CHUNK), parts
    )


def counts_of(tokens: int, bounds: torch.Tensor | None, start: torch.Tensor | None) -> torch.Tensor | int:
    """Return the tokens of each sequence of a call of T ``tokens``, with its integers clamped as kernels clamp them."""
    if bounds is not None:
        return bounds.clamp(0, tokens).diff().clamp(min=0)
    return tokens if start is None else tokens - start.clamp(0, tokens)
