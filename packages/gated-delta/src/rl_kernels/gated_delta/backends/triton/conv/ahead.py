"""Calls that launch every kernel of the backend, without data; ``rl-kernels compile`` compiles what they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.gated_delta.backends.triton.conv import backend

SIZE = 8192
"""Channels of Qwen3-Next and Qwen3.5."""


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for operands of a dtype."""
    weight, bias = empty(SIZE, 4, dtype=dtype), empty(SIZE, dtype=dtype)
    bounds, start = empty(9, dtype=torch.int32), empty(2, dtype=torch.int64)
    for batch, tokens, cu_seqlens, begin in ((2, 1, None, None), (2, 100, None, start), (1, 1000, bounds, None)):
        x = empty(batch, tokens, SIZE, dtype=dtype)
        state = None if begin is not None else empty(8 if cu_seqlens is not None else batch, 3, SIZE, dtype=dtype)
        call = (x, weight, None if begin is not None else bias, state, cu_seqlens, begin, begin is None)
        yield partial(backend.forward, *call, state is not None)
        yield partial(backend.backward, *call, x, state, True, state is not None)
