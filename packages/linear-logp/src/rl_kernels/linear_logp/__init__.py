"""Selected-token log-probability, logsumexp and entropy from hidden states, without materializing the logits."""

from rl_kernels.core import LogpStats
from rl_kernels.linear_logp.api import linear_logp, linear_logp_from_known, linear_logp_known
from rl_kernels.linear_logp.arguments import Memory
from rl_kernels.linear_logp.known import BitsDiffer, Known
from rl_kernels.linear_logp.loss.api import linear_logp_loss
from rl_kernels.linear_logp.loss.chunks import Chunk
from rl_kernels.linear_logp.sampled import Sampled
from rl_kernels.linear_logp.sampling import LinearLogits, linear_logits
from rl_kernels.linear_logp.vocabulary import VocabCuts, vocab_shards

__all__ = [
    "BitsDiffer",
    "Chunk",
    "Known",
    "LinearLogits",
    "LogpStats",
    "Memory",
    "Sampled",
    "VocabCuts",
    "linear_logits",
    "linear_logp",
    "linear_logp_from_known",
    "linear_logp_known",
    "linear_logp_loss",
    "vocab_shards",
]
