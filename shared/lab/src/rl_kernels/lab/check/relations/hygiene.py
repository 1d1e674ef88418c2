"""The relation of memory: a call reads only its inputs, writes all its outputs, and changes nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch

from rl_kernels.core.testing import Inputs, Variant
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.compare import Comparison
from rl_kernels.lab.check.guard import Misbehaved, Results
from rl_kernels.lab.check.ran import Ran
from rl_kernels.lab.check.relations.around import around, functions_unreplaced
from rl_kernels.lab.check.relations.determinism import unchanged_by
from rl_kernels.lab.check.relations.lifetimes import PASSED, first_difference, lifetimes
from rl_kernels.lab.check.result import Record
from rl_kernels.lab.check.surroundings import Surroundings
from rl_kernels.lab.check.transforms import STORAGE


def hygiene(cell: Cell) -> Iterator[Record]:
    """Check that inputs are unchanged, outputs fully written, and garbage in gaps or masked positions has no effect."""
    try:
        base = cell.run()
        upstream = cell.upstream(base)
        expected = base.results(upstream)
    except Misbehaved as error:
        yield cell.failed("hygiene", "run", error)
        return
    yield cell.record("hygiene", "inputs unchanged", (), "bitwise", _untouched(cell, cell.inputs, base))
    yield from _written(cell, base)
    yield from _poisoned(cell, expected, upstream)
    if cell.is_slow:
        yield cell.skip("hygiene", "what only the host decides: not in Triton's interpreter")
    else:
        yield from _untouched_elsewhere(cell)
        yield from lifetimes(cell, expected, upstream)
        yield from _expanded(cell)
        yield from functions_unreplaced(cell)
        yield from around(cell, expected, upstream)
    transforms = {**dict(cell.some(list(STORAGE.items()))), **cell.spec.hygiene}
    yield from unchanged_by(transforms, "hygiene", cell, expected, upstream)
    yield from _masked_by_argument(cell, upstream)
    if cell.is_first:
        yield from _empty(cell)


def _masked_by_argument(cell: Cell, upstream: Results) -> Iterator[Record]:
    """Check garbage in masked positions for each argument's gradient alone, which may have its own backward."""
    for name in cell.some(cell.leaves) if upstream and len(cell.leaves) > 1 else ():
        alone = replace(cell, spec=replace(cell.spec, differentiable=(name,)))
        transforms = {f"{label}, {name} alone": transform for label, transform in cell.spec.hygiene.items()}
        try:
            expected = alone.run().results(upstream)
        except Misbehaved as error:
            yield cell.failed("hygiene", f"{name} alone", error)
            continue
        yield from unchanged_by(transforms, "hygiene", alone, expected, upstream)


def _untouched_elsewhere(cell: Cell) -> Iterator[Record]:
    """Check that inputs are unchanged without gradient too, and with garbage between and around their elements."""
    moved = [variant for transform in STORAGE.values() for variant in transform(cell.case, cell.inputs, cell.draw())]
    for variant in (Variant("without gradient", cell.inputs), *moved):
        item = f"inputs unchanged, {variant.label}"
        try:
            run = cell.run(variant.inputs, leaves=[])
        except Misbehaved as error:
            yield cell.failed("hygiene", item, error)
            continue
        yield cell.record("hygiene", item, (), "bitwise", _untouched(cell, variant.inputs, run))


def _untouched(cell: Cell, inputs: Inputs, run: Ran) -> Comparison:
    """Compare every argument with its value before the call, gaps between its elements included.

    An argument into which the call writes a result must hold that result in the same memory. An argument that the call
    may overwrite otherwise may hold anything.
    """
    overwritten = cell.spec.overwritten(inputs)
    for name, before in inputs.items():
        after, wrong = run.inputs[name], "was changed"
        if name in overwritten:
            wrong = "does not hold its result, or was changed outside of it"
            result = run.outputs.get(cell.spec.writes.get(name, ""), after.detach())
            before = copy.deepcopy(before).copy_(result)
        if isinstance(before, torch.Tensor):
            comparison = _same_tensor(after.detach(), before)
            if not comparison.passed:
                return replace(comparison, message=f"{name} {wrong}: {comparison.message}")
        elif after != before and not (after != after and before != before):
            return Comparison(False, message=f"{name} was changed: got {after!r}, expected {before!r}")
    return PASSED


