"""Checks the arguments of the two loss functions and builds the call of a raw op, without communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_kernels.core import validate as check
from rl_kernels.grpo_loss.arguments import Layout
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.extras import OptionalInputs
from rl_kernels.grpo_loss.groups import Groups, groups_of
from rl_kernels.grpo_loss.objective import Objective
from rl_kernels.grpo_loss.run import CallOf, Options, Tokens, prepare

NO_GROUPS = Groups(None, 0)


def rewards_call(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    samples_per_prompt: int | None,
    group_boundaries: Sequence[int] | torch.Tensor | None,
    objective: Objective,
    optional: OptionalInputs,
    options: Options,
    backend: str | None,
) -> LossCall:
    """Check the arguments of ``grpo_loss``."""
    tensors = (current_logps, old_logps, ref_logps, rewards, mask)
    call_of = rewards_call_of(*tensors, objective, optional, options, backend)
    groups = groups_of(rewards, samples_per_prompt, group_boundaries, values=options.validate)
    return call_of((rewards.detach(), *groups, None), objective.estimator, objective.eps)


def advantages_call(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    objective: Objective,
    optional: OptionalInputs,
    options: Options,
    backend: str | None,
) -> LossCall:
    """Check the arguments of ``grpo_loss_from_advantages``."""
    layout = Layout(current_logps, optional.cu_seqlens, optional.max_seqlen, options.validate)
    scores = layout.scores("advantages", advantages)
    check.same_device(current_logps=current_logps, advantages=advantages)
    tokens = Tokens(old_logps, ref_logps, mask, optional.rollout_ratio, optional.entropy)
    call_of = prepare(current_logps, tokens, layout, objective, options)
    check.backend_name(backend)
    return call_of((None, *NO_GROUPS, scores), Estimator(), 0.0)


def rewards_call_of(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    objective: Objective,
    optional: OptionalInputs,
    options: Options,
    backend: str | None,
) -> CallOf:
    """Check the arguments of ``grpo_loss`` other than the groups; return a function that builds the call."""
    layout = Layout(current_logps, optional.cu_seqlens, optional.max_seqlen, options.validate)
    check.tensor("rewards", rewards, check.FLOATS, ndim=1)
    check.shape("rewards", rewards, (layout.batch,), "one per sequence of current_logps")
    check.same_device(current_logps=current_logps, rewards=rewards)
    tokens = Tokens(old_logps, ref_logps, mask, optional.rollout_ratio, optional.entropy)
    call_of = prepare(current_logps, tokens, layout, objective, options)
    check.backend_name(backend)
    return call_of
