"""The public function ``group_advantages``, in one process and over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.torchlib.derivatives import no_lost_derivatives
from rl_kernels.core.torchlib.scalars import scalar
from rl_kernels.grpo_loss.call import Estimator
from rl_kernels.grpo_loss.inputs import check_groups, checked_groups
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops
from rl_kernels.grpo_loss.ranks import Batch, Grouping, Sizes, agreed, shared_groups


def group_advantages(
    rewards: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    eps: float = 1e-6,
    advantage_estimator: str = "population",
    eps_placement: str = "max",
    skip_nan: bool = False,
    process_group: ProcessGroup | DeviceMesh | None = None,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the advantage of each completion in its group, by default ``(r - mean) / max(std, eps)``, population std.

    Mean and standard deviation are computed in two passes in FP64, so that a large offset of the rewards costs no
    accuracy. A group of one member, or with equal rewards, gives exactly 0; a group with a NaN reward gives NaN. Except
    with ``batch``, an advantage depends on its group alone, bit for bit.

    Advantages normalized by group are from GRPO (arXiv 2402.03300), ``none`` is from Dr. GRPO (arXiv 2503.20783),
    ``leave_one_out`` from Back to Basics (arXiv 2402.14740).

    Args:
        rewards: ``[B]``, FP32, BF16, FP16 or FP64; they get no gradient.
        samples_per_prompt: as in ``grpo_loss``.
        group_boundaries: as in ``grpo_loss``.
        eps: > 0; keeps the division by a small standard deviation finite.
        advantage_estimator: ``population`` or ``sample``: r - mean, divided by that standard deviation of the group;
            ``batch``: r - mean, divided by the sample standard deviation of all rewards; ``none``: r - mean;
            ``leave_one_out``: r minus the mean of the other members.
        eps_placement: ``max`` divides by max(std, eps), ``add`` by std + eps.
        skip_nan: leave members whose reward is NaN out of their group, and give them 0.
        process_group: as in ``Normalizer``: the rewards of all ranks, in the order of ranks, are grouped as one batch.
        validate: as in ``grpo_loss``.
        backend: as in ``grpo_loss``.

    Returns:
        ``[B]``, FP32, or FP64 for FP64 rewards; with process_group the advantages of this rank's rewards.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, or gradients through a ``torch.func`` transform.
    """
    keywords = (advantage_estimator, eps_placement, skip_nan, eps)
    if process_group is not None:
        grouping = (samples_per_prompt, group_boundaries)
        return advantages_over_ranks(process_group, rewards, grouping, keywords, validate, backend)
    if group_boundaries is not None:
        check.tensor("rewards", rewards, check.FLOATS, ndim=1)
        group_boundaries = checked_groups(rewards, samples_per_prompt, group_boundaries, values=validate)
    ready, arguments = _prepare(rewards, samples_per_prompt, group_boundaries, *keywords, backend)
    no_lost_derivatives("group_advantages", rewards)
    return ops["advantages"].call(ready, rewards.detach(), group_boundaries, samples_per_prompt or 0, *arguments)


@remembered
def _prepare(
    rewards: torch.Tensor,
    samples_per_prompt: int | None,
    boundaries: torch.Tensor | None,
    advantage_estimator: str,
    eps_placement: str,
    skip_nan: bool,
    eps: float,
    backend: str | None,
) -> tuple[Ready, tuple[torch.Tensor, str]]:
    """Check all that depends on the kinds of the arguments, and choose a backend."""
    check.tensor("rewards", rewards, check.FLOATS, ndim=1)
    estimator = Estimator.of(advantage_estimator, eps_placement, skip_nan, eps)
    check.backend_name(backend)
    check_groups(rewards.shape[0], samples_per_prompt, boundaries)
    arguments = scalar(eps, torch.float64), estimator.text
    chosen = choose(OPERATOR, describe(rewards), backend).name
    return ops["advantages"].ready(rewards, boundaries, samples_per_prompt or 0, *arguments, chosen), arguments


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

    def check_here(compares: bool) -> tuple[tuple[Estimator, str], Sizes, dict[str, object]]:
        check.tensor("rewards", rewards, check.FLOATS, ndim=1)
        estimator = Estimator.of(*keywords)
        check.backend_name(backend)
        no_lost_derivatives("group_advantages", rewards)
        chosen = choose(OPERATOR, describe(rewards), backend).name
        shared = {"backend": chosen, "rewards": rewards.dtype, "eps": keywords[-1], **estimator._asdict()}
        return (estimator, chosen), Sizes(len(rewards), 0), {**shared, **shared_groups(grouping)} if compares else {}

    (estimator, chosen), batch = agreed("group_advantages", process_group, check_here, validate)
    return advantages_of_rank(batch, rewards.detach(), grouping, keywords[-1], estimator, validate, chosen)


def advantages_of_rank(
    batch: Batch,
    rewards: torch.Tensor,
    grouping: Grouping,
    eps: float,
    estimator: Estimator,
    validate: bool,
    backend: str,
) -> torch.Tensor:
    """Return the advantages of this rank's rewards in groups of all rewards."""
    all_rewards = batch.gathered(rewards)
    # All ranks group the same rewards in the same way, so that an error is the same on each.
    boundaries = checked_groups(all_rewards, *grouping, values=validate)
    arguments = boundaries, grouping[0] or 0, scalar(eps, torch.float64), estimator.text
    return batch.own(ops["advantages"](all_rewards, *arguments, backend))