def _same_tensor(after: torch.Tensor, before: torch.Tensor) -> Comparison:
    if after.stride() != before.stride() or after.storage_offset() != before.storage_offset():
        return Comparison(False, message=f"expected strides {before.stride()}, got {after.stride()}")
    comparison = compare.bits(after, before)
    if not comparison.passed:
        return comparison
    return compare.bits(_storage(after), _storage(before))


def _storage(value: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def _written(cell: Cell, run: Ran) -> Iterator[Record]:
    for argument, item in cell.spec.writes.items():
        if argument in cell.inputs:
            comparison = compare.bits(run.inputs[argument].detach(), run.outputs[item])
            shape = tuple(run.outputs[item].shape)
            yield cell.record("hygiene", f"{argument} holds {item}", shape, "bitwise", comparison)


def _poisoned(cell: Cell, expected: Results, upstream: Results) -> Iterator[Record]:
    """Compare with a call whose fresh memory holds NaN, which shows elements that are never written."""
    try:
        results = cell.run(around=Surroundings(poisoned=True)).results(upstream)
    except Misbehaved as error:
        yield cell.failed("hygiene", "poisoned memory", error)
        return
    for item, value in expected.items():
        comparison = compare.bits(results[item], value)
        yield cell.record("hygiene", f"{item}, poisoned memory", tuple(value.shape), "bitwise", comparison)


def _expanded(cell: Cell) -> Iterator[Record]:
    """Compare differentiable arguments of stride 0 with contiguous copies."""
    if cell.spec.inplace.keys() & cell.inputs.keys():
        return
    for name in cell.spec.differentiable:
        value = cell.inputs.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        views = {**cell.inputs, name: value[:1].expand(value.shape)}
        copies = {**cell.inputs, name: value[:1].expand(value.shape).contiguous()}
        try:
            base = cell.run(copies)
            upstream = cell.upstream(base)
            expected, run = base.results(upstream), cell.run(views)
            comparison = first_difference(run.results(upstream), expected)
            if comparison.passed and not cell.spec.overwritten(cell.inputs):
                comparison = first_difference(run.scribbled(upstream), expected)
        except Misbehaved as error:
            yield cell.failed("hygiene", f"{name} expanded", error)
            continue
        yield cell.record("hygiene", f"{name} expanded", tuple(value.shape), "bitwise", comparison)


def _empty(cell: Cell) -> Iterator[Record]:
    """Call on empty tensors: shapes, dtypes and zeros (sums of no terms) must equal the definition's."""
    for case in (case for case in cell.spec.empty if case.function == cell.case.function):
        empty_cell = replace(cell, case=case)
        item = f"empty: {case.name}"
        if empty_cell.missing():
            continue
        try:
            run = empty_cell.run()
            eager = empty_cell.eager()
            upstream = empty_cell.upstream(eager)
            expected = _without_signed_zeros(eager.results(upstream))
            comparison = first_difference(_without_signed_zeros(run.results(upstream)), expected)
            if comparison.passed and not empty_cell.spec.overwritten(empty_cell.inputs):
                comparison = first_difference(_without_signed_zeros(empty_cell.run().scribbled(upstream)), expected)
        except Misbehaved as error:
            yield cell.failed("hygiene", item, error)
            continue
        yield cell.record("hygiene", item, (), "exact", comparison)


def _without_signed_zeros(results: Results) -> Results:
    """Drop the sign of zeros: a sum of no terms may be +0 or -0."""
    return {item: value + 0.0 for item, value in results.items()}
