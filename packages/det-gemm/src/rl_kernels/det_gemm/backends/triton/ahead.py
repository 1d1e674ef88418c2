"""Calls that launch the kernel with every schedule on meta tensors: ``rl-kernels compile`` compiles these launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.core.triton_lib.gemm import Product
from rl_kernels.core.triton_lib.schedule import in_segments, schedules

SIZE = 4096
SEGMENTS = 8
"""Largest number of K segments: most partial sums in registers."""
SPAN = 256
"""Terms of a span of linear_logp's products in FP32."""


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for operands of a dtype."""
    x, bias, total = empty(SIZE, SIZE, dtype=dtype), empty(SIZE, dtype=dtype), empty(SIZE, SIZE)
    cuts = schedules(dtype, x.device)
    for cut in cuts:
        yield partial(_multiply, x, x.t(), torch.empty_like(x), bias, schedule=cut)
        yield partial(_multiply, x.t(), x, total, continues=True, schedule=cut)
    length = SIZE // SEGMENTS
    for cut in {in_segments(cut, SEGMENTS, length, dtype): cut for cut in cuts}.values():
        yield partial(_multiply, x, x, torch.empty_like(x), schedule=cut, segments=SEGMENTS, length=length)
    # Rows that no descriptor can describe.
    odd = empty(SIZE, SIZE + 1, dtype=dtype)[:, :SIZE]
    yield partial(_multiply, odd, odd.t(), torch.empty_like(odd), span=SPAN)


def _multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
) -> None:
    Product(a, b, out, bias, **options)(a, b, out, bias)
