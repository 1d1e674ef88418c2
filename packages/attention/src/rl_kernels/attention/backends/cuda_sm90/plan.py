"""Plan a call: what its kernels' grids and scalar arguments follow from."""

from __future__ import annotations

import torch

from rl_kernels.attention.backends.cuda_sm90.schedule import PART, block_of, widths_of
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.core.constants import KEY_SEGMENT as SEGMENT

LOG2E = 1.4426950408889634
L2_BYTES = 32 << 20
"""Bytes of operands that stay in the L2 cache while thread blocks share them."""
LEAST = 2
"""Smallest number of pairs (sequence, KV head) in a section."""


class Plan:
    """What the launches of a call follow from: its sizes, strides and options.

    Attributes:
        kv_heads: number of KV heads.
        group: query heads of a KV head.
        longest_k: largest number of keys of a sequence, as the caller says, with dropped ones.
        most_k: the same, as the tensors have room for.
        rows: largest number of rows of a sequence and a KV head: its queries, by head.
        is_empty: whether no sequence has a query, so that nothing is launched.
        strides: strides of q between sequences, queries and heads.
        widths: columns of a tile of k and of v.
        box: keys that one TMA copy of the forward pass loads.
        factor: factor of the scores in the exponent of 2.
        cap: soft cap of the scores, and the factor of scores in its tanh; zeros without a cap.
    """

    def __init__(self, inputs: Inputs) -> None:
        q, k, v = inputs.operands
        self.dtype, self.device, self.batch, self.group = q.dtype, q.device, inputs.batch, inputs.group
        self.queries, self.heads, self.size = q.shape[-3:]
        self.kv_heads, self.size_v = v.shape[-2:]
        self._pages, self._page, self._table_step = 0, 1, 0
        self.widths = widths_of(self.size, self.size_v)
        self.keys, self.box = k.shape[-3], block_of(self.widths)
        if inputs.block_table is not None:
            self._pages, self._page, self._table_step = k.shape[0], k.shape[1], inputs.block_table.shape[1]
            self.keys = self._table_step * self._page * bool(self._pages)
            # The largest power of two in a page: a copy lies in one page.
            self.box = min(self.box, self._page & -self._page)
        self.longest_q, self.longest_k = min(inputs.max_seqlen_q, self.queries), min(inputs.max_seqlen_k, self.keys)
        self._window = inputs.left, inputs.right
        # Room for dropped keys, modulo a segment.
        dropped = SEGMENT - 1 if inputs.k_start is not None and inputs.left != UNLIMITED else 0
        self.longest_k, self.most_k = self.longest_k + dropped, self.keys + dropped
        self.is_empty = not (self.batch and self.longest_q)
        self.rows, self.strides = self.longest_q * self.group, strides_of(q.stride())
        capped, self.scale = inputs.softcap > 0, inputs.scale
        self.factor = LOG2E if capped else inputs.scale * LOG2E
        self.cap = (inputs.softcap, inputs.scale / inputs.softcap) if capped else (0.0, 0.0)
        wide = [x is not None and x.dtype == torch.int64 for x in inputs.integer_tensors]
        self._wide = sum(1 << index for index, is_wide in enumerate(wide) if is_wide)
        sinks = inputs.sinks
        self._sink_size = 0 if sinks is None else q.itemsize if sinks.dtype == q.dtype else torch.float32.itemsize

    @property
    def is_masked(self) -> bool:
        """Whether a causal mask or a window makes some tiles of a sequence see fewer keys than others."""
        return self._window != (UNLIMITED, UNLIMITED)

    @property
    def backward_box(self) -> int:
        """Keys of one copy in the backward pass."""
        return min(self.box, PART)

    @property
    def queries_of_block(self) -> int:
        """Queries in a block of rows of the kernel of dk and dv."""
        return PART // self.group

    def section(self, rows: int, least: int) -> int:
        """Return the number of pairs (sequence, KV head) in a section; a pair has ``rows`` rows of operands.

        As many pairs as fit into the L2 cache, but at least ``least``, so that the last tiles of a section leave few
        thread blocks idle. In the backward pass, ``least`` pairs have about one tile for each thread block.
        """
        size = self.dtype.itemsize * rows * (self.size + self.size_v)
        return min(max(L2_BYTES // max(size, 1), least, LEAST), self.batch * self.kv_heads)

    def backward_numbers(self, tiles: int, rows: int, multiprocessors: int) -> tuple[float, ...]:
        """Return the members of ``struct Args`` after the counter, for tiles whose pairs have ``rows`` rows."""
        return tiles, self.section(rows, round(multiprocessors / tiles)), self.factor, self.scale, *self.cap

    def shape(self, box: int) -> tuple[int, ...]:
        """Return the numbers of ``struct Shape``; one copy loads ``box`` rows of its operand."""
        sizes = (self.size, self.size_v, self.queries, self.keys, self._pages, self._page, self._table_step)
        inverse = -(-(1 << 32) // self.group) % (1 << 32)
        signed = inverse - (inverse >> 31 << 32)
        rows = (box, signed, self._sink_size, self.queries_of_block)
        return (*(self._wide, self.batch, self.kv_heads, self.group), *sizes, *self._window, *rows)


def strides_of(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the strides of sequences, rows and heads; packed rows are one sequence, so the first is not used."""
    return strides[0], strides[-3], strides[-2]
