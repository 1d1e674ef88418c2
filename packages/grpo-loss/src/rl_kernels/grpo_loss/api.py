"""The public functions ``grpo_loss`` and ``grpo_loss_from_advantages``: validation and dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch

from rl_kernels.grpo_loss.call import UNSET, LossCall
from rl_kernels.grpo_loss.extras import NO_EXTRAS, NO_NORMALIZER, Extras, Normalizer, value_or_default
from rl_kernels.grpo_loss.loss import checked_call, loss_of, loss_over_ranks
from rl_kernels.grpo_loss.objective import Objective, with_overrides
from rl_kernels.grpo_loss.outputs import GRPOLossOutput, LossAndMetrics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import TypedDict, Unpack

    class Keywords(TypedDict, total=False):
        """Keyword arguments of ``grpo_loss_from_advantages`` that its type does not depend on."""

        objective: Objective | None
        loss_type: str | None
        beta: float | None
        clip_eps: float | None
        extras: Extras | None
        cu_seqlens: torch.Tensor | None
        max_seqlen: int | None
        normalizer: Normalizer | None
        process_group: ProcessGroup | DeviceMesh | None
        validate: bool
        backend: str | None

    class WithGroups(Keywords, total=False):
        """Keyword arguments of ``grpo_loss`` that its type does not depend on."""

        samples_per_prompt: int | None
        group_boundaries: Sequence[int] | torch.Tensor | None


@overload
def grpo_loss(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    return_metrics: Literal[False] = False,
    **options: Unpack[WithGroups],
) -> GRPOLossOutput: ...


@overload
def grpo_loss(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    return_metrics: Literal[True],
    **options: Unpack[WithGroups],
) -> LossAndMetrics: ...


@overload
def grpo_loss(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    return_metrics: bool,
    **options: Unpack[WithGroups],
) -> GRPOLossOutput | LossAndMetrics: ...


def grpo_loss(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    objective: Objective | None = None,
    loss_type: str | None = None,
    beta: float | None = None,
    clip_eps: float | None = None,
    extras: Extras | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    normalizer: Normalizer | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    return_metrics: bool = False,
    validate: bool = True,
    backend: str | None = None,
) -> GRPOLossOutput | LossAndMetrics:
    """Return the DAPO loss of B completions of up to T tokens, or another objective; rewards give the advantages.

    The default, ``loss_type="dapo"``, is that of TRL: the mean over active tokens of ``-min(ratio A, clamp(ratio,
    1 - clip_low, 1 + clip_high) A) + beta k3``, where ``ratio = exp(current - old)``, ``k3 = exp(e) - e - 1`` with
    ``e = ref - current``, and A is the advantage of the completion, as in ``group_advantages``: the terms of GRPO
    (arXiv 2402.03300), averaged over the tokens of the batch (arXiv 2503.14476). ``objective`` selects another loss;
    docs/objectives.md has all formulas, their papers, and the presets of frameworks:
    ``Objective.preset("trl-1.16:dapo")`` also has TRL's advantages.

    Computed in FP32 (in FP64 if current_logps is FP64). If every token is masked, the loss is 0 with zero gradient.
    Values at masked positions change no bit. Right padding and masked completions at the end change none either,
    unless the divisor counts them.

    Args:
        current_logps: ``[B, T]``, log-probabilities under the policy being trained, FP32, BF16, FP16 or FP64, any
            strides; the only differentiable argument.
        old_logps: ``[B, T]``, log-probabilities under the policy that sampled, any of those dtypes. None means
            on-policy: ratio 1, gradient -A.
        ref_logps: ``[B, T]``, log-probabilities under the reference policy, any of those dtypes. Not read with
            ``beta == 0``, and may then be None.
        rewards: ``[B]``, any of those dtypes.
        completion_mask: ``[B, T]``, bool, or 0 and 1 in an integer or floating-point dtype; 1 is an active token.
        samples_per_prompt: size of every group, at least 2, a divisor of B. Give either this or group_boundaries. With
            process_group both are about the rewards of all ranks.
        group_boundaries: ``[G + 1]`` offsets of the groups, a sequence of integers, or an int64 or int32 tensor on the
            CPU or the device of the rewards: from 0 to B, strictly increasing. A group may have one member.
        objective: the loss to compute; ``Objective()`` by default. The next three arguments override its options.
        loss_type: as in ``Objective``.
        beta: as in ``Objective``.
        clip_eps: >= 0; sets both clip_low and clip_high.
        extras: rollout ratio and entropy.
        cu_seqlens: ``[B + 1]`` offsets of packed sequences, int32 or int64. Tensors that are ``[B, T]`` otherwise are
            then ``[total]``.
        max_seqlen: T of packed sequences, an integer; by default the longest one, which syncs with a GPU. Required
            under torch.compile and graph capture.
        normalizer: the count that the sums are divided by, if this batch is one of several micro-batches.
        process_group: a ``ProcessGroup`` of any size, or a ``DeviceMesh`` with one dim. The sequences of its ranks, in
            the order of ranks, are one batch: groups, advantages, divisors, loss and metrics are those of this batch on
            every rank, bit for bit what one process returns. The gradient is that of this loss to the rank's own
            log-probabilities, without a factor of the number of ranks. Ranks may differ in B and T; all else besides
            the tensors must be equal. Under torch.compile the call breaks the graph.
        return_metrics: return ``LossAndMetrics`` instead of ``GRPOLossOutput``.
        validate: check that a mask that is not bool holds only 0 and 1, and check offsets and counts on a GPU. This
            syncs with the GPU, and is skipped under torch.compile and graph capture. Without the check, every nonzero
            mask value is active, offsets out of range are clamped, and counts are used as they are. With process_group,
            True also compares the call on all ranks first, so that an error of one rank is raised by each; with False B
            and T must be equal on all ranks.
        backend: name of a backend, ``auto``, or None: the backend that ``use_backend`` or ``RL_KERNELS_BACKEND``
            forces, otherwise ``auto``.

    Returns:
        ``GRPOLossOutput(loss, policy_loss, kl)``: scalars, FP32 (FP64 if current_logps is FP64); only ``loss`` has a
            gradient. With return_metrics, ``LossAndMetrics(output, metrics)``; ``METRICS`` defines the metrics.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, or gradients through a ``torch.func`` transform.
    """
    tensors = current_logps, old_logps, ref_logps, rewards, group_boundaries, samples_per_prompt, None, completion_mask
    more = *value_or_default("extras", extras, NO_EXTRAS), None, cu_seqlens, max_seqlen
    inputs, objective_arguments = LossCall._make((*tensors, *more, *UNSET)), (objective, loss_type, beta, clip_eps)
    options = value_or_default("normalizer", normalizer, NO_NORMALIZER), return_metrics, validate, backend
    if process_group is not None:
        return loss_over_ranks("grpo_loss", process_group, inputs, objective_arguments, *options)
    return loss_of(*checked_call("grpo_loss", "forward", inputs, with_overrides(*objective_arguments), *options))


@overload
def grpo_loss_from_advantages(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    return_metrics: Literal[False] = False,
    **options: Unpack[Keywords],
) -> GRPOLossOutput: ...


@overload
def grpo_loss_from_advantages(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    return_metrics: Literal[True],
    **options: Unpack[Keywords],
) -> LossAndMetrics: ...


@overload
def grpo_loss_from_advantages(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    return_metrics: bool,
    **options: Unpack[Keywords],
) -> GRPOLossOutput | LossAndMetrics: ...


def grpo_loss_from_advantages(
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
    process_group: ProcessGroup | DeviceMesh | None = None,
    return_metrics: bool = False,
    validate: bool = True,
    backend: str | None = None,
) -> GRPOLossOutput | LossAndMetrics:
    """Return the policy loss for given advantages: ``grpo_loss`` without the step from rewards to advantages.

    Args:
        current_logps: ``[B, T]``, FP32, BF16, FP16 or FP64, any strides; the only differentiable argument.
        old_logps: ``[B, T]``, any of those dtypes, or None.
        ref_logps: ``[B, T]``, any of those dtypes, or None with ``beta == 0``.
        advantages: ``[B]``, one per completion, or ``[B, T]``, one per token; any of those dtypes. With packed
            sequences ``[B]`` or ``[total]``; if B equals total, they count as one per completion.
        completion_mask: ``[B, T]``, as in ``grpo_loss``.
        objective: as in ``grpo_loss``; its advantage options are not read.
        loss_type: as in ``grpo_loss``.
        beta: as in ``grpo_loss``.
        clip_eps: as in ``grpo_loss``.
        extras: as in ``grpo_loss``.
        cu_seqlens: as in ``grpo_loss``.
        max_seqlen: as in ``grpo_loss``.
        normalizer: as in ``grpo_loss``.
        process_group: as in ``grpo_loss``.
        return_metrics: as in ``grpo_loss``.
        validate: as in ``grpo_loss``.
        backend: as in ``grpo_loss``.

    Returns:
        ``GRPOLossOutput``, or ``LossAndMetrics`` with return_metrics, as in ``grpo_loss``.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, or gradients through a ``torch.func`` transform.
    """
    tensors = current_logps, old_logps, ref_logps, None, None, None, advantages, completion_mask
    more = *value_or_default("extras", extras, NO_EXTRAS), None, cu_seqlens, max_seqlen
    inputs, objective_arguments = LossCall._make((*tensors, *more, *UNSET)), (objective, loss_type, beta, clip_eps)
    options = value_or_default("normalizer", normalizer, NO_NORMALIZER), return_metrics, validate, backend
    name = "grpo_loss_from_advantages"
    if process_group is not None:
        return loss_over_ranks(name, process_group, inputs, objective_arguments, *options)
    return loss_of(*checked_call(name, "forward", inputs, with_overrides(*objective_arguments), *options))
