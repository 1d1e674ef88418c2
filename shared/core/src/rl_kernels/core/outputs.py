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
