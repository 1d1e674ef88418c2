"""fused_logp in Triton: a row is read once in the forward pass, and read and written once in the backward pass.

Reduction order, which is the contract of this backend: a row is cut into segments of 8192 columns, a segment into
blocks of 1024, both taken in ascending order. With many rows one program takes a whole row, with few rows one program
takes a segment; both give the same bits. The register layout of a block depends on the alignment that the compiler may
assume. V alone fixes that alignment; rows aligned otherwise are copied. ``op.py`` says what the functions take and
return.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.outputs import statistics_room
from rl_kernels.core.triton_lib.launch import Launch, ceil_div
from rl_kernels.fused_logp.backends.triton import kernels
from rl_kernels.fused_logp.rows import per_row

SPLIT_BELOW = 2048
"""Number of rows below which each segment gets its own program, so that few rows fill the GPU."""
GRADIENT_WIDTHS = {True: 4096, False: 1024}
"""Gradient columns of one program, with and without wide loads of the rows; they change no bit."""


def _statistics(*inputs: Any, entropy: bool) -> Launches:
    logits, _, temperature, ignore_index, row_indices, min_logit = inputs
    count, vocab = logits.shape
    fits, flags = _is_canonical(logits), _flags(temperature, ignore_index, row_indices, min_logit)
    wide = vocab % kernels.ALIGNED.value == 0
    numbers = (vocab, logits.stride(0) if fits else vocab, ignore_index or 0, wide, *flags, entropy)
    segments = ceil_div(vocab, kernels.SEGMENT.value)
    is_split = segments > 1 and count < SPLIT_BELOW
    whole = Launch(kernels.forward_rows, (count,), numbers, num_warps=1)
    split = Launch(kernels.forward_segments, (count, segments), (count, *numbers), num_warps=1)
    tiles = (ceil_div(count, kernels.ROWS.value),)
    merge = Launch(kernels.forward_merge, tiles, (count, segments, *numbers), num_warps=1)

    def launch(
        logits: torch.Tensor,
        target_ids: torch.Tensor,
        temperature: torch.Tensor,
        _: int | None,
        row_indices: torch.Tensor | None,
        min_logit: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        logp, norm, lse, row_entropy = statistics_room(logits, entropy=entropy)
        if count:
            with device_of(logits):
                inputs = (
                    logits if fits else readable(logits, fits),
                    *_rows(target_ids, temperature, row_indices, min_logit),
                )
                if is_split:
                    parts = logits.new_empty(segments, 3, count, dtype=torch.float32)
                    split(*inputs, parts)
                    merge(*inputs, parts, logp, norm, lse, row_entropy)
                else:
                    whole(*inputs, logp, norm, lse, row_entropy)
        return (logp, lse, row_entropy, norm) if entropy else (logp, norm)

    return launch


def _is_canonical(logits: torch.Tensor) -> bool:
    """Say whether rows are contiguous, and aligned for wide loads if V allows these."""
    is_aligned = not (logits.stride(0) | logits.data_ptr()) % kernels.ALIGNED.value
    return logits.stride(1) == 1 and (logits.shape[1] % kernels.ALIGNED.value > 0 or is_aligned)


def _flags(
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    min_logit: torch.Tensor | None,
) -> tuple[bool, bool, bool, bool]:
    """Return HAS_ROWS, HAS_IGNORED, PER_ROW and MIN_LOGIT."""
    return row_indices is not None, ignore_index is not None, temperature.ndim > 0, min_logit is not None


def _rows(*inputs: Any) -> tuple[torch.Tensor | float, ...]:
    """Return ids, temperatures, marks and thresholds as kernels take them; ids stand in for what is missing."""
    ids, scale, marks, least = per_row(*inputs)
    return ids, scale, ids if marks is None else marks, ids if least is None else least


def _gradient(*inputs: Any, inplace: bool) -> Launches:
    logits, _, temperature, ignore_index, row_indices, min_logit, _, _, *grads = inputs
    count, vocab = logits.shape
    flags = (*_flags(temperature, ignore_index, row_indices, min_logit), *[grad is not None for grad in grads])
    out_strides = logits.stride() if inplace else (vocab, 1)
    width, unit = GRADIENT_WIDTHS[vocab % kernels.ALIGNED.value == 0], logits.stride(1) == out_strides[1] == 1
    numbers = (vocab, *logits.stride(), *out_strides, ignore_index or 0, *flags, unit, width)
    gradient = Launch(kernels.backward, (count, ceil_div(vocab, width)), numbers, num_warps=4)
    sizes = count, vocab, *logits.stride(), temperature.ndim > 0, grads[0] is not None
    find_kept = Launch(kernels.find_kept, (ceil_div(count, kernels.ROWS.value),), sizes, num_warps=1)

    def launch(
        logits: torch.Tensor,
        target_ids: torch.Tensor,
        temperature: torch.Tensor,
        _: int | None,
        row_indices: torch.Tensor | None,
        min_logit: torch.Tensor | None,
        norm: torch.Tensor,
        entropy: torch.Tensor | None,
        *grads: torch.Tensor | None,
    ) -> torch.Tensor | None:
        out = logits if inplace else logits.new_empty(count, vocab)
        if count:
            *rows, least = _rows(target_ids, temperature, row_indices, min_logit)
            # Tensors that the kernel does not read stand in for those that are missing.
            upstream = [norm if grad is None else grad.contiguous() for grad in grads]
            with device_of(logits):
                kept = norm if min_logit is None else torch.empty_like(norm)
                if min_logit is not None:
                    find_kept(logits, *rows[:2], least, norm, upstream[0], kept)
                gradient(logits, out, *rows, kept, norm, norm if entropy is None else entropy, *upstream)
        return None if inplace else out

    return launch


forward, forward_stats = prepared(partial(_statistics, entropy=False)), prepared(partial(_statistics, entropy=True))
backward, backward_inplace = prepared(partial(_gradient, inplace=False)), prepared(partial(_gradient, inplace=True))
