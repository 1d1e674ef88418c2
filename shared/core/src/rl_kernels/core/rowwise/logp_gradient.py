"""The gradient of log-prob, logsumexp and entropy with respect to the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.rowwise.ids import column_of
from rl_kernels.core.rowwise.softmax import SMALLEST_SHIFT, divide


class LogpUpstream(NamedTuple):
    """Inputs of ``dlogits``: saved statistics and upstream gradients of each row, all ``[N]`` except ``norm[N, 2]``."""

    ids: torch.Tensor
    norm: torch.Tensor
    entropy: torch.Tensor | None
    grad_logp: torch.Tensor | None
    grad_logsumexp: torch.Tensor | None
    grad_entropy: torch.Tensor | None

    def rows(self, index: torch.Tensor | slice) -> LogpUpstream:
        """Return the fields of the selected rows."""
        ids, norm, *optional = self
        return LogpUpstream(ids[index], norm[index], *(None if field is None else field[index] for field in optional))


def dlogits(
    x: torch.Tensor, temperature: torch.Tensor | None, up: LogpUpstream, first: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient of ``x[N, n]``: columns ``first`` to ``first + n`` of logits not divided by temperature yet.

    dx_j = (g_logp (1[j = id] - p_j) + g_lse p_j - g_H p_j (log p_j + H)) / temperature. ``out`` is room for log p, and
    often for the result.
    """
    log_p = divide(torch.sub(x, up.norm[:, :1], out=out), temperature).sub_(up.norm[:, 1:])
    p = log_p.exp_() if up.grad_entropy is None else log_p.exp()
    if up.grad_logp is None:
        dz = torch.zeros_like(p)
    else:
        down = -up.grad_logp[:, None]
        column, elsewhere = column_of(x, up.ids, first)
        at = p.gather(1, column)
        chosen = torch.where(elsewhere, at, at - 1.0).mul_(down)
        dz = p.mul_(down) if up.grad_logsumexp is up.grad_entropy is None else p * down
        dz.scatter_(1, column, chosen)
    if up.grad_logsumexp is not None:
        dz += up.grad_logsumexp[:, None] * p
    if up.grad_entropy is not None and up.entropy is not None:
        # Clamped, because -inf times a probability of 0 is NaN.
        surprise = log_p.clamp_(min=SMALLEST_SHIFT).add_(up.entropy[:, None]).mul_(p)
        dz -= surprise.mul_(up.grad_entropy[:, None])
    return divide(dz, temperature)
