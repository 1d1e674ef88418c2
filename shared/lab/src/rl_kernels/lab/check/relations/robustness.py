"""The relation of bad input: illegal calls raise the promised error at once, and later calls still work."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from rl_kernels.core.testing import Inputs
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.compare import Comparison
from rl_kernels.lab.check.guard import Misbehaved
from rl_kernels.lab.check.result import Record


def robustness(cell: Cell) -> Iterator[Record]:
    """Make illegal calls derived from this case: each raises the promised error, and then a good call still works."""
    spec = cell.spec
    calls = [bad for bad in spec.illegal if cell.case.name == (bad.case or spec.case().name)]
    if not calls:
        return
    try:
        expected = cell.run(leaves=[]).outputs
        for bad in calls:
            inputs = bad.change(cell.spec.inputs(cell.case, cell.draw()))
            comparison = _raises(cell, inputs, bad.error, bad.match)
            yield cell.record("robustness", bad.name, (), bad.error.__name__, comparison)
        again = cell.run(leaves=[]).outputs
    except Misbehaved as error:
        yield cell.failed("robustness", "good call", error)
        return
    for item, value in again.items():
        yield cell.record(
            "robustness", f"{item} afterwards", tuple(value.shape), "bitwise", compare.bits(value, expected[item])
        )


def _raises(cell: Cell, inputs: Inputs, error: type[Exception], match: str) -> Comparison:
    try:
        cell.candidate.call(cell.case.function, inputs)
        if cell.setting.device.type == "cuda":
            torch.cuda.synchronize(cell.setting.device)
    except error as raised:
        if re.search(match, str(raised)):
            return Comparison(True)
        return Comparison(False, message=f"expected a message matching {match!r}, got {str(raised)!r}")
    except (Exception, SystemExit) as raised:
        return Comparison(False, message=f"expected {error.__name__}, got {type(raised).__name__}: {raised}")
    return Comparison(False, message=f"expected {error.__name__} ({match!r}), nothing was raised")
