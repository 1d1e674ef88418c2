"""Descriptors of the Tensor Memory Accelerator (TMA), by which it copies a box of a tensor to or from shared memory.

A descriptor is 128 bytes with address, sizes, strides and box. It is passed to a kernel by value, as a ``T`` of its
signature (``const __grid_constant__`` in the kernel). It owns no memory, so it may outlive the tensor; as for a
pointer, the caller keeps the memory alive while a kernel uses it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NewType

import torch

from rl_kernels.core.cuda.driver import checked, error_of
from rl_kernels.core.cuda.signature import MAP_SIZE
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import ALIGNED

TensorMap = NewType("TensorMap", bytes)
DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}
SWIZZLES = (0, 32, 64, 128)
PROMOTIONS = (64, 128, 256)
DIMS = range(2, 6)
LONGEST = 256
"""Largest number of elements of a box along each dimension."""
ROOM = 128
"""Alignment of a descriptor while it is written."""
CACHE_SIZE = 4096
"""Number of descriptors at which the cache is cleared."""

_maps: dict[tuple[object, ...], TensorMap] = {}
_layouts: dict[tuple[object, ...], tuple[tuple[Any, ...], tuple[Any, ...]]] = {}
"""Arguments of the driver before and after the address, for each layout: a cache that grows has new addresses in each
layer, but a new layout in each step only."""


def tensor_map(
    tensor: torch.Tensor,
    box: tuple[int, ...],
    *,
    swizzle: int = 0,
    promotion: int = 256,
    transposed: bool = False,
    strides: tuple[int, ...] | None = None,
) -> TensorMap:
    """Return the descriptor of a tensor on a GPU; elements beyond its edges are read as 0 and not written.

    A cached descriptor is found without making a view of the tensor, which would take longer.

    Args:
        tensor: two to five dimensions, the last one contiguous, all others at multiples of 16 bytes; if ``transposed``,
            its transpose, for a matrix.
        box: sizes of the box that one copy moves.
        swizzle: swizzle width of the box in shared memory, in bytes: 0 (none), 32, 64 or 128; a row of the box is at
            most this long.
        promotion: bytes that are loaded into the L2 cache at a time, even beyond the box: 64, 128 or 256.
        transposed: describe the transpose.
        strides: strides of the described tensor, in place of its own; strides of dimensions of size 1 count too.

    Raises:
        ValueError: an argument is not as described.
        CudaError: the driver refused the descriptor.
    """
    layout = (tensor.shape, tensor.stride(), tensor.dtype, box, swizzle, promotion, transposed, strides)
    key = tensor.data_ptr(), layout
    descriptor = _maps.get(key)
    if descriptor is None:
        arguments = _layouts.get(layout)
        if arguments is None or key[0] % ALIGNED:
            view = described_view(tensor, transposed, strides)
            _check(view, box, swizzle, promotion)
            _make_room(_layouts)
            arguments = _layouts[layout] = _arguments(view, box, swizzle, promotion)
        _make_room(_maps)
        # The driver needs a context, which an autograd thread may not have yet.
        with device_of(tensor):
            descriptor = _maps[key] = _encoded(key[0], *arguments)
    return descriptor


def _make_room(cache: dict[Any, Any]) -> None:
    if len(cache) >= CACHE_SIZE:
        cache.clear()


def described_view(tensor: torch.Tensor, transposed: bool, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Return the view that a descriptor covers: the tensor or its transpose, with ``strides`` if they are given."""
    view = tensor.t() if transposed else tensor
    return view if strides is None else view.as_strided(view.shape, strides)


def _check(tensor: torch.Tensor, box: tuple[int, ...], swizzle: int, promotion: int) -> None:
    size = tensor.element_size()
    if tensor.dtype not in DTYPES:
        raise ValueError(f"tensor: expected bfloat16, float16 or float32, got {tensor.dtype}")
    if tensor.ndim not in DIMS or tensor.stride(-1) != 1 or not tensor.numel():
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(
            f"tensor: expected {DIMS[0]} to {DIMS[-1]} dims, the last contiguous, got shape {shape}, strides {strides}"
        )
    if tensor.data_ptr() % ALIGNED or any(step * size % ALIGNED or not step for step in tensor.stride()[:-1]):
        raise ValueError(f"tensor: expected rows that begin at multiples of {ALIGNED} bytes")
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle: expected one of {SWIZZLES}, got {swizzle}")
    if promotion not in PROMOTIONS:
        raise ValueError(f"promotion: expected one of {PROMOTIONS}, got {promotion}")
    longest = min(LONGEST, swizzle // size or LONGEST)
    fits = len(box) == tensor.ndim and all(1 <= side <= LONGEST for side in box) and box[-1] <= longest
    if not fits or box[-1] * size % ALIGNED:
        raise ValueError(
            f"box: expected {tensor.ndim} sizes up to {LONGEST}, the last up to {longest} in multiples of "
            f"{ALIGNED // size}, got {box}"
        )


def _arguments(
    tensor: torch.Tensor, box: tuple[int, ...], swizzle: int, promotion: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the arguments of ``cuTensorMapEncodeTiled`` between the descriptor and the address, and after it."""
    from cuda.bindings import driver

    dims, size = tensor.ndim, tensor.element_size()
    steps = [step * size for step in tensor.stride()[:-1]]
    before = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{DTYPES[tensor.dtype]}"), dims
    enums = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle}B' if swizzle else 'NONE'}"),
        getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{promotion}B"),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    after = (
        # The contiguous dimension comes first, and has no stride.
        (ctypes.c_uint64 * dims)(*reversed(tensor.shape)),
        (ctypes.c_uint64 * (dims - 1))(*reversed(steps)),
        (ctypes.c_uint32 * dims)(*reversed(box)),
        (ctypes.c_uint32 * dims)(*[1] * dims),
        *map(int, enums),
    )
    return before, after


def _encoded(address: int, before: tuple[Any, ...], after: tuple[Any, ...]) -> TensorMap:
    buffer = (ctypes.c_char * (MAP_SIZE + ROOM))()
    start = -ctypes.addressof(buffer) % ROOM
    status = _encode()(ctypes.addressof(buffer) + start, *before, address, *after)
    if status:
        from cuda.bindings import driver

        shape, box = (tuple(reversed(after[place])) for place in (0, 2))
        raise error_of(driver.CUresult(status), f"tensor map of {shape} in boxes of {box}")
    return TensorMap(buffer.raw[start : start + MAP_SIZE])


@cache
def _encode() -> Callable[..., int]:
    """Return cuTensorMapEncodeTiled, to be called with a descriptor in memory of our own.

    The descriptor of cuda.bindings lies at any address, but the driver needs a multiple of 64, from CUDA 13 on of 128:
    a call with another address may end the process.
    """
    from cuda.bindings import driver

    name, version = b"cuTensorMapEncodeTiled", 12000
    address, _ = checked(driver.cuGetProcAddress(name, version, driver.cuuint64_t(0)), name.decode())
    integer, number, pointer = ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p
    kinds = (pointer, integer, number, *(pointer,) * 5, *(integer,) * 4)
    return ctypes.CFUNCTYPE(integer, *kinds)(address)
