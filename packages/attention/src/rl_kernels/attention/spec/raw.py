"""Arguments of the raw operator, in every layout, for tests of what backends launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_kernels.attention.inputs import UNLIMITED, Inputs

OPTIONAL_TENSORS = ("sinks", "cu_seqlens_q", "cu_seqlens_k", "k_start", "seqused_q", "seqused_k", "block_table")


def make_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    longest: tuple[int, int],
    window: tuple[int, int] = (UNLIMITED, 0),
    softcap: float = 0.0,
    **tensors: Any,
) -> Inputs:
    """Return the arguments of a raw op; ``tensors`` has sinks and integer tensors by name."""
    return Inputs._make([q, k, v, *map(tensors.get, OPTIONAL_TENSORS), *longest, 0.125, *window, softcap])


def dense(*sizes: int, dtype: torch.dtype = torch.bfloat16, size_v: int | None = None, **options: Any) -> Inputs:
    """Return a call of (batch, queries, keys, KV heads, group, head size)."""
    batch, queries, keys, kv_heads, group, size = sizes
    q = torch.randn(batch, queries, kv_heads * group, size).to(dtype)
    k, v = (torch.randn(batch, keys, kv_heads, width).to(dtype) for width in (size, size_v or size))
    return make_inputs(q, k, v, (queries, keys), **options)


def packed(lengths: Sequence[int], kv_heads: int = 2, group: int = 4, size: int = 128) -> Inputs:
    """Return packed sequences; bounds of queries are int64, of keys int32."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(sum(lengths), heads, size).bfloat16() for heads in (kv_heads * group, kv_heads, kv_heads))
    return make_inputs(q, k, v, (max(lengths),) * 2, cu_seqlens_q=bounds, cu_seqlens_k=bounds.int())


def paged(queries: int, page: int, used: torch.Tensor, size: int = 128, size_v: int = 128) -> Inputs:
    """Return a cache in 40 pages, whose table is a slice of a wider one."""
    q = torch.randn(len(used), queries, 8, size).bfloat16()
    k, v = (torch.randn(40, page, 2, width).bfloat16() for width in (size, size_v))
    table = (torch.arange(20 * len(used)) * 7 % 40).view(len(used), 20)[:, :17]
    return make_inputs(q, k, v, (queries, 17 * page), block_table=table, seqused_k=used)


def sliced() -> Inputs:
    """Return operands that are parts of wider tensors or have strided columns, with a window on both sides."""
    inputs = dense(3, 40, 90, 2, 4, 64, window=(7, 5), softcap=30.0)
    wide = torch.randn(3, 90, 5, 64).bfloat16()
    strided = torch.stack((inputs.q, inputs.q), -1)[..., 0]
    return inputs._replace(q=strided, k=wide[:, :, 1:3], v=wide[:, :, 3:], sinks=torch.randn(16)[::2])


def expanded() -> Inputs:
    """Return sequences that share their keys."""
    inputs = dense(3, 40, 90, 2, 4, 64)
    return inputs._replace(k=inputs.k[:1].expand(3, -1, -1, -1))
