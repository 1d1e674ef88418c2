"""Numbers as tensors on the CPU, so that a compiled graph does not depend on their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import repeat

import torch

from rl_kernels.core.torchlib.observed import ops_are_observed


def scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor without dims on the CPU, which a kernel reads without a launch or a sync.

    Do not write to it: in eager mode the next call with this number gets the same tensor.
    """
    # Converted to a float first, because torch takes no integer of more than 64 bits.
    if torch.compiler.is_compiling():
        # A product, unlike torch.full, stays one graph when the number varies from call to call.
        return torch.ones((), dtype=dtype, device="cpu") * (value * 1.0)
    value = value * 1.0
    return _numbers_function()(value, math.copysign(1.0, value), dtype)


def scalars(*values: float) -> torch.Tensor:
    """Return numbers as one FP64 tensor ``[n]`` on the CPU, as ``scalar`` does, at the cost of one call."""
    if torch.compiler.is_compiling():
        return torch.stack([scalar(value, torch.float64) for value in values])
    return _numbers_function()(values, tuple(map(math.copysign, repeat(1.0), values)), torch.float64)


def _numbers(values: float | tuple[float, ...], _: float | tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of numbers. The signs are an argument too, because 0.0 and -0.0 are the same key of a cache."""
    # A tensor made in inference mode could not be saved for backward.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device="cpu")


_cached_numbers = functools.lru_cache(maxsize=1024)(_numbers)


def _numbers_function() -> Callable[..., torch.Tensor]:
    # Under a mode the tensor may be of another type, which must not be cached.
    return _numbers if ops_are_observed() else _cached_numbers


def scalar_or_rows(value: float | torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as ``scalar`` does, or a tensor ``[...]`` as one value per row ``[rows]``, in ``dtype``.

    A tensor without dims is expanded, because reading it as a number would sync with a GPU.
    """
    if not isinstance(value, torch.Tensor):
        return scalar(value, dtype)
    return value.to(dtype).reshape(-1) if value.ndim else value.to(dtype).expand(rows)
