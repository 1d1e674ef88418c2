"""The GRPO loss: group advantages, clipped policy term and KL to a reference policy, in one pass."""

from rl_kernels.grpo_loss.api import group_advantages, grpo_loss, grpo_loss_from_advantages
from rl_kernels.grpo_loss.outputs import GRPOLossOutput

__all__ = ["GRPOLossOutput", "group_advantages", "grpo_loss", "grpo_loss_from_advantages"]
