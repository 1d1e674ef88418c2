"""Relations of bits: repeated calls, and the same rows in other layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from rl_kernels.core.contract import Tolerance
from rl_kernels.core.testing import Case, Draw, Inputs, Transform, Variant
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.compare import Comparison
from rl_kernels.lab.check.guard import Misbehaved, Results
from rl_kernels.lab.check.repeat import other_stream
from rl_kernels.lab.check.result import Check, Record
from rl_kernels.lab.check.surroundings import Surroundings

RUNS, INTERPRETED_RUNS = 20, 3
"""Calls that repeatability compares; in Triton's interpreter each takes seconds, and its programs run in order."""
CALLS, SECONDS = 50_000, {"quick": 1.0, "full": 8.0}
"""Limits of the calls of a function's plainest case: corrupted state or a rare error shows only after many calls."""
AT_ONCE = 60
"""Number of calls per thread, where two threads call at once."""
THREADS = (1, 2, 3, 8, 12)
"""Numbers of CPU threads between which no bit may change."""
PRODUCTS = 4
"""Number of products queued on another stream of a GPU at the start of each call."""
MISSING = Comparison(False, message="this result is missing in another run of the same call")


def repeatability(cell: Cell) -> Iterator[Record]:
    """Make the same call many times, on a GPU while another stream is busy: equal bits."""
    try:
        first = cell.run()
        upstream = cell.upstream(first)
        expected = first.results(upstream)
        comparisons: dict[str, Comparison] = {}
        for _ in range((INTERPRETED_RUNS if cell.is_slow else RUNS) - 1):
            other_stream(cell.setting.device).top_up(PRODUCTS)
            again = cell.run().results(upstream)
            for item, value in expected.items():
                if item not in comparisons or comparisons[item].passed:
                    comparisons[item] = compare.bits(again[item], value) if item in again else MISSING
    except Misbehaved as error:
        yield cell.failed("repeatability", "run", error)
        return
    for item, comparison in comparisons.items():
        tolerance = cell.tolerance("repeatability", item)
        yield cell.record("repeatability", item, tuple(expected[item].shape), tolerance, comparison)
    yield from _many_calls(cell)


def _many_calls(cell: Cell) -> Iterator[Record]:
    """Alternate two calls thousands of times without gradients; then make both at once, in two threads."""
    if not cell.is_first:
        return
    if cell.is_slow:
        yield cell.skip("repeatability", "thousands of calls: not in Triton's interpreter")
        return
    function_and_output, both = (cell.case.function, cell.spec.output), [cell.inputs, cell.redrawn().inputs]
    item = "thousands of calls"
    try:
        richest = replace(cell, case=cell.spec.richest_of(cell.case.function))
        if not (richest.is_first or richest.missing()):
            both.append(richest.inputs)
        first, other, number = cell.candidate.many(*function_and_output, both, CALLS, SECONDS[cell.setting.suite])
        yield _compare_bits(cell, item, first, other, f"call {number}: ")
        item = "two threads at once"
        pairs = cell.candidate.threads(*function_and_output, both[:2], AT_ONCE)
        for expected, results in zip(pairs[::2], pairs[1::2], strict=True):
            yield _compare_bits(cell, item, expected, results)
    except Misbehaved as error:
        yield cell.failed("repeatability", item, error)


def _compare_bits(cell: Cell, item: str, expected: Results, results: Results, prefix: str = "") -> Check:
    for name, value in expected.items():
        comparison = compare.bits(results[name], value) if name in results else MISSING
        if not comparison.passed:
            failed = replace(comparison, message=f"{prefix}{name}: {comparison.message}")
            return cell.record("repeatability", item, tuple(value.shape), "bitwise", failed)
    return cell.record("repeatability", item, (), "bitwise", Comparison(True))


def invariance(cell: Cell) -> Iterator[Record]:
    """Compare every promised layout of the same computation: equal bits, gradients too."""
    try:
        base = cell.run()
        upstream = cell.upstream(base)
        expected = base.results(upstream)
    except Misbehaved as error:
        yield cell.failed("invariance", "base", error)
        return
    records = list(unchanged_by({**cell.spec.transforms, **_THREADS}, "invariance", cell, expected, upstream))
    yield from records or [cell.skip("invariance", "no transform applies to this case")]
    if upstream:
        yield from _without_gradient(cell, base.outputs)


def _without_gradient(cell: Cell, expected: Results) -> Iterator[Record]:
    """Compare with a call on inputs that require no gradient."""
    try:
        results = cell.run(leaves=[]).outputs
    except Misbehaved as error:
        yield cell.failed("invariance", "without gradient", error)
        return
    for item, value in expected.items():
        comparison = compare.bits(results[item], value) if item in results else MISSING
        yield cell.record(
            "invariance", f"{item} without gradient", tuple(value.shape), _invariance_row(cell, item), comparison
        )


def unchanged_by(
    transforms: Mapping[str, Transform], relation: str, cell: Cell, expected: Results, upstream: Results
) -> Iterator[Record]:
    """Yield a record for each transform that applies: results of its variants must have the bits of ``expected``."""
    for name, transform in transforms.items():
        variants = list(transform(cell.case, cell.inputs, cell.draw(salt=1)))
        accepted = [variant for variant in variants if not cell.missing(variant.inputs)]
        if variants and not accepted:
            yield cell.skip(relation, f"{name}: {cell.missing(variants[0].inputs)}")
        elif variants:
            yield _compare_variants(cell, relation, name, accepted, expected, upstream)


def _compare_variants(
    cell: Cell, relation: str, name: str, variants: list[Variant], expected: Results, upstream: Results
) -> Check:
    compared = 0
    for variant in variants:
        try:
            lifted = {item: variant.lift(item, value) for item, value in upstream.items()}
            results = cell.run(variant.inputs, around=Surroundings(threads=variant.threads)).results(lifted)
            pairs = list(_pairs(variant, results, expected))
        except Misbehaved as error:
            return cell.failed(relation, name, Misbehaved(f"{variant.label}: {error}", error.traceback))
        compared += len(pairs)
        for item, part, whole in pairs:
            comparison = compare.bits(part, whole)
            if not comparison.passed:
                failed = replace(comparison, message=f"{variant.label}, {item}: {comparison.message}")
                return cell.record(relation, name, tuple(expected[item].shape), _invariance_row(cell, item), failed)
    if not compared:
        return cell.failed(relation, name, "no variant of this transform compares anything")
    item, first = next(iter(expected.items()))
    return cell.record(relation, name, tuple(first.shape), _invariance_row(cell, item), Comparison(True, 0.0, 0.0, 0.0))


def _invariance_row(cell: Cell, item: str) -> Tolerance:
    return cell.tolerance("invariance", item)


def _pairs(variant: Variant, results: Results, expected: Results) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (result, the variant's elements, the base call's) for each result that the variant compares."""
    for item, whole in expected.items():
        try:
            part = variant.pick(item, whole)
            if part is not None:
                yield item, variant.find(item, results[item]), part
        except (KeyError, IndexError, RuntimeError) as error:
            raise Misbehaved(f"{item}: no result of the shape that the arguments ask for ({error})") from error


def _other_threads(case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
    if draw.device.type == "cpu":
        for count in THREADS:
            yield Variant(f"{count} threads", inputs, threads=count)


_THREADS = {"threads": _other_threads}
