"""fused_logp in PyTorch, for any device: rows in blocks of bounded memory, every sum in a fixed order.

Reduction order, which is the contract of this backend: the maximum of the whole row, then its sum by
``core.rowwise.sums.row_sum``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_kernels.core.rowwise.ids import outside, select
from rl_kernels.core.rowwise.logp_gradient import LogpUpstream, dlogits
from rl_kernels.core.rowwise.softmax import below, finish, per_row, softmax_state

BLOCK_ELEMENTS = 1 << 18
"""Logits processed at once, so that they stay in the cache. Rows are independent, so this changes no bit."""

Rows = torch.Tensor | slice


def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """Return (logp, norm), ``[N]`` and ``[N, 2]``."""
    logp, norm = _statistics(*inputs, entropy=False)
    return logp, norm


def forward_stats(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """Return (logp, logsumexp, entropy, norm), the first three ``[N]``, the last ``[N, 2]``."""
    logp, norm, lse, entropy = _statistics(*inputs, entropy=True)
    return logp, lse, entropy, norm


def _statistics(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    min_logit: torch.Tensor | None,
    *,
    entropy: bool,
) -> list[torch.Tensor]:
    count = logits.shape[0]
    shapes = ((count,), (count, 2), *([(count,)] * 2 if entropy else ()))
    totals = [logits.new_zeros(shape, dtype=temperature.dtype) for shape in shapes]
    for rows in _blocks(logits, row_indices):
        x, ids = logits[rows].to(temperature.dtype), target_ids[rows]
        scale = _column(temperature, rows, x)
        if min_logit is not None:
            x = x.masked_fill(below(x, scale, min_logit[rows]), -torch.inf)
        statistics = finish(softmax_state(x, scale, entropy=entropy), scale)
        logp = statistics.logp(select(x, ids), scale)
        values = [torch.where(_undefined(ids, x.shape[1], statistics.norm), torch.nan, logp), statistics.norm]
        if statistics.logsumexp is not None and statistics.entropy is not None:
            values += [statistics.logsumexp, statistics.entropy]
        active = _active(ids, ignore_index)
        for total, value in zip(totals, values, strict=True):
            total[rows] = torch.where(active if value.ndim == 1 else active[:, None], value, 0.0)
    return totals


def backward(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return dlogits ``[N, V]`` in the dtype of logits."""
    grad = logits.new_zeros(logits.shape)
    for rows, dx in _gradients(logits, *rest):
        grad[rows] = dx
    return grad


def backward_inplace(logits: torch.Tensor, *rest: Any) -> None:
    """Overwrite logits with dlogits."""
    *arguments, row_indices, min_logit = rest[:5]
    saved = rest[5:]
    if row_indices is None:
        for rows, dx in _gradients(logits, *arguments, None, min_logit, *saved):
            logits[rows] = dx
        return
    inactive = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    logits.masked_fill_(inactive.index_fill(0, row_indices, False)[:, None], 0)
    # Indices are sorted, so a row given twice may end one block and start the next; its second turn is skipped.
    done = torch.full_like(row_indices[:1], -1)
    for rows, dx in _gradients(logits, *arguments, row_indices.sort().values, min_logit, *saved):
        assert isinstance(rows, torch.Tensor)
        logits[rows] = torch.where((rows == done)[:, None], logits[rows], dx)
        done = rows[-1:]


def _gradients(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    min_logit: torch.Tensor | None,
    norm: torch.Tensor,
    *upstream: torch.Tensor | None,
) -> Iterator[tuple[Rows, torch.Tensor]]:
    for rows in _blocks(logits, row_indices):
        x = logits[rows].to(temperature.dtype)
        upstream_rows = LogpUpstream(target_ids, norm, *upstream).rows(rows)
        scale = _column(temperature, rows, x)
        grad_logp = upstream_rows.grad_logp
        if min_logit is not None and grad_logp is not None:
            is_below = below(select(x, upstream_rows.ids)[:, None], scale, min_logit[rows])[:, 0]
            upstream_rows = upstream_rows._replace(grad_logp=grad_logp.masked_fill(is_below, 0.0))
        dx = dlogits(x, scale, upstream_rows)
        if min_logit is not None:
            dx.masked_fill_(below(x, scale, min_logit[rows]), 0.0)
        active = _active(upstream_rows.ids, ignore_index)
        is_gradient = active & ~_undefined(upstream_rows.ids, x.shape[1], upstream_rows.norm)
        # Asking a GPU would sync.
        if x.is_cuda or not is_gradient.all():
            other = torch.where(active, torch.nan, 0.0).to(dx.dtype)
            dx = torch.where(is_gradient[:, None], dx, other[:, None])
        yield rows, dx.to(logits.dtype)


def _blocks(logits: torch.Tensor, row_indices: torch.Tensor | None) -> Iterator[Rows]:
    height = max(BLOCK_ELEMENTS // logits.shape[1], 1)
    if row_indices is not None:
        yield from row_indices.split(height)
        return
    for row in range(0, logits.shape[0], height):
        yield slice(row, row + height)


def _column(temperature: torch.Tensor, rows: Rows, x: torch.Tensor) -> torch.Tensor | None:
    return per_row(temperature[rows] if temperature.ndim else temperature, x)


def _undefined(ids: torch.Tensor, vocab: int, norm: torch.Tensor) -> torch.Tensor:
    """Return the rows whose result is NaN: the id is out of range, or the logits are no distribution.

    They all get the same NaN: the sign of a NaN from arithmetic depends on its position in the vector.
    """
    return outside(ids, vocab) | norm.isnan().any(1)


def _active(ids: torch.Tensor, ignore_index: int | None) -> torch.Tensor:
    return torch.ones_like(ids, dtype=torch.bool) if ignore_index is None else ids != ignore_index
