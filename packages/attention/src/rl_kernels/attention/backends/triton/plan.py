"""What follows from the sizes and strides of a call: the grids of its kernels and the numbers that they are given."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from rl_kernels.attention.backends.triton import loads
from rl_kernels.attention.backends.triton.boxes import UNIT, Box, box_of
from rl_kernels.attention.backends.triton.schedule import FEW, KeyTile, Tile, tile_of, tile_of_keys, tile_of_queries
from rl_kernels.attention.inputs import UNLIMITED
from rl_kernels.core.operator import arch_of
from rl_kernels.core.triton_lib.launch import INTERPRETED, ceil_div
from rl_kernels.core.triton_lib.schedule import HALF, processors

BLOCK = 64
"""Keys of a block."""
SEGMENT = loads.SEGMENT.value
"""Keys of a segment."""
LOG2E = 1.4426950408889634
FAR = 1 << 30
"""Stands for a side of the window that has no end."""
FULL = 4
"""Programs for each multiprocessor from which on keys are not split over more of them."""
PART, COLUMNS, AHEAD = 4, 32, 8
"""Rows and columns that one program merges, and states that it loads at once."""
PACKED_DIMS = 3
LEAST_WIDTH = 16
"""What a product's sizes are at least."""


class Forward(NamedTuple):
    """The launches of a forward pass: of ``attend`` and, where ``states`` are merged, of ``finish``."""

    tile: Tile
    grid: tuple[int, int]
    numbers: tuple[float, ...]
    grid_finish: tuple[int, int]
    numbers_finish: tuple[float, ...]
    states: int


class Plan:
    """What follows from the sizes and strides of a call, for all its kernels; made once for each that there are.

    Attributes:
        factor: of scores, whose powers are of 2.
        strides: in units, of q between sequences, of k and v between sequences or pages, and between heads.
        constants: sizes that a kernel is compiled for.
        fast: whether 16 bits are multiplied on Hopper.
        boxes: of k and v, or None where they come by pointers.
    """

    def __init__(
        self,
        shapes: tuple[torch.Size, ...],
        strides: tuple[tuple[int, ...], ...],
        kind: tuple[torch.dtype, torch.device],
        batch: int,
        packed_k: bool,
        started: bool,
        table: torch.Size | None,
        longest: tuple[int, int],
        scores: tuple[float, int, int, float],
    ) -> None:
        (self.queries, heads, self.size), (*_, kv_heads, self.size_v) = shapes[0][-3:], shapes[2]
        self.dtype, self.device = kind
        self.batch, self.kv_heads, self.group = batch, kv_heads, heads // kv_heads
        self.width, self.width_v = (max(triton.next_power_of_2(x), LEAST_WIDTH) for x in (self.size, self.size_v))
        self.keys, self.page, self.pages, self.table_step = shapes[1][0 if packed_k else 1], 1, 0, 0
        if table is not None:
            self.pages, self.page, self.table_step = shapes[1][0], shapes[1][1], table[1]
            self.keys = table[1] * self.page * bool(self.pages)
        self.longest_q, self.longest_k = min(longest[0], self.queries), min(longest[1], self.keys)
        self.scale, left, right, self.cap = scores
        self.capped, self.has_left = self.cap > 0, left != UNLIMITED
        if started and self.has_left:
            # Of those that are gone, what whole segments leave.
            self.longest_k += SEGMENT - 1
        self.factor = LOG2E if self.capped else self.scale * LOG2E
        self.rate = self.scale / self.cap if self.capped else 0.0
        self.window = tuple(FAR if side == UNLIMITED else min(side, FAR) for side in (left, right))
        of_q, of_k, of_v = map(units, strides)
        self.strides = of_q[0], *of_k[::2], *of_v[::2]
        sizes = kv_heads, self.group, self.size, self.size_v, self.width, self.width_v
        self.constants = *sizes, *of_q[1:], of_k[1], of_v[1]
        on_hopper = not INTERPRETED and arch_of(self.device.type, self.device.index) == "sm90"
        self.fast = on_hopper and self.dtype in HALF
        self.boxes: tuple[Box, Box] | None = None
        if self.has_boxes and (table is None or self.page % BLOCK == 0):
            k, v = (box_of(x, y, (BLOCK, 1), z) for x, y, z in zip(shapes[1:], strides[1:], self.widths, strict=True))
            self.boxes = (k, v) if k and v else None
        self._of_q = shapes[0], strides[0]
        # No row at all: nothing is launched.
        self.is_empty = not (batch and self.longest_q)

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of a tile of k, and of v."""
        return self.width, self.width_v

    @property
    def has_boxes(self) -> bool:
        """Whether the copy engine is there, or Triton is interpreted."""
        return self.fast or INTERPRETED

    def boxes_of_rows(self, rows: int, shape: torch.Size, strides: tuple[int, ...]) -> tuple[Box, Box] | None:
        """Return the boxes of so many rows of q, and of the gradient of out, which lies so."""
        if not self.has_boxes or rows % self.group:
            return None
        block = rows // self.group, self.group
        q, grad = box_of(*self._of_q, block, self.width), box_of(shape, strides, block, self.width_v)
        return (q, grad) if q and grad else None

    @functools.cached_property
    def tile_of_queries(self) -> Tile:
        """How the rows of dq are cut."""
        return tile_of_queries(self.dtype, max(self.widths), self.fast)

    @functools.cached_property
    def tile_of_keys(self) -> KeyTile:
        """How the keys of dk and dv are cut."""
        return tile_of_keys(self.dtype, max(self.widths), self.fast, self.group)

    def tiles(self, rows: int) -> int:
        """Return the tiles of the longest sequence's rows."""
        return ceil_div(self.longest_q * self.group, rows)

    @functools.cached_property
    def forward(self) -> Forward:
        """What the forward pass launches."""
        tile = tile_of(self.dtype, max(self.widths), self.fast, self.longest_q * self.group, self.boxes is not None)
        tiles, segments = self.tiles(tile.rows), ceil_div(self.longest_k, SEGMENT)
        programs = self.batch * tiles
        few = programs * self.kv_heads < FULL * processors(self.device)
        split = segments > 1 and (few or tile.rows <= FEW)
        numbers = (
            *(self.queries, self.keys, self.pages, self.table_step, tiles, segments, *self.window, *self.strides),
            *(self.factor, self.cap, self.rate, *self.constants, self.page, self.capped),
            *(tile.rows, BLOCK, self.has_left, split, segments <= 1),
        )
        merging = (
            *(self.queries, self.keys, tiles, segments, self.kv_heads, self.group, self.size_v, self.width_v),
            *(tile.rows, self.has_left, PART, min(COLUMNS, self.width_v), AHEAD),
        )
        parts = (tile.rows // PART) * ceil_div(self.width_v, COLUMNS)
        return Forward(
            tile,
            (programs * segments if split else programs, self.kv_heads),
            numbers,
            (programs * parts, self.kv_heads),
            merging,
            programs * self.kv_heads * segments * tile.rows if split else 0,
        )


plan_of = functools.lru_cache(maxsize=4096)(Plan)


def units(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the strides of a sequence or page, a row and a head, in units of 8 elements."""
    batch = strides[0] if len(strides) > PACKED_DIMS else 0
    return batch // UNIT, strides[-3] // UNIT, strides[-2] // UNIT
