"""The public function of advantages alone: validation and dispatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose
from rl_kernels.core.torchlib import no_lost_derivatives, scalar
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.groups import groups_of
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops


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
