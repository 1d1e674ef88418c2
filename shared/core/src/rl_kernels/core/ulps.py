"""The bits of floating-point numbers, and how far two numbers are apart in representable numbers (ULPs)."""

from __future__ import annotations

import torch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size in bytes -> integer dtype in which bits are compared."""


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as an integer, in a tensor of the same shape."""
    return value.detach().contiguous().view(INTEGERS[value.element_size()])


def ulps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the distance of two tensors' elements in representable numbers, in int64; 0 only for identical bits.

    +0 and -0 are 1 apart. Of FP64 numbers far apart the distance may overflow.
    """
    left, right = bits_of(one), bits_of(other)
    distance = (_ordered(left) - _ordered(right)).abs().clamp(min=1)
    return torch.where(left == right, 0, distance)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of the floating-point numbers that the bits encode."""
    # Negative numbers count down from zero.
    wide = bits.long()
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)
