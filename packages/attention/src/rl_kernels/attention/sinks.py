"""The gradient of sinks, shared by the backends."""

from __future__ import annotations

import torch


def gradient(sinks: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``sinks[H]``: ``-sum p delta`` over the queries, p being the sink's softmax weight.

    Without sinks, return an empty tensor.

    Args:
        sinks: ``[H]``, or None.
        lse: ``[..., H, T]``, FP32.
        delta: for each query, the sum of out times its gradient; in the shape of lse.
    """
    if sinks is None:
        return lse.new_empty(0)
    # lse is -inf for queries that are not in use, and for those that see no key if their sink is -inf.
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    terms = torch.where(lse == -torch.inf, 0.0, share * delta)
    return -terms.movedim(-2, 0).flatten(1).sum(1).to(sinks.dtype)
