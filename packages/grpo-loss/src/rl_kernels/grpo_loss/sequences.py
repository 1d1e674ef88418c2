"""The public function ``sequence_losses``: the loss as one number for each sequence."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.calls import Ready
from rl_kernels.core.saved import are_hooked, save
from rl_kernels.core.torchlib.derivatives import apply_of, first_order, may_overwrite
from rl_kernels.grpo_loss.call import UNSET, LossCall
from rl_kernels.grpo_loss.extras import NO_EXTRAS, NO_NORMALIZER, Extras, Normalizer, value_or_default
from rl_kernels.grpo_loss.loss import checked_call
from rl_kernels.grpo_loss.objective import Objective, with_overrides
from rl_kernels.grpo_loss.op import ops


def sequence_losses(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    objective: Objective | None = None,
    loss_type: str | None = None,
    beta: float | None = None,
    clip_eps: float | None = None,
    extras: Extras | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    normalizer: Normalizer | None = None,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the share of each sequence in the loss of ``grpo_loss_from_advantages``; the shares add up to that loss.

    With a ``normalizer`` a sequence's number and its gradient depend on that sequence alone, bit for bit, so a batch
    may be cut into chunks of whole sequences, as ``linear_logp_loss`` does. Gradients are those of
    ``grpo_loss_from_advantages``, bit for bit.

    Args:
        current_logps: ``[B, T]``, as all arguments that follow, as in ``grpo_loss_from_advantages``.
        old_logps: ``[B, T]``, or None.
        ref_logps: ``[B, T]``, or None with ``beta == 0``.
        advantages: ``[B]`` or ``[B, T]``.
        completion_mask: ``[B, T]``.
        objective: the loss; the next three arguments override its options.
        loss_type: as in ``Objective``.
        beta: as in ``Objective``.
        clip_eps: >= 0.
        extras: rollout ratio.
        cu_seqlens: as in ``grpo_loss``, and so is ``max_seqlen``.
        max_seqlen: the longest sequence.
        normalizer: the count that the sums are divided by; by default the count of this call. Give the counts of all
            ranks, if there are several.
        validate: check the values of the mask, of offsets, and of a normalizer that is a tensor; on a GPU each of these
            checks syncs.
        backend: name of a backend, ``auto``, or None.

    Returns:
        ``[B]``, FP32 (FP64 if current_logps is FP64), differentiable.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, or gradients through a ``torch.func`` transform.
    """
    tensors = current_logps, old_logps, ref_logps, None, None, None, advantages, completion_mask
    more = *value_or_default("extras", extras, NO_EXTRAS), None, cu_seqlens, max_seqlen
    inputs = LossCall._make((*tensors, *more, *UNSET))
    objective = with_overrides(objective, loss_type, beta, clip_eps)
    options = value_or_default("normalizer", normalizer, NO_NORMALIZER), False, validate, backend
    call, ready = checked_call("sequence_losses", "sums", inputs, objective, *options)
    if current_logps.requires_grad and torch.is_grad_enabled():
        losses: torch.Tensor = apply_of(_SequenceLosses, ready)(current_logps, tuple(call[1:]), ready)
        return losses
    return _losses(ops["sums"].call(ready, *call), call, ready.backend)[0]


def _losses(sums: torch.Tensor, call: LossCall, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each sequence, and the divisor of all."""
    *_, divisor = ops["combine"](sums, call.normalizer, call.length, call.numbers, call.plan, backend)
    policy, kl, counts = sums
    if call.formula.mean == "sequences":
        policy, kl = policy / counts.clamp(min=1), kl / counts.clamp(min=1)
    return policy / divisor + call.values.beta * (kl / divisor), divisor


class _SequenceLosses(torch.autograd.Function):
    """Saves the slope and the divisor that forward computes; only current_logps gets a gradient."""

    @staticmethod
    def forward(ctx: Any, current_logps: torch.Tensor, arguments: tuple[Any, ...], ready: Ready) -> torch.Tensor:
        """Return the losses ``[B]``."""
        call = LossCall(current_logps, *arguments)
        sums, slope = ops["sums_grad"].call(ready, *call)
        losses, divisor = _losses(sums, call, ready.backend)
        # current_logps is saved only to stay in the graph: otherwise a second derivative would silently be 0.
        save(ctx, current_logps, divisor, slope, call.cu_seqlens)
        ctx.owns_slope = not are_hooked()
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of current_logps, with one upstream gradient a sequence."""
        return first_order(_gradient, *ctx.saved_tensors, upstream, ctx.owns_slope), None, None


def _gradient(
    current_logps: torch.Tensor,
    divisor: torch.Tensor,
    slope: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    upstream: torch.Tensor,
    owns_slope: bool,
) -> torch.Tensor:
    """Return the gradient, as the raw op ``backward`` computes it; 0 at masked tokens for any upstream gradient."""
    factors = upstream.to(slope.dtype) / divisor
    if cu_seqlens is None:
        factors = factors[:, None]
    else:
        # The sequence of each token. Offsets that are not checked may be out of range.
        place = torch.arange(slope.shape[0], device=slope.device)
        row = torch.bucketize(place, cu_seqlens[1:-1].long().contiguous(), right=True)
        factors = factors[row]
    masked = (slope == 0) & slope.signbit()
    if current_logps.dtype == slope.dtype and owns_slope and may_overwrite(slope):
        return slope.mul_(factors).masked_fill_(masked, 0.0)
    return torch.where(masked, 0.0, slope * factors).to(current_logps.dtype)
