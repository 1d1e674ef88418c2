"""linear_logp in Triton: tiles of logits stay in registers and are reduced there to softmax states or to dz.

Reduction order, which is the contract of this backend: a logit is a canonical chain over D. The vocabulary is cut into
segments of 4096 columns, a segment into blocks of 256. Each block gives a softmax state; blocks are merged in ascending
order, then segments. With many rows one program takes a whole segment, with few rows one block; both give the same
bits. dH is a canonical chain over the vocabulary (for FP32 inputs in spans of 256 columns), dW one over the tokens;
dbias adds tiles of tokens in ascending order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.operator import arch_of
from rl_kernels.core.rowwise import LogpUpstream
from rl_kernels.core.triton_lib import gemm
from rl_kernels.core.triton_lib.launch import INTERPRETED, ceil_div
from rl_kernels.core.triton_lib.schedule import HALF, Schedule, processors
from rl_kernels.core.tuned import entry
from rl_kernels.linear_logp import products
from rl_kernels.linear_logp.backends.triton import kernels
from rl_kernels.linear_logp.inputs import Cap, Inputs

NO_CAP = Cap(0.5, 0.5)
"""Stands in for a missing cap and is not read; not 1, for which Triton would compile another kernel."""


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logp, norm), ``[N]`` and ``[N, 2]``."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap)
    logp, _, _, norm = _statistics(inputs, entropy=False)
    return logp, norm


def forward_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm), the first three ``[N]``, the last ``[N, 2]``."""
    return _statistics(Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap), entropy=True)


def backward(
    hidden: torch.Tensor, weight: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), empty if not needed; with ``main_grad``, dweight is added to it instead."""
    return products.backward(Steps(), hidden, weight, *others)


def backward_main_grad(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Add dweight to ``main_grad``, the last argument, and return (dhidden, dbias), each empty if not needed."""
    dhidden, _, dbias = backward(*args)  # type: ignore[arg-type]
    return dhidden, dbias


def schedule_of(name: str, hidden: torch.Tensor) -> Schedule:
    """Return the schedule of the logit tiles; where it could change bits, dtype and architecture alone decide."""
    if INTERPRETED:
        return Schedule(64, kernels.BLOCK.value, 64, 4, 1)
    if hidden.dtype not in HALF:
        return Schedule(32, kernels.BLOCK.value, 16, 8, 3)
    if arch_of(hidden.device.type, hidden.device.index) != "sm90":
        return Schedule(64, kernels.BLOCK.value, 32, 8, 3)
    return _tuned(name)


@functools.cache
def _tuned(name: str) -> Schedule:
    return entry("rl_kernels.linear_logp.backends.triton", name, kind=Schedule)


