"""A linear layer whose launches are planned once per kind of operands: the fast path on the host.

A kind is shapes, strides, dtypes and device. The launches are those that ``matmul`` makes for the same tensors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch

from rl_kernels.core.cuda.gemm.matmul import NO_MAP, SIGNATURE, Box, plan_of, scratch_of
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.gpu import processors
from rl_kernels.core.layout import ALIGNED
from rl_kernels.core.torchlib.observed import are_plain
from rl_kernels.det_gemm.segments import segment_length

MOST_MAPS = 1 << 14
"""Largest number of tensor maps that are remembered: about 5 MiB."""
Needed = tuple[bool, bool]
"""Whether the gradients of x and of the weight are needed."""
Gradients = tuple[torch.Tensor | None, torch.Tensor | None]
"""The gradients of x and of the weight."""


class Linear:
    """A linear layer for one kind of ``x[..., K]``, ``weight[N, K]`` and bias, and its gradients.

    Each method returns None for tensors that it has not planned for; the caller then takes the general path.
    """

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, segments: tuple[int, int] = (1, 1)) -> None:
        self._segments = segments
        self._x, self._weight = (x.shape, x.stride()), (weight.shape, weight.stride())
        self._shape = (*x.shape[:-1], weight.shape[0])
        self._products: dict[str, Product] = {}
        self._parts: dict[tuple[Any, ...], Product] = {}

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``x @ weight^T + bias``."""
        out = x.new_empty(self._shape)
        product = self._products.get("forward")
        if product is None:
            product = Product(x, weight, out, bias, b_transposed=True, segments=self._segments[0])
            self._products["forward"] = product
        return out if product.launch(x, weight, out, bias) else None

    def segmented_into(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        segments: int,
        length: int,
    ) -> bool:
        """Write ``a @ b + bias``, K in segments of ``length`` terms, to ``out``; say whether it was launched.

        For ranks that hold a part of the layer: ``a`` are rows of ``x`` or of a gradient, ``b[K, N]`` is the weight or
        its transpose. ``out[M, N]`` is contiguous, and not empty.
        """
        if not are_plain(a, b) or a.dtype != b.dtype or not a.get_device() == b.get_device() == out.get_device():
            return False
        key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), out.dtype, bias is None, segments, length)
        product = self._parts.get(key)
        if product is None:
            product = self._parts[key] = Product(a, b, out, bias, segments=segments, length=length)
        return product.launch(a, b, out, bias)

    def gradients(
        self, dc: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor | None, needed: Needed
    ) -> Gradients | None:
        """Return ``dc @ weight`` and ``dc^T @ x``; with ``into[N, K]``, the chain of the second continues in it.

        A gradient that is not needed is None. Either all needed products are launched, or none.
        """
        needs_x, needs_weight = needed
        # A saved-tensor hook may swap the tensors of the forward pass, and a gradient can have any layout.
        if dc.shape != self._shape or not dc.is_contiguous() or not are_plain(dc, x, weight):
            return None
        if not dc.dtype == x.dtype == weight.dtype or not dc.get_device() == x.get_device() == weight.get_device():
            return None
        dx = dw = None
        addresses = dc.data_ptr()
        if needs_x:
            if (weight.shape, weight.stride()) != self._weight:
                return None
            dx = dc.new_empty(self._x[0])
            addresses |= weight.data_ptr() | dx.data_ptr()
            input_product = self._products.get("input")
            if input_product is None:
                input_product = self._products["input"] = Product(dc, weight, dx, segments=self._segments[1])
            if not input_product.possible:
                return None
        if needs_weight:
            if (x.shape, x.stride()) != self._x or not (into is None or into.is_contiguous()):
                return None
            dw = dc.new_empty(self._weight[0]) if into is None else into
            addresses |= x.data_ptr() | dw.data_ptr()
        # Checked before the first launch, so that all launches below are made.
        if addresses % ALIGNED:
            return None
        if dx is not None:
            self._products["input"].launch(dc, weight, dx)
        if dw is not None:
            name, continues = ("weight", False) if into is None else ("continued", True)
            product = self._products.get(name)
            if product is None:
                product = self._products[name] = Product(dc, x, dw, a_transposed=True, continues=continues)
            product.launch(dc, x, dw)
        return dx, dw


