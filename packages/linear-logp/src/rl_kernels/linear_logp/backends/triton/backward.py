"""The backward pass of the Triton backend."""

from __future__ import annotations

from dataclasses import replace

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.rowwise.logp_gradient import LogpUpstream
from rl_kernels.core.triton_lib import gemm
from rl_kernels.core.triton_lib.launch import ceil_div
from rl_kernels.core.triton_lib.schedule import processors
from rl_kernels.linear_logp import blocks
from rl_kernels.linear_logp.backends.triton import kernels
from rl_kernels.linear_logp.backends.triton.tiles import NO_CAP, bias_of, number_or_rows, schedule_of
from rl_kernels.linear_logp.inputs import Inputs
from rl_kernels.linear_logp.vocabulary import BLOCK

KEPT_ROWS = 32
"""Rows of a tile whose logits are kept: it is bound by memory, and more rows would not fit in registers."""


class Steps(blocks.Blocks):
    """One piece of the vocabulary for one block of rows of the backward pass."""

    def summed(self, hidden: torch.Tensor) -> int:
        """Return how many rows are summed into one term of dbias: the height of a tile."""
        return schedule_of("gradient", hidden).rows

    def dlogits(
        self, block: Inputs, upstream: LogpUpstream, columns: slice, dbias: torch.Tensor | None, dz: torch.Tensor
    ) -> None:
        """Write dz, rounded, and add its row sum to dbias."""
        hidden, weight = block.hidden, block.weight
        count, width = len(hidden), columns.stop - columns.start
        cut = schedule_of("gradient", hidden)
        # The sum of a tile's rows depends on which thread holds what, so for dbias the logits are formed again.
        kept = block.kept_part(columns) if dbias is None else None
        if kept is not None:
            cut = replace(cut, rows=min(cut.rows, KEPT_ROWS), persistent=False)
        stored = gemm.described(dz)
        row_tiles = ceil_div(count, cut.rows)
        tiles = row_tiles * ceil_div(width, kernels.BLOCK.value)
        partial = hidden.new_empty((row_tiles, width), dtype=torch.float32) if dbias is not None else hidden
        norm, *others = upstream[1:]
        saved = [norm if value is None else value for value in others]
        with device_of(hidden):
            kernels.dlogits[(min(tiles, processors(hidden.device)) if cut.persistent else tiles,)](
                (first := gemm.operand(hidden, cut.rows, cut.inner)).of(hidden),
                *first[1:3],
                (second := gemm.operand(weight, kernels.BLOCK.value, cut.inner)).of(weight),
                *second[1:3],
                *bias_of(block),
                *(block.cap or NO_CAP),
                block.target_ids.contiguous(),
                number_or_rows(block.temperature),
                norm,
                *saved,
                gemm.box_of(dz, cut.rows, kernels.BLOCK.value).of(dz) if stored else dz,
                0 if stored else dz.stride(0),
                partial,
                norm if kept is None else kept,
                0 if kept is None else kept.stride(0),
                block.start,
                block.vocab,
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
                KEPT=kept is not None,
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

    def add_dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz @ weight`` to ``out``, or continue the chain that ``out`` holds."""
        gemm.matmul(dz, weight, out, continues=continues, span=BLOCK)

    def add_dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz^T @ hidden`` to ``out``, or continue the chain that ``out`` holds."""
        gemm.matmul(dz.t(), hidden, out, continues=continues)
