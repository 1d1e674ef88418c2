"""det_attention in Triton: the arguments of the kernels, their grids, and the tiles, of which no bit follows.

The order of the sums, which is the contract of this backend: keys are counted from the first of their sequence and
taken in blocks of 64; a segment of 1024 keys starts a state of its own, and states are merged in ascending order. 64
keys are what a warp group multiplies at once with registers to spare at every head size; 1024 keys keep the merges
below a few percent of a prompt's time, and cut a cache of 32768 keys into enough programs to fill a GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from rl_kernels.attention import sinks as sink
from rl_kernels.attention.backends.triton import backward as kernels_backward
from rl_kernels.attention.backends.triton import forward as kernels_forward
from rl_kernels.attention.backends.triton import tiles as kernels_tiles
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.core.gpu import device_of
from rl_kernels.core.operator import arch_of
from rl_kernels.core.triton_lib.launch import INTERPRETED, launch
from rl_kernels.core.triton_lib.schedule import HALF, processors

BLOCK = 64
"""Keys of a block."""
SEGMENT = kernels_tiles.SEGMENT.value
"""Keys of a segment."""
ROWS = 32
"""Rows that join dk and dv at once."""
WIDE = 128
"""Head size up to which a warp can hold its rows' accumulators."""
LOG2E = 1.4426950408889634
UNIT = 8
"""Elements of which strides are multiples."""
FAR = 1 << 30
"""Stands for a side of the window that has no end."""
ALIGNED = 16
"""Bytes of which addresses and strides are multiples."""
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
    """How a kernel is cut: rows of a program, its warps, and the loads in flight."""

    rows: int
    warps: int
    stages: int


class Plan:
    """What follows from the sizes and strides of a call, for all its kernels; made once for each that there are.

    Attributes:
        factor: of scores, whose powers are of 2.
        strides: in units, of q between sequences, of k and v between sequences or pages, and between heads.
        constants: sizes that a kernel is compiled for.
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
        self.on_hopper = not INTERPRETED and arch_of(self.device.type, self.device.index) == "sm90"
        # No row at all: nothing is launched.
        self.is_empty = not (batch and self.longest_q)

    def tiles(self, rows: int) -> int:
        """Return the tiles of the longest sequence's rows."""
        return triton.cdiv(self.longest_q * self.group, rows)

    @functools.cached_property
    def forward(self) -> Forward:
        """What the forward pass launches."""
        tile = _tile(self)
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


class Forward(NamedTuple):
    """The launches of a forward pass: of ``attend`` and, where ``states`` are merged, of ``finish``."""

    tile: Tile
    grid: tuple[int, int]
    numbers: tuple[float, ...]
    grid_finish: tuple[int, int]
    numbers_finish: tuple[float, ...]
    states: int


plan_of = functools.lru_cache(maxsize=4096)(Plan)


class _Call:
    """The tensors of a call as the kernels read them, and its plan."""

    def __init__(self, given: Inputs) -> None:
        self.q, self.k, self.v = q, k, v = _canonical(given.q), _canonical(given.k), _canonical(given.v)
        self.sinks, self.table = _contiguous(given.sinks), _contiguous(given.block_table)
        self.where = (
            *(_contiguous(given.cu_seqlens_q), _contiguous(given.cu_seqlens_k), _contiguous(given.k_start)),
            *(_contiguous(given.seqused_q), _contiguous(given.seqused_k)),
        )
        self.plan = plan_of(
            (q.shape, k.shape, v.shape),
            (q.stride(), k.stride(), v.stride()),
            (q.dtype, q.device),
            given.batch,
            given.cu_seqlens_k is not None,
            given.k_start is not None,
            None if self.table is None else self.table.shape,
            (given.max_seqlen_q, given.max_seqlen_k),
            (given.scale, given.left, given.right, given.softcap),
        )


