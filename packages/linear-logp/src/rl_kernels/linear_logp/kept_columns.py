"""The argument ``kept_ids``: statistics over a set of columns of each row, which are given by their ids.

The backend forms all logits of a block of rows, from which those of the columns are gathered. Their sums are
``row_sum``, in ascending order of the ids, on every backend. Backward computes dz of the columns from these logits, and
scatters it into the pieces of the vocabulary: products stay those of the backend, and dz of a dropped column is 0.

``columns[N, K]`` holds the ids of a row in ascending order, each once. What is left of it, and all of an ignored row,
is V, the number of columns of the vocabulary. A row with an id out of range ends with V + 1; its results are NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from rl_kernels.core.constants import UNIT
from rl_kernels.core.rowwise import softmax
from rl_kernels.core.rowwise.ids import outside, select
from rl_kernels.core.rowwise.logp_gradient import LogpUpstream, dlogits
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.rowwise.softmax import per_row
from rl_kernels.core.rowwise.sums import sum_over_rows
from rl_kernels.linear_logp.inputs import FEW, Inputs, slices
from rl_kernels.linear_logp.vocabulary import BLOCK

FILLING = -1
"""The id that fills rows which keep fewer ids than others."""
MIB = 1 << 20
ROOM_MIB = 256
"""MiB of the logits of a block of rows in the forward pass, unless ``workspace_mib`` says how many."""


def columns_of(kept_ids: torch.Tensor, target_ids: torch.Tensor, ignore_index: int | None, vocab: int) -> torch.Tensor:
    """Return ``columns[N, K]`` of ids ``[..., K]``, for targets ``[N]``."""
    ids = kept_ids.reshape(len(target_ids), kept_ids.shape[-1]).long()
    ids = torch.where((ids < FILLING) | (ids >= vocab), vocab + 1, torch.where(ids == FILLING, vocab, ids))
    if ignore_index is not None:
        ids = ids.masked_fill((target_ids == ignore_index)[:, None], vocab)
    ids = ids.sort(-1).values
    is_repeated = F.pad(ids[:, 1:] == ids[:, :-1], [1, 0])
    return ids.masked_fill(is_repeated, vocab).sort(-1).values


def statistics(
    forward: Callable[..., tuple[torch.Tensor, ...]],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
    columns: torch.Tensor,
    workspace_mib: int | None,
) -> tuple[torch.Tensor, ...]:
    """Return (logp, logsumexp, entropy, norm, logits) over the columns: the last as ``kept`` of the backward pass.

    Args:
        forward: the raw op of a backend.
        hidden: ``[N, D]``, as all others those of the raw ops (``op.py``).
        weight: ``[V, D]``.
        target_ids: ``[N]``.
        bias: ``[V]`` or None.
        temperature: ``[]`` or ``[N]``.
        ignore_index: id of ignored rows, or None.
        cap: the numbers of ``Cap``, or None.
        columns: ``[N, K]``.
        workspace_mib: MiB of the logits of a block of rows, which has at least 64; None for 256.
    """
    vocab, dtype = len(weight), compute_dtype(hidden.dtype)
    logits = hidden.new_empty(columns.shape, dtype=dtype)
    of_row = -(-vocab // BLOCK) * BLOCK * dtype.itemsize
    height = max(((workspace_mib or ROOM_MIB) * MIB // of_row) // FEW, 1) * FEW
    for rows in slices(len(hidden), height):
        scale = temperature[rows] if temperature.ndim else temperature
        mib = -(-(rows.stop - rows.start) * of_row // MIB)
        operands = hidden[rows], weight, target_ids[rows], bias, scale, ignore_index, cap, None
        logits[rows] = forward(*operands, mib)[-1].gather(1, columns[rows].clamp(max=vocab - 1))
    logits.masked_fill_(columns >= vocab, -torch.inf)
    divisor, place = per_row(temperature, logits), place_of(columns, target_ids)
    found = softmax.finish(softmax.softmax_state(logits, divisor, entropy=True), divisor)
    assert found.logsumexp is not None
    assert found.entropy is not None
    is_bad = columns[:, -1] > vocab
    norm = found.norm.masked_fill((is_bad | outside(target_ids, vocab))[:, None], torch.nan)
    logp = found.logp(select(logits, place), divisor).masked_fill_(place < 0, -torch.inf)
    logp.masked_fill_(norm[:, 1].isnan(), torch.nan)
    stats = [value.masked_fill(is_bad, torch.nan) for value in (found.logsumexp, found.entropy)]
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, None)
    return *(inputs.keep(value) for value in (logp, *stats, norm)), logits


def gradient(inputs: Inputs, columns: torch.Tensor) -> torch.Tensor:
    """Return dz of the columns ``[N, K]``, 0 beside them; the kept logits of the inputs are those of the columns."""
    x, place = inputs.kept, place_of(columns, inputs.target_ids)
    assert x is not None
    assert inputs.norm is not None
    # The log-probability of a target that is not kept has no gradient.
    grad_logp = None if inputs.grad_logp is None else inputs.grad_logp.masked_fill(place < 0, 0.0)
    upstream = LogpUpstream(place, inputs.norm, inputs.entropy, grad_logp, inputs.grad_logsumexp, inputs.grad_entropy)
    dz = dlogits(x, per_row(inputs.temperature, x), upstream)
    if inputs.cap is not None:
        dz *= inputs.cap.slope(x)
    return dz.masked_fill_(columns >= inputs.vocab, 0.0)


def scattered(block: Inputs, columns: slice, dbias: torch.Tensor | None, dz: torch.Tensor) -> Callable[..., None]:
    """Prepare the step that writes dz of columns of the weight, as ``Steps.dlogits`` of a backend does."""
    return functools.partial(_scatter, columns)


def _scatter(columns: slice, block: Inputs, dbias: torch.Tensor | None, dz: torch.Tensor) -> None:
    first = block.start + columns.start
    if dbias is None:
        _write(block, first, dz)
        return
    # The terms of the bias are not rounded; a unit at a time, because they take much memory.
    for part in slices(dz.shape[1], UNIT):
        terms = dz.new_empty((len(dz), part.stop - part.start), dtype=dbias.dtype)
        _write(block, first + part.start, terms)
        dbias[part] = sum_over_rows(terms, dbias[part])
        dz[:, part] = terms


def _write(block: Inputs, first: int, out: torch.Tensor) -> None:
    """Write dz of the columns ``first`` to ``first + n`` to ``out[N, n]``."""
    assert block.columns is not None
    assert block.dz is not None
    assert block.norm is not None
    index, value = block.columns - first, block.dz.to(out.dtype)
    is_here = (index >= 0) & (index < out.shape[1])
    # Others write what the first of these writes: the same number twice, whatever the order; or 0 if there is none.
    one = is_here.to(torch.uint8).argmax(1, keepdim=True)
    index, value = index.clamp(0, out.shape[1] - 1), value.masked_fill(~is_here, 0.0)
    index, value = (torch.where(is_here, each, each.gather(1, one)) for each in (index, value))
    out.zero_().scatter_(1, index, value).masked_fill_(block.norm[:, 1:].isnan(), torch.nan)


def place_of(columns: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """Return where each row's target is among its columns ``[N]``; -1 if it is not."""
    is_target = columns == target_ids[:, None]
    return torch.where(is_target.any(1), is_target.to(torch.uint8).argmax(1), -1)
