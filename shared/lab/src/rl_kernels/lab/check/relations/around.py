"""Global state around a call: it must not change the result, and the call must not change it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from rl_kernels.lab.check import compare
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.compare import Comparison
from rl_kernels.lab.check.guard import STATE_CHANGED, Misbehaved, Results
from rl_kernels.lab.check.result import Check, Record
from rl_kernels.lab.check.surroundings import Surroundings

REFUSED = 3
"""Largest number of bad calls."""
PLAIN_VALUES = (torch.Tensor, torch.dtype, int, float, str, type(None))
AROUND = {
    "default dtype FP64": Surroundings(default_dtype=torch.float64),
    "default device meta": Surroundings(default_device="meta"),
    "inference mode": Surroundings(inference=True),
    "matmul precision medium": Surroundings(matmul_precision="medium"),
    "arguments computed": Surroundings(computed=True),
    "checkpointed": Surroundings(checkpointed=True),
}
CASTS = (torch.bfloat16, torch.float16)
"""Dtypes of autocast; the second is used only for the plainest case of a function."""


def functions_unreplaced(cell: Cell) -> Iterator[Record]:
    """Check that a candidate has replaced no function of other packages; only for candidates in their own process."""
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
    """Repeat the call with other torch defaults and modes, and under autocast: equal bits."""
    for label, surroundings in AROUND.items():
        if surroundings.checkpointed and cell.spec.overwritten(cell.inputs):
            continue
        upstream_used = {} if surroundings.inference else upstream
        yield _compare_bits(
            cell, label, surroundings, expected if upstream_used else _outputs_only(expected), upstream_used
        )
    for dtype in CASTS if cell.is_first else CASTS[:1]:
        yield from _autocast(cell, expected, upstream, dtype)
    yield from _same_tensor(cell, upstream)
    if cell.is_first:
        yield from _refused(cell, expected, upstream)


def _compare_bits(cell: Cell, label: str, surroundings: Surroundings, expected: Results, upstream: Results) -> Check:
    try:
        results = cell.run(leaves=None if upstream else [], around=surroundings).results(upstream)
    except Misbehaved as error:
        return cell.failed("hygiene", label, error)
    if results.keys() != expected.keys():
        return cell.failed("hygiene", label, f"expected {', '.join(expected)}, got {', '.join(results)}")
    for item, value in expected.items():
        comparison = compare.bits(results[item], value)
        if not comparison.passed:
            return cell.record("hygiene", f"{item}, {label}", tuple(value.shape), "bitwise", comparison)
    return cell.record("hygiene", label, (), "bitwise", Comparison(True))


def _autocast(cell: Cell, expected: Results, upstream: Results, dtype: torch.dtype) -> Iterator[Record]:
    """Compare a call under autocast with a plain call on arguments that were cast beforehand.

    Only the arguments in ``Spec.autocast`` may be cast. Backward runs outside of autocast, as after a ``with`` block,
    and inside.
    """
    cast = [name for name in cell.spec.autocast.get(cell.case.function, ()) if name in cell.inputs]
    if cell.dtype_name == "fp64" or (cast and cell.is_slow):
        return
    reference = expected
    if cast:
        try:
            results = cell.run({**cell.inputs, **{name: cell.inputs[name].to(dtype) for name in cast}}).results(
                upstream
            )
        except Misbehaved as error:
            yield cell.failed("hygiene", "autocast, cast beforehand", error)
            return
        # The gradient of a cast is a cast.
        reference = {
            name: value.to(expected[name].dtype) if "gradient:" in name else value for name, value in results.items()
        }
    label = "autocast" if dtype == CASTS[0] else "autocast to FP16"
    yield _compare_bits(cell, label, Surroundings(autocast=dtype, forward_only=True), reference, upstream)
    if upstream:
        yield _compare_bits(cell, f"{label}, backward inside", Surroundings(autocast=dtype), reference, upstream)


def _same_tensor(cell: Cell, upstream: Results) -> Iterator[Record]:
    """Pass one tensor as two arguments, the second without gradient: the same bits as with a copy."""
    if cell.spec.overwritten(cell.inputs) or not upstream:
        return
    constants = [
        name
        for name, value in cell.inputs.items()
        if isinstance(value, torch.Tensor) and name not in (*cell.leaves, *cell.spec.masks)
    ]
    for leaf in cell.leaves:
        value = cell.inputs[leaf]
        for name in constants:
            if (cell.inputs[name].shape, cell.inputs[name].dtype) == (value.shape, value.dtype):
                try:
                    expected = cell.run({**cell.inputs, name: value.clone()}).results(upstream)
                except Misbehaved:  # These values may be illegal for that argument.
                    continue
                yield _compare_bits(cell, f"{name} is {leaf}", Surroundings(same=(leaf, name)), expected, upstream)


def _refused(cell: Cell, expected: Results, upstream: Results) -> Iterator[Record]:
    """Check that refused calls leave the global state unchanged, and that a good call then gives the same bits."""
    spec, item = cell.spec, "after refused calls"
    bad = [call for call in spec.illegal if cell.case.name == (call.case or spec.case().name)]
    for call in [call for call in bad if call.error is ValueError][:REFUSED]:
        inputs = call.change(copy.deepcopy(cell.inputs))
        if cell.missing(inputs) or not all(isinstance(value, PLAIN_VALUES) for value in inputs.values()):
            continue
        try:
            cell.run(inputs, leaves=[])
        except Misbehaved as error:
            if STATE_CHANGED in str(error):
                yield cell.failed("hygiene", item, f"{call.name}: {error}")
                return
    yield _compare_bits(cell, item, Surroundings(), expected, upstream)


def _outputs_only(results: Results) -> Results:
    return {name: value for name, value in results.items() if not name.startswith("gradient:")}
