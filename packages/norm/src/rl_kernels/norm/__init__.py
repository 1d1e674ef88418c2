"""Norms of a row: rms_norm and layer_norm, each row a function of that row alone, bit for bit."""

from rl_kernels.norm.api import layer_norm, rms_norm
from rl_kernels.norm.results import NormAndSum

__all__ = ["NormAndSum", "layer_norm", "rms_norm"]
