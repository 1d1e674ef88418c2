"""grpo_loss in Triton: every token is read once, in three launches: the terms, their sum, and the gradient.

Reduction order, which is the contract of this backend: a sequence is cut into segments of 4096 tokens from its start.
Token i of a segment is added to lane i mod 256, in ascending order, and a tree adds the lanes; the segments of a
sequence are added in ascending order. Sequence sums are added in the same way, sequence i to lane i mod 256, and so are
the rewards of a group, in FP64 and from the group's start. The trees are explicit, four neighbors first and then
halves, so no bit depends on the compiler's layout, on strides, addresses or the number of warps. Nor does the number of
lanes change a bit if there are at least as many lanes as terms: unused lanes hold zeros. Masked tokens are zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import launch
from rl_kernels.grpo_loss.backends.triton.groups import Scores, advantages, scores_of_call
from rl_kernels.grpo_loss.backends.triton.objectives import SUMS, loss_of, results_of, segment_sums
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
from rl_kernels.grpo_loss.backends.triton.reduce import FIRST_METRIC, LEAST, MOST
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.plan import Formula, Numbers

__all__ = [
    "advantages",
    "backward",
    "backward_inplace",
    "combine",
    "forward",
    "forward_grad",
    "planned",
    "sums",
    "sums_grad",
]


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
    _scale(slope.contiguous(), count, upstream, grad)
    return grad


def backward_inplace(slope: torch.Tensor, count: torch.Tensor, upstream: torch.Tensor) -> None:
    """Write the gradient, as ``backward`` returns it in FP32, over a contiguous slope."""
    _scale(slope, count, upstream, slope)


def _scale(slope: torch.Tensor, count: torch.Tensor, upstream: torch.Tensor, grad: torch.Tensor) -> None:
    if grad.numel():
        with device_of(grad):
            work = gradient_work(grad.numel())
            launch(plain_gradient, work.grid, slope, count, upstream, grad, **work.options)


def sums(*arguments: Any) -> torch.Tensor:
    """Return the sums of each sequence, ``[3, B]``, or ``[14, B]`` with metrics."""
    return _sums(LossCall(*arguments), None)


def sums_grad(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sums, slope); slope has the shape of current_logps."""
    call = LossCall(*arguments)
    slope = torch.empty(call.current_logps.shape, dtype=torch.float32, device=call.current_logps.device)
    return _sums(call, slope), slope


def combine(
    sums: torch.Tensor, normalizer: torch.Tensor | None, length: int, numbers: torch.Tensor, plan: str
) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics, count) of the sequences whose sums are given."""
    return results_of(sums.contiguous()[None], normalizer, length, Numbers(*numbers.tolist()), Formula.parse(plan))


def _sums(call: LossCall, slope: torch.Tensor | None) -> torch.Tensor:
    """Return the sums of each sequence; write ``slope`` unless it is None."""
    scores = scores_of_call(call)
    if not is_plain(call):
        return _add_segments(segment_sums(call, scores, slope))
    current = call.current_logps
    batch, length = current.shape
    # Without a reference the kernel writes no KL.
    sums = torch.zeros((segments_of(length), SUMS, batch), dtype=torch.float32, device=current.device)
    if batch and length:
        _launch_terms(call, scores, sums, slope)
    return _add_segments(sums)


def _add_segments(sums: torch.Tensor) -> torch.Tensor:
    """Add the segments of each sequence in ascending order; return its sums, ``[quantities, B]``."""
    if sums.shape[0] == 1:
        return sums[0]
    total = sums.new_zeros(sums.shape[1:])
    for segment in sums:
        total = total + segment
    if sums.shape[1] > SUMS:
        least, most = FIRST_METRIC.value + LEAST.value, FIRST_METRIC.value + MOST.value
        total[least], total[most] = sums[:, least].amin(0), sums[:, most].amax(0)
    return total


def _launch_terms(call: LossCall, scores: Scores, sums: torch.Tensor, slope: torch.Tensor | None) -> None:
    current = call.current_logps
    tensors = [rows_of(x) for x in (current, call.old_logps, call.ref_logps, call.mask, scores.values)]
    work = terms_work(call, scores, tensors)
    with device_of(current):
        launch(plain_terms, work.grid, *tensors, scores.boundaries, sums, slope, **work.options)


def _loss(call: LossCall, slope: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics, count); write ``slope`` unless it is None."""
    current = call.current_logps
    scores = scores_of_call(call)
    if not is_plain(call):
        return loss_of(call, scores, slope)
    batch, length = current.shape
    sums = torch.empty((segments_of(length), 3, batch), dtype=torch.float32, device=current.device)
    loss = sums.new_empty(())
    policy_loss, kl, count = torch.empty_like(loss), torch.empty_like(loss), torch.empty_like(loss)
    if batch and length:
        _launch_terms(call, scores, sums, slope)
    with device_of(current):
        work = sum_work(call)
        launch(plain_sum, work.grid, sums, loss, policy_loss, kl, count, **work.options)
    return loss, policy_loss, kl, sums.new_empty(0), count
