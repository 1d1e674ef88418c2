"""Calls that launch every kernel of the backend, without data; ``rl-kernels compile`` compiles what they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.gated_delta.backends.triton import backend
from rl_kernels.gated_delta.cache import DeltaCache

HEADS = 16, 32
"""Heads of keys and values of Qwen3-Next."""
SIZES, WIDE_SIZES = (128, 256), (64,)
"""Sizes of heads in 16 bits, its own and the largest; and in FP32, whose larger ones take minutes to compile."""
TOKENS = 4096


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for operands of a dtype."""
    for size in WIDE_SIZES if dtype == torch.float32 else SIZES:
        bounds, state = empty(9, dtype=torch.int32), empty(8, HEADS[1], size, size)
        dense, packed = operands(2, TOKENS, size, dtype), operands(1, TOKENS, size, dtype)
        yield partial(backend.forward, *dense, None, None, None, 0.1, True, True)
        yield partial(backend.forward, *packed, state, bounds, None, 0.1, False, False)
        yield partial(backend.backward, *packed, state, bounds, None, 0.1, True, packed[2], state, True)
        cache = DeltaCache.empty(2, *HEADS, size, size, dtype=dtype, device="meta")
        for tokens, start in ((1, None), (5, empty(2, dtype=torch.int32))):
            options = (None, None, start, 0.1, True)
            yield partial(backend.continued, *operands(2, tokens, size, dtype), *options, *cache)


def operands(
    batch: int, tokens: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v, g and beta."""
    q, k = (empty(batch, tokens, HEADS[0], size, dtype=dtype) for _ in range(2))
    v = empty(batch, tokens, HEADS[1], size, dtype=dtype)
    return q, k, v, empty(batch, tokens, HEADS[1]), empty(batch, tokens, HEADS[1], dtype=dtype)
