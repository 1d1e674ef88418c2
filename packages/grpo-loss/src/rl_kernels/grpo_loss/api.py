"""The public functions of the package: validation, dispatch, autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose
from rl_kernels.core.torchlib import define_check, first_order, scalar, scalars, values_hidden
from rl_kernels.grpo_loss.groups import Groups, groups_of
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops
from rl_kernels.grpo_loss.outputs import GRPOLossOutput

MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *check.FLOATS)
NO_GROUPS = Groups(None, 0)


def grpo_loss(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    clip_eps: float = 0.2,
    beta: float = 0.0,
    eps: float = 1e-6,
    validate: bool = True,
    backend: str | None = None,
) -> GRPOLossOutput:
    """Return the GRPO loss of B completions of up to T tokens, with advantages from the rewards of each group.

    The mean over active tokens of ``-min(ratio A, clamp(ratio, 1 - clip_eps, 1 + clip_eps) A) + beta k3``, where
    ``ratio = exp(current - old)``, ``k3 = exp(e) - e - 1`` with ``e = ref - current``, and A is the advantage of the
    completion, as ``group_advantages`` gives it. All masked: 0, with zero gradient. Worked in FP32, in FP64 if
    current_logps is FP64. Right padding, what masked positions hold, and masked completions at the end change no bit.

    Args:
        current_logps: ``[B, T]``, log-probabilities of the policy being trained, FP32, BF16, FP16 or FP64, any strides;
            the only differentiable argument.
        old_logps: ``[B, T]``, of the policy that sampled, any of those dtypes; None means on-policy: ratio 1,
            gradient -A.
        ref_logps: ``[B, T]``, of the reference policy, any of those dtypes. Not read with ``beta == 0``, and may then
            be None.
        rewards: ``[B]``, any of those dtypes.
        completion_mask: ``[B, T]``, bool, or 0 and 1 of another dtype; 1 is an active token.
        samples_per_prompt: size of every group, at least 2, a divisor of B. Either this or group_boundaries.
        group_boundaries: offsets of the groups, ``[G + 1]``, integers as a sequence or a tensor (on the CPU or the
            device of the rewards): from 0 to B, strictly increasing. A group may have one member.
        clip_eps: half-width of the clipping range, >= 0. A tie takes the unclipped branch.
        beta: weight of the KL, >= 0.
        eps: the least standard deviation that advantages are divided by, > 0.
        validate: check that a mask that is not bool holds 0 and 1, and the values of boundaries on a GPU, which syncs
            with it; skipped under torch.compile and graph capture. Unchecked, any value but 0 is active, and offsets
            outside ``[0, B]`` are clamped.
        backend: name of a backend, ``auto``, or None for what is forced elsewhere, if anything.

    Returns:
        ``GRPOLossOutput(loss, policy_loss, kl)``, scalars, FP32 (FP64 if current_logps is FP64); gradients flow through
        ``loss`` alone.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
    """
    check.tensor("current_logps", current_logps, check.FLOATS, ndim=2)
    _validate_rewards(rewards, eps)
    check.shape("rewards", rewards, current_logps.shape[:1], "one a sequence of current_logps")
    check.same_device(current_logps=current_logps, rewards=rewards)
    _validate_tokens(current_logps, old_logps, ref_logps, completion_mask, clip_eps, beta, validate)
    check.backend_name(backend)
    groups = groups_of(rewards, samples_per_prompt, group_boundaries, values=validate)
    chosen = choose(OPERATOR, describe(current_logps), backend).name
    scores = (rewards.detach(), *groups, None)
    return _loss(current_logps, old_logps, ref_logps, scores, completion_mask, (clip_eps, beta, eps), chosen)


def grpo_loss_from_advantages(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    clip_eps: float = 0.2,
    beta: float = 0.0,
    validate: bool = True,
    backend: str | None = None,
) -> GRPOLossOutput:
    """Return the GRPO loss for given advantages; all else as in ``grpo_loss``, of which this is the second half.

    Args:
        current_logps: ``[B, T]``; the only differentiable argument.
        old_logps: ``[B, T]`` or None.
        ref_logps: ``[B, T]``, or None with ``beta == 0``.
        advantages: ``[B]``, one a completion, or ``[B, T]``, one a token; FP32, BF16, FP16 or FP64.
        completion_mask: ``[B, T]``.
        clip_eps: >= 0.
        beta: >= 0.
        validate: as in ``grpo_loss``.
        backend: as in ``grpo_loss``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
    """
    check.tensor("current_logps", current_logps, check.FLOATS, ndim=2)
    check.tensor("advantages", advantages, check.FLOATS, least=1)
    wanted = current_logps.shape[:1] if advantages.ndim == 1 else current_logps.shape
    check.shape("advantages", advantages, wanted, "one a sequence, or one a token, of current_logps")
    check.same_device(current_logps=current_logps, advantages=advantages)
    _validate_tokens(current_logps, old_logps, ref_logps, completion_mask, clip_eps, beta, validate)
    check.backend_name(backend)
    chosen = choose(OPERATOR, describe(current_logps), backend).name
    scores = (None, *NO_GROUPS, advantages.detach())
    return _loss(current_logps, old_logps, ref_logps, scores, completion_mask, (clip_eps, beta, 0.0), chosen)


def group_advantages(
    rewards: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    eps: float = 1e-6,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the advantage of each completion in its group: ``(r - mean) / max(std, eps)``, population std.

    Mean and deviations are taken in two passes, in FP64, so that a large offset of the rewards costs nothing. A group
    whose rewards are all equal, or of one member, gives exactly 0; one with a NaN gives NaN, and no other group does.
    An advantage depends on its group alone, bit for bit.

    Args:
        rewards: ``[B]``, FP32, BF16, FP16 or FP64; no gradient flows to them.
        samples_per_prompt: as in ``grpo_loss``.
        group_boundaries: as in ``grpo_loss``.
        eps: > 0.
        validate: as in ``grpo_loss``.
        backend: as in ``grpo_loss``.

    Returns:
        ``[B]``, FP32, or FP64 for FP64 rewards.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
    """
    _validate_rewards(rewards, eps)
    check.backend_name(backend)
    groups = groups_of(rewards, samples_per_prompt, group_boundaries, values=validate)
    chosen = choose(OPERATOR, describe(rewards), backend).name
    return ops["advantages"](rewards.detach(), *groups, scalar(eps, torch.float64), chosen)


