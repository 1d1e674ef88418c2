"""Host code of the products of ``products``: how operands are read, tiles, and grids."""

from __future__ import annotations

import torch

from rl_kernels.core.constants import STEP
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.gemm import Box, box_of, described
from rl_kernels.core.triton_lib.gemm_kernels import COLUMNS, POINTERS, ROWS
from rl_kernels.core.triton_lib.launch import INTERPRETED, Launch, ceil_div, next_power_of_2
from rl_kernels.core.triton_lib.schedule import ANYWHERE, IN_INTERPRETER, Schedule
from rl_kernels.moe.backends.triton import products

FEW, MANY = 16, 64
"""Mean numbers of an expert's routes up to which tiles are low, and of medium height."""
LOW, MEDIUM, HIGH = Schedule(16, 64, 128, 4, 4), Schedule(64, 128, 64, 4, 4), Schedule(128, 128, 64, 8, 3)
"""Schedules of 16-bit products on sm_90, where tiles change no bit of core's product; not tuned yet."""
GRADIENT = Schedule(128, 128, 64, 8, 3)


def schedule_for(routes: int, experts: int, dtype: torch.dtype, device: torch.device) -> Schedule:
    """Return the schedule of a product; on architectures other than sm_90 it depends on the dtype alone."""
    if INTERPRETED:
        return IN_INTERPRETER
    if dtype == torch.float32 or not tiles_change_no_bit(device):
        return ANYWHERE[dtype]
    mean = routes / experts
    return LOW if mean <= FEW else MEDIUM if mean <= MANY else HIGH


def gradient_schedule(dtype: torch.dtype, device: torch.device) -> Schedule:
    """Return the schedule of the gradient of a weight."""
    if INTERPRETED:
        return IN_INTERPRETER
    return ANYWHERE[dtype] if dtype == torch.float32 or not tiles_change_no_bit(device) else GRADIENT


class Product:
    """Write ``a[route] @ b[e]^T + bias[e]`` for all routes, prepared for operands like those it is made with.

    Args:
        b: ``[E, N, K]``, any strides.
        routes: number of routes.
        slots: routes of a token.
        gathered: rows of ``a`` are tokens, else they are in the order of routes.
        scattered: rows of the result are routes, else they are in the order of routes.
    """

    def __init__(
        self,
        b: torch.Tensor,
        routes: int,
        slots: int,
        *,
        gathered: bool = False,
        scattered: bool = False,
    ) -> None:
        count, n, k = b.shape
        cut = schedule_for(routes, count, b.dtype, b.device)
        self._kind, self._box = _operand(b, cut)
        # Strides that are passed as 0 do not specialize the kernel.
        strides = (0, 0, 0) if self._box is not None else b.stride()
        tiles = routes // cut.rows + min(routes, count)
        self._launch = Launch(
            products.product,
            (tiles * ceil_div(n, cut.columns),),
            (
                *(count, n, k, slots, *strides),
                *(self._kind, gathered, scattered, next_power_of_2(count), cut.rows, cut.columns, cut.inner),
            ),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        routes: torch.Tensor,
        bounds: torch.Tensor,
    ) -> None:
        """Launch it: ``a[M, K]`` in the dtype of b, ``bias[E, N]`` or None and ``out[T k, N]`` are contiguous."""
        if self._box is not None:
            b = self._box.of((b if self._kind == ROWS.value else b.mT).flatten(0, 1))
        self._launch(a, b, bias, out, routes, bounds)


def _operand(b: torch.Tensor, cut: Schedule) -> tuple[int, Box | None]:
    """Return how tiles of ``b[E, N, K]`` are read: through a descriptor of all experts' rows, or by pointers."""
    _, n, k = b.shape
    if b.stride(0) == n * b.stride(1) and described(b.flatten(0, 1)):
        return ROWS.value, box_of(b.flatten(0, 1), cut.columns, cut.inner)
    # A block of K must not reach into the next expert, as one of N may.
    if b.stride(0) == k * b.stride(2) and not k % cut.inner and described(b.mT.flatten(0, 1)):
        return COLUMNS.value, box_of(b.mT.flatten(0, 1), cut.inner, cut.columns)
    return POINTERS.value, None


class WeightGradient:
    """Write ``left[:, N]^T @ right[:, K]`` over each expert's routes to ``out[E, N, K]``, or continue it in ``out``.

    The operands have the dtype of the weight and are contiguous.

    Args:
        weight: ``[E, N, K]``, whose gradient is computed; any strides.
        buffer: FP32 ``[E, N, K]``, any strides: the chain continues in it. None: ``out`` is contiguous, in the dtype of
            the weight.
        slots: routes of a token.
        left_gathered: rows of the left operand are tokens, else they are in the order of routes.
        right_gathered: the same for the right operand.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        buffer: torch.Tensor | None,
        slots: int,
        *,
        left_gathered: bool = False,
        right_gathered: bool = False,
    ) -> None:
        count, n, k = weight.shape
        cut = gradient_schedule(weight.dtype, weight.device)
        strides = (n * k, k, 1) if buffer is None else buffer.stride()
        inner = STEP if weight.dtype == torch.float32 else cut.inner
        self._launch = Launch(
            products.weight_gradient,
            (count * ceil_div(n, cut.rows) * ceil_div(k, cut.columns),),
            (
                *(n, k, slots, *strides, left_gathered, right_gathered, buffer is not None),
                *(cut.rows, cut.columns, inner),
            ),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )

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
