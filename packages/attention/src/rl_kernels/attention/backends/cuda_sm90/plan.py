"""Plan the tiles, grids and scalar arguments of a call's kernels from its sizes and strides."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from rl_kernels.attention.backends.cuda_sm90.launches import Backward, Forward
from rl_kernels.attention.backends.cuda_sm90.schedule import (
    BLOCK,
    PART,
    TILE,
    BackwardTile,
    backward_program,
    program,
    tile_of,
    width_of,
)
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.core.constants import KEY_SEGMENT as SEGMENT
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.gpu import processors

LOG2E = 1.4426950408889634
SHAPE = "PPPPPP" + 17 * "i"
"""Layout of ``struct Shape``."""
ARGS = f"({SHAPE}PPPPPqqqPiiiifff)"
"""Layout of ``struct Args`` of the forward pass."""
BACKWARD_ARGS = f"({SHAPE}PPPPPPPqqqqqqPiiffff)"
ROWS_ARGS = "(PPPPPPqqqiiii)"
"""Layouts of ``struct Args`` and ``struct Rows`` of the backward pass."""
LANES, THREADS = 16, 256
"""Lanes of a row, and threads of a thread block, of the kernel that sums out times its gradient."""
WARPS = 4
"""Warps of a thread block that merges states; each warp has one row."""
PACKED_DIMS = 3
"""Dims of packed tensors."""
L2_BYTES = 32 << 20
"""Bytes of operands that stay in the L2 cache while thread blocks share them."""
SHARING = 4
"""Largest number of thread blocks per pair of a section, where tiles of the forward pass differ in work: the blocks of
a pair share its keys and values in the L2 cache."""
LEAST = 2
"""Smallest number of pairs (sequence, KV head) in a section."""


class Plan:
    """The launches for one set of sizes and strides; made once for each set.

    Attributes:
        kv_heads: number of KV heads.
        group: query heads of a KV head.
        is_empty: whether there is no row at all, and so nothing to launch.
        tile: tile of the forward pass.
        box: keys that one TMA copy loads.
    """

    def __init__(self, key: Key) -> None:
        self._key = key
        (self._queries, heads, self._size), (*_, self.kv_heads, self._size_v) = key.shapes[0][-3:], key.shapes[2]
        self.group, self._longest_q = heads // self.kv_heads, min(key.longest[0], self._queries)
        self._pages, self._page, self._table_step = 0, 1, 0
        self._keys, self.box = key.shapes[1][0 if key.packed_k else 1], BLOCK
        if key.table is not None:
            self._pages, self._page, self._table_step = *key.shapes[1][:2], key.table[1]
            self._keys = self._table_step * self._page * bool(self._pages)
            # The largest power of two in a page: a copy lies in one page.
            self.box = min(BLOCK, self._page & -self._page)
        self._longest_k = min(key.longest[1], self._keys)
        if key.started and key.window[0] != UNLIMITED:
            # Room for dropped keys, modulo a segment.
            self._longest_k += SEGMENT - 1
        self.is_empty = not (key.batch and self._longest_q)
        rows = self._longest_q * self.group
        self.tile = tile_of(rows, (width_of(self._size), width_of(self._size_v)))
        self._forward: Forward | None = None
        self._backward: Backward | None = None

    def forward(self) -> Forward:
        """Return the launches of the forward pass."""
        if self._forward is None:
            self._forward = self._plan_forward()
        return self._forward

    def backward(self) -> Backward:
        """Return the launches of the backward pass."""
        if self._backward is None:
            self._backward = self._plan_backward()
        return self._backward

    def _plan_forward(self) -> Forward:
        key, tile = self._key, self.tile
        rows = self._longest_q * self.group
        tiles, segments = -(-rows // tile.rows), -(-self._longest_k // SEGMENT)
        count, multiprocessors = tiles * key.batch * self.kv_heads, processors(key.device)
        # One consumer merges no segments; two leave them to more thread blocks only if half of these would idle.
        split = segments > 1 and (tile.groups == 1 or 2 * count <= multiprocessors)
        section = self._section(self._longest_k, multiprocessors // SHARING if self._is_masked else LEAST)
        forward_program = program(key.dtype, tile, capped=key.cap > 0)
        parts = segments if split else 1
        # An even number, so that the sums behind the tops and totals are aligned.
        state_rows = min(tile.rows, rows + rows % 2)
        return Forward(
            kernel(forward_program, "attend", f"TT{ARGS}", key.device),
            min(count * parts, multiprocessors),
            tile.threads,
            tile.shared,
            kernel(forward_program, "finish", ARGS, key.device) if split else None,
            (key.batch, -(-rows // WARPS), self.kv_heads),
            count * segments * state_rows * (2 + tile.widths[1]) if split else 0,
            self._shape(self.box),
            strides_of(key.strides),
            # Packed sequences and caches differ in their tiles.
            (key.used or len(key.strides) == PACKED_DIMS) and count * parts > multiprocessors,
            (tiles, parts, section, state_rows, self._factor, *self._cap),
        )

    def _plan_backward(self) -> Backward:
        key, multiprocessors, heads = self._key, processors(self._key.device), self.kv_heads * self.group
        tile = BackwardTile(self.tile.widths)
        tile_program = backward_program(key.dtype, tile, capped=key.cap > 0)
        sequences = 1 if len(key.strides) == PACKED_DIMS else key.batch
        row_tiles = -(-self._longest_q * self.group // TILE)
        # One tile at least, for keys in no sequence.
        key_tiles = max(-(-self._longest_k // TILE), 1)
        numbers = (self._factor, key.scale, *self._cap)
        return Backward(
            kernel(tile_program, "rows_of", ROWS_ARGS, key.device),
            sequences * -(-self._queries * heads * LANES // THREADS),
            (self._queries, heads, self.group, self._size_v),
            kernel(tile_program, "of_queries", f"TT{BACKWARD_ARGS}", key.device),
            min(row_tiles * key.batch * self.kv_heads, multiprocessors),
            kernel(tile_program, "of_keys", f"TTTT{BACKWARD_ARGS}", key.device),
            min(key_tiles * key.batch * self.kv_heads, multiprocessors) if self._keys else 0,
            tile.threads,
            tile.shared,
            (self._shape(self.backward_box), self._shape(PART)),
            strides_of(key.strides),
            (
                (row_tiles, self._section(self._longest_k, round(multiprocessors / row_tiles)), *numbers),
                (key_tiles, self._section(self._longest_q * self.group, round(multiprocessors / key_tiles)), *numbers),
            ),
        )

    @property
    def _is_masked(self) -> bool:
        """Whether a causal mask or a window makes some tiles of a sequence see fewer keys than others."""
        return self._key.window != (UNLIMITED, UNLIMITED)

    def _section(self, rows: int, least: int) -> int:
        """Return the number of pairs (sequence, KV head) in a section; a pair has ``rows`` rows of operands.

        As many pairs as fit into the L2 cache, but at least ``least``, so that the last tiles of a section leave few
        thread blocks idle. In the backward pass, ``least`` pairs have about one tile for each thread block.
        """
        size = self._key.dtype.itemsize * rows * (self._size + self._size_v)
        return min(max(L2_BYTES // max(size, 1), least, LEAST), self._key.batch * self.kv_heads)

    @property
    def backward_box(self) -> int:
        """Keys of one copy in the backward pass."""
        return min(self.box, PART)

    @property
    def queries_of_block(self) -> int:
        """Queries in a block of rows of the kernel of dk and dv."""
        return PART // self.group

    @property
    def _factor(self) -> float:
        """Factor of the scores in the exponent of 2."""
        return LOG2E if self._key.cap > 0 else self._key.scale * LOG2E

    @property
    def _cap(self) -> tuple[float, float]:
        cap = self._key.cap
        return (cap, self._key.scale / cap) if cap > 0 else (0.0, 0.0)

    def _shape(self, box: int) -> tuple[int, ...]:
        """Return the numbers of ``struct Shape``."""
        key = self._key
        sizes = (self._size, self._size_v, self._queries, self._keys, self._pages, self._page, self._table_step)
        inverse = -(-(1 << 32) // self.group) % (1 << 32)
        signed = inverse - (inverse >> 31 << 32)
        rows = (box, signed, key.sink_size, self.queries_of_block)
        return (*(key.wide, key.batch, self.kv_heads, self.group), *sizes, *key.window, *rows)


def strides_of(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the strides of sequences, rows and heads; packed rows are one sequence, so the first is not used."""
    return strides[0], strides[-3], strides[-2]


