"""TMA descriptors of the operands of attention: shape, strides, and the block that one copy loads."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernels.attention.backends.triton import loads

UNIT = loads.UNIT.value
"""Strides are multiples of this many elements."""
DIMS = 4
"""Dims of a descriptor."""


class Box(NamedTuple):
    """A TMA descriptor without an address: shape, strides, and the block that one copy loads."""

    shape: list[int]
    strides: list[int]
    block: list[int]

    def of(self, x: torch.Tensor) -> TensorDescriptor:
        """Return the descriptor of a tensor with this shape and these strides.

        The constructor is skipped: it would check every number at each call.
        """
        descriptor = object.__new__(TensorDescriptor)
        vars(descriptor).update(base=x, shape=self.shape, strides=self.strides, block_shape=self.block)
        return descriptor


def box_of(shape: torch.Size, strides: tuple[int, ...], block: tuple[int, int], width: int) -> Box | None:
    """Return the box of ``[B, rows, heads, size]``, or of packed rows, that loads ``block`` (rows, heads) at once.

    None for an empty tensor and for a stride of 0: such tensors are loaded by pointers.
    """
    leading = [1] * (DIMS - len(shape))
    sizes, steps = [*leading, *shape], [0] * len(leading) + list(strides)
    if not all(size == 1 or size * step for size, step in zip(sizes, steps, strict=True)):
        return None
    # The stride of a dim of size 1 is never used, but TMA must accept it.
    for dim in (0, 1, 2):
        if sizes[dim] == 1:
            steps[dim] = math.prod(sizes[dim + 1 : -1]) * -(-sizes[-1] // UNIT) * UNIT
    return Box(sizes, [*steps[:-1], 1], [1, *block, width])


def descriptors_of(
    boxes: tuple[Box, Box], first: torch.Tensor, second: torch.Tensor
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the descriptors of two tensors."""
    return boxes[0].of(first), boxes[1].of(second)
