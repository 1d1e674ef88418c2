"""Result types that more than one operator returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LogpStats(NamedTuple):
    """Per-token statistics of one softmax, each of the leading shape of the call; 0 at ignored positions.

    Attributes:
        logp: log-probability of the selected token.
        logsumexp: of the logits after temperature.
        entropy: of the distribution, in nats.
    """

    logp: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor


def statistics_room(
    like: torch.Tensor, *, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return room for (logp, norm, logsumexp, entropy) of the rows of ``like``, in FP32.

    norm is ``[N, 2]``, the others ``[N]``. Without ``entropy`` logp stands in for two that a kernel does not write.
    """
    count = like.shape[0]
    logp, norm = like.new_empty(count, dtype=torch.float32), like.new_empty(count, 2, dtype=torch.float32)
    if not entropy:
        return logp, norm, logp, logp
    return logp, norm, like.new_empty(count, dtype=torch.float32), like.new_empty(count, dtype=torch.float32)
