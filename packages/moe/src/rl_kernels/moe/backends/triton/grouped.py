"""Host code of the products of ``products``: how operands are read, tiles, grids, and the order of routes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from rl_kernels.core.constants import STEP
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.gemm import Box, box_of, described
from rl_kernels.core.triton_lib.gemm_kernels import COLUMNS, POINTERS, ROWS
from rl_kernels.core.triton_lib.launch import INTERPRETED, Launch, ceil_div, next_power_of_2
from rl_kernels.core.triton_lib.schedule import ANYWHERE, IN_INTERPRETER, Schedule
from rl_kernels.moe.backends.triton import order, products
from rl_kernels.moe.op import order_size

ALONE = 2048
"""Largest number of routes that are sorted by one launch."""
LISTED = 256
"""Tiles that a program lists, of routes whose order is known."""


class Schedules(NamedTuple):
    """The schedules of the products of a call; those of a pass have tiles of equal height.

    Attributes:
        gate_up: the first product; its columns are those of the activation.
        product: every other product of routes.
        gradient: the gradient of a weight.
    """

    gate_up: Schedule
    product: Schedule
    gradient: Schedule


FEW, MANY = Schedule(128, 128, 32, 4, 4), Schedule(128, 128, 64, 8, 3)
"""Schedules of a weight's gradient for experts with few and with many routes."""
TUNED = (
    (8, Schedules(Schedule(16, 32, 256, 4, 3), Schedule(16, 64, 128, 2, 4), FEW)),
    (24, Schedules(Schedule(32, 64, 128, 4, 3), Schedule(32, 64, 128, 4, 4), FEW)),
    (48, Schedules(Schedule(64, 128, 64, 8, 4), Schedule(64, 128, 64, 4, 3), FEW)),
    (None, Schedules(Schedule(128, 128, 64, 8, 3), Schedule(128, 128, 64, 8, 3), MANY)),
)
"""Largest mean number of an expert's routes, and schedules of 16 bits on sm_90, where tiles change no bit."""
LEAST_INNER, MOST_STAGES = 64, 8


