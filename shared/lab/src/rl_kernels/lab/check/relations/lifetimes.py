"""Lifetimes across calls: results of a call, tensors saved for backward, and values cached from its arguments."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch

from rl_kernels.core.testing import Inputs
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.compare import Comparison
from rl_kernels.lab.check.guard import Misbehaved, Results
from rl_kernels.lab.check.result import Check, Record
from rl_kernels.lab.check.run import PLAIN
from rl_kernels.lab.check.surroundings import Surroundings

PASSED = Comparison(True)
ROLLOUT = Surroundings(recording=False)
FEW_UNITS = 8
PENDING = 300
"""Calls that wait for their backward pass at the same time, as in the steps of a long decode."""


def lifetimes(cell: Cell, expected: Results, upstream: Results) -> Iterator[Record]:
    """Check calls in between, a second backward pass, and writes into results and arguments."""
    yield from _interleaved(cell, expected, upstream)
    yield from _pending_calls(cell, expected, upstream)
    yield from _backward_twice(cell, upstream)
    yield from _scribbled(cell, expected, upstream)
    yield from _updated(cell, upstream)
    yield from _written(cell, expected, upstream)


def _interleaved(cell: Cell, expected: Results, upstream: Results) -> Iterator[Record]:
    """Call on other values before and after a backward pass: the first call's results and saved tensors must stay."""
    try:
        first = cell.run()
        cell.redrawn().run().results(upstream)
        results = first.results(upstream)
        cell.redrawn().run().results(upstream)
        comparison = first_difference({**results, **first.kept}, expected)
    except Misbehaved as error:
        yield cell.failed("hygiene", "a call in between", error)
        return
    yield cell.record("hygiene", "a call in between", (), "bitwise", comparison)


def _pending_calls(cell: Cell, expected: Results, upstream: Results) -> Iterator[Record]:
    """Call on other values many times before the first backward pass; for two cases of a function."""
    if not upstream or not (cell.is_first or cell.is_richest) or cell.spec.overwritten(cell.inputs):
        return
    fresh = cell.redrawn()
    try:
        first = cell.run()
        pending = [fresh.run() for _ in range(PENDING)]
        results = first.results(upstream)
        comparison = first_difference({**results, **first.kept}, expected)
        if comparison.passed:
            comparison = first_difference(pending[0].results(upstream), pending[-1].results(upstream))
    except Misbehaved as error:
        yield cell.failed("hygiene", f"{PENDING} calls pending", error)
        return
    yield cell.record("hygiene", f"{PENDING} calls pending", (), "bitwise", comparison)


def _backward_twice(cell: Cell, upstream: Results) -> Iterator[Record]:
    """Run backward twice on one graph: the second pass gives the same bits, even if the first result was changed."""
    if not upstream:
        return
    if cell.spec.inplace.keys() & cell.inputs.keys():
        yield _second_backward_refused(cell, upstream)
        return
    try:
        run = cell.run()
        first = run.gradients(upstream, again=True)
        run.spoil()
        comparison = first_difference(run.gradients(upstream), first)
    except Misbehaved as error:
        yield cell.failed("hygiene", "backward again", error)
        return
    yield cell.record("hygiene", "backward again", (), "bitwise", comparison)


def _second_backward_refused(cell: Cell, upstream: Results) -> Check:
    """Check that a second backward pass raises if the first has overwritten a tensor that it needs."""
    try:
        run = cell.run()
        run.gradients(upstream, again=True)
    except Misbehaved as error:
        return cell.failed("hygiene", "backward again", error)
    try:
        run.gradients(upstream)
    except Misbehaved:
        return cell.record("hygiene", "backward again", (), "refused", PASSED)
    message = "expected an error, because the first pass has overwritten an input; nothing was raised"
    return cell.record("hygiene", "backward again", (), "refused", Comparison(False, message=message))


def _scribbled(cell: Cell, expected: Results, upstream: Results) -> Iterator[Record]:
    """Write into the results, and call again."""
    if cell.spec.overwritten(cell.inputs):
        return
    try:
        comparison = first_difference(cell.run().scribbled(upstream), expected)
    except Misbehaved as error:
        yield cell.failed("hygiene", "results written into", error)
        return
    yield cell.record("hygiene", "results written into", (), "bitwise", comparison)