def units(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the strides of a sequence or page, a row and a head, in units of 8 elements."""
    batch = strides[0] if len(strides) > PACKED_DIMS else 0
    return batch // UNIT, strides[-3] // UNIT, strides[-2] // UNIT


def _contiguous(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.contiguous()


@functools.lru_cache(maxsize=4096)
def _is_apart(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Say whether heads lie in one piece, and begin at multiples of 8 elements from the first."""
    *outer, last = zip(strides, shape, strict=True)
    return last[0] == 1 and all(stride % UNIT == 0 for stride, size in outer if size > 1)


def _canonical(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose heads lie in one piece, and at addresses for wide loads; a copy if they do not.

    How a kernel lays out its loads then follows from sizes alone.
    """
    if _is_apart(x.shape, x.stride()) and x.data_ptr() % ALIGNED == 0:
        return x
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def forward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for the arguments of ``Inputs``."""
    given = Inputs(*arguments)  # type: ignore[arg-type]
    packed = given.cu_seqlens_q is not None
    shape = (*given.q.shape[:-1], given.v.shape[-1])
    # Rows that are in no sequence, where nobody validated that there are none.
    out = given.q.new_zeros(shape) if packed else given.q.new_empty(shape)
    lse = given.q.new_empty(given.lse_shape(), dtype=torch.float32)
    if packed:
        lse.fill_(-torch.inf)
    call = _Call(given)
    if call.plan.is_empty:
        return out, lse
    plan = call.plan.forward
    states: tuple[torch.Tensor | None, ...] = (None, None, None)
    if plan.states:
        sizes = (1, 1, call.plan.width_v)
        states = tuple(out.new_empty(plan.states * size, dtype=torch.float32) for size in sizes)
    with device_of(given.q):
        launch(
            kernels_forward.attend,
            plan.grid,
            *(call.q, call.k, call.v, out, lse, call.sinks, *call.where, call.table, *states, *plan.numbers),
            num_warps=plan.tile.warps,
            num_stages=plan.tile.stages,
        )
        if plan.states:
            launch(
                kernels_forward.finish,
                plan.grid_finish,
                *(out, lse, call.sinks, *call.where, *states, *plan.numbers_finish),
                num_warps=1,
            )
    return out, lse


def _tile(plan: Plan) -> Tile:
    """Return how rows are cut: by their number only where that was shown to change no bit."""
    wide = max(plan.width, plan.width_v)
    if INTERPRETED or plan.dtype not in HALF:
        return Tile(32, 4, 1)
    if wide > WIDE:
        return Tile(32, 8, 1)
    rows = plan.longest_q * plan.group
    if wide <= 64:
        return Tile(FEW, 4, 3) if plan.on_hopper and rows <= FEW else Tile(64, 4, 3 if plan.on_hopper else 2)
    if not plan.on_hopper or FEW < rows <= 64:
        return Tile(64, 8, 2)
    return Tile(FEW, 4, 3) if rows <= FEW else Tile(128, 8, 3)


def backward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv, dsinks) for the arguments of ``Inputs``, out, lse, the gradient of out and ``needs_keys``."""
    *inputs, out, lse, grad, needs_keys = arguments
    given = Inputs(*inputs)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert isinstance(grad, torch.Tensor)
    packed = given.cu_seqlens_q is not None
    dq = given.q.new_zeros(given.q.shape) if packed else given.q.new_empty(given.q.shape)
    # Rows of no sequence, and keys where no query is, get zeros.
    covered = given.cu_seqlens_k is None and given.k_start is None and bool(given.q.numel())
    dk, dv = (
        (x.new_empty(x.shape) if covered else x.new_zeros(x.shape)) if needs_keys else x.new_empty(0)
        for x in (given.k, given.v)
    )
    call = _Call(given)
    *lead, _, queries = lse.shape
    lses, deltas = (lse.new_empty((*lead, call.plan.kv_heads, queries, given.group)) for _ in range(2))
    if not call.plan.is_empty:
        saved = (_canonical(out), lse.contiguous(), lses, deltas, _canonical(grad))
        with device_of(given.q):
            _gradients(call, *saved, (dq, dk, dv), bool(needs_keys))
    return dq, dk, dv, sink.gradient(given.sinks, lse, deltas.mT.flatten(-3, -2))


def _gradients(
    call: _Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    lses: torch.Tensor,
    deltas: torch.Tensor,
    grad: torch.Tensor,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    needs_keys: bool,
) -> None:
    plan, rows = call.plan, 32
    of_grad, heads = units(grad.stride()), plan.kv_heads * plan.group
    launch(
        kernels_backward.rows_of,
        (triton.cdiv(plan.queries * heads, rows) * (1 if out.ndim == PACKED_DIMS else out.shape[0]),),
        *(out, grad, lse, lses, deltas, plan.queries, of_grad[0]),
        *(heads, plan.group, plan.size_v, plan.width_v, *of_grad[1:], rows),
        num_warps=4,
    )
    tile = _tile_of_queries(plan)
    common = (*plan.strides, of_grad[0], plan.factor, plan.scale, plan.cap, plan.rate)
    constants = (*plan.constants, *of_grad[1:])
    tiles = plan.tiles(tile.rows)
    launch(
        kernels_backward.of_queries,
        (plan.batch * tiles, plan.kv_heads),
        *(call.q, call.k, call.v, grad, lses, deltas, into[0], *call.where, call.table),
        *(plan.queries, plan.keys, plan.pages, plan.table_step, tiles, *plan.window),
        *(*common, *constants, plan.page, plan.capped, tile.rows, BLOCK, plan.has_left),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    keys = _tile_of_keys(plan)
    tiles = triton.cdiv(plan.longest_k, keys.rows)
    if needs_keys and tiles:
        launch(
            kernels_backward.of_keys,
            (plan.batch * tiles, plan.kv_heads),
            *(call.q, call.k, call.v, grad, lses, deltas, *into[1:], *call.where[:4]),
            *(plan.queries, plan.keys, tiles, *plan.window, *common, *constants, plan.capped, ROWS, keys.rows),
            plan.has_left,
            num_warps=keys.warps,
            num_stages=keys.stages,
        )


def _tile_of_queries(plan: Plan) -> Tile:
    """Return how the rows of dq are cut: by head size and dtype alone."""
    if INTERPRETED or plan.dtype not in HALF:
        return Tile(32, 4, 1)
    if max(plan.width, plan.width_v) > WIDE:
        return Tile(64, 8, 1)
    return Tile(64, 4, 2)


def _tile_of_keys(plan: Plan) -> Tile:
    """Return how the keys of dk and dv are cut: by head size and dtype alone."""
    if INTERPRETED or plan.dtype not in HALF:
        return Tile(32, 4, 1)
    if max(plan.width, plan.width_v) > WIDE:
        return Tile(64, 8, 1)
    return Tile(64, 4, 3 if plan.on_hopper else 2)
