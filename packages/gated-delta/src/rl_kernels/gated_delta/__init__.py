"""The gated delta rule of hybrid models, and their convolution: prefill, chunks and decode give the same bits."""

from rl_kernels.gated_delta.api import gated_delta_rule
from rl_kernels.gated_delta.cache import DeltaCache
from rl_kernels.gated_delta.conv_api import causal_conv1d
from rl_kernels.gated_delta.results import Convolved, GatedDelta

__all__ = ["Convolved", "DeltaCache", "GatedDelta", "causal_conv1d", "gated_delta_rule"]
