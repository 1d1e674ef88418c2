"""Exchanges between ranks whose sums have a fixed order, on ``torch.distributed``: same bits for every number of ranks.

Everything runs on the collectives of the given process group (NCCL or gloo), on the current stream.
"""

from rl_kernels.core.distributed.agreement import Validate, agree, agree_on_kind, fingerprint
from rl_kernels.core.distributed.exchange import begin_all_gather, reduce_product
from rl_kernels.core.distributed.functions import all_gather, all_reduce, reduce_scatter, split
from rl_kernels.core.distributed.groups import SIZES, group_of, group_rank, group_size
from rl_kernels.core.distributed.sums import chain_sum, tree_sum

__all__ = [
    "SIZES",
    "Validate",
    "agree",
    "agree_on_kind",
    "all_gather",
    "all_reduce",
    "begin_all_gather",
    "chain_sum",
    "fingerprint",
    "group_of",
    "group_rank",
    "group_size",
    "reduce_product",
    "reduce_scatter",
    "split",
    "tree_sum",
]
