"""Helpers of the definition of the losses: padding of packed sequences, and the metrics."""

from __future__ import annotations

import torch


def metrics_of(
    mask: torch.Tensor,
    is_low: torch.Tensor,
    is_high: torch.Tensor,
    ratio: torch.Tensor,
    e: torch.Tensor | None,
    logps: list[torch.Tensor],
    entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the metrics in the order of ``METRICS``, over active tokens; 0 if their tensor is not given."""
    count = mask.sum().clamp(min=1)
    dtype, missing = ratio.dtype, ratio.new_zeros(())

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values.to(dtype), 0).sum() / count

    any_active = mask.any()
    is_number = mask & ~ratio.isnan()
    smallest = torch.where(is_number, ratio, torch.inf).flatten()
    largest = torch.where(is_number, ratio, -torch.inf).flatten()
    smallest, largest = (
        torch.where(any_active, x, 0) if mask.numel() else missing
        for x in ((smallest.amin(), largest.amax()) if mask.numel() else (missing, missing))
    )
    total, squares = mean(ratio), mean(ratio.square())
    nonfinite = mask & ~torch.stack([x.isfinite() for x in logps]).all(0)
    values = [mean(is_low), mean(is_high), total, smallest, largest]
    if e is None:
        values += [missing] * 3
    else:
        e = e.detach()
        values += [mean(-e), mean(e.square() / 2), mean(e.expm1() - e)]
    values.append(total.square() / torch.where(squares == 0, 1, squares) * count)
    values.append(nonfinite.sum().to(dtype))
    values.append(missing if entropy is None else mean(entropy))
    return torch.stack(values).float()


class Padding:
    """Turns packed tokens ``[total]`` into ``[B, T]``; ``inside`` marks the positions that hold a token."""

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int | None) -> None:
        self.total = int(cu_seqlens[-1])
        start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        length = max_seqlen if max_seqlen is not None else int(max([0, *(end - start).tolist()]))
        index = start[:, None] + torch.arange(length, device=cu_seqlens.device)
        self.inside = index < end[:, None]
        self.index = torch.where(self.inside, index, 0)

    def padded(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Return per-token values as ``[B, T]``, zero outside the sequences."""
        if values is None or not self.total:
            return None if values is None else values.new_zeros(self.index.shape) + values.sum()
        return torch.where(self.inside, values[self.index], 0).to(values.dtype)

    def scores(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Return per-sequence values unchanged, and per-token values as ``[B, T]``."""
        return values if values is None or values.shape[0] == len(self.index) else self.padded(values)
