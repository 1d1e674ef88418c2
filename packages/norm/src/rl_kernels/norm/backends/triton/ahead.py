"""Calls that launch every kernel of the backend, without data; ``rl-kernels compile`` compiles what they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.norm.backends.triton import backend
from rl_kernels.norm.op import WIDEST

ROWS = 100
SIZES = (64, 4096, WIDEST)
"""Columns for which a tile has several rows, one row, and the most numbers per thread."""
HEADS = 128
"""Columns of which so many rows are read by programs of one warp."""
FEW, MANY = (1e-6, False, 0.0, False), (1e-6, True, 1.0, True)
GATED = (1e-6, False, 0.0, True)
"""eps, centered, offset and cast_first: RMSNorm, LayerNorm with all options, and the gated norm of Qwen3-Next."""


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for operands of a dtype."""
    many = backend.MANY_STEPS * backend.LONGEST_STEP
    x, stats = empty(many, HEADS, dtype=dtype), empty(2, many)
    yield partial(backend.backward, x, x, x, x[0], stats, *MANY[1:3], True, True)
    for size in SIZES:
        x, weight, stats = empty(ROWS, size, dtype=dtype), empty(size, dtype=dtype), empty(2, ROWS)
        if size == SIZES[1]:
            yield partial(backend.forward, x, weight, None, *FEW)
            yield partial(backend.backward_into, x, None, x, weight, stats, *FEW[1:3], empty(size), False)
            yield partial(backend.forward_gated, x, x, weight, None, *FEW)
            yield partial(backend.backward_gated_into, x, x, None, x, weight, stats, *FEW[1:3], empty(size), False)
        else:
            yield partial(backend.forward_sum, x, x, weight, weight, *MANY)
            yield partial(backend.backward, x, x, x, weight, stats, *MANY[1:3], True, True)
            yield partial(backend.forward_gated, x, x, weight, None, *GATED)
            yield partial(backend.backward_gated, x, x, None, x, weight, stats, *GATED[1:3], True, False)
