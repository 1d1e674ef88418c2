"""How the kernels of attention are cut: tiles, warps and loads in flight, of which no bit follows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.core.triton_lib.schedule import HALF

NARROW, WIDE = 64, 128
"""Head sizes up to which tiles are cut alike."""
FEW = 16
"""Rows of a tile for a few queries: it has no registers for the states of two segments."""
MOST_ROWS = 64
"""Rows that join dk and dv at once where they come in boxes."""


class Tile(NamedTuple):
    """How a kernel is cut: rows of a program, its warps, the loads in flight, and registers of a thread, if bounded."""

    rows: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """What a launch is told of it."""
        bound = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **bound}


class KeyTile(NamedTuple):
    """How dk and dv are cut: keys of a program, rows that join them at once, warps, and the loads in flight."""

    keys: int
    rows: int
    warps: int
    stages: int


IN_INTERPRETER = Tile(32, 4, 1)


def tile_of(dtype: torch.dtype, wide: int, fast: bool, rows: int, in_boxes: bool) -> Tile:
    """Return how so many rows are cut: by their number only where that was shown to change no bit.

    ``wide`` is the larger head size, ``fast`` whether 16 bits are multiplied on Hopper.
    """
    if INTERPRETED:
        return IN_INTERPRETER
    if dtype not in HALF:
        # Products without tensor cores: what keeps the spills small.
        return Tile(64 if wide <= NARROW else 16, 8, 1)
    if not fast:
        return Tile(32, 8, 1) if wide > WIDE else Tile(64, 4 if wide <= NARROW else 8, 2)
    if wide > WIDE:
        return Tile(64, 4, 1)
    if rows > FEW:
        return Tile(64, 4, 3)
    # Four programs a multiprocessor: what bounds one token is the loads under way.
    return Tile(FEW, 2, 2) if wide <= NARROW else Tile(FEW, 4, 2, 128 if in_boxes else 0)


def tile_of_queries(dtype: torch.dtype, wide: int, fast: bool) -> Tile:
    """Return how the rows of dq are cut: by head size and dtype alone."""
    if INTERPRETED:
        return IN_INTERPRETER
    if dtype not in HALF:
        return Tile(16, 8, 1)
    if not fast:
        return Tile(64, 8, 1) if wide > WIDE else Tile(64, 4, 2)
    if wide > WIDE:
        return Tile(64, 4, 1)
    return Tile(64, 4, 3 if wide <= NARROW else 2)


def tile_of_keys(dtype: torch.dtype, wide: int, fast: bool, group: int) -> KeyTile:
    """Return how the keys of dk and dv are cut: by head size, dtype and group alone."""
    if INTERPRETED or dtype not in HALF:
        return KeyTile(32, 32, 8, 1)
    if wide > WIDE:
        return KeyTile(64, 64, 8, 2) if fast else KeyTile(64, 32, 8, 1)
    if fast and MOST_ROWS % group == 0:
        return KeyTile(64, MOST_ROWS, 4, 3 if wide <= NARROW else 2)
    return KeyTile(64, 32, 4, 2)
