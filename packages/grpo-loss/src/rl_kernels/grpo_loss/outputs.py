"""What the loss returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GRPOLossOutput(NamedTuple):
    """Three scalars, FP32, or FP64 if current_logps is.

    Attributes:
        loss: ``policy_loss + beta * kl``; carries the gradient.
        policy_loss: mean of the clipped policy term over active tokens; detached.
        kl: mean of the k3 estimate over active tokens, 0 with ``beta == 0``; detached.
    """

    loss: torch.Tensor
    policy_loss: torch.Tensor
    kl: torch.Tensor
