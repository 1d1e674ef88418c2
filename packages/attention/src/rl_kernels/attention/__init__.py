"""Batch-invariant attention: no bit depends on the batch, padding, packing, chunks or the KV cache."""

from rl_kernels.attention.api import det_attention
from rl_kernels.attention.context import context_shards, cut_context, join_context
from rl_kernels.attention.inputs import Attended

__all__ = ["Attended", "context_shards", "cut_context", "det_attention", "join_context"]
