"""fused_logp in Triton: a row is read once in the forward pass, and read and written once in the backward pass.

Reduction order, which is the contract of this backend: a row is cut into segments of 8192 columns, a segment into
blocks of 1024, both taken in ascending order. With many rows one program takes a whole row, with few rows one program
takes a segment; both give the same bits. The register layout of a block depends on the alignment that the compiler may
assume. V alone fixes that alignment; rows aligned otherwise are copied.
"""

from __future__ import annotations

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.triton_lib.launch import ceil_div
from rl_kernels.fused_logp.backends.triton import kernels
from rl_kernels.fused_logp.rows import per_row

SPLIT_BELOW = 2048
"""Number of rows below which each segment gets its own program, so that few rows fill the GPU."""
GRADIENT_WIDTHS = {True: 4096, False: 1024}
"""Gradient columns of one program, with and without wide loads of the rows; they change no bit."""


def forward(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logp, norm), ``[N]`` and ``[N, 2]``."""
    logp, _, _, norm = _statistics(logits, target_ids, temperature, ignore_index, row_indices, entropy=False)
    return logp, norm


def forward_stats(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm), the first three ``[N]``, the last ``[N, 2]``."""
    return _statistics(logits, target_ids, temperature, ignore_index, row_indices, entropy=True)


def _statistics(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    *,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm); logsumexp and entropy are written only with ``entropy``."""
    count, vocab = logits.shape
    logp, norm = logits.new_empty(count, dtype=torch.float32), logits.new_empty((count, 2), dtype=torch.float32)
    lse, row_entropy = (logits.new_empty(count, dtype=torch.float32) if entropy else logp for _ in range(2))
    if not count:
        return logp, lse, row_entropy, norm
    rows = _canonical(logits)
    inputs = (rows, *_rows(target_ids, temperature, row_indices))
    sizes = (vocab, rows.stride(0), ignore_index or 0)
    flags = {
        "WIDE": vocab % kernels.ALIGNED.value == 0,
        "HAS_ROWS": row_indices is not None,
        "HAS_IGNORED": ignore_index is not None,
        "PER_ROW": temperature.ndim > 0,
        "ENTROPY": entropy,
    }
    segments = ceil_div(vocab, kernels.SEGMENT.value)
    with device_of(logits):
        if segments == 1 or count >= SPLIT_BELOW:
            kernels.forward_rows[(count,)](*inputs, logp, norm, lse, row_entropy, *sizes, **flags, num_warps=1)
        else:
            parts = logits.new_empty((segments, 3, count), dtype=torch.float32)
            kernels.forward_segments[(count, segments)](*inputs, parts, count, *sizes, **flags, num_warps=1)
            merged = (parts, logp, norm, lse, row_entropy, count, segments)
            kernels.forward_merge[(ceil_div(count, kernels.ROWS.value),)](
                *inputs, *merged, *sizes, **flags, num_warps=1
            )
    return logp, lse, row_entropy, norm


def _canonical(logits: torch.Tensor) -> torch.Tensor:
    """Return contiguous rows, aligned for wide loads if V allows it: the logits themselves, or else a copy."""
    aligned = (
        logits.shape[1] % kernels.ALIGNED.value or not (logits.stride(0) | logits.data_ptr()) % kernels.ALIGNED.value
    )
    return readable(logits, logits.stride(1) == 1 and aligned)


def _rows(
    target_ids: torch.Tensor, temperature: torch.Tensor, row_indices: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor]:
    """Return ids, temperature and marks; ids stand in for missing marks, which the kernel does not read."""
    ids, scale, marks = per_row(target_ids, temperature, row_indices)
    return ids, scale, ids if marks is None else marks


def backward(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    norm: torch.Tensor,
    *upstream: torch.Tensor | None,
) -> torch.Tensor:
    """Return dlogits ``[N, V]`` in the dtype of logits; ``upstream``: entropy, and the three upstream gradients."""
    grad = logits.new_empty(logits.shape)
    _gradient(logits, grad, target_ids, temperature, ignore_index, row_indices, norm, *upstream)
    return grad


def backward_inplace(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    norm: torch.Tensor,
    *upstream: torch.Tensor | None,
) -> None:
    """Overwrite logits with dlogits."""
    _gradient(logits, logits, target_ids, temperature, ignore_index, row_indices, norm, *upstream)


def _gradient(
    logits: torch.Tensor,
    out: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    norm: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_logp: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> None:
    count, vocab = logits.shape
    if not count:
        return
    # A missing gradient is replaced by a tensor that the kernel does not read.
    grads = [norm if grad is None else grad.contiguous() for grad in (grad_logp, grad_logsumexp, grad_entropy)]
    saved = (norm, norm if entropy is None else entropy, *grads)
    sizes = (vocab, *logits.stride(), *out.stride(), ignore_index or 0)
    width = GRADIENT_WIDTHS[vocab % kernels.ALIGNED.value == 0]
    with device_of(logits):
        kernels.backward[(count, ceil_div(vocab, width))](
            logits,
            out,
            *_rows(target_ids, temperature, row_indices),
            *saved,
            *sizes,
            HAS_ROWS=row_indices is not None,
            HAS_IGNORED=ignore_index is not None,
            PER_ROW=temperature.ndim > 0,
            HAS_LOGP=grad_logp is not None,
            HAS_LSE=grad_logsumexp is not None,
            HAS_ENTROPY=grad_entropy is not None,
            UNIT=logits.stride(1) == out.stride(1) == 1,
            WIDTH=width,
            num_warps=4,
        )
