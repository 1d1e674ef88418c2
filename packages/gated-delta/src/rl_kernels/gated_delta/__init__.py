"""The gated delta rule of hybrid models: prefill, chunks and decode give the same bits."""

from rl_kernels.gated_delta.api import GatedDelta, gated_delta_rule
from rl_kernels.gated_delta.cache import DeltaCache

__all__ = ["DeltaCache", "GatedDelta", "gated_delta_rule"]
