"""Plan the grids and scalar arguments of a call's kernels from its sizes and strides."""

from __future__ import annotations

import torch
import triton

from rl_kernels.attention.backends.triton.backward import rows_of
from rl_kernels.attention.backends.triton.boxes import UNIT, Box, box_of
from rl_kernels.attention.backends.triton.dkdv import of_keys
from rl_kernels.attention.backends.triton.dq import of_queries
from rl_kernels.attention.backends.triton.forward import attend, finish
from rl_kernels.attention.backends.triton.schedule import (
    BLOCK,
    FEW,
    block_of_queries,
    tile_of,
    tile_of_keys,
    tile_of_queries,
)
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.core.constants import KEY_SEGMENT as SEGMENT
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.launch import INTERPRETED, Launch, ceil_div
from rl_kernels.core.triton_lib.schedule import HALF, processors

LOG2E = 1.4426950408889634
FAR = 1 << 30
"""The value that kernels get for an unlimited side of the window."""
FULL = 4
"""With this many programs per multiprocessor, keys are not split over more programs."""
PART, COLUMNS, AHEAD = 4, 32, 8
"""Rows and columns that one program merges, and states that it loads at once."""
PACKED_DIMS = 3
ROWS = 32
"""Rows of a program that sums out times its gradient."""
LEAST_WIDTH = 16
"""The smallest width of an operand of ``tl.dot``."""
SMALL = 1 << 21
"""Calls with up to this many scores load by pointers: a descriptor costs the host more than it saves the GPU."""