def _validate_rewards(rewards: torch.Tensor, eps: float) -> None:
    check.tensor("rewards", rewards, check.FLOATS, ndim=1)
    check.number("eps", eps, above=0)


def _validate_tokens(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    mask: torch.Tensor,
    clip_eps: float,
    beta: float,
    values: bool,
) -> None:
    check.number("clip_eps", clip_eps, least=0)
    check.number("beta", beta, least=0)
    if ref_logps is None and beta > 0:
        raise ValueError(f"ref_logps: expected a tensor with beta > 0 (beta is {beta}), got None")
    for name, value in (("old_logps", old_logps), ("ref_logps", ref_logps)):
        if value is not None:
            check.tensor(name, value, check.FLOATS)
            check.shape(name, value, current_logps.shape, "that of current_logps")
    check.tensor("completion_mask", mask, MASKS)
    check.shape("completion_mask", mask, current_logps.shape, "that of current_logps")
    check.same_device(current_logps=current_logps, old_logps=old_logps, ref_logps=ref_logps, completion_mask=mask)
    if values and mask.dtype != torch.bool and not values_hidden(mask):
        _check_mask(mask)


def _zero_or_one(mask: torch.Tensor) -> None:
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise ValueError(f"completion_mask: expected values 0 and 1, got {wrong[0].item()}")


_check_mask = define_check("check_completion_mask", "(Tensor mask)", _zero_or_one)


def _loss(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    scores: tuple[torch.Tensor | None, torch.Tensor | None, int, torch.Tensor | None],
    mask: torch.Tensor,
    numbers: tuple[float, float, float],
    backend: str,
) -> GRPOLossOutput:
    """Run the raw op: ``scores`` are rewards, their groups and advantages, ``numbers`` clip_eps, beta and eps."""
    old = None if old_logps is None else old_logps.detach()
    ref = None if ref_logps is None or numbers[1] == 0 else ref_logps.detach()
    others = (old, ref, *scores, mask.detach(), scalars(*numbers), backend)
    if current_logps.requires_grad and torch.is_grad_enabled():
        return GRPOLossOutput(*_GRPOLoss.apply(current_logps, others))
    return GRPOLossOutput(*ops["forward"](current_logps, *others))


class _GRPOLoss(torch.autograd.Function):
    """Saves the slope that the forward writes and what divides it; gradients flow to current_logps alone.

    The other arguments come as one, so that autograd need not look at each.
    """

    @staticmethod
    def forward(ctx: Any, current_logps: torch.Tensor, others: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        loss, policy_loss, kl, count, slope = ops["forward_grad"](current_logps, *others)
        # current_logps is saved for the graph's sake alone: without it a second derivative would be silently 0.
        ctx.save_for_backward(current_logps, count, slope)
        ctx.mark_non_differentiable(policy_loss, kl)
        ctx.set_materialize_grads(False)
        ctx.backend = others[-1]
        return loss, policy_loss, kl

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, None]:
        if upstream is None:
            return None, None
        return first_order(ops["backward"], *ctx.saved_tensors, upstream, ctx.backend), None