def _updated(cell: Cell, upstream: Results) -> Iterator[Record]:
    """Write other values into the same tensors, with and without a new version of them, and call again.

    This catches results cached by address, version or attribute, and outputs that are views of an input.
    """
    fresh = cell.redrawn().inputs
    if cell.spec.overwritten(cell.inputs) or not _same_shapes(cell.inputs, fresh):
        return
    autocast = Surroundings(autocast=torch.bfloat16)
    mixed = _one_number_changed(cell, fresh)
    ways: list[tuple[str, Inputs, bool, list[str] | None, Surroundings]] = [
        ("updated in place", fresh, False, None, PLAIN),
        ("updated unseen", fresh, True, None, PLAIN),
        ("updated unseen, no gradients", fresh, True, [], ROLLOUT),
        ("updated unseen, parameters", fresh, True, [], replace(ROLLOUT, parameters=tuple(cell.leaves))),
        ("updated unseen, permuted", _permuted(cell), True, None, PLAIN),
        ("updated unseen by little, no gradients", _changed_by_ulps(cell), True, [], ROLLOUT),
        ("updated unseen in one place", mixed, True, None, PLAIN),
        ("updated unseen in one place, no gradients", mixed, True, [], ROLLOUT),
    ]
    if cell.dtype_name != "fp64":
        ways.append(("updated in place, autocast", fresh, False, [], autocast))
    for label, inputs, silently, leaves, surroundings in ways:
        upstream_used = {} if leaves == [] else upstream
        try:
            # Keep both alive: otherwise a cache by address could be right by accident, through the other call.
            first, second = cell.run(leaves=leaves, around=surroundings), cell.run(inputs, leaves, surroundings)
            results = first.updated(inputs, upstream_used, silently=silently)
            comparison = first_difference(results, second.results(upstream_used))
        except Misbehaved as error:
            yield cell.failed("hygiene", f"inputs {label}", error)
            continue
        yield cell.record("hygiene", f"inputs {label}", (), "bitwise", comparison)


def _written(cell: Cell, expected: Results, upstream: Results) -> Iterator[Record]:
    """Write into an argument between a call and its backward pass, which must raise or use the values of the call."""
    fresh = cell.redrawn().inputs
    if not upstream or cell.spec.overwritten(cell.inputs) or not _same_shapes(cell.inputs, fresh):
        return
    gradients = {item: value for item, value in expected.items() if item.startswith("gradient:")}
    for name, value in fresh.items():
        if not isinstance(value, torch.Tensor):
            continue
        item = f"{name} written before backward"
        try:
            result = cell.run().written(name, value, upstream)
        except Misbehaved as error:
            yield cell.failed("hygiene", item, error)
            continue
        comparison = PASSED if isinstance(result, str) else first_difference(result, gradients)
        yield cell.record("hygiene", item, (), "bitwise or refused", comparison)


def _one_number_changed(cell: Cell, fresh: Inputs) -> Inputs:
    """Return the inputs with one number of each floating tensor from ``fresh``: sampling a few numbers misses it."""
    mixed, draw = dict(cell.inputs), cell.draw(salt=2)
    for name, value in cell.inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            place = torch.unravel_index(torch.tensor(draw.integer(0, value.numel())), value.shape)
            mixed[name] = copy.deepcopy(value)
            mixed[name][place] = fresh[name][place]
    return mixed


def _changed_by_ulps(cell: Cell) -> Inputs:
    """Return the inputs with differentiable arguments changed by a few units in the last place."""
    nudged, draw = dict(cell.inputs), cell.draw(salt=4)
    for name in cell.spec.differentiable:
        if isinstance(value := cell.inputs.get(name), torch.Tensor):
            nudged[name] = copy.deepcopy(value)
            nudged[name].mul_(1 + FEW_UNITS * torch.finfo(value.dtype).eps * draw.normal(*value.shape).round())
    return nudged


def _permuted(cell: Cell) -> Inputs:
    """Return the inputs with the numbers of each floating tensor in other places, which keeps their sums."""
    return {
        name: value.roll(1, -2 if value.ndim > 1 and value.shape[-2] > 1 else -1)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim
        else value
        for name, value in cell.inputs.items()
    }


def _same_shapes(inputs: Inputs, other: Inputs) -> bool:
    """Return whether the values of one call can be written into the tensors of another."""

    def shapes(arguments: Inputs) -> dict[str, object]:
        return {name: value.shape for name, value in arguments.items() if isinstance(value, torch.Tensor)}

    return shapes(inputs) == shapes(other)


def first_difference(results: Results, expected: Results) -> Comparison:
    """Compare the bits of all results, and report the first that differs."""
    if results.keys() != expected.keys():
        return Comparison(False, message=f"expected {', '.join(expected)}, got {', '.join(results)}")
    for item, value in expected.items():
        comparison = compare.bits(results[item], value)
        if not comparison.passed:
            return replace(comparison, message=f"{item}: {comparison.message}")
    return PASSED
