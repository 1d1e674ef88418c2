"""The gated delta rule of hybrid models: prefill, chunks and decode give the same bits."""

from rl_kernels.gated_delta.api import gated_delta_rule

__all__ = ["gated_delta_rule"]
