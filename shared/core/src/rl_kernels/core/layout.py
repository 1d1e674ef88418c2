"""The layout in which a kernel reads a tensor, or a copy in that layout."""

from __future__ import annotations

import math

import torch

ALIGNED = 16
"""Bytes of which addresses and the strides of rows are multiples, where 16 bytes are loaded at once or by TMA."""
ALLOCATED = 64
"""Bytes to which PyTorch aligns its allocations; a library may choose its kernel by an address modulo these."""


def readable(x: torch.Tensor, fits: bool) -> torch.Tensor:
    """Return ``x`` if its layout ``fits`` a kernel, else a contiguous copy, which PyTorch aligns."""
    # Not clone: a single row counts as contiguous with any stride, and clone would keep that stride.
    return x if fits else torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x[..., K]`` as ``[M, K]``."""
    # The vmap of torch.autograd, for batched gradients, supports reshape but not flatten.
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def has_flat_rows(x: torch.Tensor) -> bool:
    """Say whether ``flat_rows`` copies nothing."""
    return x.ndim == 2 or flat_rows(x).data_ptr() == x.data_ptr()
