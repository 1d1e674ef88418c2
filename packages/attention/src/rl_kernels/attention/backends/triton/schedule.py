"""The schedules of the attention kernels: tiles, warps and pipeline stages. Only the block of dq changes bits.

Heads of more than 128 in FP32, and on other GPUs than Hopper, have tiles that fit into 99 KiB of shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.core.triton_lib.schedule import HALF

NARROW, WIDE = 64, 128
"""Largest head sizes of two kinds of tile; larger heads have a third."""
BLOCK = 64
"""Keys of a block."""
FEW = 16
"""Rows of a tile for few queries; it has too few registers for the states of two segments."""
MOST_ROWS = 64
"""Rows that are added to dk and dv at once, if TMA loads them."""


class Tile(NamedTuple):
    """A schedule: rows of a program, warps, pipeline stages, and the register limit of a thread (0 is no limit)."""

    rows: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """The keyword arguments of a launch."""
        bound = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **bound}


class KeyTile(NamedTuple):
    """The schedule of dk and dv: keys of a program, rows that are added at once, warps, and pipeline stages."""

    keys: int
    rows: int
    warps: int
    stages: int


IN_INTERPRETER = Tile(32, 4, 1)


def tile_of(dtype: torch.dtype, wide: int, fast: bool, rows: int, in_boxes: bool) -> Tile:
    """Choose the tile for ``rows`` rows; their number matters only where that was shown to change no bit.

    ``wide`` is the larger head size; ``fast`` says whether the operands are 16-bit on Hopper.
    """
    if INTERPRETED:
        return IN_INTERPRETER
    if dtype not in HALF:
        # No tensor cores: these sizes keep register spills small.
        return Tile(64 if wide <= NARROW else 16, 8, 1)
    if not fast:
        return Tile(32, 8, 1) if wide > WIDE else Tile(64, 4 if wide <= NARROW else 8, 2)
    if wide > WIDE:
        return Tile(64, 4, 1)
    if rows > FEW:
        return Tile(64, 4, 3)
    # Four programs per multiprocessor: one token is bound by the loads in flight.
    return Tile(FEW, 2, 2) if wide <= NARROW else Tile(FEW, 4, 2, 128 if in_boxes else 0)


def tile_of_queries(dtype: torch.dtype, wide: int, fast: bool) -> Tile:
    """Choose the tile of dq, by head size and dtype alone."""
    if INTERPRETED:
        return IN_INTERPRETER
    if dtype not in HALF:
        return Tile(16, 8, 1)
    if not fast:
        return Tile(32, 8, 1) if wide > WIDE else Tile(64, 4, 2)
    if wide > WIDE:
        return Tile(64, 4, 1)
    return Tile(64, 4, 3 if wide <= NARROW else 2)


def block_of_queries(dtype: torch.dtype, wide: int) -> int:
    """Choose the keys of a block of dq, by dtype and head size alone: they fix the order of its sums."""
    return BLOCK if INTERPRETED or dtype in HALF or wide <= WIDE else BLOCK // 2


def tile_of_keys(dtype: torch.dtype, wide: int, fast: bool, group: int) -> KeyTile:
    """Choose the tile of dk and dv, by head size, dtype and group alone."""
    if INTERPRETED or dtype not in HALF:
        return KeyTile(16, 16, 8, 1) if wide > WIDE else KeyTile(32, 32, 8, 1)
    if wide > WIDE:
        return KeyTile(64, 64, 8, 2) if fast else KeyTile(32, 32, 8, 1)
    if fast and MOST_ROWS % group == 0:
        return KeyTile(64, MOST_ROWS, 4, 3 if wide <= NARROW else 2)
    return KeyTile(64, 32, 4, 2)
