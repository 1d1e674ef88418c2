"""The schedules of the kernels: columns of a program, warps, and pipeline stages. On Hopper they change no bit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.core.triton_lib.schedule import HALF

WIDEST = 128
"""Largest Dk whose state fits into registers in the columns of a fast tile."""


class Tile(NamedTuple):
    """A schedule: columns of the state that a program holds, warps, and pipeline stages."""

    width: int
    warps: int
    stages: int = 1


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


def tile_of_differentiate(dtype: torch.dtype, key_size: int, value_size: int, fast: bool) -> Tile:
    """Choose the schedule of the kernels of ``differentiate``, with the columns of Dv that they take at once."""
    width = 64 if fast and key_size <= WIDEST else 32
    return Tile(min(width if dtype in HALF else 16, value_size), 8, 2 if fast else 1)
