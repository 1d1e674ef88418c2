"""Host side of fused_logp in CUDA C++: how rows and units are assigned to blocks, and the kernel arguments.

``fused_logp.cuh`` defines the reduction order, on every architecture from sm_80.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.where import target_of
from rl_kernels.core.operator import arch_of
from rl_kernels.core.tuned import entry, tuned
from rl_kernels.fused_logp.rows import per_row

PACKAGE = "rl_kernels.fused_logp.backends.cuda"
SEGMENT, STEP, WARP, WARPS, UNITS = 32768, 1024, 32, 8, 8
"""Columns of a segment and of a step, threads of a warp, summing warps of a block, units of a segment; the same values
as in ``fused_logp.cuh``."""
MOST_UNITS = 256
"""Largest number of units of a row whose states one block keeps; a separate kernel merges those of longer rows."""
SPLIT_BELOW = 2048
"""Number of rows below which each unit gets its own warp, so that few rows fill the GPU."""
STATE = 12
"""Bytes of a state."""
MOST_THREADS, COLUMNS = 512, 32
"""Largest number of threads of a backward block, and columns that one thread processes."""

GENERIC, GRADIENT = "fused_logp_generic", "fused_logp_backward"
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Values of the kernels' DTYPE macro."""
ROWS = "PPPqfi"
FORWARD, BACKWARD = f"({ROWS}PPPPPPqqqi)", f"({ROWS}PPPPPPPqqqqii)"
"""Layouts of ``struct Forward`` and ``struct Backward``: the fields of ``struct Rows``, then pointers and sizes."""


@functools.cache
def constants(file: str, size: int) -> dict[str, int]:
    """Return the tuned constants for logits of ``size`` bytes: blocks per multiprocessor."""
    # Not every kernel file has tuned constants.
    return entry(PACKAGE, file, str(size), kind=dict[str, int]) if file in tuned(PACKAGE) else {}


@functools.cache
def program(file: str, arch: str, dtype: torch.dtype, *, entropy: bool) -> Program:
    """Return a kernel file with its compile-time constants."""
    defines = {"DTYPE": CODES[dtype], "ENTROPY": int(entropy), **constants(file, dtype.itemsize)}
    return Program(PACKAGE, f"{file}.cu", arch, tuple(defines.items()))


def programs(arch: str) -> list[Program]:
    """Return the programs of these ops that are compiled for a target such as ``sm_90``; none for ``sm_90a``."""
    files = () if arch.endswith("a") else (GENERIC, GRADIENT)
    variants = [(dtype, entropy) for dtype in CODES for entropy in (False, True)]
    return [program(file, arch, dtype, entropy=entropy) for file in files for dtype, entropy in variants]


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


def backward(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    norm: torch.Tensor,
    *upstream: torch.Tensor | None,
) -> torch.Tensor:
    """Return dlogits ``[N, V]`` in the dtype of logits; ``upstream``: entropy and the three upstream gradients."""
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
    results = (logp, lse, row_entropy, norm)
    if not count:
        return results
    units = _units(vocab)
    split = units > MOST_UNITS or (units > 1 and count < SPLIT_BELOW)
    parts = logits.new_empty((units, 3, count), dtype=torch.float32) if split else None
    rows = _rows(target_ids, temperature, ignore_index, row_indices)
    strides = (stride * logits.itemsize for stride in logits.stride())
    arguments = (*rows, logits, logp, norm, lse, row_entropy, parts, count, *strides, vocab)
    plain = target_of(arch_of("cuda", logits.device.index), exact=False)
    generic = program(GENERIC, plain, logits.dtype, entropy=entropy)
    if split:
        per_unit_kernel = kernel(generic, "forward_parts", FORWARD, logits.device)
        per_unit_kernel.launch(-(-count * units // WARPS), WARPS * WARP, *arguments)
        kernel(generic, "merge_parts", FORWARD, logits.device).launch(-(-count // WARPS), WARPS * WARP, *arguments)
        return results
    per_row_kernel = kernel(generic, "forward_rows", FORWARD, logits.device)
    per_row_kernel.launch(count, sharing(vocab * logits.itemsize) * WARP, *arguments, shared=units * STATE)
    return results


def _gradient(
    logits: torch.Tensor,
    out: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    norm: torch.Tensor,
    entropy: torch.Tensor | None,
    *grads: torch.Tensor | None,
) -> None:
    count, vocab = logits.shape
    if not count:
        return
    grad_logp, grad_lse, grad_entropy = (grad if grad is None else grad.contiguous() for grad in grads)
    rows = _rows(target_ids, temperature, ignore_index, row_indices)
    threads = min(-(-vocab // (COLUMNS * WARP)) * WARP, MOST_THREADS)
    chunks = -(-vocab // (threads * COLUMNS))
    strides = (stride * logits.itemsize for tensor in (logits, out) for stride in tensor.stride())
    plain = target_of(arch_of("cuda", logits.device.index), exact=False)
    gradient = program(GRADIENT, plain, logits.dtype, entropy=grad_entropy is not None)
    tensors = (logits, out, norm, entropy, grad_logp, grad_lse, grad_entropy)
    backward_kernel = kernel(gradient, "backward", BACKWARD, logits.device)
    backward_kernel.launch(count * chunks, threads, *rows, *tensors, *strides, vocab, chunks)


def _rows(
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Return the fields of ``struct Rows``."""
    ids, scale, marks = per_row(target_ids.to(torch.int64), temperature, row_indices)
    temperatures, number = (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, scale)
    return ids, temperatures, marks, ignore_index or 0, number, ignore_index is not None


def sharing(size: int) -> int:
    """Return the number of warps that share a row of ``size`` bytes: long rows read faster when reads are close by."""
    return 1 if size <= 1 << 16 else WARPS // 2 if size <= 1 << 17 else WARPS


def _units(vocab: int) -> int:
    """Return the number of units, and so of softmax states, of a row of ``vocab`` columns."""
    last = (vocab - 1) // SEGMENT
    return last * UNITS + min(-(-(vocab - last * SEGMENT) // STEP), UNITS)
