"""Calls that launch every kernel of the backend, without data; ``rl-kernels compile`` compiles what they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.gated_delta.backends.triton import backend
from rl_kernels.gated_delta.cache import DeltaCache

HEADS, SIZES = (16, 32), ((128, 128), (256, 256), (64, 64))
"""Heads of keys and values of Qwen3-Next, and sizes of heads: its own, the largest, and a small one."""
TOKENS = 4096


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for operands of a dtype."""
    for size, value_size in SIZES:
        bounds = empty(9, dtype=torch.int32)
        yield partial(backend.forward, *operands(2, TOKENS, size, value_size, dtype), None, None, None, 0.1, True, True)
        state = empty(8, HEADS[1], size, value_size)
        packed = operands(1, TOKENS, size, value_size, dtype)
        yield partial(backend.forward, *packed, state, bounds, None, 0.1, False, False)
        cache = DeltaCache.empty(2, *HEADS, size, value_size, dtype=dtype, device="meta")
        for tokens, start in ((1, None), (5, empty(2, dtype=torch.int32))):
            options = (None, None, start, 0.1, True)
            yield partial(backend.continued, *operands(2, tokens, size, value_size, dtype), *options, *cache)


def operands(
    batch: int, tokens: int, size: int, value_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v, g and beta."""
    q, k = (empty(batch, tokens, HEADS[0], size, dtype=dtype) for _ in range(2))
    v = empty(batch, tokens, HEADS[1], value_size, dtype=dtype)
    return q, k, v, empty(batch, tokens, HEADS[1]), empty(batch, tokens, HEADS[1], dtype=dtype)