class Key(NamedTuple):
    """The sizes, strides and options that determine a plan.

    Attributes:
        shapes: shapes of q, k and v.
        strides: strides of q.
        dtype: dtype of the operands.
        device: the GPU.
        batch: number of sequences.
        packed_k: whether keys are packed.
        started: whether ``k_start`` is given.
        used: whether ``seqused_k`` is given.
        table: shape of the block table, or None.
        longest: upper bounds of the queries and of the keys of a sequence.
        scale: factor of the scores.
        window: left and right side of the window.
        cap: soft cap of the scores, or 0.
        wide: bit i is set if integer tensor i has 64 bits.
        sink_size: bytes of a sink, 0 without sinks.
    """

    shapes: tuple[torch.Size, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    batch: int
    packed_k: bool
    started: bool
    used: bool
    table: torch.Size | None
    longest: tuple[int, int]
    scale: float
    window: tuple[int, int]
    cap: float
    wide: int
    sink_size: int


plan_of = functools.lru_cache(maxsize=4096)(Plan)


def plan_for(inputs: Inputs) -> Plan:
    """Return the plan for the sizes and strides of a call."""
    q, k, v = inputs.operands
    sinks, *integer_tensors = inputs.optional_tensors
    wide_bits = sum(1 << index for index, x in enumerate(integer_tensors) if x is not None and x.dtype == torch.int64)
    key = Key(
        shapes=(q.shape, k.shape, v.shape),
        strides=q.stride(),
        dtype=q.dtype,
        device=q.device,
        batch=inputs.batch,
        packed_k=inputs.cu_seqlens_k is not None,
        started=inputs.k_start is not None,
        used=inputs.seqused_k is not None,
        table=None if inputs.block_table is None else inputs.block_table.shape,
        longest=(inputs.max_seqlen_q, inputs.max_seqlen_k),
        scale=inputs.scale,
        window=(inputs.left, inputs.right),
        cap=inputs.softcap,
        wide=wide_bits,
        sink_size=0 if sinks is None else q.element_size() if sinks.dtype == q.dtype else torch.float32.itemsize,
    )
    return plan_of(key)
