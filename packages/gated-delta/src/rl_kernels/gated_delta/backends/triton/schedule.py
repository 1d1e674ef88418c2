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


def tile_of_scan(dtype: torch.dtype, key_size: int, value_size: int) -> Tile:
    """Choose the tile of the pass over chunks, by dtype and head sizes alone."""
    if INTERPRETED:
        return Tile(min(64, value_size), 4)
    width = 32 if dtype in HALF and key_size <= WIDEST else 16
    return Tile(min(width, value_size), 4)


def tile_of_decode(dtype: torch.dtype, key_size: int, value_size: int) -> Tile:
    """Choose the tile of a decode step, by dtype and head sizes alone."""
    if INTERPRETED:
        return Tile(min(64, value_size), 4)
    width = 64 if dtype in HALF and key_size <= WIDEST else 16
    return Tile(min(width, value_size), 4)


def warps_of_prepare(key_size: int) -> int:
    """Choose the warps of ``prepare``."""
    return 4 if key_size <= WIDEST else 8
