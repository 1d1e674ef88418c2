"""The schedules of the kernels: columns of a program, warps, and pipeline stages. On Hopper they change no bit."""

from __future__ import annotations

import torch

from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.core.triton_lib.schedule import HALF
from rl_kernels.gated_delta.triton_lib.schedule import WIDEST, Tile


def tile_of_scan(dtype: torch.dtype, key_size: int, value_size: int, fast: bool) -> Tile:
    """Choose the tile of the pass over chunks, by dtype and head sizes alone; ``fast`` says whether this is Hopper."""
    if INTERPRETED:
        return Tile(min(64, value_size), 4)
    if dtype in HALF and key_size <= WIDEST:
        return Tile(min(32, value_size), 4, 2 if fast else 1)
    return Tile(16, 8)


def tile_of_decode(dtype: torch.dtype, key_size: int, value_size: int) -> Tile:
    """Choose the tile of a decode step, by dtype and head sizes alone."""
    if INTERPRETED:
        return Tile(min(64, value_size), 4)
    width = 64 if dtype in HALF and key_size <= WIDEST else 16
    return Tile(min(width, value_size), 4)


def part_of_keys(dtype: torch.dtype, key_size: int) -> int:
    """Choose the columns of keys that a product takes at once."""
    return min(32 if dtype in HALF else 16, key_size)
