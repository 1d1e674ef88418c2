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

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.triton_lib.launch import Launch, ceil_div
from rl_kernels.grpo_loss.backends.triton.groups import advantages
from rl_kernels.grpo_loss.backends.triton.losses import prepare_loss, prepare_total
from rl_kernels.grpo_loss.backends.triton.plain import plain_gradient
from rl_kernels.grpo_loss.call import Formula, LossCall

__all__ = [
    "advantages",
    "backward",
    "backward_inplace",
    "combine",
    "forward",
    "forward_grad",
    "sums",
    "sums_grad",
]

GRADIENT_BLOCK, GRADIENT_WARPS = 1024, 4
"""Tokens that one program of the backward pass scales, and its warps: element by element, so they change no bit."""


@prepared
def forward(*arguments: Any) -> Launches:
    """Return (loss, policy_loss, kl, metrics); the first three are scalars."""
    return prepare_loss(LossCall(*arguments), has_slope=False, has_total=True)


@prepared
def forward_grad(*arguments: Any) -> Launches:
    """Return (loss, policy_loss, kl, metrics, count, slope); slope has the shape of current_logps."""
    return prepare_loss(LossCall(*arguments), has_slope=True, has_total=True)


@prepared
def sums(*arguments: Any) -> Launches:
    """Return the sums of each sequence, ``[3, B]``, or ``[14, B]`` with metrics."""
    return prepare_loss(LossCall(*arguments), has_slope=False, has_total=False)


@prepared
def sums_grad(*arguments: Any) -> Launches:
    """Return (sums, slope); slope has the shape of current_logps."""
    return prepare_loss(LossCall(*arguments), has_slope=True, has_total=False)


@prepared
def combine(
    sums: torch.Tensor, normalizer: torch.Tensor | None, length: int, numbers: torch.Tensor, plan: str
) -> Launches:
    """Return (loss, policy_loss, kl, metrics, count) of the sequences whose sums are given."""
    return prepare_total(sums, length, Formula.parse(plan))


@prepared
def backward(current_logps: torch.Tensor, count: torch.Tensor, slope: torch.Tensor, upstream: torch.Tensor) -> Launches:
    """Return the gradient in the dtype of current_logps; 0 at masked positions for any upstream gradient."""
    size, scale, fits = slope.numel(), _scale(slope), slope.is_contiguous()

    def launch(
        current_logps: torch.Tensor, count: torch.Tensor, slope: torch.Tensor, upstream: torch.Tensor
    ) -> torch.Tensor:
        grad = current_logps.new_empty(current_logps.shape)
        if size:
            with device_of(grad):
                scale(readable(slope, fits), count, upstream, grad)
        return grad

    return launch


@prepared
def backward_inplace(slope: torch.Tensor, count: torch.Tensor, upstream: torch.Tensor) -> Launches:
    """Write the gradient, as ``backward`` returns it in FP32, over a contiguous slope."""
    size, scale = slope.numel(), _scale(slope)

    def launch(slope: torch.Tensor, count: torch.Tensor, upstream: torch.Tensor) -> None:
        if size:
            with device_of(slope):
                scale(slope, count, upstream, slope)

    return launch


def _scale(slope: torch.Tensor) -> Launch:
    size = slope.numel()
    return Launch(plain_gradient, (ceil_div(size, GRADIENT_BLOCK),), (size, GRADIENT_BLOCK), num_warps=GRADIENT_WARPS)
