"""The schedule of the kernels of ``differentiate``, and what it is made of. On Hopper it changes no bit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.triton_lib.schedule import HALF

WIDEST = 128
"""Largest Dk whose state fits into registers in the columns of a fast tile."""


class Tile(NamedTuple):
    """A schedule: columns of the state that a program holds, warps, and pipeline stages."""

    width: int
    warps: int
    stages: int = 1


def tile_of_differentiate(dtype: torch.dtype, key_size: int, value_size: int, fast: bool) -> Tile:
    """Choose the schedule of the kernels of ``differentiate``, with the columns of Dv that they take at once."""
    width = 64 if fast and key_size <= WIDEST else 32
    return Tile(min(width if dtype in HALF else 16, value_size), 8, 2 if fast else 1)
