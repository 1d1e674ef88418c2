"""The backward pass of ``cuda-sm90``: dz, and the product of core.

dbias is a chain over tokens whose terms are sums of 16 tokens. Everything else is as in ``backward.py`` and
``blocks.py`` of the package.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.cuda.gemm.matmul import matmul
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.core.rowwise.logp_gradient import LogpUpstream
from rl_kernels.linear_logp import blocks
from rl_kernels.linear_logp.backends.cuda_sm90.tiles import (
    BACKWARD,
    BLOCK,
    HEIGHT,
    SWIZZLE,
    Operands,
    copyable,
    program,
)
from rl_kernels.linear_logp.inputs import Inputs

ARGS = "({}PPPPPPPPiiii)"
"""Layout of ``struct Args``; ``{}`` is the layout of ``struct Inputs``, its first part."""
SUMMED = 16
"""Rows that are summed into one term of dbias."""
KEPT_THREADS, KEPT_COLUMNS = 128, 512
"""Threads and columns of a block that reads kept logits; it has as many rows as are summed."""


class Steps(blocks.Blocks):
    """One piece of the vocabulary for one block of rows of the backward pass."""

    def summed(self, hidden: torch.Tensor) -> int:
        """Return how many rows are summed into one term of dbias."""
        return SUMMED

    def dlogits(
        self, block: Inputs, upstream: LogpUpstream, columns: slice, dbias: torch.Tensor | None, dz: torch.Tensor
    ) -> None:
        """Write dz, rounded, and add its row sum to dbias."""
        hidden, width = block.hidden, columns.stop - columns.start
        count, device = hidden.shape[0], hidden.device
        operands = Operands.of(block, hidden)
        cut = operands.cut
        sums = None if dbias is None else hidden.new_empty((-(-count // SUMMED), width), dtype=torch.float32)
        has_entropy, is_capped = upstream.grad_entropy is not None, block.cap is not None
        made = program(BACKWARD, hidden.dtype, cut, entropy=has_entropy, capped=is_capped)
        kept = block.kept_part(columns)
        form = ARGS.format(operands.form)
        arguments = (
            *operands.arguments,
            upstream.norm,
            # The kernel reads this pointer only if there is an entropy, so it is never null there.
            upstream.norm if upstream.entropy is None else upstream.entropy,
            *(upstream.grad_logp, upstream.grad_logsumexp, upstream.grad_entropy),
            *(sums, kept, dz, columns.start, width, 0 if kept is None else kept.stride(0), dz.stride(0)),
        )
        if kept is None:
            kernel(made, "gradient", f"TTT{form}", device).launch(
                cut.grid(count, -(-width // BLOCK), hidden.get_device()),
                cut.threads,
                *operands.maps,
                tensor_map(dz, (HEIGHT, SWIZZLE // hidden.itemsize), swizzle=SWIZZLE),
                *arguments,
                shared=cut.shared(stores=True),
            )
        else:
            grid = -(-count // SUMMED), -(-width // KEPT_COLUMNS)
            kernel(made, "gradient_of_kept", form, device).launch(grid, KEPT_THREADS, *arguments)
        if dbias is not None:
            kernel(made, "add_rows", "PPii", device).launch(-(-width // 256), 256, sums, dbias, count, width)

    def add_dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz @ weight`` to ``out``, or continue the chain that ``out`` holds."""
        matmul(dz, weight, out, continues=continues)

    def add_dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz^T @ hidden`` to ``out``, or continue the chain that ``out`` holds."""
        matmul(dz.t(), hidden, out, continues=continues)


def backward(
    hidden: torch.Tensor, weight: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), empty if not needed; with ``main_grad``, dweight is added to it instead."""
    # What TMA cannot read is copied once here, not for each piece.
    return blocks.backward(Steps(), copyable(hidden), copyable(weight), *others)
