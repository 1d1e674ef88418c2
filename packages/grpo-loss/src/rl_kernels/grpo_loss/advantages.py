"""The public function ``group_advantages``, and the groups of the rewards: their checks, and one form of both kinds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.torchlib.derivatives import no_lost_derivatives
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check
from rl_kernels.core.torchlib.scalars import scalar
from rl_kernels.grpo_loss.call import Estimator
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops
from rl_kernels.grpo_loss.ranks import Batch, Grouping, Sizes, agreed, shared_groups

SHOWN = 8
"""Largest number of offsets in an error message."""


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
        group_boundaries = boundaries_of(rewards, samples_per_prompt, group_boundaries, values=validate)
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
    samples, boundaries = grouping
    check_groups(all_rewards.shape[0], samples, boundaries)
    if boundaries is not None:
        boundaries = boundaries_of(all_rewards, samples, boundaries, values=validate)
    arguments = (boundaries, samples or 0, scalar(eps, torch.float64), estimator.text)
    return batch.own(ops["advantages"](all_rewards, *arguments, backend))


def check_groups(count: int, samples_per_prompt: int | None, group_boundaries: object) -> None:
    """Check that ``count`` rewards are grouped in exactly one way, and the size of the groups."""
    if (samples_per_prompt is None) == (group_boundaries is None):
        passed = "neither" if samples_per_prompt is None else "both"
        raise ValueError(f"samples_per_prompt, group_boundaries: expected exactly one of them, got {passed}")
    if samples_per_prompt is not None:
        check.integer("samples_per_prompt", samples_per_prompt, least=2)
        if count % samples_per_prompt:
            raise ValueError(f"samples_per_prompt: expected a divisor of the {count} rewards, got {samples_per_prompt}")


def boundaries_of(
    rewards: torch.Tensor,
    samples_per_prompt: int | None,
    group_boundaries: Sequence[int] | torch.Tensor,
    *,
    values: bool,
) -> torch.Tensor:
    """Return checked offsets of groups ``[G + 1]``, int64 on the device of the rewards.

    ``values=False`` skips the check of offsets that are not on the CPU. Under torch.compile and graph capture the
    offsets of no tensor are checked.

    Raises:
        TypeError, ValueError: samples_per_prompt is given too, or the offsets do not cut ``rewards[B]``.
    """
    check.tensor("rewards", rewards, check.FLOATS, ndim=1)
    check_groups(rewards.shape[0], samples_per_prompt, group_boundaries)
    if isinstance(group_boundaries, torch.Tensor):
        offsets = _checked(group_boundaries, rewards, values)
    else:
        offsets = torch.tensor(_listed(group_boundaries, rewards.shape[0]), dtype=torch.int64, device="cpu")
    # Non-blocking: the copy to a GPU must not wait for running kernels.
    return offsets.to(rewards.device, torch.int64, non_blocking=True).contiguous()


def _checked(boundaries: torch.Tensor, rewards: torch.Tensor, values: bool) -> torch.Tensor:
    check.tensor("group_boundaries", boundaries, check.INTEGERS, ndim=1)
    if boundaries.device.type != "cpu" and boundaries.device != rewards.device:
        raise ValueError(f"group_boundaries: expected device cpu or {rewards.device}, got {boundaries.device}")
    least = 2 if rewards.shape[0] else 1
    if boundaries.shape[0] < least:
        raise ValueError(f"group_boundaries: expected at least {least} offsets, got {boundaries.shape[0]}")
    if (values or boundaries.device.type == "cpu") and not values_hidden(boundaries):
        _check_offsets(boundaries, rewards.shape[0])
    return boundaries


def _listed(boundaries: object, count: int) -> list[int]:
    if not isinstance(boundaries, Sequence) or isinstance(boundaries, (str, bytes)):
        raise TypeError(
            f"group_boundaries: expected a sequence of integers or a tensor, got {type(boundaries).__name__}"
        )
    offsets = list(boundaries)
    for offset in offsets:
        check.integer("group_boundaries", offset)
    _increasing(offsets, count)
    return offsets


def _increasing(offsets: list[int], count: int) -> None:
    if not offsets or offsets[0] != 0 or offsets[-1] != count or any(low >= high for low, high in pairwise(offsets)):
        shown = ", ".join(map(str, offsets[:SHOWN])) + (", ..." if len(offsets) > SHOWN else "")
        raise ValueError(
            f"group_boundaries: expected offsets that start at 0, increase strictly and end at {count} "
            f"(the number of rewards), got [{shown}]"
        )


def _offsets(boundaries: torch.Tensor, count: int) -> None:
    _increasing(boundaries.tolist(), count)


_check_offsets = define_check("check_group_boundaries", "(Tensor boundaries, SymInt count)", _offsets)
