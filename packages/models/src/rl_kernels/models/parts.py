"""The functions behind the ops of ``models.ops``, under the names of their schemas."""

from rl_kernels.models.attention import attention, attention_backward
from rl_kernels.models.norm import norm, norm_backward

__all__ = ["attention", "attention_backward", "norm", "norm_backward"]
