"""The logits of one piece of the vocabulary for one block of rows, as forward and backward both compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from rl_kernels.core import rowwise

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(hidden[n, D], weight[p, D]) -> hidden @ weight^T``, FP32 (FP64 for FP64 inputs), never rounded further."""


class Inputs(NamedTuple):
    """The inputs of a call, as the raw ops take them."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target_ids: torch.Tensor
    bias: torch.Tensor | None
    temperature: torch.Tensor
    ignore_index: int | None

    def block(self, rows: slice) -> Inputs:
        """Return the same for some of the rows, with zeros where an ignored row of hidden may hold anything."""
        temperature = self.temperature[rows] if self.temperature.ndim else self.temperature
        block = self._replace(hidden=self.hidden[rows], target_ids=self.target_ids[rows], temperature=temperature)
        return block._replace(hidden=block.keep(block.hidden))

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value[n]`` or ``value[n, k]`` with 0 at ignored positions."""
        if self.ignore_index is None:
            return value
        active = self.target_ids != self.ignore_index
        return torch.where(active if value.ndim == 1 else active[:, None], value, 0.0)

    def logits(self, product: Product, columns: slice) -> torch.Tensor:
        """Return columns of ``(hidden @ weight^T + bias) / temperature``."""
        z = product(self.hidden, self.weight[columns])
        if self.bias is not None:
            z += self.bias[columns].to(z.dtype)
        return z.div_(rowwise.per_row(self.temperature, z))


def slices(count: int, width: int) -> Iterator[slice]:
    """Cut ``range(count)`` into slices of ``width``, the last one maybe shorter."""
    for start in range(0, count, width):
        yield slice(start, min(start + width, count))
