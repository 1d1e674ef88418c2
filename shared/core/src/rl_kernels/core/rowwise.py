"""Batch-invariant sums and softmax statistics: a row gives the same bits wherever it is in the batch.

Library sums choose their reduction order by shape, alignment and thread count. Here every order is fixed: sums of 64
terms by the library, once it is seen to give them the same bits in every row, added in ascending order; or power-of-two
trees of element-wise additions over fixed segments, merged in ascending order. Products are in ``products``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from rl_kernels.core.constants import FAN, SEGMENT
from rl_kernels.core.verified import aside, on_one_thread


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are computed: FP64 for FP64, otherwise FP32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pad_to(x: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Append zeros along ``dim`` up to the next multiple; ``x`` itself if none are missing."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    if not x.numel():
        # F.pad before PyTorch 2.10 refuses other dims of size 0.
        return x.new_zeros([size + missing * (place == dim % x.ndim) for place, size in enumerate(x.shape)])
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, missing])


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dim of ``x[..., n]``: sums of 64 terms, added in ascending order.

    Zeros appended to a row change no bit, nor does the sign of a zero: an all-zero row sums to +0. On a GPU, under
    torch.compile, and where the library's sums depend on a row's place, this is ``tree_sum``.
    """
    if not x.is_cpu or not x.shape[-1] or torch.compiler.is_compiling() or not _alike(x.dtype, torch.get_num_threads()):
        return tree_sum(x)
    return _library_sum(x)


