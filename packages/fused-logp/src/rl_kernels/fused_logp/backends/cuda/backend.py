"""Host side of fused_logp in CUDA C++: how rows and units are assigned to blocks, and the kernel arguments.

``fused_logp.cuh`` defines the reduction order, on every architecture from sm_80; ``op.py`` says what the functions take
and return.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.where import target_of
from rl_kernels.core.operator import arch_of
from rl_kernels.core.outputs import statistics_room
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
ROWS = {False: "PPPqfi", True: "PPPqfiP"}
"""Layouts of ``struct Rows``, without and with thresholds."""
FORWARD, BACKWARD = "PPPPPPqqqi", {False: "PPPPPPPqqqqii", True: "PPPPPPPqqqqiiPq"}
"""Layouts of ``struct Forward`` and ``struct Backward`` after the fields of ``struct Rows``: pointers and sizes."""
KEPT_THREADS = 256
"""Threads of a block of ``find_kept``, one for each row."""


@functools.cache
def constants(file: str, size: int) -> dict[str, int]:
    """Return the tuned constants for logits of ``size`` bytes: blocks per multiprocessor."""
    # Not every kernel file has tuned constants.
    return entry(PACKAGE, file, str(size), kind=dict[str, int]) if file in tuned(PACKAGE) else {}


@functools.cache
def program(file: str, arch: str, dtype: torch.dtype, *, entropy: bool, min_logit: bool) -> Program:
    """Return a kernel file with its compile-time constants."""
    defines = {
        "DTYPE": CODES[dtype],
        "ENTROPY": int(entropy),
        "MIN_LOGIT": int(min_logit),
        **constants(file, dtype.itemsize),
    }
    return Program(PACKAGE, f"{file}.cu", arch, tuple(defines.items()))


def programs(arch: str) -> list[Program]:
    """Return the programs of these ops that are compiled for a target such as ``sm_90``; none for ``sm_90a``."""
    files = () if arch.endswith("a") else (GENERIC, GRADIENT)
    return [
        program(file, arch, dtype, entropy=entropy, min_logit=min_logit)
        for file in files
        for dtype in CODES
        for entropy in (False, True)
        for min_logit in (False, True)
    ]


def _statistics(logits: torch.Tensor, target_ids: torch.Tensor, *rest: Any, entropy: bool) -> Launches:
    has_least = rest[-1] is not None
    (count, vocab), is_long = logits.shape, target_ids.dtype == torch.int64
    units = _units(vocab)
    is_split = units > MOST_UNITS or (units > 1 and count < SPLIT_BELOW)
    sizes = (count, *(stride * logits.itemsize for stride in logits.stride()), vocab)
    arch = target_of(arch_of("cuda", logits.device.index), exact=False)
    generic = program(GENERIC, arch, logits.dtype, entropy=entropy, min_logit=has_least)
    form = f"({ROWS[has_least]}{FORWARD})"
    # Kernels by name, with their blocks, threads of a block and bytes of shared memory.
    steps = [("forward_rows", count, sharing(vocab * logits.itemsize) * WARP, units * STATE)]
    if is_split:
        blocks = {"forward_parts": -(-count * units // WARPS), "merge_parts": -(-count // WARPS)}
        steps = [(name, number, WARPS * WARP, 0) for name, number in blocks.items()]
    starts = [
        (kernel(generic, name, form, logits.device).start, (number, 1, 1), threads, shared)
        for name, number, threads, shared in steps
        if count
    ]

    def launch(
        logits: torch.Tensor,
        target_ids: torch.Tensor,
        temperature: torch.Tensor,
        ignore_index: int | None,
        row_indices: torch.Tensor | None,
        min_logit: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        logp, norm, lse, row_entropy = statistics_room(logits, entropy=entropy)
        parts = logits.new_empty(units, 3, count, dtype=torch.float32) if is_split else None
        rows = per_row(target_ids if is_long else target_ids.to(torch.int64), temperature, row_indices, min_logit)
        tensors = logits, logp, norm, lse, row_entropy, parts
        numbers = _numbers(rows, ignore_index, tensors, sizes)
        for start, grid, threads, shared in starts:
            start(grid, threads, shared, False, numbers)
        return (logp, lse, row_entropy, norm) if entropy else (logp, norm)

    return launch


def _gradient(logits: torch.Tensor, target_ids: torch.Tensor, *rest: Any, inplace: bool) -> Launches:
    (count, vocab), entropy, is_long = logits.shape, rest[-1] is not None, target_ids.dtype == torch.int64
    has_least = rest[3] is not None
    threads = min(-(-vocab // (COLUMNS * WARP)) * WARP, MOST_THREADS)
    chunks = -(-vocab // (threads * COLUMNS))
    out_strides = logits.stride() if inplace else (vocab, 1)
    sizes = (*(stride * logits.itemsize for stride in (*logits.stride(), *out_strides)), vocab, chunks)
    arch = target_of(arch_of("cuda", logits.device.index), exact=False)
    compiled = program(GRADIENT, arch, logits.dtype, entropy=entropy, min_logit=has_least)
    form = f"({ROWS[has_least]}{BACKWARD[has_least]})"
    gradient = kernel(compiled, "backward", form, logits.device)
    find_kept = kernel(compiled, "find_kept", form, logits.device) if has_least else None

    def launch(
        logits: torch.Tensor,
        target_ids: torch.Tensor,
        temperature: torch.Tensor,
        ignore_index: int | None,
        row_indices: torch.Tensor | None,
        min_logit: torch.Tensor | None,
        norm: torch.Tensor,
        row_entropy: torch.Tensor | None,
        *upstream: torch.Tensor | None,
    ) -> torch.Tensor | None:
        out = logits if inplace else logits.new_empty(count, vocab)
        grads = [None if grad is None else grad.contiguous() for grad in upstream]
        rows = per_row(target_ids if is_long else target_ids.to(torch.int64), temperature, row_indices, min_logit)
        if count:
            numbers = _numbers(rows, ignore_index, (logits, out, norm, row_entropy, *grads), sizes)
            if find_kept is not None:
                kept = logits.new_empty((count, 2), dtype=torch.float32)
                numbers = *numbers, kept.data_ptr(), count
                find_kept.start((-(-count // KEPT_THREADS), 1, 1), KEPT_THREADS, 0, False, numbers)
            gradient.start((count * chunks, 1, 1), threads, 0, False, numbers)
        return None if inplace else out

    return launch


forward, forward_stats = prepared(partial(_statistics, entropy=False)), prepared(partial(_statistics, entropy=True))
backward, backward_inplace = prepared(partial(_gradient, inplace=False)), prepared(partial(_gradient, inplace=True))


def _numbers(
    rows: tuple[torch.Tensor, torch.Tensor | float, torch.Tensor | None, torch.Tensor | None],
    ignore_index: int | None,
    tensors: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, ...],
) -> tuple[float, ...]:
    """Return the arguments of a kernel: the fields of ``struct Rows`` from ``per_row``, then addresses and sizes.

    The caller keeps the tensors until the kernel is launched.
    """
    ids, scale, marks, least = rows
    place, number = (scale.data_ptr(), 1.0) if isinstance(scale, torch.Tensor) else (0, scale)
    pointers = ids.data_ptr(), place, 0 if marks is None else marks.data_ptr()
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    thresholds = () if least is None else (least.data_ptr(),)
    return *pointers, ignore_index or 0, number, ignore_index is not None, *thresholds, *addresses, *sizes


def sharing(size: int) -> int:
    """Return the number of warps that share a row of ``size`` bytes: long rows read faster when reads are close by."""
    return 1 if size <= 1 << 16 else WARPS // 2 if size <= 1 << 17 else WARPS


def _units(vocab: int) -> int:
    """Return the number of units, and so of softmax states, of a row of ``vocab`` columns."""
    last = (vocab - 1) // SEGMENT
    return last * UNITS + min(-(-(vocab - last * SEGMENT) // STEP), UNITS)
