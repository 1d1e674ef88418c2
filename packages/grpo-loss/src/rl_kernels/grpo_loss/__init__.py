"""Losses of policy gradients with grouped rewards: GRPO and its kin, advantages, loss and gradient in one pass."""

from rl_kernels.grpo_loss.api import group_advantages, grpo_loss, grpo_loss_from_advantages
from rl_kernels.grpo_loss.outputs import METRICS, GRPOLossOutput, LossAndMetrics
from rl_kernels.grpo_loss.presets import preset

__all__ = [
    "METRICS",
    "GRPOLossOutput",
    "LossAndMetrics",
    "group_advantages",
    "grpo_loss",
    "grpo_loss_from_advantages",
    "preset",
]
