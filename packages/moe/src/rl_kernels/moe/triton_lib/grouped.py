"""Host code of the products of ``products``: how operands are read, and grids."""

from __future__ import annotations

from dataclasses import replace

import torch

from rl_kernels.core.constants import STEP
from rl_kernels.core.triton_lib.gemm import Box, box_of, described
from rl_kernels.core.triton_lib.gemm_kernels import COLUMNS, POINTERS, ROWS
from rl_kernels.core.triton_lib.launch import Launch, ceil_div
from rl_kernels.core.triton_lib.schedule import Schedule
from rl_kernels.moe.inputs import Inputs
from rl_kernels.moe.triton_lib import products
from rl_kernels.moe.triton_lib.launches import Kit
from rl_kernels.moe.triton_lib.schedule import LEAST_INNER, dividing, schedules_for
from rl_kernels.moe.triton_lib.sorting import tile_count


class Product:
    """Return ``a[route] @ b[e]^T + bias[e]`` of all routes, prepared for operands like those it is made with.

    Args:
        b: ``[E, N, K]``, any strides.
        routes: number of routes.
        slots: routes of a token.
        cut: the schedule.
        gathered: rows of ``a`` are tokens, else they are in the order of routes.
        scattered: rows of the result are routes, else they are in the order of routes.
        out_dtype: dtype of the result; by default that of ``b``.
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
        out_dtype: torch.dtype | None = None,
    ) -> None:
        count, n, k = b.shape
        self._shape, self._dtype = (routes, n), out_dtype or b.dtype
        self._right = Right(b, dividing(cut, k), cut.columns)
        cut = self._right.cut
        self._left = None if gathered else _dense_box(b, routes, cut)
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
        routes: torch.Tensor,
        tiles: torch.Tensor,
    ) -> torch.Tensor:
        """Launch it, and return ``[T k, N]``: ``a[M, K]`` and ``bias[E, N]`` are contiguous, in the dtype of b."""
        out = a.new_empty(self._shape, dtype=self._dtype)
        left = a if self._left is None else self._left.of(a)
        if out.numel():
            self._launch(left, self._right.of(b), bias, out, routes, tiles)
        return out


class GateUp:
    """Return ``hidden[token] @ b[e]^T + bias[e]`` of all routes, and its activation; see ``Product``.

    Args:
        b: ``[E, 2F, D]``, any strides.
        routes: number of routes.
        slots: routes of a token.
        cut: the schedule.
        activation: number of the activation.
        interleaved: whether rows of gate and up alternate.
        keeps: whether the product is returned too.
    """

    def __init__(
        self, b: torch.Tensor, routes: int, slots: int, cut: Schedule, activation: int, interleaved: bool, keeps: bool
    ) -> None:
        count, double, k = b.shape
        self._shape, self._keeps = (routes, double), keeps
        self._right = Right(b, dividing(cut, k), 2 * cut.columns if interleaved else cut.columns)
        cut = self._right.cut
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
        routes: torch.Tensor,
        tiles: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Launch it, and return ``z[T k, 2F]`` or None and ``h[T k, F]``: hidden and the bias are contiguous."""
        count, double = self._shape
        z, h = hidden.new_empty(self._shape) if self._keeps else None, hidden.new_empty((count, double // 2))
        if count:
            self._launch(hidden, self._right.of(b), bias, z, h, routes, tiles)
        return z, h


class Right:
    """How tiles of ``b[E, N, K]`` are read: through a descriptor of all experts' rows, or by pointers.

    Attributes:
        kind: ROWS, COLUMNS or POINTERS.
        strides: strides of b for POINTERS, else 0, which does not specialize the kernel.
        cut: the schedule; for POINTERS without long blocks of K, whose addresses would not fit into registers.
    """

    def __init__(self, b: torch.Tensor, cut: Schedule, columns: int) -> None:
        _, n, k = b.shape
        self.kind, self.strides, self.cut, self._box = POINTERS.value, b.stride(), cut, None
        if b.stride(0) == n * b.stride(1) and described(b.flatten(0, 1)):
            self.kind, self._box = ROWS.value, box_of(b.flatten(0, 1), columns, cut.inner)
        # A block of K must not reach into the next expert, as one of N may.
        elif b.stride(0) == k * b.stride(2) and not k % cut.inner and described(b.mT.flatten(0, 1)):
            self.kind, self._box = COLUMNS.value, box_of(b.mT.flatten(0, 1), cut.inner, columns)
        if self._box is not None:
            self.strides = (0, 0, 0)
        elif cut.inner > LEAST_INNER:
            self.cut = replace(cut, inner=LEAST_INNER)

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


def kit_of(inputs: Inputs, _: bool) -> Kit:
    """Return the products of a call."""
    hidden, routes, experts = inputs.hidden, inputs.ids.numel(), inputs.gate_up.shape[0]
    return Kit(schedules_for(routes, experts, hidden.dtype, hidden.device), GateUp, Product, WeightGradient)
