"""The gradient of sinks, for every backend."""

from __future__ import annotations

import torch


def gradient(sinks: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return that of ``sinks[H]``: ``-sum p delta`` over the queries, p the share of the sink; empty without sinks.

    Args:
        sinks: ``[H]``, or None.
        lse: ``[..., H, T]``, FP32.
        delta: the sum of out times its gradient for each query, as lse.
    """
    if sinks is None:
        return lse.new_empty(0, dtype=delta.dtype)
    # A query that is no part of its sequence has an lse of -inf; with a sink no other one has.
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    terms = torch.where(lse == -torch.inf, 0.0, share * delta)
    return -terms.movedim(-2, 0).flatten(1).sum(1).to(sinks.dtype)
