"""The backward pass of ``cuda-sm90``: dz, and the product of core.

dbias is a chain over tokens whose terms are sums of 16 tokens. Everything else is as in ``backward.py`` of the package.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.cuda.gemm import matmul
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.linear_logp import backward
from rl_kernels.linear_logp.backends.cuda_sm90.tiles import (
    BACKWARD,
    BLOCK,
    Fields,
    Maps,
    copyable,
    program,
    read,
    variant,
)
from rl_kernels.linear_logp.backward import Dlogits, Product
from rl_kernels.linear_logp.inputs import Inputs

ARGS = "({}PPPPPPPPiiii)"
"""Layout of ``struct Args``; ``{}`` is the layout of ``struct Inputs``, its first part."""
SUMMED = 16
"""Rows of a term of dbias, a step of the canonical chain."""
KEPT_THREADS, KEPT_COLUMNS = 128, 512
"""Threads and columns of a block that reads kept logits; it has as many rows as are summed."""


class Steps(backward.Steps):
    """One piece of the vocabulary for one block of rows of the backward pass."""

    def summed(self, hidden: torch.Tensor) -> int:
        """Return how many rows are summed into one term of dbias."""
        return SUMMED

    def begin(self, args: Any) -> Inputs:
        """Return the inputs in the layouts that the kernels read."""
        grads = [None if grad is None else grad.contiguous() for grad in args[11:14]]
        # What TMA cannot read is copied once here, not for each piece.
        return read(copyable(args[0]), *args[1:11], *grads, *args[14:16])

    def dlogits(self, block: Inputs, columns: slice, dbias: torch.Tensor | None, dz: torch.Tensor) -> Dlogits:
        """Write dz, rounded, and add its row sum to dbias."""
        (count, width), device = dz.shape, dz.device
        fields, kept, terms = Fields(block), block.kept_part(columns), -(-count // SUMMED)
        cut, form = fields.cut, ARGS.format(fields.form)
        has_entropy, sums_bias, is_kept = block.grad_entropy is not None, dbias is not None, kept is not None
        compiled = program(BACKWARD, dz.dtype, cut, entropy=has_entropy, **variant(block))
        numbers = columns.start, width, 0 if kept is None else kept.stride(0), dz.stride(0)
        place = slice(columns.start - block.first_kept, columns.stop - block.first_kept)
        if is_kept:
            gradient, grid = kernel(compiled, "gradient_of_kept", form, device), (terms, -(-width // KEPT_COLUMNS), 1)
            threads, shared = KEPT_THREADS, 0
        else:
            gradient = kernel(compiled, "gradient", f"TTT{form}", device)
            grid = cut.grid(count, -(-width // BLOCK), dz.get_device()), 1, 1
            threads, shared = cut.threads, cut.shared(stores=True)
        add, maps = kernel(compiled, "add_rows", "PPii", device) if sums_bias else None, Maps()

        def step(block: Inputs, dbias: torch.Tensor | None, dz: torch.Tensor) -> None:
            hidden, norm = block.hidden, block.norm
            sums = hidden.new_empty(terms, width, dtype=torch.float32) if sums_bias else None
            members, _order = fields.of(block)
            logits = block.kept[:, place] if is_kept and block.kept is not None else None
            # The kernel reads the entropy only if it has a gradient, and then it is there.
            tensors = norm, norm if block.entropy is None else block.entropy, *block[11:14], sums, logits, dz
            arguments = *members, *[0 if x is None else x.data_ptr() for x in tensors], *numbers
            if not is_kept:
                arguments = *maps.of(hidden, block.weight, dz), *arguments
            gradient.start(grid, threads, shared, False, arguments)
            if add is not None and sums is not None and dbias is not None:
                add.start((-(-width // 256), 1, 1), 256, 0, False, (sums.data_ptr(), dbias.data_ptr(), count, width))

        return step

    def dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz @ weight`` to ``out``, or continue the chain that ``out`` holds."""
        return matmul.Product(dz, weight, out, continues=continues)

    def dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz^T @ hidden`` to ``out``, or continue the chain that ``out`` holds."""
        return matmul.Product(dz, hidden, out, a_transposed=True, continues=continues)
