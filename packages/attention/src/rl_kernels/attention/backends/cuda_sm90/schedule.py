"""Tiles of the kernels of ``cuda-sm90``: consumers, stages and shared memory. None of them changes a bit."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from rl_kernels.core.cuda.program import Program

PACKAGE = "rl_kernels.attention.backends.cuda_sm90"
FORWARD, BACKWARD = "attention_sm90.cu", "attention_backward_sm90.cu"
CODES = {torch.bfloat16: 1, torch.float16: 2}
"""Values of the kernels' DTYPE macro."""
WIDTHS = ((64, 64), (64, 128), (128, 64), (128, 128), (192, 128), (256, 256))
"""Columns of a tile of k and of v: the first of these that are at least the head sizes."""
WIDEST_KEPT = 128
"""Widest tiles of k with sums of segments in shared memory, and of v with registers for blocks of 128 keys."""
HEIGHT, AT_ONCE = 64, 32
"""Rows of a consumer, and columns of its output that it writes at once if tiles are wide, in the forward pass."""
PART = 64
"""Keys or rows of a block in the backward pass."""
SHARED = 227 * 1024
"""Bytes of shared memory that a thread block may have."""
BARRIERS, ROW_BYTES = 256, 2048
"""Bytes of shared memory for barriers, and in the backward pass for the lse and delta of rows."""
WARPGROUP, ALIGNMENT, CHUNK = 128, 1024, 16
MOST_STAGES = 4


MOST_GROUPS = {(64, 64): 3}
"""Consumers of a tile with many rows, by its widths; other widths have 2: their sums leave too few registers for 3."""


def widths_of(size: int, size_v: int) -> tuple[int, int]:
    """Return the columns of a tile of k and of v for heads of these sizes."""
    return next((width, width_v) for width, width_v in WIDTHS if size <= width and size_v <= width_v)


def block_of(widths: tuple[int, int]) -> int:
    """Return the number of keys of a block of the forward pass."""
    return 64 if widths[1] > WIDEST_KEPT else 128


def is_wide(widths: tuple[int, int]) -> bool:
    """Say whether tiles are wider than those of the backward pass, and their sums of segments in global memory."""
    return max(widths) > WIDEST_KEPT


class Tile(NamedTuple):
    """A tile of the forward pass: ``groups`` consumers with 64 rows each, ``widths`` columns of k and of v."""

    groups: int
    widths: tuple[int, int]

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return self.groups * HEIGHT

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.groups + 1) * WARPGROUP

    @property
    def stages(self) -> int:
        """Number of blocks of keys, and of values, in shared memory at once."""
        return min((SHARED - BARRIERS - self._fixed) // self._stage, MOST_STAGES)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return self._fixed + self.stages * self._stage

    @property
    def _stage(self) -> int:
        return 2 * block_of(self.widths) * sum(self.widths)

    @property
    def _fixed(self) -> int:
        """Bytes of the rows of q, and of each consumer's output, or with several consumers its sums of segments.

        If tiles are wide, a part of the output, and a state of segments for each thread.
        """
        width, width_v = self.widths
        if is_wide(self.widths):
            row_bytes = 2 * AT_ONCE + CHUNK + WARPGROUP * CHUNK // HEIGHT
        else:
            row_bytes = 4 * width_v if self.groups > 1 else 2 * width_v + CHUNK
        return ALIGNMENT + self.rows * (2 * width + row_bytes)


def tile_of(rows: int, widths: tuple[int, int]) -> Tile:
    """Return the tile of a call whose sequences have up to ``rows`` rows."""
    return Tile(1 if rows <= HEIGHT else MOST_GROUPS.get(widths, 2), widths)


@functools.cache
def program(dtype: torch.dtype, tile: Tile, *, capped: bool) -> Program:
    """Return the kernels of the forward pass, compiled for a tile."""
    width, width_v = tile.widths
    defines = {"DTYPE": CODES[dtype], "K_WIDTH": width, "V_WIDTH": width_v, "CAPPED": int(capped)}
    sizes = {"GROUPS": tile.groups, "STAGES": tile.stages, "SHARED_BYTES": tile.shared}
    return Program(PACKAGE, FORWARD, "sm_90a", tuple({**defines, **sizes}.items()))


class BackwardTile(NamedTuple):
    """The tiles of the backward pass: two consumers, ``widths`` columns of k and of v."""

    widths: tuple[int, int]

    @property
    def height(self) -> int:
        """Rows or keys of the tile: 64 of each consumer, or if tiles are wide of both."""
        return HEIGHT if is_wide(self.widths) else 2 * HEIGHT

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 3 * WARPGROUP

    @property
    def stages(self) -> int:
        """Number of blocks of rows or keys in shared memory at once."""
        return min((SHARED - BARRIERS - ROW_BYTES - self._fixed) // self._stage, MOST_STAGES)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return self._fixed + self.stages * self._stage

    @property
    def _stage(self) -> int:
        return 2 * PART * sum(self.widths)

    @property
    def _fixed(self) -> int:
        """Bytes of the operands of a tile, of the consumers' output, and of two blocks of weights if tiles are wide."""
        columns, given = (AT_ONCE, 2 * 2 * HEIGHT * PART) if is_wide(self.widths) else (max(self.widths), 0)
        return ALIGNMENT + 2 * self.height * sum(self.widths) + 2 * HEIGHT * (2 * columns + CHUNK) + given


@functools.cache
def backward_program(dtype: torch.dtype, tile: BackwardTile, *, capped: bool) -> Program:
    """Return the kernels of the backward pass."""
    width, width_v = tile.widths
    defines = {"DTYPE": CODES[dtype], "K_WIDTH": width, "V_WIDTH": width_v, "CAPPED": int(capped)}
    sizes = {"STAGES": tile.stages, "SHARED_BYTES": tile.shared}
    return Program(PACKAGE, BACKWARD, "sm_90a", tuple({**defines, **sizes}.items()))
