"""Return types of the losses."""

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
"""Names of the entries of ``metrics``, in order; all are over the active tokens.

- ``clip_low``, ``clip_high``: share of tokens with A < 0 and a ratio below the range, and with A > 0 and a ratio above
  it; with ``cispo``, share of ratios below its floor and above its cap; 0 for other types that do not clip.
- ``ratio_mean``, ``ratio_min``, ``ratio_max``: of the importance ratio.
- ``k1``, ``k2``, ``k3``: means of the KL estimates, 0 without a KL.
- ``effective_samples``: ``(sum ratio)^2 / sum ratio^2``; NaN if a square overflows, 0 if all of them underflow.
- ``nonfinite``: number of tokens with a log-probability that is not finite.
- ``entropy``: mean of the given entropy, 0 if none is given.

All are 0 if no token is active.
"""


class GRPOLossOutput(NamedTuple):
    """Three scalars, FP32, or FP64 if current_logps is FP64.

    Attributes:
        loss: ``policy_loss + beta * kl``; carries the gradient.
        policy_loss: mean of the policy term, by default over active tokens; detached.
        kl: mean of the KL estimate, averaged like ``policy_loss``; 0 with ``beta == 0``; detached.
    """

    loss: torch.Tensor
    policy_loss: torch.Tensor
    kl: torch.Tensor


class LossAndMetrics(NamedTuple):
    """Result of a loss with ``return_metrics=True``.

    Attributes:
        output: the loss and its two parts.
        metrics: ``[11]``, FP32, on the device of current_logps, detached; ``METRICS`` names the entries.
    """

    output: GRPOLossOutput
    metrics: torch.Tensor
