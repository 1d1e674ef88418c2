"""Gradients that are added to a buffer ``main_grad`` of a parameter, in place of a gradient of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.check import compare
from rl_kernels.core.check.cell import Cell
from rl_kernels.core.check.result import Record
from rl_kernels.core.check.run import Misbehaved, Results


def main_grad(cell: Cell, upstream: Results) -> Iterator[Record]:
    """Two backward passes add up in the buffer; a user's implementation may leave it alone, and give a gradient."""
    for name in sorted(cell.spec.main_grad & set(cell.leaves)):
        value = cell.inputs[name].clone()
        value.main_grad = torch.zeros_like(value, dtype=torch.float32, memory_format=torch.contiguous_format)
        inputs = {**cell.inputs, name: value}
        item = f"gradient:{name}"
        exact = {output: 2 * grad.double() for output, grad in upstream.items()}
        try:
            run = cell.run(inputs)
            once = run.gradients(upstream, again=True)
            found = run.gradients(upstream)[item]
        except Misbehaved as error:
            yield cell.failed("gradients", f"{item} in main_grad", error)
            continue
        if cell.candidate.backend is None and compare.bits(found, once[item]).passed:
            continue
        eager = cell.eager().gradients({output: 2 * grad for output, grad in upstream.items()})[item]
        gold, magnitude = cell.gold().gradients(exact)[item], cell.magnitudes(exact)[item]
        row = cell.tolerance("accuracy", item, eager.dtype)
        comparison = compare.accuracy(found.to(eager.dtype), eager, gold, magnitude, row, "gradient")
        yield cell.record("gradients", f"{item} in main_grad", tuple(found.shape), row, comparison)
