"""What the loss returns."""

from __future__ import annotations

from typing import NamedTuple

import torch

METRICS = (
    "clip_low",
    "clip_high",
    "ratio_mean",
    "ratio_min",
    "ratio_max",
    "k1",
    "k2",
    "k3",
    "effective_samples",
    "nonfinite",
    "entropy",
)
"""What the numbers of ``metrics`` are, in order; ``grpo_loss`` says how each is defined."""


class GRPOLossOutput(NamedTuple):
    """Three scalars, FP32, or FP64 if current_logps is.

    Attributes:
        loss: ``policy_loss + beta * kl``; carries the gradient.
        policy_loss: mean of the policy term, by default over active tokens; detached.
        kl: mean of the KL estimate, in the same way, 0 with ``beta == 0``; detached.
    """

    loss: torch.Tensor
    policy_loss: torch.Tensor
    kl: torch.Tensor


class LossAndMetrics(NamedTuple):
    """The loss, and what ``return_metrics=True`` adds.

    Attributes:
        output: the loss.
        metrics: ``[11]``, FP32, on the device of the log-probabilities, detached; named by ``METRICS``.
    """

    output: GRPOLossOutput
    metrics: torch.Tensor
