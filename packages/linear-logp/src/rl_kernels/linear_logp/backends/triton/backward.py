"""The backward pass of the Triton backend, and how rows of both passes are cut into tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.operator import arch_of, tiles_change_no_bit
from rl_kernels.core.triton_lib import gemm
from rl_kernels.core.triton_lib.launch import INTERPRETED, Launch, ceil_div
from rl_kernels.core.triton_lib.schedule import HALF, Schedule, processors
from rl_kernels.core.triton_lib.targets import LEAST, shared_memory_of
from rl_kernels.core.tuned import entry
from rl_kernels.linear_logp import backward
from rl_kernels.linear_logp.backends.triton import kernels
from rl_kernels.linear_logp.backward import Dlogits, Product
from rl_kernels.linear_logp.inputs import Cap, Inputs
from rl_kernels.linear_logp.vocabulary import BLOCK

NO_CAP = Cap(0.5, 0.5)
"""Stands in for a missing cap and is not read; not 1, for which Triton would compile another kernel."""
KEPT_ROWS = 32
"""Rows of a tile whose logits are kept: it is bound by memory, and more rows would not fit in registers."""


def schedule_of(name: str, hidden: torch.Tensor) -> Schedule:
    """Return the schedule of the logit tiles; where it could change bits, dtype and architecture alone decide."""
    if INTERPRETED:
        return Schedule(64, kernels.BLOCK.value, 64, 4, 1)
    is_small = shared_memory_of(arch_of(hidden.device.type, hidden.device.index)) == LEAST
    if hidden.dtype not in HALF:
        return Schedule(32, kernels.BLOCK.value, 16, 8, 1 if is_small else 3)
    if not tiles_change_no_bit(hidden.device):
        return Schedule(32, kernels.BLOCK.value, 32, 8, 2) if is_small else Schedule(64, kernels.BLOCK.value, 32, 8, 3)
    return _tuned(name)


def leasts_of(count: int, vocab: int, *, per_row: bool, has_norm: bool) -> Callable[..., torch.Tensor]:
    """Return ``(min_logit, temperature, ids, norm) -> leasts`` of ``count`` rows (``kernels.find_least``)."""
    tiles = ceil_div(count, kernels.ROWS.value)
    find = Launch(kernels.find_least, (tiles,), (count, vocab, per_row, has_norm), num_warps=1)

    def launch(min_logit: torch.Tensor, *rest: Any) -> torch.Tensor:
        leasts = torch.empty_like(min_logit)
        find(min_logit, *rest, leasts)
        return leasts

    return launch


@functools.cache
def _tuned(name: str) -> Schedule:
    return entry("rl_kernels.linear_logp.backends.triton", name, kind=Schedule)


class Steps(backward.Steps):
    """One piece of the vocabulary for one block of rows of the backward pass."""

    def summed(self, hidden: torch.Tensor) -> int:
        """Return how many rows are summed into one term of dbias: the height of a tile."""
        return schedule_of("gradient", hidden).rows

    def dlogits(self, block: Inputs, columns: slice, dbias: torch.Tensor | None, dz: torch.Tensor) -> Dlogits:
        """Write dz, rounded, and add its row sum to dbias."""
        hidden, weight, bias = block.hidden, block.weight, block.bias
        count, width = len(hidden), columns.stop - columns.start
        cut = schedule_of("gradient", hidden)
        # The sum of a tile's rows depends on which thread holds what, so for dbias the logits are recomputed.
        kept = block.kept_part(columns) if dbias is None else None
        if kept is not None:
            cut = replace(cut, rows=min(cut.rows, KEPT_ROWS), persistent=False)
        row_tiles = ceil_div(count, cut.rows)
        tiles, is_kept, sums_bias = row_tiles * ceil_div(width, BLOCK), kept is not None, dbias is not None
        first, second = gemm.operand(hidden, cut.rows, cut.inner), gemm.operand(weight, BLOCK, cut.inner)
        box = gemm.box_of(dz, cut.rows, BLOCK) if gemm.described(dz) else None
        per_row = isinstance(block.temperature, torch.Tensor)
        place = slice(columns.start - block.first_kept, columns.stop - block.first_kept)
        form = Launch(
            kernels.dlogits,
            (min(tiles, processors(hidden.device)) if cut.persistent else tiles,),
            (
                *(*first[1:3], *second[1:3], 0 if bias is None else bias.stride(0), 0 if box else dz.stride(0)),
                *(0 if kept is None else kept.stride(0), block.start, block.vocab, count, len(weight)),
                *(hidden.shape[1], columns.start, width, block.ignore_index or 0, first.kind, second.kind),
                *(
                    box is not None,
                    bias is not None,
                    block.cap is not None,
                    per_row,
                    block.min_logit is not None,
                ),
                *(block.ignore_index is not None, *[grad is not None for grad in block[11:14]], sums_bias, is_kept),
                *(cut.rows, cut.inner, cut.group, cut.persistent),
            ),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        find_least = leasts_of(count, block.vocab, per_row=per_row, has_norm=True)
        add = Launch(kernels.add_tiles, (ceil_div(width, BLOCK),), (row_tiles, width), num_warps=4)

        def step(block: Inputs, dbias: torch.Tensor | None, dz: torch.Tensor) -> None:
            hidden, norm = block.hidden, block.norm
            saved = [norm if value is None else value for value in (block.entropy, *block[11:14])]
            partial = hidden.new_empty(row_tiles, width, dtype=torch.float32) if sums_bias else hidden
            with device_of(hidden):
                least = block.target_ids
                if block.min_logit is not None:
                    least = find_least(block.min_logit, block.temperature, block.target_ids, norm)
                form(
                    *(first.of(hidden), second.of(block.weight), hidden if block.bias is None else block.bias),
                    *(*(block.cap or NO_CAP), block.target_ids, block.temperature, least, norm, *saved),
                    *(
                        box.of(dz) if box else dz,
                        partial,
                        norm if block.kept is None or not is_kept else block.kept[:, place],
                    ),
                )
                if sums_bias:
                    add(partial, dbias)

        return step

    def dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz @ weight`` to ``out``, or continue the chain that ``out`` holds."""
        return gemm.Product(dz, weight, out, continues=continues, span=BLOCK)

    def dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz^T @ hidden`` to ``out``, or continue the chain that ``out`` holds."""
        return gemm.Product(dz, hidden, out, a_transposed=True, continues=continues)
