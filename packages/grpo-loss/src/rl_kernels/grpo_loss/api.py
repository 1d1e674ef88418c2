"""The public functions of the package: validation and dispatch; ``objective`` checks the keywords of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose
from rl_kernels.core.torchlib import no_lost_derivatives, scalar
from rl_kernels.grpo_loss.arguments import Layout
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.groups import Groups, groups_of
from rl_kernels.grpo_loss.objective import Objective
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops
from rl_kernels.grpo_loss.run import Options, Tokens, prepare

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
    eps: float = 1e-6,
    advantage_estimator: str = "population",
    eps_placement: str = "max",
    skip_nan: bool = False,
    clip_eps: float | None = None,
    beta: float = 0.0,
    loss_type: str = "bnpo",
    clip_low: float | None = None,
    clip_high: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
    cispo_floor: float = 0.0,
    cispo_cap: float = 5.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    importance_level: str | None = None,
    kl_estimator: str = "k3",
    kl_correction: bool = False,
    rollout_ratio: torch.Tensor | None = None,
    rollout_mode: str | None = None,
    rollout_min: float | None = None,
    rollout_max: float | None = None,
    num_tokens: float | torch.Tensor | None = None,
    num_sequences: float | torch.Tensor | None = None,
    max_completion_length: int | None = None,
    entropy: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    return_metrics: bool = False,
    validate: bool = True,
    backend: str | None = None,
) -> Any:
    """Return the policy loss of B completions of up to T tokens, with advantages from the rewards of each group.

    By default the mean over active tokens of ``-min(ratio A, clamp(ratio, 1 - clip_low, 1 + clip_high) A) + beta k3``,
    where ``ratio = exp(current - old)``, ``k3 = exp(e) - e - 1`` with ``e = ref - current``, and A is the advantage of
    the completion, as ``group_advantages`` gives it. ``loss_type`` chooses another objective: docs/objectives.md has
    each formula, ``preset`` those of frameworks. All masked: 0, with zero gradient. Worked in FP32, in FP64 if
    current_logps is FP64. What masked positions hold changes no bit, nor do right padding and masked completions at the
    end, unless the divisor counts them.

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
        eps: as in ``group_advantages``, with the three that follow.
        advantage_estimator: ``population``, ``sample``, ``leave_one_out``, ``none`` or ``batch``.
        eps_placement: ``max`` or ``add``.
        skip_nan: leave members whose reward is NaN out of their group.
        clip_eps: clip_low and clip_high in one, >= 0; 0.2 if none of the three is given. A tie takes the unclipped
            branch.
        beta: weight of the KL, >= 0.
        loss_type: ``bnpo``, ``dapo``, ``ppo``, ``cispo``, ``vespo``, ``reinforce``: divided by tokens; ``grpo``,
            ``gspo``, ``sapo``: means of each sequence's mean; ``dr_grpo``, ``luspo``: of each sequence's sum.
        clip_low: the ratio is clipped at 1 - clip_low, >= 0.
        clip_high: and at 1 + clip_high, >= 0.
        delta: a cap of the ratio in the unclipped branch too, > 0, for types that clip.
        dual_clip: of ``ppo``: where A < 0 a term is at most ``-dual_clip A``; > 1.
        cispo_floor: least weight of a token in ``cispo``, >= 0.
        cispo_cap: greatest one, the ratio itself and no offset; > 0.
        sapo_temperature_pos: of the gate of ``sapo`` where A > 0; > 0.
        sapo_temperature_neg: elsewhere.
        vespo_k_pos: power of the weight of ``vespo`` where A >= 0; >= 0.
        vespo_lambda_pos: its decay there, > 0.
        vespo_k_neg: power elsewhere.
        vespo_lambda_neg: decay elsewhere.
        importance_level: ``token``, or ``sequence``: one ratio a sequence, exp of the mean of its log-ratios. By
            default ``sequence`` for ``gspo``, which has no other, and ``token`` for all others.
        kl_estimator: ``k1`` (-e), ``k2`` (e^2 / 2) or ``k3``.
        kl_correction: weight the KL estimate by the ratio, whose gradient it then has.
        rollout_ratio: ``[B]`` or ``[B, T]``, probability under old over that under the sampler; multiplies the policy
            term, and joins the weight of ``vespo``.
        rollout_mode: ``truncate`` it to the range of the next two, or ``mask`` (0) what lies outside; None takes it as
            it is.
        rollout_min: >= 0.
        rollout_max: >= 0.
        num_tokens: what a token mean is divided by in place of the batch's active tokens: a number >= 1 or a tensor
            without dims on the device, so that losses of micro-batches add up to that of all.
        num_sequences: the same for types that are means over sequences, > 0; by default B, masked ones too.
        max_completion_length: what ``dr_grpo`` divides by too; by default T.
        entropy: ``[B, T]``, for the metrics alone.
        cu_seqlens: offsets ``[B + 1]`` of packed sequences, int32 or int64: what is ``[B, T]`` above is ``[total]``.
        max_seqlen: T of packed sequences; by default their longest, which a GPU must be waited for.
        return_metrics: return ``LossAndMetrics`` in place of the loss.
        validate: check that a mask that is not bool holds 0 and 1, and the values of offsets on a GPU, which syncs
            with it; skipped under torch.compile and graph capture. Unchecked, any value but 0 is active, and offsets
            outside of their range are clamped.
        backend: name of a backend, ``auto``, or None for what is forced elsewhere, if anything.

    Returns:
        ``GRPOLossOutput(loss, policy_loss, kl)``, scalars, FP32 (FP64 if current_logps is FP64); gradients flow through
        ``loss`` alone. With return_metrics ``(GRPOLossOutput, metrics)``: one FP32 vector of the numbers that
        ``METRICS`` names, over active tokens: share clipped below (A < 0) and above (A > 0; the bounds of the weight
        with ``cispo``), mean, least and greatest ratio, the three KL estimates, effective sample size
        ``(sum ratio)^2 / sum ratio^2`` (NaN where a square overflows), how many tokens have a log-probability that is
        not finite, mean entropy; 0 for what is not given, and if no token is active.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
    """
    layout = Layout(current_logps, cu_seqlens, max_seqlen, validate)
    check.tensor("rewards", rewards, check.FLOATS, ndim=1)
    estimator = Estimator.of(advantage_estimator, eps_placement, skip_nan, eps)
    check.shape("rewards", rewards, (layout.batch,), "one a sequence of current_logps")
    check.same_device(current_logps=current_logps, rewards=rewards)
    objective = Objective.of(
        clip_eps=clip_eps,
        beta=beta,
        loss_type=loss_type,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        dual_clip=dual_clip,
        cispo_floor=cispo_floor,
        cispo_cap=cispo_cap,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
        importance_level=importance_level,
        kl_estimator=kl_estimator,
        kl_correction=kl_correction,
        rollout_mode=rollout_mode,
        rollout_min=rollout_min,
        rollout_max=rollout_max,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_completion_length=max_completion_length,
    )
    tokens = Tokens(old_logps, ref_logps, completion_mask, rollout_ratio, entropy)
    options = Options(return_metrics, validate, backend)
    run = prepare(current_logps, tokens, layout, objective, options)
    groups = groups_of(rewards, samples_per_prompt, group_boundaries, values=validate)
    no_lost_derivatives("grpo_loss", current_logps, rewards, *tokens, num_tokens, num_sequences)
    return run((rewards.detach(), *groups, None), estimator, eps)


def grpo_loss_from_advantages(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    clip_eps: float | None = None,
    beta: float = 0.0,
    loss_type: str = "bnpo",
    clip_low: float | None = None,
    clip_high: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
    cispo_floor: float = 0.0,
    cispo_cap: float = 5.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    importance_level: str | None = None,
    kl_estimator: str = "k3",
    kl_correction: bool = False,
    rollout_ratio: torch.Tensor | None = None,
    rollout_mode: str | None = None,
    rollout_min: float | None = None,
    rollout_max: float | None = None,
    num_tokens: float | torch.Tensor | None = None,
    num_sequences: float | torch.Tensor | None = None,
    max_completion_length: int | None = None,
    entropy: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    return_metrics: bool = False,
    validate: bool = True,
    backend: str | None = None,
) -> Any:
    """Return the policy loss for given advantages; all else as in ``grpo_loss``, of which this is the second half.

    Args:
        current_logps: ``[B, T]``; the only differentiable argument.
        old_logps: ``[B, T]`` or None.
        ref_logps: ``[B, T]``, or None with ``beta == 0``.
        advantages: ``[B]``, one a completion, or ``[B, T]``, one a token; FP32, BF16, FP16 or FP64. With packed
            sequences ``[B]`` or ``[total]``, the former if B is total.
        completion_mask: ``[B, T]``.
        clip_eps: as in ``grpo_loss``.
        beta: as in ``grpo_loss``.
        loss_type: as in ``grpo_loss``.
        clip_low: as in ``grpo_loss``.
        clip_high: as in ``grpo_loss``.
        delta: as in ``grpo_loss``.
        dual_clip: as in ``grpo_loss``.
        cispo_floor: as in ``grpo_loss``.
        cispo_cap: as in ``grpo_loss``.
        sapo_temperature_pos: as in ``grpo_loss``.
        sapo_temperature_neg: as in ``grpo_loss``.
        vespo_k_pos: as in ``grpo_loss``.
        vespo_lambda_pos: as in ``grpo_loss``.
        vespo_k_neg: as in ``grpo_loss``.
        vespo_lambda_neg: as in ``grpo_loss``.
        importance_level: as in ``grpo_loss``.
        kl_estimator: as in ``grpo_loss``.
        kl_correction: as in ``grpo_loss``.
        rollout_ratio: as in ``grpo_loss``.
        rollout_mode: as in ``grpo_loss``.
        rollout_min: as in ``grpo_loss``.
        rollout_max: as in ``grpo_loss``.
        num_tokens: as in ``grpo_loss``.
        num_sequences: as in ``grpo_loss``.
        max_completion_length: as in ``grpo_loss``.
        entropy: as in ``grpo_loss``.
        cu_seqlens: as in ``grpo_loss``.
        max_seqlen: as in ``grpo_loss``.
        return_metrics: as in ``grpo_loss``.
        validate: as in ``grpo_loss``.
        backend: as in ``grpo_loss``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
    """
    layout = Layout(current_logps, cu_seqlens, max_seqlen, validate)
    scores = layout.scores("advantages", advantages)
    check.same_device(current_logps=current_logps, advantages=advantages)
    objective = Objective.of(
        clip_eps=clip_eps,
        beta=beta,
        loss_type=loss_type,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        dual_clip=dual_clip,
        cispo_floor=cispo_floor,
        cispo_cap=cispo_cap,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
        importance_level=importance_level,
        kl_estimator=kl_estimator,
        kl_correction=kl_correction,
        rollout_mode=rollout_mode,
        rollout_min=rollout_min,
        rollout_max=rollout_max,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_completion_length=max_completion_length,
    )
    tokens = Tokens(old_logps, ref_logps, completion_mask, rollout_ratio, entropy)
    options = Options(return_metrics, validate, backend)
    run = prepare(current_logps, tokens, layout, objective, options)
    no_lost_derivatives("grpo_loss_from_advantages", current_logps, advantages, *tokens, num_tokens, num_sequences)
    return run((None, *NO_GROUPS, scores), Estimator(), 0.0)


def group_advantages(
    rewards: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    eps: float = 1e-6,
    advantage_estimator: str = "population",
    eps_placement: str = "max",
    skip_nan: bool = False,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the advantage of each completion in its group, by default ``(r - mean) / max(std, eps)``, population std.

    Mean and deviations are taken in two passes, in FP64, so that a large offset of the rewards costs nothing. A group
    whose rewards are all equal, or of one member, gives exactly 0; one with a NaN gives NaN, and no other group does.
    An advantage depends on its group alone, bit for bit, but with ``batch``.

    Args:
        rewards: ``[B]``, FP32, BF16, FP16 or FP64; no gradient flows to them.
        samples_per_prompt: as in ``grpo_loss``.
        group_boundaries: as in ``grpo_loss``.
        eps: > 0.
        advantage_estimator: what is divided by: the group's ``population`` or ``sample`` standard deviation; that of
            the whole ``batch``, a sample's, about its own mean; or ``none``. ``leave_one_out`` is the difference to the
            mean of the others.
        eps_placement: divide by the ``max`` of the standard deviation and eps, or ``add`` eps to it.
        skip_nan: leave members whose reward is NaN out of their group, and give them 0.
        validate: as in ``grpo_loss``.
        backend: as in ``grpo_loss``.

    Returns:
        ``[B]``, FP32, or FP64 for FP64 rewards.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
    """
    check.tensor("rewards", rewards, check.FLOATS, ndim=1)
    estimator = Estimator.of(advantage_estimator, eps_placement, skip_nan, eps)
    check.backend_name(backend)
    groups = groups_of(rewards, samples_per_prompt, group_boundaries, values=validate)
    no_lost_derivatives("group_advantages", rewards)
    chosen = choose(OPERATOR, describe(rewards), backend).name
    return ops["advantages"](rewards.detach(), *groups, scalar(eps, torch.float64), estimator.text, chosen)
