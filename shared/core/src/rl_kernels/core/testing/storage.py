"""Memory layouts of a tensor: every other element, column-major, at an odd address, far apart; garbage in gaps."""

from __future__ import annotations

import torch


def with_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a matrix in another memory layout.

    ``"column"``: column-major. ``"apart"``: every other element. ``"odd"``: at an odd address.
    """
    rows, columns = x.shape
    if layout == "column":
        return x.t().contiguous().t()
    if layout == "apart":
        return every_other(x)
    if layout == "odd":
        return garbage(x, rows, columns + 1)[:, 1:].copy_(x)
    return x


def far(x: torch.Tensor, dim: int, reach: int = 1 << 31) -> torch.Tensor:
    """Return a copy whose last element along a dim is at least ``reach`` elements after its first.

    Nothing else of the memory between them is touched. On a CPU an offset that is cut to 32 bits stays inside the
    memory: the result is then wrong, and the process does not end.
    """
    first, *_ = rows = x.detach().movedim(dim, 0)
    # A multiple of 16 bytes in every dtype, as TMA needs it.
    step = -(-reach // (16 * (len(rows) - 1))) * 16
    before = 0 if x.is_cuda else reach
    memory = x.new_empty(before + (len(rows) - 1) * step + first.numel())
    return memory.as_strided(rows.shape, (step, *first.contiguous().stride()), before).copy_(rows).movedim(0, dim)


def garbage(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return NaN, or the largest integer, in the dtype and on the device of ``like``; a bool is True."""
    if like.is_floating_point():
        return like.new_full(shape, torch.nan)
    return like.new_full(shape, True if like.dtype == torch.bool else torch.iinfo(like.dtype).max)


def every_other(value: torch.Tensor) -> torch.Tensor:
    """Return a copy in every other element of its storage."""
    return garbage(value, *value.shape[:-1], 2 * value.shape[-1])[..., ::2].copy_(value)


def inside(value: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a copy inside a tensor that is larger by one at the start of a dim."""
    larger = garbage(value, *(size + (at == dim) for at, size in enumerate(value.shape)))
    return larger.narrow(dim, 1, value.shape[dim]).copy_(value)
