"""Batch-invariant sums: a row gives the same bits wherever it is in the batch.

Library sums choose their reduction order by shape, alignment and thread count. Here every order is fixed: sums of 64
terms by the library, if a trial shows the same bits in every row, added in ascending order; or power-of-two
trees of element-wise additions over fixed segments, merged in ascending order.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from rl_kernels.core.constants import FAN, SEGMENT, STEP
from rl_kernels.core.rowwise.operands import pad_to
from rl_kernels.core.torchlib.observed import without_modes
from rl_kernels.core.verified import on_one_thread


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dim of ``x[..., n]``: sums of 64 terms, added in ascending order.

    Zeros appended to a row change no bit, nor does the sign of a zero: an all-zero row sums to +0. On a GPU, under
    torch.compile, and where the library's sums depend on a row's place, this is ``tree_sum``.
    """
    if (
        not x.is_cpu
        or not x.shape[-1]
        or torch.compiler.is_compiling()
        or not _library_is_invariant(x.dtype, torch.get_num_threads())
    ):
        return tree_sum(x)
    return _library_sum(x)


def _library_sum(x: torch.Tensor) -> torch.Tensor:
    padded = pad_to(x, -1, FAN)
    if padded.stride(-1) != 1:
        padded = padded.contiguous()
    if padded.shape[-1] == FAN:
        return padded.sum(-1)
    return padded.view(*x.shape[:-1], padded.shape[-1] // FAN, FAN).sum(-1).cumsum(-1)[..., -1]


@functools.cache
def _library_is_invariant(dtype: torch.dtype, threads: int) -> bool:
    """Say whether a row's sum by the library depends on that row alone; tried once for each number of threads."""
    with without_modes():
        # Enough rows for several threads, aligned to one element only.
        rows = torch.linspace(1, 1000, 517 * 5 * FAN + 1, dtype=dtype, device="cpu").sin_()[1:].view(517, -1)
        sums = _library_sum(rows)
        cuts = [slice(row, row + height) for height in (1, 2, 3, 64) for row in range(67)]
        is_invariant = all(torch.equal(_library_sum(rows[cut].clone()), sums[cut]) for cut in cuts)
        is_invariant = is_invariant and torch.equal(on_one_thread(lambda: _library_sum(rows)), sums)
        apart = F.pad(rows, [0, 16])[:, : rows.shape[1]]
        is_invariant = is_invariant and torch.equal(_library_sum(apart), sums)
        first = rows[:, :FAN]
        is_invariant = is_invariant and torch.equal(_library_sum(F.pad(first, [0, FAN])), _library_sum(first))
        return is_invariant and torch.equal(_library_sum(F.pad(rows, [0, 9 * FAN])), sums)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dim, on any device: trees over segments, merged in ascending order."""
    trees = _tree(pad_to(x, -1, SEGMENT).unflatten(-1, (-1, SEGMENT)) if x.shape[-1] > SEGMENT else x[..., None, :])
    total = x.new_zeros(x.shape[:-1])
    for segment in trees.unbind(-1):
        total = total + segment
    return total


def sum_over_rows(terms: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return ``start[D]`` plus the sum of ``terms[N, D]`` over the rows: a tree for each step of 16, steps ascending.

    Steps of zeros change no bit, wherever they are.
    """
    total = start.clone()
    if len(terms):
        for step in _tree(pad_to(terms, 0, STEP).unflatten(0, (-1, STEP)).mT).unbind():
            total += step
    return total


def _tree(x: torch.Tensor) -> torch.Tensor:
    width = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = F.pad(x, [0, width - x.shape[-1]])
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]