def _library_sum(x: torch.Tensor) -> torch.Tensor:
    padded = pad_to(x, -1, FAN).contiguous()
    return padded.view(*x.shape[:-1], padded.shape[-1] // FAN, FAN).sum(-1).cumsum(-1)[..., -1]


@functools.cache
def _alike(dtype: torch.dtype, threads: int) -> bool:
    """Say whether a row's sum by the library depends on that row alone; tried once for each number of threads."""
    with aside():
        # Enough rows for several threads, aligned to one element only.
        rows = torch.linspace(1, 1000, 517 * 5 * FAN + 1, dtype=dtype, device="cpu").sin_()[1:].view(517, -1)
        sums = _library_sum(rows)
        cuts = [slice(row, row + height) for height in (1, 2, 3, 64) for row in range(67)]
        alone = all(torch.equal(_library_sum(rows[cut].clone()), sums[cut]) for cut in cuts)
        alone = alone and torch.equal(on_one_thread(lambda: _library_sum(rows)), sums)
        return alone and torch.equal(_library_sum(F.pad(rows, [0, 9 * FAN])), sums)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Return ``row_sum`` in another order, on every device: trees over segments, merged in ascending order."""
    trees = _tree(pad_to(x, -1, SEGMENT).unflatten(-1, (-1, SEGMENT)) if x.shape[-1] > SEGMENT else x[..., None, :])
    total = x.new_zeros(x.shape[:-1])
    for segment in trees.unbind(-1):
        total = total + segment
    return total


def _tree(x: torch.Tensor) -> torch.Tensor:
    width = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = F.pad(x, [0, width - x.shape[-1]])
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


SMALLEST_SHIFT = -1e4
"""``exp`` of anything below is 0 in every dtype. Shifts are clamped to it, because -inf times a sum of 0 is NaN."""


class SoftmaxState(NamedTuple):
    """Softmax statistics of a part of each row x, where z = x / temperature.

    Attributes:
        top: max x.
        total: sum of e^(z - max z).
        weighted: sum of (z - max z) e^(z - max z); None if the entropy is not wanted, which changes no bit of the
            others.
    """

    top: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor | None


class Statistics(NamedTuple):
    """Softmax statistics of whole rows: ``norm[N, 2]`` holds max x and the log of the sum of e^(z - max z).

    ``norm[:, 0] / temperature + norm[:, 1]`` is the logsumexp. Both parts are kept, because the rounded logsumexp is
    too coarse to subtract where x is large.
    """

    norm: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor | None

    def logp(self, chosen: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of the raw value that each row selects; at most 0, as the largest one counts 1."""
        return (chosen - self.norm[:, 0]) / temperature[:, 0] - self.norm[:, 1]


def softmax_state(x: torch.Tensor, temperature: torch.Tensor, *, entropy: bool) -> SoftmaxState:
    """Return the state of ``x[N, n]``, n >= 1, with ``temperature[N, 1]``; a -inf entry adds nothing to it."""
    top = x.amax(-1)
    # Subtract before scaling: exact for the values that matter, however large they are.
    shifted = _divide(x - torch.where(top == -torch.inf, 0.0, top)[:, None], temperature)
    if not entropy:
        return SoftmaxState(top, row_sum(shifted.exp_()), None)
    power = shifted.exp()
    return SoftmaxState(top, row_sum(power), row_sum(shifted.clamp_(min=SMALLEST_SHIFT).mul_(power)))


def _divide(x: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divide ``x[N, n]`` in place by ``temperature[N, 1]``; not by 1, where a look at it waits for nothing."""
    is_one_number = temperature.is_cpu and temperature.numel() and not temperature.stride(0)
    return x if is_one_number and float(temperature[0, 0]) == 1.0 else x.div_(temperature)


def fill_rows(x: torch.Tensor, where: torch.Tensor, value: float) -> torch.Tensor:
    """Write a value to the rows of ``x[N, n]`` where ``where[N]`` says so, and return ``x``."""
    if where.is_cpu and not where.any():
        return x
    return x.masked_fill_(where[:, None], value)


def merge(left: SoftmaxState, right: SoftmaxState, temperature: torch.Tensor) -> SoftmaxState:
    """Return the state of two parts of a row; not associative in the last bit, so always merge in ascending order."""
    top = torch.maximum(left.top, right.top)
    (left_total, left_weighted), (right_total, right_weighted) = (_at(s, top, temperature) for s in (left, right))
    if left_weighted is None or right_weighted is None:
        return SoftmaxState(top, left_total + right_total, None)
    return SoftmaxState(top, left_total + right_total, left_weighted + right_weighted)


def _at(state: SoftmaxState, top: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    # A part that is all -inf has sums of 0, which stay 0 under any finite scale.
    shift = ((state.top - top) / temperature[:, 0]).clamp(min=SMALLEST_SHIFT)
    shift = torch.where(state.top == top, 0.0, shift)
    scale = shift.exp()
    if state.weighted is None:
        return state.total * scale, None
    return state.total * scale, (state.weighted + shift * state.total) * scale


def finish(state: SoftmaxState, temperature: torch.Tensor) -> Statistics:
    """Return the statistics of whole rows; NaN for a row that is all -inf or contains NaN or +inf.

    The NaN always has the same bits: on a CPU, the sign of a computed NaN depends on its place in the vector.
    """
    log_total = state.total.log()
    undefined = (state.top == -torch.inf) | (state.top + log_total).isnan()
    top, log_total = (torch.where(undefined, torch.nan, value) for value in (state.top, log_total))
    norm, lse = torch.stack((top, log_total), 1), torch.where(undefined, torch.nan, top / temperature[:, 0] + log_total)
    if state.weighted is None:
        return Statistics(norm, lse, None)
    entropy = torch.where(undefined, torch.nan, log_total - state.weighted / state.total)
    return Statistics(norm, lse, entropy)


def select(z: torch.Tensor, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return ``z[i, ids[i] - first]`` for each row, 0 where that column is not in this part of the row."""
    column, inside = _column_of(z, ids, first)
    return torch.where(inside, z.gather(1, column), 0.0)[:, 0]


def _column_of(z: torch.Tensor, ids: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column ``[N, 1]`` of each row's id in this part of the row, and whether it is there."""
    column = ids.long()[:, None] - first
    return column.clamp(0, z.shape[1] - 1), (column >= 0) & (column < z.shape[1])


def outside(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Say for each id whether it lies outside ``[0, size)``."""
    return (ids < 0) | (ids >= size)


class LogpUpstream(NamedTuple):
    """Inputs of ``dlogits``: saved statistics and upstream gradients of each row, all ``[N]`` except ``norm[N, 2]``."""

    ids: torch.Tensor
    norm: torch.Tensor
    entropy: torch.Tensor | None
    grad_logp: torch.Tensor | None
    grad_logsumexp: torch.Tensor | None
    grad_entropy: torch.Tensor | None

    def rows(self, index: torch.Tensor | slice) -> LogpUpstream:
        """Return the same for some of the rows."""
        ids, norm, *others = self
        return LogpUpstream(ids[index], norm[index], *(None if field is None else field[index] for field in others))


def dlogits(x: torch.Tensor, temperature: torch.Tensor, up: LogpUpstream, first: int = 0) -> torch.Tensor:
    """Return the gradient of ``x[N, n]``: columns ``first`` to ``first + n`` of logits not divided by temperature yet.

    dx_j = (g_logp (1[j = id] - p_j) + g_lse p_j - g_H p_j (log p_j + H)) / temperature.
    """
    log_p = _divide(x - up.norm[:, :1], temperature).sub_(up.norm[:, 1:])
    p = log_p.exp_() if up.grad_entropy is None else log_p.exp()
    if up.grad_logp is None:
        dz = torch.zeros_like(p)
    else:
        down = -up.grad_logp[:, None]
        column, inside = _column_of(x, up.ids, first)
        chosen = (p.gather(1, column) - inside.to(p.dtype)) * down
        dz = p.mul_(down) if up.grad_logsumexp is up.grad_entropy is None else p * down
        dz.scatter_(1, column, chosen)
    if up.grad_logsumexp is not None:
        dz += up.grad_logsumexp[:, None] * p
    if up.grad_entropy is not None and up.entropy is not None:
        # Clamped, because -inf times a probability of 0 is NaN.
        surprise = log_p.clamp_(min=SMALLEST_SHIFT).add_(up.entropy[:, None]).mul_(p)
        dz -= surprise.mul_(up.grad_entropy[:, None])
    return _divide(dz, temperature)


def per_row(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a column for the rows of ``like``, of one value per row or of one number (without dims, maybe on the CPU).

    Never a scalar: as an operand it may run another kernel (a GPU multiplies by its reciprocal) and give other bits.
    """
    if value.ndim:
        return value[:, None]
    if value.device == like.device:
        return value.expand(like.shape[0], 1)
    return torch.full((like.shape[0], 1), float(value), dtype=value.dtype, device=like.device)
