"""Policy-gradient losses with grouped rewards, GRPO and its variants: advantages, loss and gradient in one pass."""

from rl_kernels.grpo_loss.advantages import group_advantages
from rl_kernels.grpo_loss.api import grpo_loss, grpo_loss_from_advantages
from rl_kernels.grpo_loss.extras import Extras, Normalizer
from rl_kernels.grpo_loss.objective import Objective
from rl_kernels.grpo_loss.outputs import METRICS, GRPOLossOutput, LossAndMetrics
from rl_kernels.grpo_loss.sequences import sequence_losses

__all__ = [
    "METRICS",
    "Extras",
    "GRPOLossOutput",
    "LossAndMetrics",
    "Normalizer",
    "Objective",
    "group_advantages",
    "grpo_loss",
    "grpo_loss_from_advantages",
    "sequence_losses",
]
