"""The norm of all gradients of a parallel model."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rl_kernels.core import validate as check
from rl_kernels.models.data_parallel import norm_of, row_squares, scale
from rl_kernels.models.parallel.states import cuts_of, gathered


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale gradients so that their common 2-norm is at most ``max_norm``; return the norm before, equal on all ranks.

    Gradients of cut weights are gathered one by one. The norm has the bits of one process, whose model went through
    ``parallelize`` too. All ranks must call it.

    Args:
        model: after ``parallelize``, not sharded by FSDP2.
        max_norm: > 0.

    Raises:
        TypeError, ValueError: ``max_norm`` is not such a number, or FSDP2 shards a gradient.
    """
    check.number("max_norm", max_norm, above=0)
    cuts, grads, rows = dict(cuts_of(model)), [], []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if isinstance(parameter.grad, DTensor):
            raise ValueError(f"model: expected gradients that FSDP2 does not shard, that of {name} is a DTensor")
        whole = gathered(parameter.grad, cuts[name]) if name in cuts else parameter.grad
        rows.append(row_squares(whole))
        grads.append(parameter.grad)
    norm = norm_of(rows)
    scale(grads, norm, max_norm)
    return norm
