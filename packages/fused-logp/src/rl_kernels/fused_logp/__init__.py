"""Selected-token log-probability, logsumexp and entropy from given logits."""

from rl_kernels.core import LogpStats
from rl_kernels.fused_logp.api import fused_logp

__all__ = ["LogpStats", "fused_logp"]
