"""What autograd saves for the backward pass."""

from __future__ import annotations

from typing import Any

import torch


def savable(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that autograd can save: a copy of one that was made in inference mode."""
    return x.clone() if not torch.compiler.is_compiling() and x.is_inference() else x


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Save tensors for backward as ``ctx.save_for_backward``, and copies of those made in inference mode.

    Autograd refuses the latter, and what a rollout gives to an update is often of inference mode.
    """
    if not torch.compiler.is_compiling():
        tensors = tuple([x.clone() if x is not None and x.is_inference() else x for x in tensors])
    ctx.save_for_backward(*tensors)


def are_hooked() -> bool:
    """Say whether hooks handle what is saved now, as in ``torch.utils.checkpoint``.

    Autograd then does not see that a saved tensor changed before its backward pass.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
