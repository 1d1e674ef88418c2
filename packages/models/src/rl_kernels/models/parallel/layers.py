"""The modules of a parallel model: linear layers that hold a shard, the head, and norms of cut rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_kernels.core.constants import UNIT
from rl_kernels.core.distributed import all_gather
from rl_kernels.core.outputs import LogpStats
from rl_kernels.det_gemm import column_parallel_linear, row_parallel_linear
from rl_kernels.det_gemm.module import DetLinear
from rl_kernels.linear_logp import linear_logp
from rl_kernels.linear_logp.vocabulary import SEGMENTS, slots
from rl_kernels.models.parallel.norms import norm_of_part
from rl_kernels.models.parallel.ranks import TOKENS, Ranks

SHARED = "_rl_kernels_ranks"
"""Attribute of a parallel module: its ``Ranks``."""
HEADS = -2
"""The dim of queries and keys ``[B, T, H, D]`` that holds heads."""


def _ranks_of(layer: DetLinear) -> Ranks:
    """Return the ranks of a parallel layer; refuse what only a layer of one process takes."""
    if layer.join_tokens is not None:
        raise ValueError(f"join_tokens: expected None on a parallel layer, got {layer.join_tokens}")
    ranks: Ranks = getattr(layer, SHARED)
    return ranks


class ColumnParallelLinear(DetLinear):
    """A linear layer that holds the rows of its weight for this rank's outputs; its input is whole on each rank."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs, ``[..., out_features / ranks]``."""
        ranks = _ranks_of(self)
        return column_parallel_linear(
            input,
            self.weight,
            self.bias,
            process_group=ranks.group,
            dx_segments=ranks.segments,
            scatter_dim=ranks.scatter_dim,
            validate=False,
        )


class RowParallelLinear(DetLinear):
    """A linear layer that holds the columns of its weight for this rank's inputs; the ranks' sums are added."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return all outputs, ``[..., out_features]``; with sequence parallelism, of this rank's tokens."""
        ranks = _ranks_of(self)
        return row_parallel_linear(
            input,
            self.weight,
            self.bias,
            process_group=ranks.group,
            k_segments=ranks.segments,
            scatter_dim=ranks.scatter_dim,
            validate=False,
        )


class VocabParallelHead(DetLinear):
    """A head that holds the rows of its weight for this rank's part of the vocabulary.

    ``forward`` returns the logits of the whole vocabulary on each rank; ``logp`` does not materialize logits.
    """

    vocab_size: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits ``[..., V]``, gathered from all ranks."""
        ranks = _ranks_of(self)
        # The segments of linear_logp, so that shards of the vocabulary are whole segments.
        length = UNIT * slots(self.vocab_size, SEGMENTS)
        logits = column_parallel_linear(
            input,
            self.weight,
            self.bias,
            process_group=ranks.group,
            dx_segments=SEGMENTS,
            dx_length=length,
            validate=False,
        )
        if ranks.group is None or ranks.size == 1:
            return logits
        width = length * SEGMENTS // ranks.size
        padded = F.pad(logits, (0, width - logits.shape[-1]))
        return all_gather(padded, ranks.group, padded.ndim - 1)[..., : self.vocab_size]

    def logp(self, hidden: torch.Tensor, target_ids: torch.Tensor, **options: Any) -> torch.Tensor | LogpStats:
        """Return ``linear_logp`` over the whole vocabulary; ``options`` are passed to it."""
        ranks = _ranks_of(self)
        shard_options: dict[str, Any] = {"vocab_segments": SEGMENTS}
        if ranks.size > 1:
            shard_options |= {"process_group": ranks.group, "vocab_size": self.vocab_size}
        result: torch.Tensor | LogpStats = linear_logp(
            hidden, self.weight, target_ids, self.bias, **shard_options, **options
        )
        return result


@functools.cache
def cut_norm(base: type[nn.Module], dim: int) -> type[nn.Module]:
    """Return the subclass of a norm whose rows are cut over ranks along ``TOKENS`` (if tokens are cut) or ``HEADS``."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        ranks: Ranks = getattr(self, SHARED)
        is_cut = ranks.tokens_cut if dim == TOKENS else ranks.size > 1
        return _forward_cut_norm(self, base.forward, x, ranks, dim) if is_cut else base.forward(self, x)

    name = f"{'Token' if dim == TOKENS else 'Head'}Parallel{base.__name__}"
    return type(name, (base,), {"forward": forward, "__module__": base.__module__})


def _forward_cut_norm(
    module: nn.Module, forward: Callable[..., torch.Tensor], x: torch.Tensor, ranks: Ranks, dim: int
) -> torch.Tensor:
    if not (torch.is_grad_enabled() and any(value.requires_grad for value in module.parameters())):
        return forward(module, x)
    assert ranks.group is not None
    return norm_of_part(module, forward, x, ranks.group, dim % x.ndim)
