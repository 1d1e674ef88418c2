"""det_attention in Triton: the arguments of the kernels, their grids, and the tiles, of which no bit follows.

The order of the sums, which is the contract of this backend: keys are counted from the first of their sequence and
taken in blocks of 64; a segment of 1024 keys starts a state of its own, and states are merged in ascending order. 64
keys are what a warp group multiplies at once with registers to spare at every head size; 1024 keys keep the merges
below a few percent of a prompt's time, and cut a cache of 32768 keys into enough programs to fill a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from rl_kernels.attention import sinks as sink
from rl_kernels.attention.backends.triton import backward as kernels_backward
from rl_kernels.attention.backends.triton import forward as kernels_forward
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.core.gpu import device_of
from rl_kernels.core.operator import arch_of
from rl_kernels.core.triton_lib.launch import INTERPRETED, launch
from rl_kernels.core.triton_lib.schedule import HALF, processors

BLOCK = 64
"""Keys of a block."""
SEGMENT = 1024
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
FARTHEST = 1 << 24
"""Elements between rows, of which a block's offsets are 32 bits."""
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


class _Call:
    """What all kernels of a call are given."""

    def __init__(self, given: Inputs) -> None:
        self.q, self.k, self.v = (_canonical(x) for x in (given.q, given.k, given.v))
        self.given = given
        self.kv_heads, self.size = self.k.shape[-2:]
        self.size_v = self.v.shape[-1]
        self.width, self.width_v = (max(triton.next_power_of_2(x), LEAST_WIDTH) for x in (self.size, self.size_v))
        self.queries = self.q.shape[-3]
        self.page = 1 if given.block_table is None else self.k.shape[1]
        packed_k = given.cu_seqlens_k is not None
        self.keys = self.k.shape[0] if packed_k else self.k.shape[1]
        self.pages = 0
        self.table = None
        if given.block_table is not None:
            self.table, self.pages = given.block_table.contiguous(), self.k.shape[0]
            self.keys = self.table.shape[1] * self.page * bool(self.pages)
        self.sinks = None if given.sinks is None else given.sinks.contiguous()
        self.starts_q, self.starts_k, self.first_k, self.used_q, self.used_k = (
            None if value is None else value.contiguous()
            for value in (given.cu_seqlens_q, given.cu_seqlens_k, given.k_start, given.seqused_q, given.seqused_k)
        )
        self.longest_k = min(given.max_seqlen_k, self.keys)
        self.longest_q = min(given.max_seqlen_q, self.queries)
        capped = given.softcap > 0
        self.factor = LOG2E if capped else given.scale * LOG2E
        self.cap, self.rate = given.softcap, given.scale / given.softcap if capped else 0.0
        self.window = tuple(FAR if side == UNLIMITED else min(side, FAR) for side in (given.left, given.right))
        self.on_hopper = not INTERPRETED and arch_of(self.q.device.type, self.q.device.index) == "sm90"

    @property
    def where(self) -> tuple[torch.Tensor | None, ...]:
        """Where the sequences lie."""
        return self.starts_q, self.starts_k, self.first_k, self.used_q, self.used_k

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in units: of q between sequences, of k and v between sequences or pages, and heads."""
        return units(self.q)[0], *units(self.k)[::2], *units(self.v)[::2]

    @property
    def constants(self) -> tuple[int, ...]:
        """Sizes that a kernel is compiled for."""
        sizes = self.kv_heads, self.given.group, self.size, self.size_v, self.width, self.width_v
        return *sizes, *units(self.q)[1:], units(self.k)[1], units(self.v)[1]

    def tiles(self, rows: int) -> int:
        """Return the tiles of the longest sequence's rows."""
        return triton.cdiv(self.longest_q * self.given.group, rows)

    def is_empty(self) -> bool:
        """Whether there is no row at all."""
        return not (self.given.batch and self.longest_q)


