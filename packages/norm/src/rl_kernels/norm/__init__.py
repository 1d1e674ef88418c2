"""Batch-invariant norms: in rms_norm and layer_norm a row depends on its own input row alone, bit for bit."""

from rl_kernels.norm.api import layer_norm, rms_norm
from rl_kernels.norm.module import LayerNorm, RMSNorm
from rl_kernels.norm.results import NormAndSum

__all__ = ["LayerNorm", "NormAndSum", "RMSNorm", "layer_norm", "rms_norm"]
