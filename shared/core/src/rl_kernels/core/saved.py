"""Tensors that autograd saves for the backward pass."""

from __future__ import annotations

from typing import Any

import torch


def savable(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that autograd can save: a copy of one that was made in inference mode.

    Results of a rollout, which an update reads, often were.
    """
    return x.clone() if not torch.compiler.is_compiling() and x.is_inference() else x


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Save tensors for backward as ``ctx.save_for_backward`` does; tensors made in inference mode are copied."""
    if not torch.compiler.is_compiling():
        # A loop, because a comprehension takes longer, and there is hardly ever such a tensor.
        for x in tensors:
            if x is not None and x.is_inference():
                tensors = tuple(None if value is None else savable(value) for value in tensors)
                break
    ctx.save_for_backward(*tensors)


def are_hooked() -> bool:
    """Say whether hooks for saved tensors are active, as in ``torch.utils.checkpoint``.

    They may give one tensor to several readers, and autograd does not see that it changed before a backward pass.
    """
    return not torch.compiler.is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
