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
from rl_kernels.core.dispatch import choose
from rl_kernels.core.distributed import fingerprint
from rl_kernels.core.torchlib.derivatives import no_lost_derivatives
from rl_kernels.core.torchlib.scalars import scalar
from rl_kernels.grpo_loss.checked import advantages_call, rewards_call_of
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.extras import OptionalInputs
from rl_kernels.grpo_loss.groups import groups_of
from rl_kernels.grpo_loss.objective import Objective, with_overrides
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops
from rl_kernels.grpo_loss.outputs import GRPOLossOutput, LossAndMetrics
from rl_kernels.grpo_loss.ranks import Batch, Sizes, agreed
from rl_kernels.grpo_loss.run import Options, run_on

Grouping = tuple[int | None, Sequence[int] | torch.Tensor | None]
"""``samples_per_prompt`` and ``group_boundaries``."""
DIVISORS = ("num_tokens", "num_sequences", "max_completion_length")
TOKENS = ("current_logps", "old_logps", "ref_logps")


# Calls of other ranks cannot be traced. torch.compiler.disable would do, but it imports the compiler at once.
@_disable_dynamo
def loss_over_ranks(
    name: str,
    process_group: ProcessGroup | DeviceMesh,
    tensors: tuple[Any, Any, Any, Any, Any],
    grouping: Grouping | None,
    objective_arguments: tuple[Any, Any, Any, Any],
    optional: OptionalInputs,
    options: Options,
    backend: str | None,
) -> GRPOLossOutput | LossAndMetrics:
    """Return the loss of the batch of all ranks.

    Args:
        name: name of the public function.
        process_group: its ranks, in order, hold the sequences.
        tensors: current_logps, old_logps, ref_logps, rewards or advantages, and the mask, of this rank.
        grouping: the groups of the rewards of all ranks; None if advantages are given.
        objective_arguments: objective, loss_type, beta and clip_eps.
        optional: optional tensors of this rank.
        options: options of the batch.
        backend: the argument of the public function.
    """

    def make() -> tuple[Any, Sizes, Callable[[], dict[str, object]]]:
        objective = with_overrides(*objective_arguments)
        if grouping is None:
            call = advantages_call(*tensors, objective, optional, options, backend)
        else:
            call_of = rewards_call_of(*tensors, objective, optional, options, backend)
            call = call_of((tensors[3].detach(), None, 0, None), objective.estimator, objective.eps)
        no_lost_derivatives(name, *tensors, *optional, *options.normalizer)
        chosen_backend = choose(OPERATOR, describe(call.current_logps), backend).name

        def shared_arguments() -> dict[str, object]:
            kinds = {**_options(objective, options), **_kinds(tensors, optional), **_groups(grouping)}
            return {"backend": chosen_backend, **kinds}

        return (call, objective, chosen_backend), Sizes(call.batch, call.length), shared_arguments

    (call, objective, chosen_backend), batch = agreed(name, process_group, make, options.validate)
    if grouping is not None:
        # The dtype in which one process computes the advantages.
        rewards = call.rewards.to(torch.promote_types(call.rewards.dtype, call.current_logps.dtype))
        advantages = _advantages(
            batch, rewards, grouping, options.validate, objective.eps, objective.estimator, chosen_backend
        )
        call = call._replace(rewards=None, advantages=advantages)
    return run_on(call, chosen_backend, batch)


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


def _options(objective: Objective, options: Options) -> dict[str, object]:
    """Return the options of a call, which must be equal on all ranks."""
    values: dict[str, object] = {
        option.name: getattr(objective, option.name) for option in fields(objective) if option.init
    }
    values |= {name: _shown(getattr(options.normalizer, name)) for name in DIVISORS}
    return values | {"return_metrics": options.return_metrics}


def _kinds(tensors: tuple[Any, ...], optional: OptionalInputs) -> dict[str, object]:
    """Return dtypes and numbers of dims: ranks that differ in them would not compute what one process does."""
    current, old, ref, scores, _ = tensors
    kinds = {name: "None" if x is None else x.dtype for name, x in zip(TOKENS, (current, old, ref), strict=True)}
    kinds["rewards or advantages"] = f"{scores.dtype}, {scores.ndim} dims"
    for name in ("rollout_ratio", "entropy", "cu_seqlens"):
        value = getattr(optional, name)
        kinds[name] = "None" if value is None else f"{value.ndim} dims"
    return kinds


def _groups(grouping: Grouping | None) -> dict[str, object]:
    samples, boundaries = grouping or (None, None)
    return {"samples_per_prompt": samples, "group_boundaries": _shown(boundaries)}


def _shown(value: object) -> object:
    """Return the form of a value that ranks compare: for a tensor its dtype, shape and a fingerprint of its bits."""
    if isinstance(value, torch.Tensor) and value.dtype in (*check.INTEGERS, *check.FLOATS):
        return f"a tensor of {value.dtype} {tuple(value.shape)}, bits {fingerprint(value):x}"
    return value
