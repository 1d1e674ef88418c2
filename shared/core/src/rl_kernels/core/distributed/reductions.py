"""Sums over ranks through symmetric memory, planned once for parts of one shape: one launch, and the parts' places.

Multicast is not used, because its sums have no fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed.groups import group_rank, group_size
from rl_kernels.core.distributed.symmetric import ONE_SHOT, Window, window_of
from rl_kernels.core.gpu import device_of
from rl_kernels.core.torchlib.observed import values_hidden

SENT_ROWS = 1024
"""Smallest number of rows of a slice whose parts are written into the memory of the rank that adds them."""
CACHE_SIZE = 512
"""Largest number of plans of a group that are cached."""
Write = Callable[[torch.Tensor, int, int], None]
"""Function that is called with ``out[n, N]``, first and end, and writes rows first to end of a part to ``out``."""


class Reduction:
    """The tree sum over ranks of FP32 parts ``[..., N]`` of one shape, plus a bias, or this rank's slice of it.

    Args:
        window: window of the group, with room for a part.
        group: 2, 4 or 8 ranks.
        shape: shape of a part.
        dtype: dtype to which the sum is rounded.
        scatter_dim: None, or the dim along which a rank gets its slice; all dims before it have size 1.
        has_bias: whether sums get a bias.
        is_product: whether parts are written by ``of_product``.
    """

    def __init__(
        self,
        window: Window,
        group: ProcessGroup,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scatter_dim: int | None,
        has_bias: bool,
        is_product: bool,
    ) -> None:
        from rl_kernels.core.triton_lib import peers

        self.window = window
        rank, ranks = group_rank(group), group_size(group)
        count, columns = math.prod(shape), shape[-1] if shape else 1
        rows, scatters = count // columns, scatter_dim is not None
        self._matrix = rows, columns
        self._out = shape
        if scatter_dim is not None:
            self._out = *shape[:scatter_dim], shape[scatter_dim] // ranks, *shape[scatter_dim + 1 :]
        self._dtype, self._device = dtype, window.memory.device
        self._copied = not scatters and 4 * count <= ONE_SHOT
        """Whether the kernel copies a part to the window."""
        rows_of_rank = rows // ranks
        sends = is_product and rows_of_rank >= SENT_ROWS and rows % ranks == 0
        # Each rank's memory takes the parts of its slice from all ranks, while later parts are still computed. The
        # slices of other ranks are first, so that their transfer is hidden.
        owners = [*range(rank + 1, ranks), *range(rank + 1)] if sends else []
        self._targets = [
            (
                window.slice_of(owner, rank * rows_of_rank * columns, (rows_of_rank, columns)),
                owner * rows_of_rank,
                (owner + 1) * rows_of_rank,
            )
            for owner in owners
        ] or [(window.slice_of(rank, 0, self._matrix), 0, rows)]
        self._memories = window.handle.buffer_ptrs_dev
        summed = peers.Sum(count, columns, rank, ranks, has_bias, self._device.index)
        if self._copied:
            self._launch = peers.exchange(summed, 0, window.small)
        else:
            sent = rows_of_rank * columns if sends else 0
            self._launch = peers.exchange_slices(summed, 0, window.parts, window.sums, scatters=scatters, sent=sent)

    def of_part(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the contiguous parts ``x`` of all ranks."""
        if self._copied:
            return self._sum(bias, x)
        self._targets[0][0].copy_(x.view(self._matrix))
        return self._sum(bias)

    def of_product(self, write: Write, like: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the parts that ``write`` writes; ``like`` is on the GPU of the window."""
        # A small part costs less to copy than an exchange by slices.
        if self._copied:
            part = like.new_empty(self._matrix, dtype=torch.float32)
            write(part, 0, self._matrix[0])
            return self._sum(bias, part)
        for part, first, end in self._targets:
            write(part, first, end)
        return self._sum(bias)

    def _sum(self, bias: torch.Tensor | None, *x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self._out, dtype=self._dtype, device=self._device)
        with device_of(out):
            self._launch(self._memories, *x, out if bias is None else bias.contiguous(), out)
        return out


_planned: WeakKeyDictionary[ProcessGroup, dict[tuple[Any, ...], Reduction]] = WeakKeyDictionary()


def reduction_of(
    group: ProcessGroup,
    like: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    scatter_dim: int | None = None,
    bias: torch.Tensor | None = None,
    is_product: bool = False,
) -> Reduction | None:
    """Return the plan of a sum on the GPU of ``like``, or None without symmetric memory; ranks call it alike."""
    if not like.is_cuda or torch.compiler.is_compiling():
        return None
    plans = _planned.get(group)
    if plans is None:
        plans = _planned[group] = {}
    # A launch is for one dtype of the bias.
    key = shape, like.get_device(), dtype, scatter_dim, None if bias is None else bias.dtype, is_product
    plan = plans.get(key)
    if plan is None:
        window = window_of(group, like, 4 * math.prod(shape)) if group_size(group) > 1 else None
        if window is None:
            return None
        if len(plans) >= CACHE_SIZE:
            plans.clear()
        plan = plans[key] = Reduction(window, group, shape, dtype, scatter_dim, bias is not None, is_product)
    # A captured stream cannot wait for work outside its graph; the docs ask for one stream.
    if not values_hidden(like):
        plan.window.follow()
    return plan
