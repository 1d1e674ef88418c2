"""Selected-token log-probability, logsumexp and entropy from hidden states, without materialising the logits."""

from rl_kernels.core import LogpStats
from rl_kernels.linear_logp.api import linear_logp
from rl_kernels.linear_logp.known import BitsDiffer, Known
from rl_kernels.linear_logp.vocabulary import vocab_shards

__all__ = ["BitsDiffer", "Known", "LogpStats", "linear_logp", "vocab_shards"]
