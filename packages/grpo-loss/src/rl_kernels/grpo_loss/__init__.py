"""Policy-gradient losses with grouped rewards, GRPO and its variants: advantages, loss and gradient in one pass."""

from rl_kernels.grpo_loss.advantages import group_advantages
from rl_kernels.grpo_loss.api import grpo_loss, grpo_loss_from_advantages
from rl_kernels.grpo_loss.extras import Extras, Normaliser
from rl_kernels.grpo_loss.objective import Objective
from rl_kernels.grpo_loss.outputs import METRICS, GRPOLossOutput, LossAndMetrics
from rl_kernels.grpo_loss.sequences import sequence_losses

__all__ = [
    "METRICS",
    "Extras",
    "GRPOLossOutput",
    "LossAndMetrics",
    "Normaliser",
    "Objective",
    "group_advantages",
    "grpo_loss",
    "grpo_loss_from_advantages",
    "sequence_losses",
]
