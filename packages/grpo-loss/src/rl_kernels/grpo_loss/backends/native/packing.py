"""Packed sequences as padded ones and back: tokens ``[total]``, sequence i at ``cu_seqlens[i]:cu_seqlens[i + 1]``."""

from __future__ import annotations

import torch


class Padding:
    """Positions of packed tokens in ``[B, T]``; reads no size from the device."""

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int, total: int) -> None:
        start, end = cu_seqlens[:-1].long()[:, None], cu_seqlens[1:].long()[:, None]
        index = start + torch.arange(max_seqlen, device=cu_seqlens.device)
        self.inside = index < end.clamp(max=total)
        # Unchecked offsets (validate=False) must not read out of bounds.
        self._index = index.clamp(0, max(total - 1, 0))
        self._total = total

    def padded(self, values: torch.Tensor, per_sequence: bool) -> torch.Tensor:
        """Return per-token values as ``[B, T]``, arbitrary outside the sequences; per-sequence values unchanged."""
        if per_sequence and values.ndim == 1:
            return values
        flat = values.reshape(-1)
        return flat[self._index] if self._total else flat.new_zeros(self._index.shape)


def packed(values: torch.Tensor, cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Return values ``[B, T]`` packed to ``[total]``."""
    if not values.numel() or not total:
        return values.new_full((total,), -0.0)
    offsets = cu_seqlens.long()
    place = torch.arange(total, device=values.device)
    row = torch.bucketize(place, offsets[1:-1].contiguous(), right=True)
    column = (place - offsets[row]).clamp(0, values.shape[1] - 1)
    return values[row, column]