def schedules_for(routes: int, experts: int, dtype: torch.dtype, device: torch.device) -> Schedules:
    """Return the schedules of a call; on architectures other than sm_90 they depend on the dtype alone."""
    if INTERPRETED:
        return Schedules(*[IN_INTERPRETER] * 3)
    if dtype == torch.float32 or not tiles_change_no_bit(device):
        cut = ANYWHERE[dtype]
        return Schedules(replace(cut, columns=cut.columns // 2), cut, cut)
    return next(cuts for most, cuts in TUNED if most is None or routes <= most * experts)


def _dividing(cut: Schedule, k: int) -> Schedule:
    """Return a schedule whose blocks of K divide it, if blocks of 64 do; no fewer bytes are loaded ahead."""
    if cut.inner <= LEAST_INNER or k % LEAST_INNER:
        return cut
    inner = math.gcd(cut.inner, k)
    return replace(cut, inner=inner, stages=min(MOST_STAGES, cut.stages * cut.inner // inner))


class Sort:
    """Sort routes by (expert, token, slot), and list the tiles of their products, prepared for ids like these.

    Args:
        ids: ``[T, k]``.
        experts: number of experts.
        rows: height of a tile.
    """

    def __init__(self, ids: torch.Tensor, experts: int, rows: int) -> None:
        routes = ids.numel()
        width = next_power_of_2(max(experts + 2, order.COLUMNS.value))
        blocks = max(1, ceil_div(routes, order.BLOCK_OF_ROUTES.value))
        self._tiles = tile_count(routes, experts, rows)
        self._size, self._counts = order_size(ids, experts), (blocks + 1, width) if routes > ALONE else None
        self._count = Launch(order.count, (blocks,), (routes, experts, width), num_warps=4)
        self._add_up = Launch(order.add_up, (ceil_div(width, order.COLUMNS.value),), (blocks, width), num_warps=8)
        self._place = Launch(order.place, (blocks,), (routes, experts, self._tiles, rows, width), num_warps=4)

    def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order as ``op`` describes it, and the tiles."""
        routes = ids.new_empty(self._size, dtype=torch.int32)
        tiles = ids.new_empty((3, self._tiles), dtype=torch.int32)
        counts = None
        if self._counts is not None:
            counts = ids.new_empty(self._counts, dtype=torch.int32)
            self._count(ids, counts)
            self._add_up(counts)
        self._place(ids, counts, routes, tiles)
        return routes, tiles


class List:
    """List the tiles of routes whose order is known; the arguments are those of ``Sort``."""

    def __init__(self, routes: int, experts: int, rows: int) -> None:
        self._tiles = tile_count(routes, experts, rows)
        numbers = (experts, self._tiles, rows, next_power_of_2(experts + 2))
        self._launch = Launch(order.list_tiles, (1 + self._tiles // LISTED,), numbers, num_warps=4)

    def __call__(self, bounds: torch.Tensor) -> torch.Tensor:
        """Return the tiles."""
        tiles = torch.empty((3, self._tiles), dtype=torch.int32, device=bounds.device)
        self._launch(bounds, tiles)
        return tiles


def tile_count(routes: int, experts: int, rows: int) -> int:
    """Return the largest number of tiles that routes may need."""
    return routes // rows + min(routes, experts)


class Product:
    """Write ``a[route] @ b[e]^T + bias[e]`` for all routes, prepared for operands like those it is made with.

    Args:
        b: ``[E, N, K]``, any strides.
        routes: number of routes.
        slots: routes of a token.
        cut: the schedule.
        gathered: rows of ``a`` are tokens, else they are in the order of routes.
        scattered: rows of the result are routes, else they are in the order of routes.
    """

    def __init__(
        self,
        b: torch.Tensor,
        routes: int,
        slots: int,
        cut: Schedule,
        *,
        gathered: bool = False,
        scattered: bool = False,
    ) -> None:
        count, n, k = b.shape
        cut = _dividing(cut, k)
        self._left = None if gathered else _dense_box(b, routes, cut)
        self._right = Right(b, cut, cut.columns)
        tiles = tile_count(routes, count, cut.rows)
        numbers = (
            *(count, tiles, n, k, *self._right.strides, _kind(self._left), self._right.kind, gathered, scattered),
            *(slots, not k % cut.inner, cut.rows, cut.columns, cut.inner),
        )
        grid = (tiles * ceil_div(n, cut.columns),)
        self._launch = Launch(products.product, grid, numbers, num_warps=cut.warps, num_stages=cut.stages)

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        routes: torch.Tensor,
        tiles: torch.Tensor,
    ) -> None:
        """Launch it: ``a[M, K]`` in the dtype of b, ``bias[E, N]`` or None and ``out[T k, N]`` are contiguous."""
        left = a if self._left is None else self._left.of(a)
        self._launch(left, self._right.of(b), bias, out, routes, tiles)


class GateUp:
    """Write ``hidden[token] @ b[e]^T + bias[e]`` for all routes, and its activation; see ``Product``.

    Args:
        b: ``[E, 2F, D]``, any strides.
        routes: number of routes.
        slots: routes of a token.
        cut: the schedule.
        activation: number of the activation.
        interleaved: whether rows of gate and up alternate.
    """

    def __init__(
        self, b: torch.Tensor, routes: int, slots: int, cut: Schedule, activation: int, interleaved: bool
    ) -> None:
        count, double, k = b.shape
        cut = _dividing(cut, k)
        self._right = Right(b, cut, 2 * cut.columns if interleaved else cut.columns)
        tiles = tile_count(routes, count, cut.rows)
        numbers = (
            *(count, tiles, double // 2, k, *self._right.strides, activation, interleaved, POINTERS.value),
            *(self._right.kind, slots, not k % cut.inner, cut.rows, cut.columns, cut.inner),
        )
        grid = (tiles * ceil_div(double // 2, cut.columns),)
        self._launch = Launch(products.gate_up, grid, numbers, num_warps=cut.warps, num_stages=cut.stages)

    def __call__(
        self,
        hidden: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        z: torch.Tensor | None,
        h: torch.Tensor,
        routes: torch.Tensor,
        tiles: torch.Tensor,
    ) -> None:
        """Launch it: ``hidden[T, D]``, ``bias[E, 2F]``, ``z[T k, 2F]`` and ``h[T k, F]`` are contiguous."""
        self._launch(hidden, self._right.of(b), bias, z, h, routes, tiles)


class Right:
    """How tiles of ``b[E, N, K]`` are read: through a descriptor of all experts' rows, or by pointers.

    Attributes:
        kind: ROWS, COLUMNS or POINTERS.
        strides: strides of b for POINTERS, else 0, which does not specialize the kernel.
    """

    def __init__(self, b: torch.Tensor, cut: Schedule, columns: int) -> None:
        _, n, k = b.shape
        self.kind, self.strides, self._box = POINTERS.value, b.stride(), None
        if b.stride(0) == n * b.stride(1) and described(b.flatten(0, 1)):
            self.kind, self._box = ROWS.value, box_of(b.flatten(0, 1), columns, cut.inner)
        # A block of K must not reach into the next expert, as one of N may.
        elif b.stride(0) == k * b.stride(2) and not k % cut.inner and described(b.mT.flatten(0, 1)):
            self.kind, self._box = COLUMNS.value, box_of(b.mT.flatten(0, 1), cut.inner, columns)
        if self._box is not None:
            self.strides = (0, 0, 0)

    def of(self, b: torch.Tensor) -> object:
        """Return what the kernel takes for b."""
        if self._box is None:
            return b
        return self._box.of(b if self.kind == ROWS.value else b.mT)


def _dense_box(b: torch.Tensor, routes: int, cut: Schedule) -> Box | None:
    """Return the box of a contiguous left operand ``[routes, K]`` of b, or None if no descriptor can describe it."""
    k = b.shape[2]
    return Box([routes, k], [k, 1], [cut.rows, cut.inner]) if described(b.new_empty((2, k))) else None


def _kind(box: Box | None) -> int:
    return POINTERS.value if box is None else ROWS.value


class WeightGradient:
    """Write ``left[:, N]^T @ right[:, K]`` over each expert's routes to ``out[E, N, K]``, or continue it in ``out``.

    The operands have the dtype of the weight and are contiguous.

    Args:
        weight: ``[E, N, K]``, whose gradient is computed; any strides.
        buffer: FP32 ``[E, N, K]``, any strides: the chain continues in it. None: ``out`` is contiguous, in the dtype of
            the weight.
        slots: routes of a token.
        cut: the schedule.
        left_gathered: rows of the left operand are tokens, else they are in the order of routes.
        right_gathered: the same for the right operand.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        buffer: torch.Tensor | None,
        slots: int,
        cut: Schedule,
        *,
        left_gathered: bool = False,
        right_gathered: bool = False,
    ) -> None:
        count, n, k = weight.shape
        strides = (n * k, k, 1) if buffer is None else buffer.stride()
        inner = STEP if weight.dtype == torch.float32 else cut.inner
        numbers = (
            *(n, k, *strides, left_gathered, right_gathered, buffer is not None, slots),
            *(cut.rows, cut.columns, inner),
        )
        grid = (count * ceil_div(n, cut.rows) * ceil_div(k, cut.columns),)
        self._launch = Launch(products.weight_gradient, grid, numbers, num_warps=cut.warps, num_stages=cut.stages)

    def __call__(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        routes: torch.Tensor,
        bounds: torch.Tensor,
    ) -> None:
        """Launch it."""
        self._launch(left, right, out, routes, bounds)
