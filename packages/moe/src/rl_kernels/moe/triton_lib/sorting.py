"""Host code of ``order``: it sorts the routes, and lists the tiles of their products."""

from __future__ import annotations

import torch

from rl_kernels.core.triton_lib.launch import Launch, ceil_div, next_power_of_2
from rl_kernels.moe.op import order_size
from rl_kernels.moe.triton_lib import order

ALONE = 2048
"""Largest number of routes that are sorted by one launch."""
LISTED = 256
"""Tiles that a program lists, of routes whose order is known."""


class Sort:
    """Sort routes by (expert, token, slot), and list the tiles of their products, prepared for ids like these.

    Args:
        ids: ``[T, k]``.
        experts: number of experts.
        rows: height of a tile.
    """

    def __init__(self, ids: torch.Tensor, experts: int, rows: int) -> None:
        routes = ids.numel()
        width = next_power_of_2(max(experts + 2, order.COLUMNS.value))
        blocks = max(1, ceil_div(routes, order.BLOCK_OF_ROUTES.value))
        self._tiles = tile_count(routes, experts, rows)
        self._size, self._counts = order_size(ids, experts), (blocks + 1, width) if routes > ALONE else None
        # With many blocks, each is faster with few warps.
        warps = 4 if self._counts is None else 2
        self._count = Launch(order.count, (blocks,), (routes, experts, width), num_warps=warps)
        self._add_up = Launch(order.add_up, (ceil_div(width, order.COLUMNS.value),), (blocks, width), num_warps=8)
        self._place = Launch(order.place, (blocks,), (routes, experts, self._tiles, rows, width), num_warps=warps)

    def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order as ``op`` describes it, and the tiles."""
        routes = ids.new_empty(self._size, dtype=torch.int32)
        tiles = ids.new_empty((3, self._tiles), dtype=torch.int32)
        counts = None
        if self._counts is not None:
            counts = ids.new_empty(self._counts, dtype=torch.int32)
            self._count(ids, counts)
            self._add_up(counts)
        self._place(ids, counts, routes, tiles)
        return routes, tiles


class List:
    """List the tiles of routes whose order is known; the arguments are those of ``Sort``."""

    def __init__(self, routes: int, experts: int, rows: int) -> None:
        self._tiles = tile_count(routes, experts, rows)
        numbers = (experts, self._tiles, rows, next_power_of_2(experts + 2))
        self._launch = Launch(order.list_tiles, (1 + self._tiles // LISTED,), numbers, num_warps=4)

    def __call__(self, bounds: torch.Tensor) -> torch.Tensor:
        """Return the tiles."""
        tiles = torch.empty((3, self._tiles), dtype=torch.int32, device=bounds.device)
        self._launch(bounds, tiles)
        return tiles


def tile_count(routes: int, experts: int, rows: int) -> int:
    """Return the largest number of tiles that routes may need."""
    return routes // rows + min(routes, experts)