def units(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of a sequence or page, a row and a head, in units of 8 elements."""
    batch = x.stride(0) if x.ndim > 3 else 0
    return batch // UNIT, x.stride(-3) // UNIT, x.stride(-2) // UNIT


def _canonical(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose heads lie in one piece, and at addresses for wide loads; a copy if they do not.

    How a kernel lays out its loads then follows from sizes alone.
    """
    apart = all(stride % UNIT == 0 for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    if x.stride(-1) == 1 and apart and x.data_ptr() % ALIGNED == 0 and x.stride(-3) < FARTHEST:
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
    if call.is_empty():
        return out, lse
    tile = _tile(call)
    tiles, segments = call.tiles(tile.rows), triton.cdiv(call.longest_k, SEGMENT)
    programs = given.batch * tiles
    few = programs * call.kv_heads < FULL * processors(given.q.device)
    split = segments > 1 and (few or tile.rows <= FEW)
    states: tuple[torch.Tensor | None, ...] = (None, None, None)
    if split:
        count = programs * call.kv_heads * segments * tile.rows
        states = tuple(out.new_empty(count * size, dtype=torch.float32) for size in (1, 1, call.width_v))
    sizes = (call.queries, call.keys, call.pages, 0 if call.table is None else call.table.stride(0), tiles)
    with device_of(given.q):
        launch(
            kernels_forward.attend,
            (programs * segments if split else programs, call.kv_heads),
            *(call.q, call.k, call.v, out, lse, call.sinks, *call.where, call.table, *states),
            *(*sizes, segments, *call.window, *call.strides, call.factor, call.cap, call.rate),
            *(*call.constants, call.page, given.softcap > 0, tile.rows, BLOCK, SEGMENT),
            *(given.left != UNLIMITED, split, segments <= 1),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if split:
            launch(
                kernels_forward.finish,
                (programs * (tile.rows // PART) * triton.cdiv(call.width_v, COLUMNS), call.kv_heads),
                *(out, lse, call.sinks, *call.where, *states, call.queries, call.keys, tiles, segments),
                *(call.kv_heads, given.group, call.size_v, call.width_v, tile.rows, SEGMENT),
                *(PART, min(COLUMNS, call.width_v), AHEAD),
                num_warps=1,
            )
    return out, lse


def _tile(call: _Call) -> Tile:
    """Return how rows are cut: by their number only where that was shown to change no bit."""
    wide = max(call.width, call.width_v)
    if INTERPRETED or call.q.dtype not in HALF:
        return Tile(32, 4, 1)
    if wide > WIDE:
        return Tile(32, 8, 1)
    rows = call.longest_q * call.given.group
    if wide <= 64:
        return Tile(FEW, 4, 3) if call.on_hopper and rows <= FEW else Tile(64, 4, 3 if call.on_hopper else 2)
    if not call.on_hopper or FEW < rows <= 64:
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
    lses, deltas = (lse.new_empty((*lead, call.kv_heads, queries, given.group)) for _ in range(2))
    if not call.is_empty():
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
    given, heads = call.given, call.kv_heads * call.given.group
    of_grad, rows = units(grad), 32
    launch(
        kernels_backward.rows_of,
        (triton.cdiv(call.queries * heads, rows) * (1 if out.ndim == PACKED_DIMS else out.shape[0]),),
        *(out, grad, lse, lses, deltas, call.queries, of_grad[0]),
        *(heads, given.group, call.size_v, call.width_v, *of_grad[1:], rows),
        num_warps=4,
    )
    tile = _tile_of_queries(call)
    common = (*call.strides, of_grad[0], call.factor, given.scale, call.cap, call.rate)
    constants = (*call.constants, *of_grad[1:])
    tiles = call.tiles(tile.rows)
    launch(
        kernels_backward.of_queries,
        (given.batch * tiles, call.kv_heads),
        *(call.q, call.k, call.v, grad, lses, deltas, into[0], *call.where, call.table),
        *(call.queries, call.keys, call.pages, 0 if call.table is None else call.table.stride(0), tiles, *call.window),
        *(*common, *constants, call.page, given.softcap > 0, tile.rows, BLOCK),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    keys = _tile_of_keys(call)
    tiles = triton.cdiv(call.longest_k, keys.rows)
    if needs_keys and tiles:
        launch(
            kernels_backward.of_keys,
            (given.batch * tiles, call.kv_heads),
            *(call.q, call.k, call.v, grad, lses, deltas, *into[1:], *call.where[:4]),
            *(call.queries, call.keys, tiles, *call.window, *common, *constants, given.softcap > 0, ROWS, keys.rows),
            num_warps=keys.warps,
            num_stages=keys.stages,
        )


def _tile_of_queries(call: _Call) -> Tile:
    """Return how the rows of dq are cut: by head size and dtype alone."""
    if INTERPRETED or call.q.dtype not in HALF:
        return Tile(32, 4, 1)
    if max(call.width, call.width_v) > WIDE:
        return Tile(64, 8, 1)
    return Tile(64, 4, 2)


def _tile_of_keys(call: _Call) -> Tile:
    """Return how the keys of dk and dv are cut: by head size and dtype alone."""
    if INTERPRETED or call.q.dtype not in HALF:
        return Tile(32, 4, 1)
    if max(call.width, call.width_v) > WIDE:
        return Tile(64, 8, 1)
    return Tile(64, 4, 3 if call.on_hopper else 2)
