"""The statistics of a forward pass, and the log-probabilities of a later call that skips it.

A rollout under ``invariant`` computes the numbers of training: the first update can skip its forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_kernels.core.outputs import LogpStats
from rl_kernels.linear_logp.arguments import Options
from rl_kernels.linear_logp.known import Known
from rl_kernels.linear_logp.run import run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rl_kernels.linear_logp.arguments import Keywords


def linear_logp_known(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_stats: bool = False,
    **options: Unpack[Keywords],
) -> Known:
    """Return the statistics of ``linear_logp``, for ``linear_logp_from_known``; without gradients.

    Args:
        hidden: as in ``linear_logp``, as all arguments that follow.
        lm_head_weight: ``[V, D]``.
        target_ids: ``[...]``.
        bias: ``[V]``, or None.
        return_stats: also return logsumexp and entropy, for a later call with ``return_stats``.
        options: the other keyword arguments of ``linear_logp``.

    Returns:
        ``Known(logp, norm, logsumexp, entropy)``; the last two are None without ``return_stats``.

    Raises:
        ValueError: gradients are enabled and an operand requires one.
        TypeError, ValueError, BackendUnavailable, CanaryMismatch, RuntimeError: as in ``linear_logp``.
    """
    group, own_options = _options(options, return_stats=return_stats, return_known=True)
    known: Known = run(hidden, lm_head_weight, target_ids, bias, group, own_options)
    return known


def linear_logp_from_known(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    known: Known,
    bias: torch.Tensor | None = None,
    *,
    check_rows: int = 8,
    return_stats: bool = False,
    **options: Unpack[Keywords],
) -> torch.Tensor | LogpStats:
    """Return what ``linear_logp`` returns, without a forward pass; backward gives the same bits.

    Args:
        hidden: as in ``linear_logp``, as all arguments that follow.
        lm_head_weight: ``[V, D]``.
        target_ids: ``[...]``.
        known: what ``linear_logp_known`` returned for these hidden states, weights, ids and options, in the shape of
            target_ids. It is returned, copied. ``memory.saved_mib`` has no effect.
        bias: ``[V]``, or None.
        check_rows: >= 0: with ``validate``, recompute this many rows and compare them bit for bit. Each call takes
            other rows, by a generator of its own.
        return_stats: as in ``linear_logp``; ``known`` must have been made with it.
        options: the other keyword arguments of ``linear_logp``.

    Raises:
        BitsDiffer: a row that was recomputed differs from ``known``; the message names it, and by how many ULPs.
        TypeError, ValueError, BackendUnavailable, CanaryMismatch, RuntimeError: as in ``linear_logp``.
    """
    if known is None:
        raise TypeError("known: expected what linear_logp_known returns, got NoneType")
    group, own_options = _options(options, return_stats=return_stats, known=known, check_rows=check_rows)
    logp: torch.Tensor | LogpStats = run(hidden, lm_head_weight, target_ids, bias, group, own_options)
    return logp


def _options(options: Any, **own: Any) -> tuple[Any, Options]:
    """Return the process group and all other options; ``TypeError`` names an unknown keyword."""
    group = options.pop("process_group", None)
    return group, Options(**options, **own)
