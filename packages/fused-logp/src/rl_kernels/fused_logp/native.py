"""fused_logp in PyTorch, for any device: rows in blocks of bounded memory, every sum in a fixed order.

Order of the sums, which is the contract of this backend: a row is cut into segments of 4096 columns. ``two_pass`` takes
the maximum of the whole row, then adds the segments' trees in ascending order; ``online`` forms the state of each
segment and merges the states in ascending order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from rl_kernels.core import rowwise

BLOCK_ELEMENTS = 1 << 18
"""Logits worked on at once, so that they stay in the cache; rows are independent, so it changes no bit."""

Rows = torch.Tensor | slice


def forward(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp), each ``[N]``."""
    logp, lse = _statistics(logits, token_ids, temperature, ignore_index, row_indices, reduction, entropy=False)
    return logp, lse


def forward_stats(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy), each ``[N]``."""
    logp, lse, entropy = _statistics(logits, token_ids, temperature, ignore_index, row_indices, reduction, entropy=True)
    return logp, lse, entropy


def _statistics(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    reduction: str,
    *,
    entropy: bool,
) -> list[torch.Tensor]:
    totals = [logits.new_zeros(logits.shape[0], dtype=temperature.dtype) for _ in range(3 if entropy else 2)]
    for rows in _blocks(logits, row_indices):
        z = _scaled(logits, rows, temperature)
        ids = token_ids[rows]
        lse, row_entropy = rowwise.finish(_state(z, reduction, entropy=entropy))
        values = [torch.where(_undefined(ids, z.shape[1], lse), torch.nan, rowwise.select(z, ids) - lse), lse]
        if row_entropy is not None:
            values.append(row_entropy)
        active = _active(ids, ignore_index)
        for total, value in zip(totals, values, strict=True):
            total[rows] = torch.where(active, value, 0.0)
    return totals


def backward(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    logsumexp: torch.Tensor,
    *upstream: torch.Tensor | None,
) -> torch.Tensor:
    """Return dlogits ``[N, V]`` in the dtype of logits; ``upstream`` is the rest of LogpUpstream."""
    grad = logits.new_zeros(logits.shape)
    for rows, dz in _gradients(logits, token_ids, temperature, ignore_index, row_indices, logsumexp, *upstream):
        grad[rows] = dz
    return grad


def backward_inplace(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    logsumexp: torch.Tensor,
    *upstream: torch.Tensor | None,
) -> None:
    """Overwrite logits with dlogits."""
    arguments = (token_ids, temperature, ignore_index)
    if row_indices is None:
        for rows, dz in _gradients(logits, *arguments, None, logsumexp, *upstream):
            logits[rows] = dz
        return
    others = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    logits.masked_fill_(others.index_fill(0, row_indices, False)[:, None], 0)
    # In order, a row that is given twice stands at the end of one block and the start of the next: it is done once.
    done = torch.full_like(row_indices[:1], -1)
    for rows, dz in _gradients(logits, *arguments, row_indices.sort().values, logsumexp, *upstream):
        assert isinstance(rows, torch.Tensor)
        logits[rows] = torch.where((rows == done)[:, None], logits[rows], dz)
        done = rows[-1:]


def _gradients(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    logsumexp: torch.Tensor,
    *upstream: torch.Tensor | None,
) -> Iterator[tuple[Rows, torch.Tensor]]:
    for rows in _blocks(logits, row_indices):
        z = _scaled(logits, rows, temperature)
        known = rowwise.LogpUpstream(token_ids, logsumexp, *upstream).rows(rows)
        dz = rowwise.dlogits(z, known) / _column(temperature, rows, z)
        dz = torch.where(_undefined(known.ids, z.shape[1], known.logsumexp)[:, None], torch.nan, dz)
        yield rows, torch.where(_active(known.ids, ignore_index)[:, None], dz, 0.0).to(logits.dtype)


def _blocks(logits: torch.Tensor, row_indices: torch.Tensor | None) -> Iterator[Rows]:
    height = max(BLOCK_ELEMENTS // logits.shape[1], 1)
    if row_indices is not None:
        yield from row_indices.split(height)
        return
    for row in range(0, logits.shape[0], height):
        yield slice(row, row + height)


def _column(temperature: torch.Tensor, rows: Rows, z: torch.Tensor) -> torch.Tensor:
    return rowwise.per_row(temperature[rows] if temperature.ndim else temperature, z)


def _scaled(logits: torch.Tensor, rows: Rows, temperature: torch.Tensor) -> torch.Tensor:
    z = logits[rows].to(temperature.dtype)
    return z / _column(temperature, rows, z)


def _undefined(ids: torch.Tensor, vocab: int, lse: torch.Tensor) -> torch.Tensor:
    """Say which rows are NaN: those of an id out of range, and those that are no distribution.

    They are given one NaN: the sign of a NaN that arithmetic made follows its place in the vector.
    """
    return rowwise.outside(ids, vocab) | lse.isnan()


def _active(ids: torch.Tensor, ignore_index: int | None) -> torch.Tensor:
    return torch.ones_like(ids, dtype=torch.bool) if ignore_index is None else ids != ignore_index


def _state(z: torch.Tensor, reduction: str, *, entropy: bool) -> rowwise.SoftmaxState:
    if reduction != "online":
        return rowwise.softmax_state(z, entropy=entropy)
    parts = (rowwise.softmax_state(part, entropy=entropy) for part in z.split(rowwise.SEGMENT, 1))
    return functools.reduce(rowwise.merge, parts)
