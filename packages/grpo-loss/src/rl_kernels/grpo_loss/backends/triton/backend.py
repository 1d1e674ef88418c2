"""grpo_loss in Triton: every token is read once; three launches, of the terms, of their sum and of the gradient.

Order of the sums, which is the contract of this backend: a sequence is cut into segments of 4096 tokens from its
start. Token i of a segment is added to lane i mod 256, ascending, and the lanes are added by a tree; a sequence's
segments are added in ascending order. Sequence i is added to lane i mod 256 too, and these lanes by a tree, and so are
the rewards of a group, counted from its start, in FP64. Trees are explicit, four neighbours first and then halves: no
bit follows how a compiler lays values out, so none follows strides, addresses or the number of warps; nor does one
follow the number of lanes where it is that of the terms at least, as the others are zeros. Masked tokens are zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import launch
from rl_kernels.grpo_loss.backends.triton.groups import advantages, scores_in
from rl_kernels.grpo_loss.backends.triton.objectives import loss_of
from rl_kernels.grpo_loss.backends.triton.plain import (
    gradient_work,
    is_plain,
    plain_gradient,
    plain_sum,
    plain_terms,
    rows_of,
    segments_of,
    sum_work,
    terms_work,
)
from rl_kernels.grpo_loss.backends.triton.planned import planned
from rl_kernels.grpo_loss.call import LossCall

__all__ = ["advantages", "backward", "forward", "forward_grad", "planned"]


def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics), scalars but the metrics, which are empty."""
    *results, _ = _loss(LossCall(*arguments), None)
    return tuple(results)


def forward_grad(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics, count, slope), the last ``[B, T]``, -0 at masked tokens."""
    call = LossCall(*arguments)
    slope = torch.empty(call.current_logps.shape, dtype=torch.float32, device=call.current_logps.device)
    return *_loss(call, slope), slope


def backward(
    current_logps: torch.Tensor, count: torch.Tensor, slope: torch.Tensor, upstream: torch.Tensor
) -> torch.Tensor:
    """Return the gradient in the dtype of current_logps; 0 at masked positions, whatever the upstream gradient."""
    grad = torch.empty(current_logps.shape, dtype=current_logps.dtype, device=current_logps.device)
    if grad.numel():
        with device_of(grad):
            work = gradient_work(grad.numel())
            launch(plain_gradient, work.grid, slope.contiguous(), count, upstream, grad, **work.options)
    return grad


def _loss(call: LossCall, slope: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics, count) and write the slope, if it is wanted."""
    current, old, ref, mask = call.current_logps, call.old_logps, call.ref_logps, call.mask
    scores = scores_in(call)
    if not is_plain(call):
        return loss_of(call, scores, slope)
    batch, length = current.shape
    sums = torch.empty((segments_of(length), 3, batch), dtype=torch.float32, device=current.device)
    loss = sums.new_empty(())
    policy_loss, kl, count = torch.empty_like(loss), torch.empty_like(loss), torch.empty_like(loss)
    with device_of(current):
        if batch and length:
            tensors = [rows_of(x) for x in (current, old, ref, mask, scores.values)]
            work = terms_work(call, scores, tensors)
            launch(plain_terms, work.grid, *tensors, scores.boundaries, sums, slope, **work.options)
        work = sum_work(call)
        launch(plain_sum, work.grid, sums, loss, policy_loss, kl, count, **work.options)
    return loss, policy_loss, kl, sums.new_empty(0), count
