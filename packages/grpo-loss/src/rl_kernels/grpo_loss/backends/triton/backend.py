"""grpo_loss in Triton: every token is read once, in three launches: the terms, their sum, and the gradient.

Reduction order, which is the contract of this backend: a sequence is cut into segments of 4096 tokens from its start.
Token i of a segment is added to lane i mod 256, in ascending order, and a tree adds the lanes; the segments of a
sequence are added in ascending order. Sequence sums are added in the same way, sequence i to lane i mod 256, and so are
the rewards of a group, in FP64 and from the group's start. The trees are explicit, four neighbours first and then
halves, so no bit depends on the compiler's layout, on strides, addresses or the number of warps. Nor does the number of
lanes change a bit if there are at least as many lanes as terms: the others are zeros. Masked tokens are zeros.
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
    """Return (loss, policy_loss, kl, metrics); the first three are scalars."""
    *results, _ = _loss(LossCall(*arguments), None)
    return tuple(results)


def forward_grad(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics, count, slope); slope has the shape of current_logps."""
    call = LossCall(*arguments)
    slope = torch.empty(call.current_logps.shape, dtype=torch.float32, device=call.current_logps.device)
    return *_loss(call, slope), slope


def backward(
    current_logps: torch.Tensor, count: torch.Tensor, slope: torch.Tensor, upstream: torch.Tensor
) -> torch.Tensor:
    """Return the gradient in the dtype of current_logps; 0 at masked positions for any upstream gradient."""
    grad = torch.empty(current_logps.shape, dtype=current_logps.dtype, device=current_logps.device)
    if grad.numel():
        with device_of(grad):
            work = gradient_work(grad.numel())
            launch(plain_gradient, work.grid, slope.contiguous(), count, upstream, grad, **work.options)
    return grad


def _loss(call: LossCall, slope: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics, count); write ``slope`` unless it is None."""
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
