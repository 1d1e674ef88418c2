"""Calls that launch every kernel of the backend on meta tensors: ``rl-kernels compile`` compiles these launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rl_kernels.attention.backends.triton import backend
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.core.triton_lib.schedule import HALF

SIZES = {torch.float32: (64, 256)}
"""Head sizes by dtype, the largest of each tile; other dtypes have 64, 128 and 256."""
HEADS, KV_HEADS = 32, 8
ODD = 7
"""A number of query heads per KV head that does not divide the rows of a block."""
PROMPT, CACHE = 2048, 8192
FEW, MANY = (UNLIMITED, 0, 0.0), (4096, 0, 30.0)
"""Options (left, right, soft cap) of the calls with the fewest and with all arguments."""
PAGE = 16
SPLIT = 64
"""Head size of the calls with split keys."""


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for operands of a dtype: with all arguments, and on Hopper also with the fewest."""
    on_hopper = dtype in HALF and tiles_change_no_bit(torch.device("meta"))
    for size in SIZES.get(dtype, (64, 128, 256)):
        scale = size**-0.5
        q, k, v = _operands((PROMPT,), (PROMPT,), KV_HEADS * ODD, size, dtype)
        tensors = {
            "sinks": q.new_empty(KV_HEADS * ODD),
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), _integers(9)),
        }
        yield partial(_both_passes, _inputs(q, k, v, PROMPT, PROMPT, scale, MANY, **tensors))
        # Only on Hopper are tiles smaller for few rows, and loaded by TMA.
        if on_hopper or size == SPLIT:
            q, k, v = _operands((4, 1), (4 * CACHE // PAGE, PAGE), HEADS, size, dtype)
            tensors = {"seqused_k": _integers(4), "block_table": _integers(4, CACHE // PAGE)}
            yield partial(backend.forward, *_inputs(q, k, v, 1, CACHE, scale, MANY, **tensors))
        if on_hopper:
            q, k, v = _operands((4, 1), (4, CACHE), HEADS, size, dtype)
            yield partial(backend.forward, *_inputs(q, k, v, 1, CACHE, scale, FEW))
            q, k, v = _operands((4, PROMPT), (4, PROMPT), HEADS, size, dtype)
            yield partial(_both_passes, _inputs(q, k, v, PROMPT, PROMPT, scale, FEW))


def _both_passes(inputs: Inputs) -> None:
    out, lse = backend.forward(*inputs)
    backend.backward(*inputs, out, lse, torch.empty_like(out), True, True)


def _inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    options: tuple[int, int, float],
    **tensors: torch.Tensor,
) -> Inputs:
    names = ("sinks", "cu_seqlens_q", "cu_seqlens_k", "k_start", "seqused_q", "seqused_k", "block_table")
    optional_tensors = [tensors.get(name) for name in names]
    return Inputs._make((q, k, v, *optional_tensors, longest_q, longest_k, scale, *options))


def _operands(
    rows: tuple[int, ...], keys: tuple[int, ...], heads: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (empty(*shape, size, dtype=dtype) for shape in ((*rows, heads), (*keys, KV_HEADS), (*keys, KV_HEADS)))
    return q, k, v


def _integers(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)
