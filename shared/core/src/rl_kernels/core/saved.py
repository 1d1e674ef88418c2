"""What autograd saves for the backward pass."""

from __future__ import annotations

from typing import Any

import torch


def savable(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that autograd can save: a copy of one that was made in inference mode.

    What a rollout gives to an update often was.
    """
    return x.clone() if not torch.compiler.is_compiling() and x.is_inference() else x


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Save tensors for backward as ``ctx.save_for_backward`` does; of those made in inference mode, copies."""
    if not torch.compiler.is_compiling():
        # A loop, because a comprehension takes longer, and there is hardly ever such a tensor.
        for x in tensors:
            if x is not None and x.is_inference():
                tensors = tuple(None if value is None else savable(value) for value in tensors)
                break
    ctx.save_for_backward(*tensors)


def are_hooked() -> bool:
    """Say whether hooks handle what is saved now, as in ``torch.utils.checkpoint``.

    They may give one tensor to several readers, and autograd does not see that it changed before a backward pass.
    """
    return not torch.compiler.is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
