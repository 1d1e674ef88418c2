"""What follows from the sizes and strides of a call: grids, numbers for the kernels, and tiles, which change no bit."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernels.attention.backends.triton import loads
from rl_kernels.attention.inputs import UNLIMITED
from rl_kernels.core.operator import arch_of
from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.core.triton_lib.schedule import HALF, processors

BLOCK = 64
"""Keys of a block."""
SEGMENT = loads.SEGMENT.value
"""Keys of a segment."""
NARROW, WIDE = 64, 128
"""Head sizes up to which tiles are cut alike."""
MOST_ROWS = 64
"""Rows that join dk and dv at once where they come in boxes."""
LOG2E = 1.4426950408889634
UNIT = loads.UNIT.value
"""Elements of which strides are multiples."""
FAR = 1 << 30
"""Stands for a side of the window that has no end."""
FULL = 4
"""Programs for each multiprocessor from which on keys are not split over more of them."""
FEW = 16
"""Rows of a tile for a few queries: it has no registers for the states of two segments."""
PART, COLUMNS, AHEAD = 4, 32, 8
"""Rows and columns that one program merges, and states that it loads at once."""
PACKED_DIMS = 3
LEAST_WIDTH = 16
"""What a product's sizes are at least."""


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


class Box(NamedTuple):
    """How the copy engine sees a tensor, and what it brings of it at once."""

    shape: list[int]
    strides: list[int]
    block: list[int]

    def of(self, x: torch.Tensor) -> TensorDescriptor:
        """Return the descriptor of a tensor that lies so.

        Its own constructor would look at every number again, at each call.
        """
        made = object.__new__(TensorDescriptor)
        vars(made).update(base=x, shape=self.shape, strides=self.strides, block_shape=self.block)
        return made


def box(shape: torch.Size, strides: tuple[int, ...], block: tuple[int, int], width: int) -> Box | None:
    """Return the box of ``[B, rows, heads, size]``, or of packed rows, that brings ``block`` of rows and heads.

    None where there is nothing, or where rows overlap, which is for pointers.
    """
    lead = [1] * (PACKED_DIMS + 1 - len(shape))
    sizes, steps = [*lead, *shape], [0] * len(lead) + list(strides)
    if not all(size == 1 or size * step for size, step in zip(sizes, steps, strict=True)):
        return None
    # The stride of a dim of one is never used, but must be one that is possible.
    for dim in (0, 1, 2):
        if sizes[dim] == 1:
            steps[dim] = math.prod(sizes[dim + 1 : -1]) * -(-sizes[-1] // UNIT) * UNIT
    return Box(sizes, [*steps[:-1], 1], [1, *block, width])


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
            k, v = (box(x, y, (BLOCK, 1), z) for x, y, z in zip(shapes[1:], strides[1:], self.widths, strict=True))
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
        q, grad = box(*self._of_q, block, self.width), box(shape, strides, block, self.width_v)
        return (q, grad) if q and grad else None

    def tiles(self, rows: int) -> int:
        """Return the tiles of the longest sequence's rows."""
        return triton.cdiv(self.longest_q * self.group, rows)

    @functools.cached_property
    def forward(self) -> Forward:
        """What the forward pass launches."""
        tile = tile_of(self)
        tiles, segments = self.tiles(tile.rows), triton.cdiv(self.longest_k, SEGMENT)
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
        parts = (tile.rows // PART) * triton.cdiv(self.width_v, COLUMNS)
        return Forward(
            tile,
            (programs * segments if split else programs, self.kv_heads),
            numbers,
            (programs * parts, self.kv_heads),
            merging,
            programs * self.kv_heads * segments * tile.rows if split else 0,
        )


plan_of = functools.lru_cache(maxsize=4096)(Plan)


def described(
    boxes: tuple[Box, Box] | None, first: torch.Tensor, second: torch.Tensor
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return the descriptors of two tensors, or of none."""
    return (None, None) if boxes is None else (boxes[0].of(first), boxes[1].of(second))


def units(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the strides of a sequence or page, a row and a head, in units of 8 elements."""
    batch = strides[0] if len(strides) > PACKED_DIMS else 0
    return batch // UNIT, strides[-3] // UNIT, strides[-2] // UNIT


def tile_of(plan: Plan) -> Tile:
    """Return how rows are cut: by their number only where that was shown to change no bit."""
    wide = max(plan.widths)
    if INTERPRETED:
        return IN_INTERPRETER
    if plan.dtype not in HALF:
        # Products without tensor cores: what keeps the spills small.
        return Tile(64 if wide <= NARROW else 16, 8, 1)
    if not plan.fast:
        return Tile(32, 8, 1) if wide > WIDE else Tile(64, 4 if wide <= NARROW else 8, 2)
    if wide > WIDE:
        return Tile(64, 4, 1)
    if plan.longest_q * plan.group > FEW:
        return Tile(64, 4, 3)
    # Four programs a multiprocessor: what bounds one token is the loads under way.
    return Tile(FEW, 2, 2) if wide <= NARROW else Tile(FEW, 4, 2, 128 if plan.boxes else 0)


def tile_of_queries(plan: Plan) -> Tile:
    """Return how the rows of dq are cut: by head size and dtype alone."""
    wide = max(plan.widths)
    if INTERPRETED:
        return IN_INTERPRETER
    if plan.dtype not in HALF:
        return Tile(16, 8, 1)
    if not plan.fast:
        return Tile(64, 8, 1) if wide > WIDE else Tile(64, 4, 2)
    if wide > WIDE:
        return Tile(64, 4, 1)
    return Tile(64, 4, 3 if wide <= NARROW else 2)


def tile_of_keys(plan: Plan) -> KeyTile:
    """Return how the keys of dk and dv are cut: by head size, dtype and group alone."""
    wide = max(plan.widths)
    if INTERPRETED or plan.dtype not in HALF:
        return KeyTile(32, 32, 8, 1)
    if wide > WIDE:
        return KeyTile(64, 64, 8, 2) if plan.fast else KeyTile(64, 32, 8, 1)
    if plan.fast and MOST_ROWS % plan.group == 0:
        return KeyTile(64, MOST_ROWS, 4, 3 if wide <= NARROW else 2)
    return KeyTile(64, 32, 4, 2)
