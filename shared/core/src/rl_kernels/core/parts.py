"""A product of few rows on a CPU as a batch of products with parts of the columns, each on one thread."""

from __future__ import annotations

import functools
from threading import get_ident
from typing import NamedTuple

import torch

from rl_kernels.core.torchlib.observed import without_modes


class Parts(NamedTuple):
    """The product of a block of rows, FP32, whose columns are cut into parts.

    Attributes:
        batch: size of the batch of blocks, which are all the same.
        right: size and strides of the batch of the right operand's parts.
        part: size and strides of the rows of the result within the product.
        result: rows and columns of the result.
    """

    batch: tuple[int, int, int]
    right: tuple[tuple[int, int, int], tuple[int, int, int]]
    part: tuple[tuple[int, int, int], tuple[int, int, int]]
    result: tuple[int, int]

    @classmethod
    def of(cls, size: tuple[int, int, int], parts: int, count: int, *, transposed: bool) -> Parts:
        """Return a product of ``size``: rows, inner size and columns; its first ``count`` rows are the result.

        The right operand has no gaps, and ``parts`` divides its columns.
        """
        height, inner, columns = size
        width = columns // parts
        strides = (width * inner, 1, inner) if transposed else (width, columns, 1)
        part = (count, parts, width), (width, height * width, 1)
        return cls((parts, height, inner), ((parts, inner, width), strides), part, (count, columns))

    def multiply(self, block: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the library's product; the block has the rows of the result, or more."""
        batch, pieces, part, result = self
        if len(block) < batch[1]:
            rows, blocks = _room(batch, result[0], get_ident())
            rows.copy_(block)
        else:
            blocks = block.expand(batch)
        product = torch.bmm(blocks, right.as_strided(*pieces))
        # Not a view: autograd would forbid in-place changes of a view.
        return torch.as_strided_copy(product, *part).resize_(result)


@functools.lru_cache(64)
def _room(batch: tuple[int, int, int], count: int, thread: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the first ``count`` rows of a block of zeros, and the batch of it, for one thread of Python.

    Each call writes these rows alone: caches of other cores have the block, so that writing all of it takes longer.
    """
    with without_modes():
        block = torch.zeros(batch[1:], dtype=torch.float32, device="cpu")
        return block[:count], block.expand(batch)
