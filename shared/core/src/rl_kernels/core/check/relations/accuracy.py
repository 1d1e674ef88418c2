"""Relations of values: outputs and gradients against the definition in FP64."""

from __future__ import annotations

from collections.abc import Iterator

from rl_kernels.core.check import compare
from rl_kernels.core.check.candidate import Misbehaved, Results
from rl_kernels.core.check.cell import Cell
from rl_kernels.core.check.result import Record

UPSTREAM_SCALES = {"": 1.0, " upstream x0": 0.0, " upstream x-1": -1.0, " upstream x3": 3.0}


def accuracy(cell: Cell) -> Iterator[Record]:
    """Outputs against the gold in FP64: shape, dtype, the contract's fence and the relative rule.

    Then the same on other values of the same shapes: a result left over from the call before shows.
    """
    for label, drawn in {"": cell, " other values": cell.redrawn()}.items():
        try:
            outputs = drawn.run(leaves=[]).outputs
        except Misbehaved as error:
            yield drawn.failed("accuracy", "forward" + label, error)
            return
        yield from _accurate(drawn, "accuracy", label, outputs, drawn.eager().outputs, drawn.gold().outputs, {})


def gradients(cell: Cell) -> Iterator[Record]:
    """Gradients against the gold's, for random upstream gradients and for these times 0, -1 and 3.

    Then through each output alone, and of each argument alone: what is not asked for must not be missed.
    """
    upstream = cell.upstream(cell.eager())
    if not upstream:
        yield cell.skip("gradients", "no output carries a gradient")
        return
    for label, scale in UPSTREAM_SCALES.items():
        yield from _gradients(cell, label, {name: value * scale for name, value in upstream.items()}, cell.leaves)
    for name in upstream if len(upstream) > 1 else ():
        yield from _gradients(cell, f" through {name} alone", {name: upstream[name]}, cell.leaves)
    for name in cell.leaves if len(cell.leaves) > 1 else ():
        yield from _gradients(cell, " alone", upstream, [name])


def _gradients(cell: Cell, label: str, upstream: Results, leaves: list[str]) -> Iterator[Record]:
    exact = {name: value.double() for name, value in upstream.items()}
    try:
        found = cell.run(leaves=leaves).gradients(upstream)
    except Misbehaved as error:
        yield cell.failed("gradients", "backward" + label, error)
        return
    wanted = {f"gradient:{name}" for name in leaves}
    expected = {name: value for name, value in cell.eager().gradients(upstream).items() if name in wanted}
    yield from _accurate(cell, "gradients", label, found, expected, cell.gold().gradients(exact), exact)


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
        tolerance = row._replace(atol=row.atol * max(1.0, abs(UPSTREAM_SCALES.get(label, 1.0))))
        comparison = compare.accuracy(value, eager[item], gold[item], magnitudes[item], tolerance, direction)
        yield cell.record(relation, item + label, tuple(value.shape), tolerance, comparison)
