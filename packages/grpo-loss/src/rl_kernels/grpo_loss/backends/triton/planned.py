"""The fast host path of the plain loss: planned once for arguments of one layout."""

from __future__ import annotations

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.torchlib.observed import are_plain
from rl_kernels.core.triton_lib.launch import Launch
from rl_kernels.grpo_loss.backends.triton.groups import Scores, scores_of_call
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
from rl_kernels.grpo_loss.call import LossCall


class Planned:
    """The plain loss for arguments with the layout and the numbers of the given call."""

    def __init__(self, call: LossCall, scores: Scores) -> None:
        current = call.current_logps
        batch, length = self._shape = current.shape
        self._dtype, self._has_ref = current.dtype, call.ref_logps is not None
        self._sums = segments_of(length), 3, batch
        work = terms_work(call, scores, (current, call.old_logps, call.ref_logps, call.mask, scores.values))
        # Two launches: each must get tensors at the same argument positions every time.
        self._terms, self._terms_and_slope = (Launch(plain_terms, work.grid, **work.options) for _ in range(2))
        work = sum_work(call)
        self._sum = Launch(plain_sum, work.grid, **work.options)
        work = gradient_work(current.numel())
        self._scale = Launch(plain_gradient, work.grid, **work.options)

    def forward(
        self,
        current_logps: torch.Tensor,
        old_logps: torch.Tensor | None,
        ref_logps: torch.Tensor | None,
        scores: torch.Tensor,
        mask: torch.Tensor,
        needs_slope: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (loss, policy_loss, kl, count, slope); slope is None unless ``needs_slope``."""
        sums = current_logps.new_empty(self._sums, dtype=torch.float32)
        loss, policy_loss, kl, count = (sums.new_empty(()) for _ in range(4))
        slope = sums.new_empty(self._shape) if needs_slope else None
        terms = self._terms_and_slope if needs_slope else self._terms
        with device_of(sums):
            ref = ref_logps if self._has_ref else None
            terms(current_logps, old_logps, ref, mask, scores, None, sums, slope)
            self._sum(sums, loss, policy_loss, kl, count)
        return loss, policy_loss, kl, count, slope

    def backward(
        self,
        current_logps: torch.Tensor,
        count: torch.Tensor,
        slope: torch.Tensor,
        upstream: torch.Tensor,
        *,
        overwrite: bool,
    ) -> torch.Tensor | None:
        """Return the gradient, or None without a launch if a saved-tensor hook changed the tensors.

        With ``overwrite`` an FP32 gradient takes the place of the slope.
        """
        tensors = (current_logps, count, slope, upstream)
        if not are_plain(*tensors) or current_logps.dtype != self._dtype:
            return None
        if slope.shape != self._shape or not slope.is_contiguous() or count.numel() != 1 or upstream.numel() != 1:
            return None
        if not all([x.dtype == torch.float32 and x.device == current_logps.device for x in tensors[1:]]):
            return None
        grad = slope if overwrite and self._dtype == torch.float32 else current_logps.new_empty(self._shape)
        with device_of(grad):
            self._scale(slope, count, upstream, grad)
        return grad


def planned(call: LossCall) -> Planned | None:
    """Return a plan for calls like this one; None if it has no plain loss, needs a copy, or launches nothing."""
    if not is_plain(call) or not call.current_logps.numel() or call.boundaries is not None:
        return None
    scores = scores_of_call(call)
    score_values = call.rewards if call.rewards is not None else call.advantages
    tensors = (call.current_logps, call.old_logps, call.ref_logps, call.mask, score_values)
    has_planned_layout = all(rows_of(x) is x for x in tensors)
    return Planned(call, scores) if has_planned_layout and scores.values is score_values else None
