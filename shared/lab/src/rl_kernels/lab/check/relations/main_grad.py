"""Gradients that are added to a parameter's buffer ``main_grad`` instead of being returned."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from rl_kernels.core.testing import Inputs
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.compare import Comparison
from rl_kernels.lab.check.guard import Misbehaved, Results
from rl_kernels.lab.check.result import Check, Record
from rl_kernels.lab.check.surroundings import Surroundings

FEW = 32
"""A buffer with at most this many numbers may look rounded by chance."""
UNEVEN = 1.37
HALF = (torch.bfloat16, torch.float16)
MORE = ALONE, COLUMNS, FROZEN, RENEWED, CAST = " alone", " of columns", "frozen", "renewed", "cast"
"""Checks beside the first; the first two are suffixes to the name of a gradient."""


def main_grad(cell: Cell, upstream: Results) -> Iterator[Record]:
    """Check two calls, then both backward passes: gradients accumulate in the buffer, for all strides and leaves.

    A user's implementation may ignore the buffer and return a gradient, but then it must always do so.
    """
    # An FP32 buffer cannot hold an FP64 gradient. One in four generated cases is enough.
    if cell.dtype_name == "fp64" or (cell.case.relations and zlib.crc32(cell.case.name.encode()) % 4):
        return
    names = sorted(cell.spec.main_grad & set(cell.leaves))
    # Where calls are slow, the plainest case runs all checks, each other case one more for one of its weights.
    more = () if cell.is_brief else MORE if cell.is_first else cell.some(MORE)
    for name in names if cell.is_first else cell.some(names):
        needed = cell.candidate.backend is not None
        for label in ("", *(label for label in (ALONE, COLUMNS) if label in more)):
            try:
                run = cell.run(
                    _with_buffer(cell, name, label == COLUMNS), leaves=[name] if label == ALONE else cell.leaves
                )
                gradient = run.two_at_once(upstream)[f"gradient:{name}"]
                needed = needed or bool(run.inputs[name].main_grad.any())
            except Misbehaved as error:
                yield cell.failed("gradients", f"gradient:{name} in main_grad{label}", error)
                break
            if not needed:
                break
            yield _added(cell, name, upstream, gradient, label)
            if not label and cell.inputs[name].dtype in HALF:
                yield _unrounded(cell, name, upstream)
        if needed and FROZEN in more and len(cell.leaves) > 1:
            yield _frozen(cell, name, upstream)
        if needed and RENEWED in more:
            yield _renewed(cell, name, upstream)
        if needed and CAST in more and name in cell.spec.autocast.get(cell.case.function, ()):
            yield _cast(cell, name, upstream)


def _unrounded(cell: Cell, name: str, upstream: Results) -> Check:
    """Check that a gradient is not rounded to the parameter's dtype before it is added to an FP32 buffer."""
    item = f"gradient:{name} in main_grad, digits"
    inputs = _with_buffer(cell, name, False)
    # Products with whole numbers may have few digits of their own.
    inputs |= {leaf: inputs[leaf] * UNEVEN for leaf in cell.leaves if leaf != name}
    try:
        run = cell.run(inputs)
        run.gradients(upstream)
        buffer = run.inputs[name].main_grad
    except Misbehaved as error:
        return cell.failed("gradients", item, error)
    is_rounded = int(buffer.count_nonzero()) > FEW and torch.equal(buffer, buffer.to(cell.inputs[name].dtype).float())
    message = f"the gradient was rounded to {cell.dtype_name} before it was added" if is_rounded else ""
    return cell.record("gradients", item, tuple(buffer.shape), "FP32", Comparison(not is_rounded, message=message))


def _frozen(cell: Cell, name: str, upstream: Results) -> Check:
    """Check that a parameter that requires no gradient gets none, even if it has a buffer."""
    item = f"gradient:{name} in main_grad, frozen"
    try:
        run = cell.run(_with_buffer(cell, name, False), leaves=[leaf for leaf in cell.leaves if leaf != name])
        run.gradients(upstream)
        is_changed = bool(run.inputs[name].main_grad.any())
    except Misbehaved as error:
        return cell.failed("gradients", item, error)
    message = "the buffer was written to" if is_changed else ""
    return cell.record("gradients", item, (), "unchanged", Comparison(not is_changed, message=message))


def _renewed(cell: Cell, name: str, upstream: Results) -> Check:
    """Assign a new buffer after a first step, and check that the second step adds its gradient to the new buffer."""
    item, inputs = f"gradient:{name} in another main_grad", _with_buffer(cell, name, False)
    try:
        run = cell.run(inputs)
        run.gradients(upstream)
        gradient = run.renewed(upstream)[f"gradient:{name}"]
        expected = cell.run(inputs).gradients(upstream)[f"gradient:{name}"]
    except Misbehaved as error:
        return cell.failed("gradients", item, error)
    return cell.record("gradients", item, tuple(gradient.shape), "bitwise", compare.bits(gradient, expected))


def _cast(cell: Cell, name: str, upstream: Results) -> Check:
    """Check that autocast, which replaces the parameter by a cast copy, still adds gradients to the buffer."""
    item = f"gradient:{name} in main_grad, autocast"
    try:
        cast = Surroundings(autocast=torch.bfloat16, forward_only=True)
        run = cell.run(_with_buffer(cell, name, False), around=cast)
        run.gradients(upstream)
        # If all tokens are ignored, there is nothing to add.
        is_nothing = not cell.run(around=cast).gradients(upstream)[f"gradient:{name}"].any()
        is_added = is_nothing or bool(run.inputs[name].main_grad.any())
    except Misbehaved as error:
        return cell.failed("gradients", item, error)
    message = "" if is_added else "nothing was added to the buffer"
    return cell.record("gradients", item, (), "added", Comparison(is_added, message=message))


def _with_buffer(cell: Cell, name: str, strided: bool) -> Inputs:
    value = cell.inputs[name].clone()
    buffer = torch.zeros_like(value, dtype=torch.float32, memory_format=torch.contiguous_format)
    if strided:
        # Column-major, or every other element.
        buffer = buffer.mT.contiguous().mT if buffer.ndim > 1 else torch.stack((buffer, buffer), -1)[..., 0]
    value.main_grad = buffer
    return {**cell.inputs, name: value}


def _added(cell: Cell, name: str, upstream: Results, gradient: torch.Tensor, label: str) -> Check:
    """Compare with the gradient for twice the upstream gradient."""
    item = f"gradient:{name}"
    twice = {output: 2 * grad for output, grad in upstream.items()}
    exact = {output: grad.double() for output, grad in twice.items()}
    eager, gold = cell.eager().gradients(twice)[item], cell.gold().gradients(exact)[item]
    row_key = ("accuracy", item, eager.dtype)
    tolerance, general = (row._replace(atol=2 * row.atol) for row in (cell.tolerance(*row_key), cell.general(*row_key)))
    operands = (gradient.to(eager.dtype), eager, gold, cell.magnitudes(exact)[item], tolerance, "gradient")
    comparison = compare.accuracy(*operands, calibrated=not cell.case.relations, row=general)
    name, shape = f"{item} in main_grad{label}", tuple(gradient.shape)
    return cell.record("gradients", name, shape, tolerance, comparison, cell.row(*row_key))
