"""Gradients that are added to a buffer ``main_grad`` of a parameter, in place of a gradient of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rl_kernels.core.check import compare
from rl_kernels.core.check.cell import Cell
from rl_kernels.core.check.result import Check, Record
from rl_kernels.core.check.run import Misbehaved, Results


def main_grad(cell: Cell, upstream: Results) -> Iterator[Record]:
    """Two calls, then the backward pass of both: they add up in the buffer, whatever its strides and the other leaves.

    An implementation of a user's may leave the buffer alone and give a gradient.
    """
    for name in sorted(cell.spec.main_grad & set(cell.leaves)):
        for label, leaves, strided in (
            ("", cell.leaves, False),
            (" alone", [name], False),
            (" of columns", cell.leaves, True),
        ):
            if label and cell.case.relations:
                continue
            record = _added(cell, name, upstream, leaves, label, strided)
            if record is not None:
                yield record


def _added(cell: Cell, name: str, upstream: Results, leaves: Sequence[str], label: str, strided: bool) -> Check | None:
    item = f"gradient:{name}"
    value = cell.inputs[name].clone()
    buffer = torch.zeros_like(value, dtype=torch.float32, memory_format=torch.contiguous_format)
    value.main_grad = buffer.mT.contiguous().mT if strided else buffer
    inputs = {**cell.inputs, name: value}
    try:
        once = cell.run(inputs, leaves=leaves).gradients(upstream)[item]
        found = cell.run(inputs, leaves=leaves).two_at_once(upstream)[item]
    except Misbehaved as error:
        return cell.failed("gradients", f"{item} in main_grad{label}", error)
    if cell.candidate.backend is None and compare.bits(found, once).passed:
        return None
    exact = {output: 2 * grad.double() for output, grad in upstream.items()}
    eager = cell.eager().gradients({output: 2 * grad for output, grad in upstream.items()})[item]
    gold, magnitude = cell.gold().gradients(exact)[item], cell.magnitudes(exact)[item]
    row = cell.tolerance("accuracy", item, eager.dtype)
    comparison = compare.accuracy(found.to(eager.dtype), eager, gold, magnitude, row, "gradient")
    return cell.record("gradients", f"{item} in main_grad{label}", tuple(found.shape), row, comparison)