class Product:
    """``a @ b + bias`` for operands of one layout, at any address; a_transposed: ``a`` is passed as its transpose.

    Attributes:
        possible: whether it can be launched: if K is cut into segments, TMA must accept the operands.
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
        segments: int = 1,
        length: int | None = None,
    ) -> None:
        self._transposed = a_transposed, b_transposed, False
        left, right, target = self._matrices(a, b, out)
        if length is None:
            length = segment_length(left.shape[1], segments) if segments > 1 else 0
        plan = plan_of(
            *(left.shape, left.stride(), True, right.shape, right.stride(), True, target.stride(), True),
            *(left.dtype, target.dtype, continues, None, processors(a.get_device())),
            *(segments, length),
        )
        self.possible = plan is not None
        if plan is None:
            return
        self._plan = plan
        self._kernel = kernel(plan.program, "gemm", SIGNATURE, a.device)
        self._numbers = *plan.strides, *plan.sizes, 0 if bias is None else plan.along, plan.length
        operands = (right, left, target) if plan.flipped else (left, right, target)
        self._maps = tuple(
            _NO_MAPS if box is None else maps_of(box, x) for box, x in zip(plan.boxes, operands, strict=True)
        )

    def launch(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
        """Launch it and return True; return False, without a launch, if an address is not aligned."""
        if not self.possible:
            return False
        plan = self._plan
        left, right = (b, a) if plan.flipped else (a, b)
        # Read each address once: passing a number to the launch is faster than reading the address again.
        left_address, right_address, out_address = left.data_ptr(), right.data_ptr(), out.data_ptr()
        left_maps, right_maps, out_maps = self._maps
        maps: tuple[Any, ...]
        try:
            maps = left_maps[left_address], right_maps[right_address], out_maps[out_address]
        except KeyError:
            if (left_address | right_address | out_address) % ALIGNED:
                return False
            maps = self._remember_maps(a, b, out)
        bias_address = 0 if bias is None else bias.data_ptr()
        scratch = scratch_of(plan.scratch, a.device)
        scratch_address = 0 if scratch is None else scratch.data_ptr()
        numbers = *maps, out_address, bias_address, left_address, right_address, scratch_address, *self._numbers
        self._kernel.start((plan.grid, 1, 1), plan.block, plan.shared, plan.pdl, numbers)
        return True

    def _remember_maps(self, *operands: torch.Tensor) -> tuple[Any, ...]:
        """Return the tensor maps, and remember the new ones."""
        left, right, target = self._matrices(*operands)
        tensors = (right, left, target) if self._plan.flipped else (left, right, target)
        maps = []
        for cache, box, tensor in zip(self._maps, self._plan.boxes, tensors, strict=True):
            if box is None:
                maps.append(NO_MAP)
            else:
                maps.append(cache.get(tensor.data_ptr()) or cache.remember(tensor.data_ptr(), box.of(tensor)))
        return tuple(maps)

    def _matrices(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        """Return a, b and the output as matrices."""
        flat = [x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 1 else x[None] for x in operands]
        return [x.t() if is_transposed else x for x, is_transposed in zip(flat, self._transposed, strict=True)]


class Maps(dict[int, Any]):
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


class _NoMaps(Maps):
    """The maps of an operand that needs none."""

    def __missing__(self, address: int) -> bytes:
        return NO_MAP


_NO_MAPS = _NoMaps()
_maps: WeakValueDictionary[tuple[Any, ...], Maps] = WeakValueDictionary()
"""The maps in use, by layout: layers of one shape and products of one weight share them."""
_map_count = 0


def maps_of(box: Box, x: torch.Tensor) -> Maps:
    """Return the maps of matrices with the layout of ``x``."""
    key = box, x.shape, x.stride(), x.dtype
    maps = _maps.get(key)
    if maps is None:
        maps = _maps[key] = Maps()
    return maps


def plan_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, segments: tuple[int, int] = (1, 1)
) -> Linear | None:
    """Return the linear layer for operands with these layouts, or None if rows would have to be copied.

    ``segments`` are those of the sum over K, and of the sum over N of the gradient of ``x``.
    """
    is_plannable = x.numel() and weight.numel() and (bias is None or bias.is_contiguous())
    return Linear(x, weight, segments) if is_plannable and _is_flat(x.shape[:-1], x.stride()[:-1]) else None


def _is_flat(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Say whether dims with these strides can be viewed as one dim."""
    outer = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    return all(stride == size * inner for (_, stride), (size, inner) in pairwise(outer))
