"""The product of matrices on Hopper, prepared for operands of one layout: a launch looks up tensor maps by address."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from rl_kernels.core.cuda.gemm.plan import Box, MatrixLayout, fits_tma, plan_of
from rl_kernels.core.cuda.gemm.schedule import Schedule
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.signature import MAP_SIZE
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.core.gpu import processors
from rl_kernels.core.layout import flat_rows, has_flat_rows, readable

SIGNATURE = "TTT(PPPPPqqqqqqiiiiii)"
"""Tensor maps of both operands and the output, then ``struct Args``."""
NO_MAP = bytes(MAP_SIZE)
MOST_MAPS = 1 << 14
"""Largest number of tensor maps that are remembered: about 5 MiB."""


class Product:
    """Write ``a[M, K] @ b[K, N] + bias[N]`` to ``out[M, N]``: ``triton_lib.gemm.Product`` for BF16 and FP16 operands.

    Its other arguments are the same, but for ``span``, which there is none of. ``out`` has FP32 or a 16-bit dtype, the
    bias has the dtype of the operands. With segments, operands that TMA does not read are copied in each call.
    """

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        a_transposed: bool = False,
        b_transposed: bool = False,
        continues: bool = False,
        schedule: Schedule | None = None,
        segments: int = 1,
        length: int = 0,
    ) -> None:
        self._is_empty = not out.numel()
        if self._is_empty:
            return
        # A sum of no terms has no segments.
        segments, length = (segments, length) if a.numel() else (1, 0)
        fits_a, fits_b = (
            has_flat_rows(x) and (segments == 1 or fits_tma(MatrixLayout.of(flat_rows(x)))) for x in (a, b)
        )
        self._fits, self._is_copied = (fits_a, fits_b), not (fits_a and fits_b)
        self._bias_fits = bias is None or bias.is_contiguous()
        a, b, out = flat_rows(readable(a, fits_a)), flat_rows(readable(b, fits_b)), flat_rows(out)
        left, right = MatrixLayout.of(a), MatrixLayout.of(b)
        plan = self._plan = plan_of(
            *(left.t() if a_transposed else left, right.t() if b_transposed else right),
            *(MatrixLayout.of(out), processors(a.get_device())),
            continues=continues,
            schedule=schedule,
            segments=segments,
            length=length,
        )
        self._kernel = kernel(plan.program, "gemm", SIGNATURE, a.device)
        self._numbers = *plan.strides, *plan.sizes, 0 if bias is None else plan.along, plan.length
        operands = [(a, a_transposed), (b, b_transposed), (out, False)]
        if plan.flipped:
            operands[:2] = operands[1::-1]
        pairs = list(zip(plan.boxes, operands, strict=True))
        self._boxes = [box.turned() if box and is_turned else box for box, (_, is_turned) in pairs]
        self._maps = [_maps_of(box, x) for box, (_, (x, _)) in zip(self._boxes, pairs, strict=True)]

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Launch it."""
        if self._is_empty:
            return
        if self._is_copied:
            a, b = readable(a, self._fits[0]), readable(b, self._fits[1])
        if not self._bias_fits and bias is not None:
            bias = readable(bias, False)
        plan, (left_maps, right_maps, out_maps) = self._plan, self._maps
        left, right = (b, a) if plan.flipped else (a, b)
        # Read each address once: passing a number to the launch is faster than reading the address again.
        left_address, right_address, out_address = left.data_ptr(), right.data_ptr(), out.data_ptr()
        maps: tuple[Any, ...]
        try:
            maps = left_maps[left_address], right_maps[right_address], out_maps[out_address]
        except KeyError:
            maps = self._remember_maps(left, right, out)
        bias_address = 0 if bias is None else bias.data_ptr()
        scratch_address = 0
        if plan.scratch:
            # Memory for the sums that wait for a merge.
            scratch = a.new_empty(plan.scratch, dtype=torch.uint8)
            scratch_address = scratch.data_ptr()
        numbers = *maps, out_address, bias_address, left_address, right_address, scratch_address, *self._numbers
        self._kernel.start((plan.grid, 1, 1), plan.block, plan.shared, plan.pdl, numbers)

    def _remember_maps(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Return the tensor maps, and remember the new ones."""
        maps = []
        for known, box, x in zip(self._maps, self._boxes, tensors, strict=True):
            address = x.data_ptr()
            maps.append(
                NO_MAP if box is None else known.get(address) or known.remember(address, _map_of(box, flat_rows(x)))
            )
        return tuple(maps)


class _Maps(dict[int, Any]):
    """The tensor maps of matrices with one layout, by address."""

    def remember(self, address: int, tensor_map: Any) -> Any:
        """Remember a map; if there are too many, forget all maps first."""
        global _map_count
        if _map_count >= MOST_MAPS:
            for maps in list(_maps.values()):
                maps.clear()
            _map_count = 0
        _map_count += 1
        self[address] = tensor_map
        return tensor_map


class _NoMaps(_Maps):
    """The maps of an operand that needs none."""

    def __missing__(self, address: int) -> bytes:
        return NO_MAP


_NO_MAPS = _NoMaps()
_maps: WeakValueDictionary[tuple[Any, ...], _Maps] = WeakValueDictionary()
"""The maps in use, by layout: layers of one shape and products of one weight share them."""
_map_count = 0


def _maps_of(box: Box | None, x: torch.Tensor) -> _Maps:
    """Return the maps of matrices with the layout of ``x``."""
    if box is None:
        return _NO_MAPS
    key = box, x.shape, x.stride(), x.dtype
    maps = _maps.get(key)
    if maps is None:
        maps = _maps[key] = _Maps()
    return maps


def _map_of(box: Box, x: torch.Tensor) -> Any:
    return tensor_map(
        x, box.size, swizzle=box.swizzle, promotion=box.promotion, transposed=box.transposed, strides=box.strides
    )
