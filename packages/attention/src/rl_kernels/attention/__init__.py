"""Attention whose bits do not depend on the batch, on padding or packing, on chunks or on the KV cache."""

from rl_kernels.attention.api import det_attention
from rl_kernels.attention.gradients import det_attention_backward
from rl_kernels.attention.inputs import Attended

__all__ = ["Attended", "det_attention", "det_attention_backward"]
