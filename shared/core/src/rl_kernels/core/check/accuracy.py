"""Relations of values: outputs and gradients against the definition in FP64."""

from __future__ import annotations

from collections.abc import Iterator

from rl_kernels.core.check import compare
from rl_kernels.core.check.candidate import Misbehaved, Results
from rl_kernels.core.check.cell import Cell
from rl_kernels.core.check.result import Record

UPSTREAM_SCALES = {"": 1.0, " upstream x0": 0.0, " upstream x-1": -1.0, " upstream x3": 3.0}


def accuracy(cell: Cell) -> Iterator[Record]:
    """Outputs against the gold in FP64: shape, dtype, the contract's fence and the relative rule."""
    try:
        outputs = cell.run(grad=False).outputs
    except Misbehaved as error:
        yield cell.failed("accuracy", "forward", str(error))
        return
    yield from _accurate(cell, "accuracy", "", outputs, cell.eager().outputs, cell.gold().outputs, {})


def gradients(cell: Cell) -> Iterator[Record]:
    """Gradients against the gold's, for random upstream gradients and for these times 0, -1 and 3."""
    upstream = cell.upstream(cell.eager())
    if not upstream:
        yield cell.skip("gradients", "no output carries a gradient")
        return
    for label, scale in UPSTREAM_SCALES.items():
        scaled = {name: value * scale for name, value in upstream.items()}
        exact = {name: value.double() for name, value in scaled.items()}
        try:
            found = cell.run().gradients(scaled)
        except Misbehaved as error:
            yield cell.failed("gradients", "backward" + label, str(error))
            continue
        expected, truth = cell.eager().gradients(scaled), cell.gold().gradients(exact)
        yield from _accurate(cell, "gradients", label, found, expected, truth, exact)


def _accurate(
    cell: Cell, relation: str, label: str, found: Results, eager: Results, gold: Results, upstream: Results
) -> Iterator[Record]:
    if found.keys() != eager.keys():
        yield cell.failed(relation, "results", f"expected {', '.join(eager)}, got {', '.join(found)}")
        return
    magnitudes = cell.magnitudes(upstream)
    direction = "forward" if relation == "accuracy" else "gradient"
    for item, value in found.items():
        row = cell.tolerance("accuracy", item, eager[item].dtype)
        # A gradient is linear in its upstream, and so is what it may be off by.
        tolerance = row._replace(atol=row.atol * max(1.0, abs(UPSTREAM_SCALES[label])))
        comparison = compare.accuracy(value, eager[item], gold[item], magnitudes[item], tolerance, direction)
        yield cell.record(relation, item + label, tuple(value.shape), tolerance, comparison)
