"""The sum of FP32 partials by a balanced binary tree, with bias and rounding, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import ceil_div, launch

BLOCK = 1024
LARGEST = 8
"""Largest number of partials of a sum."""


def tree_total(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the tree sum of FP32 ``parts[n, ..., N]`` plus ``bias[N]``; None if the kernel does not take them."""
    count = parts.shape[0]
    if parts.dtype != torch.float32 or not parts.is_contiguous() or count > LARGEST or count & (count - 1):
        return None
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    size = out.numel()
    if not size:
        return out
    with device_of(parts):
        numbers = (size, parts.shape[-1], count, bias is not None, BLOCK)
        tensors = (parts, parts if bias is None else bias.contiguous(), out)
        launch(_tree, (ceil_div(size, BLOCK),), *tensors, numbers=numbers, num_warps=4)
    return out


@triton.jit
def _part(parts, at, inside, size, index: tl.constexpr):
    return tl.load(parts + at + tl.full((), index, tl.int64) * size, mask=inside, other=0.0)


@triton.jit
def _subtree(parts, at, inside, size, first: tl.constexpr, COUNT: tl.constexpr):
    """Return the sum of COUNT parts, a power of two, that begin at ``first``."""
    if COUNT == 1:
        value = _part(parts, at, inside, size, first)
    elif COUNT == 2:
        value = _part(parts, at, inside, size, first) + _part(parts, at, inside, size, first + 1)
    elif COUNT == 4:
        value = _subtree(parts, at, inside, size, first, 2) + _subtree(parts, at, inside, size, first + 2, 2)
    else:
        value = _subtree(parts, at, inside, size, first, 4) + _subtree(parts, at, inside, size, first + 4, 4)
    return value


@triton.jit(do_not_specialize=["size", "columns"])
def _tree(parts, bias, out, size, columns, COUNT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = at < size
    value = _subtree(parts, at, inside, size, 0, COUNT)
    if HAS_BIAS:
        value += tl.load(bias + at % columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
