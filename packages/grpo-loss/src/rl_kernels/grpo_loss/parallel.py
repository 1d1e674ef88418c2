"""Losses and advantages of a batch whose sequences are spread over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose
from rl_kernels.core.distributed import fingerprint
from rl_kernels.core.torchlib.derivatives import no_lost_derivatives
from rl_kernels.core.torchlib.scalars import scalar
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.extras import Normalizer, divisor_of
from rl_kernels.grpo_loss.groups import groups_of
from rl_kernels.grpo_loss.inputs import Inputs, call_of, check_inputs, check_values, options_of, resolved
from rl_kernels.grpo_loss.loss import loss_of
from rl_kernels.grpo_loss.objective import Objective, with_overrides
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops
from rl_kernels.grpo_loss.outputs import GRPOLossOutput, LossAndMetrics
from rl_kernels.grpo_loss.ranks import Batch, Sizes, agreed

Grouping = tuple[int | None, Sequence[int] | torch.Tensor | None]
"""``samples_per_prompt`` and ``group_boundaries``."""


# Calls of other ranks cannot be traced. torch.compiler.disable would do, but it imports the compiler at once.
@_disable_dynamo
def loss_over_ranks(
    name: str,
    process_group: ProcessGroup | DeviceMesh,
    inputs: Inputs,
    objective_arguments: tuple[Any, Any, Any, Any],
    normalizer: Normalizer,
    return_metrics: bool,
    validate: bool,
    backend: str | None,
) -> GRPOLossOutput | LossAndMetrics:
    """Return the loss of the batch of all ranks.

    Args:
        name: name of the public function.
        process_group: its ranks, in order, hold the sequences.
        inputs: what this rank was given; its groups are those of the rewards of all ranks.
        objective_arguments: objective, loss_type, beta and clip_eps.
        normalizer: as in the public function, and so are the arguments that follow.
        return_metrics: of the batch.
        validate: whether values are checked.
        backend: the argument of the public function.
    """
    grouping = (inputs.samples, inputs.boundaries)

    def make() -> tuple[tuple[LossCall, Objective, str], Sizes, Callable[[], dict[str, object]]]:
        objective = with_overrides(*objective_arguments)
        divisor = divisor_of(objective.loss_type, normalizer)
        own = resolved(inputs._replace(samples=None, boundaries=None), divisor, validate)
        check_inputs(own, objective, divisor.name)
        check.flag("return_metrics", return_metrics)
        check.backend_name(backend)
        if validate:
            check_values(own, divisor)
        no_lost_derivatives(name, *inputs, *normalizer)
        call = call_of(own, options_of(own, objective, divisor, return_metrics))
        chosen_backend = choose(OPERATOR, describe(call.current_logps), backend).name

        def shared_arguments() -> dict[str, object]:
            options = {**_options(objective, normalizer), "return_metrics": return_metrics}
            return {"backend": chosen_backend, **options, **_kinds(inputs), **_groups(grouping)}

        return (call, objective, chosen_backend), Sizes(call.batch, call.length), shared_arguments

    (call, objective, chosen_backend), batch = agreed(name, process_group, make, validate)
    if call.rewards is not None:
        # The dtype in which one process computes the advantages.
        rewards = call.rewards.to(torch.promote_types(call.rewards.dtype, call.current_logps.dtype))
        advantages = _advantages(batch, rewards, grouping, validate, objective.eps, objective.estimator, chosen_backend)
        call = call._replace(rewards=None, advantages=advantages)
    return loss_of(call, Ready(chosen_backend), batch)


@_disable_dynamo
def advantages_over_ranks(
    process_group: ProcessGroup | DeviceMesh,
    rewards: torch.Tensor,
    grouping: Grouping,
    keywords: tuple[str, str, bool, float],
    validate: bool,
    backend: str | None,
) -> torch.Tensor:
    """Return the advantages of this rank's rewards; ``keywords`` are the arguments of ``Estimator.of``."""

    def make() -> tuple[Any, Sizes, Callable[[], dict[str, object]]]:
        check.tensor("rewards", rewards, check.FLOATS, ndim=1)
        estimator = Estimator.of(*keywords)
        check.backend_name(backend)
        no_lost_derivatives("group_advantages", rewards)
        chosen_backend = choose(OPERATOR, describe(rewards), backend).name
        same = {"backend": chosen_backend, "rewards": rewards.dtype, "eps": keywords[-1], **estimator._asdict()}
        return (estimator, chosen_backend), Sizes(len(rewards), 0), lambda: same | _groups(grouping)

    (estimator, chosen_backend), batch = agreed("group_advantages", process_group, make, validate)
    return _advantages(batch, rewards.detach(), grouping, validate, keywords[-1], estimator, chosen_backend)


def _advantages(
    batch: Batch,
    rewards: torch.Tensor,
    grouping: Grouping,
    validate: bool,
    eps: float,
    estimator: Estimator,
    backend: str,
) -> torch.Tensor:
    """Return the advantages of this rank's rewards in groups of all rewards."""
    all_rewards = batch.gathered(rewards)
    # All ranks group the same rewards in the same way, so that an error is the same on each.
    groups = groups_of(all_rewards, *grouping, values=validate)
    advantages = ops["advantages"](all_rewards, *groups, scalar(eps, torch.float64), estimator.text, backend)
    return batch.own(advantages)


def _options(objective: Objective, normalizer: Normalizer) -> dict[str, object]:
    """Return the options of a call, which must be equal on all ranks."""
    values = {option.name: getattr(objective, option.name) for option in fields(objective) if option.init}
    return values | {name: _shown(value) for name, value in normalizer._asdict().items()}


def _kinds(inputs: Inputs) -> dict[str, object]:
    """Return dtypes and numbers of dims: ranks that differ in them would not compute what one process does."""
    kinds: dict[str, object] = {}
    for name in ("current_logps", "old_logps", "ref_logps"):
        value = getattr(inputs, name)
        kinds[name] = "None" if value is None else value.dtype
    kinds["rewards or advantages"] = f"{inputs.scores.dtype}, {inputs.scores.ndim} dims"
    for name in ("rollout_ratio", "entropy", "cu_seqlens"):
        value = getattr(inputs, name)
        kinds[name] = "None" if value is None else f"{value.ndim} dims"
    return kinds


def _groups(grouping: Grouping) -> dict[str, object]:
    samples, boundaries = grouping
    return {"samples_per_prompt": samples, "group_boundaries": _shown(boundaries)}


def _shown(value: object) -> object:
    """Return the form of a value that ranks compare: for a tensor its dtype, shape and a fingerprint of its bits."""
    if isinstance(value, torch.Tensor) and value.dtype in (*check.INTEGERS, *check.FLOATS):
        return f"a tensor of {value.dtype} {tuple(value.shape)}, bits {fingerprint(value):x}"
    return value
