"""What surrounds a call: it may change nothing in the result, and the call may change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.check import compare
from rl_kernels.core.check.cell import Cell
from rl_kernels.core.check.compare import Comparison
from rl_kernels.core.check.guard import Misbehaved, Results
from rl_kernels.core.check.result import Check, Record
from rl_kernels.core.testing.surroundings import Surroundings

AROUND = {
    "default dtype FP64": Surroundings(default_dtype=torch.float64),
    "default device meta": Surroundings(default_device="meta"),
    "inference mode": Surroundings(inference=True),
    "matmul precision medium": Surroundings(matmul_precision="medium"),
}
CAST = torch.bfloat16
"""The dtype of autocast."""


def as_found(cell: Cell) -> Iterator[Record]:
    """Say which of other people's functions a candidate has replaced; only in a process of its own would it dare."""
    if cell.candidate.worker is None:
        return
    try:
        patched = cell.candidate.worker.ask("patched")
    except Misbehaved as error:
        yield cell.failed("hygiene", "functions of others", error)
        return
    message = f"replaced: {', '.join(patched)}" if patched else ""
    yield cell.record("hygiene", "functions of others", (), "exact", Comparison(not patched, message=message))


def around(cell: Cell, expected: Results, upstream: Results) -> Iterator[Record]:
    """The same call with other defaults of torch, and under autocast: equal bits."""
    for label, surroundings in AROUND.items():
        given = {} if surroundings.inference else upstream
        yield _same(cell, label, surroundings, expected if given else _outputs(expected), given)
    yield from _autocast(cell, expected, upstream)


def _same(cell: Cell, label: str, surroundings: Surroundings, expected: Results, upstream: Results) -> Check:
    try:
        found = cell.run(leaves=None if upstream else [], around=surroundings).results(upstream)
    except Misbehaved as error:
        return cell.failed("hygiene", label, error)
    if found.keys() != expected.keys():
        return cell.failed("hygiene", label, f"expected {', '.join(expected)}, got {', '.join(found)}")
    for item, value in expected.items():
        comparison = compare.bits(found[item], value)
        if not comparison.passed:
            return cell.record("hygiene", f"{item}, {label}", tuple(value.shape), "bitwise", comparison)
    return cell.record("hygiene", label, (), "bitwise", Comparison(True))


def _autocast(cell: Cell, expected: Results, upstream: Results) -> Iterator[Record]:
    """Compare with a call of the arguments that autocast casts, cast beforehand; of others it casts none.

    Backward runs outside of autocast, as it does after a ``with`` block, and inside.
    """
    cast = [name for name in cell.spec.autocast.get(cell.case.function, ()) if name in cell.inputs]
    if cell.dtype_name == "fp64" or (cast and cell.is_slow):
        return
    wanted = expected
    if cast:
        try:
            found = cell.run({**cell.inputs, **{name: cell.inputs[name].to(CAST) for name in cast}}).results(upstream)
        except Misbehaved as error:
            yield cell.failed("hygiene", "autocast, cast beforehand", error)
            return
        # The gradient of a cast is a cast.
        wanted = {
            name: value.to(expected[name].dtype) if "gradient:" in name else value for name, value in found.items()
        }
    yield _same(cell, "autocast", Surroundings(autocast=CAST, forward_only=True), wanted, upstream)
    if upstream:
        yield _same(cell, "autocast, backward inside", Surroundings(autocast=CAST), wanted, upstream)


def _outputs(results: Results) -> Results:
    return {name: value for name, value in results.items() if not name.startswith("gradient:")}