def _statistics(inputs: Inputs, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm); logsumexp and entropy are written only with ``entropy``."""
    hidden, (count, vocab) = inputs.hidden, (len(inputs.hidden), len(inputs.weight))
    logp, chosen = (hidden.new_empty(count, dtype=torch.float32) for _ in range(2))
    norm = hidden.new_empty((count, 2), dtype=torch.float32)
    lse, row_entropy = (hidden.new_empty(count, dtype=torch.float32) if entropy else logp for _ in range(2))
    if not count:
        return logp, lse, row_entropy, norm
    # On sm_90 the height of a tile changes no bit: each softmax state belongs to one row.
    cut = schedule_of("few_rows", hidden)
    if count > cut.rows:
        cut = schedule_of("many_rows", hidden)
    row_tiles, segments = -(-count // cut.rows), ceil_div(vocab, kernels.SEGMENT.value)
    width = kernels.SEGMENT.value if row_tiles * segments >= 2 * processors(hidden.device) else kernels.BLOCK.value
    units = ceil_div(vocab, width)
    parts = hidden.new_empty((units, 3, count), dtype=torch.float32)
    ids, temperature = inputs.target_ids.contiguous(), _number_or_rows(inputs.temperature)
    flags = {"PER_ROW": inputs.temperature.ndim > 0, "ENTROPY": entropy}
    cap, is_capped = inputs.cap or NO_CAP, inputs.cap is not None
    with device_of(hidden):
        kernels.states[(row_tiles * units,)](
            *(first := gemm.operand(hidden, cut.rows, cut.inner))[:3],
            *(second := gemm.operand(inputs.weight, kernels.BLOCK.value, cut.inner))[:3],
            *_bias(inputs),
            *cap,
            temperature,
            parts,
            count,
            vocab,
            hidden.shape[1],
            width,
            HIDDEN=first.kind,
            WEIGHT=second.kind,
            HAS_BIAS=inputs.bias is not None,
            CAPPED=is_capped,
            RAGGED=vocab % kernels.BLOCK.value > 0,
            BLOCK_M=cut.rows,
            BLOCK_K=cut.inner,
            GROUP=cut.group,
            **flags,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        at = (hidden, *hidden.stride(), inputs.weight, *inputs.weight.stride(), *_bias(inputs), *cap)
        kernels.selected[(ceil_div(count, kernels.SELECTED.value),)](
            *at,
            ids,
            chosen,
            count,
            vocab,
            hidden.shape[1],
            HAS_BIAS=inputs.bias is not None,
            CAPPED=is_capped,
            BLOCK_K=16 if hidden.dtype == torch.float32 and not INTERPRETED else 64,
            num_warps=4,
            num_stages=4,
        )
        programs = ceil_div(count, kernels.ROWS.value)
        if units > segments:
            merged = hidden.new_empty((segments, 3, count), dtype=torch.float32)
            kernels.merge_blocks[(programs, segments)](parts, merged, temperature, count, units, **flags, num_warps=1)
            parts = merged
        results = (chosen, ids, logp, norm, lse, row_entropy, count, segments, vocab, inputs.ignore_index or 0)
        kernels.finish[(programs,)](
            parts, temperature, *results, HAS_IGNORED=inputs.ignore_index is not None, **flags, num_warps=1
        )
    return logp, lse, row_entropy, norm


def _number_or_rows(temperature: torch.Tensor) -> torch.Tensor | float:
    return temperature.contiguous() if temperature.ndim else float(temperature)


def _bias(inputs: Inputs) -> tuple[torch.Tensor, int]:
    """Return the bias and its stride; without a bias, a tensor that the kernel does not read."""
    return (inputs.hidden, 0) if inputs.bias is None else (inputs.bias, inputs.bias.stride(0))


class Steps(products.Products):
    """One piece of the vocabulary for one block of rows of the backward pass."""

    def summed(self, hidden: torch.Tensor) -> int:
        """Return how many rows are summed into one term of dbias: the height of a tile."""
        return schedule_of("gradient", hidden).rows

    def dlogits(
        self, block: Inputs, upstream: LogpUpstream, columns: slice, dbias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return dz, rounded, and add its row sum to dbias."""
        hidden, weight = block.hidden, block.weight
        count, width = len(hidden), columns.stop - columns.start
        cut = schedule_of("gradient", hidden)
        # The padded width lets a tensor descriptor address the rows, whatever ``width`` is.
        dz = hidden.new_empty((count, ceil_div(width, kernels.BLOCK.value) * kernels.BLOCK.value))[:, :width]
        stored = gemm.described(dz)
        row_tiles = ceil_div(count, cut.rows)
        tiles = row_tiles * ceil_div(width, kernels.BLOCK.value)
        partial = hidden.new_empty((row_tiles, width), dtype=torch.float32) if dbias is not None else hidden
        norm, *others = upstream[1:]
        saved = [norm if value is None else value for value in others]
        with device_of(hidden):
            kernels.dlogits[(min(tiles, processors(hidden.device)) if cut.persistent else tiles,)](
                *(first := gemm.operand(hidden, cut.rows, cut.inner))[:3],
                *(second := gemm.operand(weight, kernels.BLOCK.value, cut.inner))[:3],
                *_bias(block),
                *(block.cap or NO_CAP),
                block.target_ids.contiguous(),
                _number_or_rows(block.temperature),
                norm,
                *saved,
                gemm.descriptor(dz, cut.rows, kernels.BLOCK.value) if stored else dz,
                0 if stored else dz.stride(0),
                partial,
                count,
                len(weight),
                hidden.shape[1],
                columns.start,
                width,
                block.ignore_index or 0,
                HIDDEN=first.kind,
                WEIGHT=second.kind,
                STORED=stored,
                HAS_BIAS=block.bias is not None,
                CAPPED=block.cap is not None,
                PER_ROW=block.temperature.ndim > 0,
                HAS_IGNORED=block.ignore_index is not None,
                HAS_LOGP=upstream.grad_logp is not None,
                HAS_LSE=upstream.grad_logsumexp is not None,
                HAS_ENTROPY=upstream.grad_entropy is not None,
                DBIAS=dbias is not None,
                BLOCK_M=cut.rows,
                BLOCK_K=cut.inner,
                GROUP=cut.group,
                PERSISTENT=cut.persistent,
                num_warps=cut.warps,
                num_stages=cut.stages,
            )
            if dbias is not None:
                kernels.add_tiles[(ceil_div(width, kernels.BLOCK.value),)](
                    partial, dbias, row_tiles, width, num_warps=4
                )
        return dz
