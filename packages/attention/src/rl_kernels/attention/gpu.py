"""Host code shared by the GPU backends: the layouts that kernels read, and calls without a query."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.attention import sinks as sink
from rl_kernels.attention.checks import MULTIPLE
from rl_kernels.core.calls import Launches
from rl_kernels.core.layout import ALIGNED, readable

Q, K, V, SINKS, OUT, LSE, GRAD, NEEDS_QUERIES, NEEDS_KEYS = 0, 1, 2, 3, 16, 17, 18, 19, 20
"""Places of arguments of the raw ops."""


def unreadable(arguments: tuple[Any, ...], *, expanded: bool) -> list[int]:
    """Return the places of the tensors that kernels cannot read as they are.

    Kernels read heads of q, k, v and out's gradient at 16-byte aligned addresses, and other tensors without strides.
    The layout of a kernel's loads then depends on sizes alone. ``expanded`` says whether strides may be 0.
    """
    places = []
    for place, x in enumerate(arguments):
        if isinstance(x, torch.Tensor):
            fits = _has_aligned_strides(x, expanded) if place in (Q, K, V, GRAD) else x.is_contiguous()
            if not fits or (place in (Q, K, V, OUT, GRAD) and x.data_ptr() % ALIGNED):
                places.append(place)
    return places


def _has_aligned_strides(x: torch.Tensor, expanded: bool) -> bool:
    """Say whether the last dim is contiguous and every other stride is a multiple of 8 elements."""
    *outer, last = x.stride()
    steps = [step for step, size in zip(outer, x.shape, strict=False) if size > 1]
    return last == 1 and all(step % MULTIPLE == 0 for step in steps) and (expanded or 0 not in steps)


def with_copies(arguments: tuple[Any, ...], places: list[int]) -> tuple[Any, ...]:
    """Return the arguments, with contiguous copies of those at these places."""
    copied = list(arguments)
    for place in places:
        copied[place] = readable(copied[place], False)
    return tuple(copied)


def as_read(arguments: tuple[Any, ...], places: list[int]) -> tuple[Any, ...]:
    """Return the arguments in the layouts of ``with_copies``, but not their values."""
    like = list(arguments)
    for place in places:
        like[place] = torch.empty_like(like[place], memory_format=torch.contiguous_format)
    return tuple(like)


def row_shape(lse: torch.Tensor, kv_heads: int) -> tuple[int, ...]:
    """Return the shape in which the backward pass keeps a number for each row: ``[..., KV heads, queries, group]``."""
    *lead, heads, queries = lse.shape
    return *lead, kv_heads, queries, heads // kv_heads


def gradient_of_sinks(sinks: torch.Tensor | None, lse: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """Return the gradient of sinks, empty without sinks; ``deltas`` has the sums of out times its gradient by row."""
    return lse.new_empty(0) if sinks is None else sink.gradient(sinks, lse, deltas.mT.flatten(-3, -2))


def forward_without_queries(out_shape: tuple[int, ...], lse_shape: tuple[int, ...], *, with_lse: bool) -> Launches:
    """Return the launches of calls in which no sequence has a query: rows in no sequence get 0, and -inf as lse."""

    def launch(q: torch.Tensor, *_: Any) -> Any:
        out = q.new_zeros(out_shape)
        return (out, q.new_full(lse_shape, -torch.inf, dtype=torch.float32)) if with_lse else out

    return launch


def backward_without_queries(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of calls in which no sequence has a query."""
    places = (Q, K, V, SINKS, LSE, NEEDS_QUERIES, NEEDS_KEYS)
    q, k, v, sinks, lse, needs_queries, needs_keys = (args[place] for place in places)
    dk, dv = (x.new_zeros(x.shape if needs_keys else 0) for x in (k, v))
    return q.new_zeros(q.shape if needs_queries else 0), dk, dv, sink.gradient(sinks, lse, lse)
