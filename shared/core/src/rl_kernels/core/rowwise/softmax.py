"""Softmax statistics of rows: states of parts of a row, which are merged in ascending order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.rowwise.sums import row_sum

SMALLEST_SHIFT = -1e4
"""``exp`` of anything below is 0 in every dtype. Shifts are clamped to it, because -inf times a sum of 0 is NaN."""


class SoftmaxState(NamedTuple):
    """Softmax statistics of a part of each row x, where z = x / temperature.

    Attributes:
        top: max x.
        total: sum of e^(z - max z).
        weighted: sum of (z - max z) e^(z - max z); None if the entropy is not requested, which changes no bit
            of the other fields.
    """

    top: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor | None


class Statistics(NamedTuple):
    """Softmax statistics of whole rows: ``norm[N, 2]`` holds max x and the log of the sum of e^(z - max z).

    ``norm[:, 0] / temperature + norm[:, 1]`` is the logsumexp. Both parts are kept, because the rounded logsumexp is
    too coarse to subtract where x is large. The logsumexp is None where the entropy is None.
    """

    norm: torch.Tensor
    logsumexp: torch.Tensor | None
    entropy: torch.Tensor | None

    def logp(self, chosen: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
        """Return the log-probability of the raw value that each row selects; at most 0, as the largest one counts 1."""
        return divide(chosen - self.norm[:, 0], temperature).sub_(self.norm[:, 1])


def softmax_state(
    x: torch.Tensor, temperature: torch.Tensor | None, *, entropy: bool, out: torch.Tensor | None = None
) -> SoftmaxState:
    """Return the state of ``x[N, n]``, n >= 1, with ``temperature`` from ``per_row``; a -inf entry adds nothing.

    ``out`` is room for numbers of the size of ``x``, maybe ``x`` itself.
    """
    top = x.amax(-1)
    # Subtract before scaling: exact for the values that matter, however large they are. -inf less itself would be NaN.
    shifted = divide(torch.sub(x, top.clamp(min=torch.finfo(x.dtype).min)[:, None], out=out), temperature)
    if not entropy:
        return SoftmaxState(top, row_sum(shifted.exp_()), None)
    power = shifted.exp()
    return SoftmaxState(top, row_sum(power), row_sum(shifted.clamp_(min=SMALLEST_SHIFT).mul_(power)))


def divide(x: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Divide ``x[N]`` or ``x[N, n]`` in place by ``temperature[N, 1]``; None means 1."""
    return x if temperature is None else x.div_(temperature if x.ndim == 2 else temperature[:, 0])


def merge(left: SoftmaxState, right: SoftmaxState, temperature: torch.Tensor | None) -> SoftmaxState:
    """Return the state of two parts of a row; not associative in the last bit, so always merge in ascending order."""
    top = torch.maximum(left.top, right.top)
    (left_total, left_weighted), (right_total, right_weighted) = (_rescaled(s, top, temperature) for s in (left, right))
    if left_weighted is None or right_weighted is None:
        return SoftmaxState(top, left_total + right_total, None)
    return SoftmaxState(top, left_total + right_total, left_weighted + right_weighted)


def _rescaled(
    state: SoftmaxState, top: torch.Tensor, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # A part that is all -inf has sums of 0, which stay 0 under any finite scale.
    shift = divide(state.top - top, temperature).clamp_(min=SMALLEST_SHIFT)
    shift = torch.where(state.top == top, 0.0, shift)
    scale = shift.exp()
    if state.weighted is None:
        return state.total * scale, None
    return state.total * scale, (state.weighted + shift * state.total) * scale


def finish(state: SoftmaxState, temperature: torch.Tensor | None) -> Statistics:
    """Return the statistics of whole rows; NaN for a row that is all -inf or contains NaN or +inf.

    The NaN always has the same bits: on a CPU, the sign of a computed NaN depends on its place in the vector.
    """
    log_total = state.total.log()
    # The total of a row that is all -inf is 0, and -inf less itself is NaN.
    undefined = (state.top - log_total).isnan()
    norm = torch.stack((state.top, log_total), 1).masked_fill_(undefined[:, None], torch.nan)
    if state.weighted is None:
        return Statistics(norm, None, None)
    lse, entropy = divide(state.top.clone(), temperature).add_(log_total), log_total - state.weighted / state.total
    return Statistics(norm, *(value.masked_fill_(undefined, torch.nan) for value in (lse, entropy)))


def below(x: torch.Tensor, temperature: torch.Tensor | None, min_logit: torch.Tensor) -> torch.Tensor:
    """Say which raw values ``x[N, n]`` have a logit ``x / temperature`` below ``min_logit[N]``; all if that is NaN."""
    least = torch.where(min_logit.isnan(), torch.inf, min_logit)[:, None]
    # A NaN is not below, so it reaches the results.
    return (x if temperature is None else x / temperature) < least


def per_row(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """Return a column for the rows of ``like``, of one value per row or of one number (without dims, maybe on the CPU).

    None stands for a 1 on the CPU, by which nothing needs to be divided. Never a scalar: as an operand it may run
    another kernel (a GPU multiplies by its reciprocal) and give other bits.
    """
    if value.ndim:
        return value[:, None]
    if value.is_cpu and float(value) == 1.0:
        return None
    if value.device == like.device:
        return value.expand(like.shape[0], 1)
    return torch.full((like.shape[0], 1), float(value), dtype=value.dtype, device=like.device)