class Plan:
    """What the launches of a call follow from: its sizes, strides and options.

    Attributes:
        factor: multiplies scores before ``exp2``.
        strides: strides in units of 8 elements: q between sequences; k and v between sequences or pages, and heads.
        constants: sizes and strides that are compile-time constants.
        fast: whether the operands are 16-bit on Hopper.
        has_boxes: whether TMA is used: on Hopper for large calls, and in Triton's interpreter.
        boxes: boxes of k and v, or None if these are loaded by pointers.
        is_empty: whether no sequence has a query, so that nothing is launched.
    """

    def __init__(self, inputs: Inputs) -> None:
        shapes, strides = [x.shape for x in inputs.operands], [x.stride() for x in inputs.operands]
        table = None if inputs.block_table is None else inputs.block_table.shape
        (self.queries, heads, self.size), (*_, kv_heads, self.size_v) = shapes[0][-3:], shapes[2]
        self.dtype, self.device = inputs.q.dtype, inputs.q.device
        self.batch, self.kv_heads, self.group = inputs.batch, kv_heads, inputs.group
        self.width, self.width_v = (max(triton.next_power_of_2(x), LEAST_WIDTH) for x in (self.size, self.size_v))
        self.keys, self.page, self.pages, self.table_step = shapes[1][-3], 1, 0, 0
        if table is not None:
            self.pages, self.page, self.table_step = shapes[1][0], shapes[1][1], table[1]
            self.keys = table[1] * self.page * bool(self.pages)
        self.longest_q, self.longest_k = min(inputs.max_seqlen_q, self.queries), min(inputs.max_seqlen_k, self.keys)
        self.scale, left, right, self.cap = inputs.numbers[2:]
        self.capped, self.has_left = self.cap > 0, left != UNLIMITED
        if inputs.k_start is not None and self.has_left:
            # Room for dropped keys, modulo a segment.
            self.longest_k += SEGMENT - 1
        self.factor = LOG2E if self.capped else self.scale * LOG2E
        self.rate = self.scale / self.cap if self.capped else 0.0
        self.window = tuple(FAR if side == UNLIMITED else min(side, FAR) for side in (left, right))
        q_strides, k_strides, v_strides = map(units, strides)
        self.strides = q_strides[0], *k_strides[::2], *v_strides[::2]
        sizes = kv_heads, self.group, self.size, self.size_v, self.width, self.width_v
        self.constants = *sizes, *q_strides[1:], k_strides[1], v_strides[1]
        self.fast = not INTERPRETED and self.dtype in HALF and tiles_change_no_bit(self.device)
        is_large = self.batch * self.longest_q * heads * self.longest_k > SMALL
        self.has_boxes = INTERPRETED or (self.fast and is_large)
        self.boxes: tuple[Box, Box] | None = None
        if self.has_boxes and (table is None or self.page % BLOCK == 0):
            k, v = (box_of(x, y, (BLOCK, 1), z) for x, y, z in zip(shapes[1:], strides[1:], self.widths, strict=True))
            self.boxes = (k, v) if k and v else None
        self._of_q = shapes[0], strides[0]
        self.is_empty = not (self.batch and self.longest_q)

    @property
    def widths(self) -> tuple[int, int]:
        """The number of columns of a tile of k, and of one of v."""
        return self.width, self.width_v

    def _boxes_of_rows(self, rows: int, strides: tuple[int, ...]) -> tuple[Box, Box] | None:
        """Return the boxes of ``rows`` rows of q and of out's gradient; ``strides`` are those of the gradient."""
        if not self.has_boxes or rows % self.group:
            return None
        block = rows // self.group, self.group
        shape, q_strides = self._of_q
        q = box_of(shape, q_strides, block, self.width)
        grad = box_of(torch.Size((*shape[:-1], self.size_v)), strides, block, self.width_v)
        return (q, grad) if q and grad else None

    def _tiles(self, rows: int) -> int:
        """Return the number of tiles of the longest sequence."""
        return ceil_div(self.longest_q * self.group, rows)

    def forward(self) -> tuple[Launch, Launch, int]:
        """Return the launches of ``attend`` and ``finish``, which merges so many states of rows if keys are split."""
        tile = tile_of(self.dtype, max(self.widths), self.fast, self.longest_q * self.group, self.boxes is not None)
        tiles, segments = self._tiles(tile.rows), ceil_div(self.longest_k, SEGMENT)
        programs = self.batch * tiles
        few = programs * self.kv_heads < FULL * processors(self.device)
        split = segments > 1 and (few or tile.rows <= FEW)
        numbers = (
            *(self.queries, self.keys, self.pages, self.table_step, tiles, segments, *self.window, *self.strides),
            *(self.factor, self.cap, self.rate, *self.constants, self.page, self.capped),
            *(tile.rows, BLOCK, self.has_left, split, segments <= 1),
        )
        finish_numbers = (
            *(self.queries, self.keys, tiles, segments, self.kv_heads, self.group, self.size_v, self.width_v),
            *(tile.rows, self.has_left, PART, min(COLUMNS, self.width_v), AHEAD),
        )
        parts = (tile.rows // PART) * ceil_div(self.width_v, COLUMNS)
        return (
            Launch(attend, (programs * segments if split else programs, self.kv_heads), numbers, **tile.options),
            Launch(finish, (programs * parts, self.kv_heads), finish_numbers, num_warps=1),
            programs * self.kv_heads * segments * tile.rows if split else 0,
        )

    def backward(self, strides: tuple[int, ...]) -> tuple[Launch, Launch, Launch | None, tuple[Box, Box] | None]:
        """Return the launches of ``rows_of``, ``of_queries`` and ``of_keys``, and the boxes of q and of out's gradient.

        ``strides`` are those of the gradient. Without a key, nothing is launched for keys.
        """
        grad_strides, heads = units(strides), self.kv_heads * self.group
        sequences = 1 if len(strides) == PACKED_DIMS else self.batch
        common = (*self.strides, grad_strides[0], self.factor, self.scale, self.cap, self.rate)
        constants = (*self.constants, *grad_strides[1:])
        wide = max(self.widths)
        tile, block = tile_of_queries(self.dtype, wide, self.fast), block_of_queries(self.dtype, wide)
        tiles = self._tiles(tile.rows)
        dq_numbers = (
            *(self.queries, self.keys, self.pages, self.table_step, tiles, *self.window),
            *(*common, *constants, self.page, self.capped, tile.rows, block, self.has_left),
        )
        key_tile = tile_of_keys(self.dtype, wide, self.fast, self.group)
        parts = ceil_div(self.longest_k, key_tile.keys)
        dk_numbers = (
            *(self.queries, self.keys, parts, *self.window),
            *(*common, *constants, self.capped, key_tile.rows, key_tile.keys, self.has_left),
        )
        return (
            Launch(
                rows_of,
                (ceil_div(self.queries * heads, ROWS) * sequences,),
                (self.queries, grad_strides[0], heads, self.group, self.size_v, self.width_v, *grad_strides[1:], ROWS),
                num_warps=4,
            ),
            Launch(of_queries, (self.batch * tiles, self.kv_heads), dq_numbers, **tile.options),
            Launch(
                of_keys,
                (self.batch * parts, self.kv_heads),
                dk_numbers,
                num_warps=key_tile.warps,
                num_stages=key_tile.stages,
            )
            if parts
            else None,
            self._boxes_of_rows(key_tile.rows, strides),
        )


def units(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the strides of a sequence or page, a row and a head, in units of 8 elements."""
    batch = strides[0] if len(strides) > PACKED_DIMS else 0
    return batch // UNIT, strides[-3] // UNIT, strides[-2] // UNIT
