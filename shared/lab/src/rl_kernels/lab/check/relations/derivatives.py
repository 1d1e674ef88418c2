"""Other derivatives that autograd may ask for: second derivatives, and derivatives in forward mode.

An operator may refuse both with an error. If it returns a result instead, this must be right: zeros, None or another
dtype would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.compare import Comparison, described
from rl_kernels.lab.check.guard import Misbehaved, Results
from rl_kernels.lab.check.ran import Ran
from rl_kernels.lab.check.result import Record

ALLOWED = {"fp64": 1e-6, "fp32": 1e-2, "bf16": 0.2, "fp16": 0.1}
"""Allowed error of such a derivative, as a share of its norm: enough to catch zeros and nonsense."""


def derivatives(cell: Cell) -> Iterator[Record]:
    """Check that double backward and forward mode raise or match the definition; for one case per function."""
    eager = cell.eager()
    upstream = cell.upstream(eager)
    if not upstream or not cell.is_first:
        return
    for mode in ("double backward", "forward mode"):
        gold = _derived(mode, cell.gold(), {name: value.double() for name, value in upstream.items()})
        kinds = cell.inputs if mode == "double backward" else eager.outputs
        try:
            result = _derived(mode, cell.run(), upstream)
        except Misbehaved as error:
            yield cell.failed("gradients", mode, error)
            continue
        if isinstance(result, str):
            yield cell.record("gradients", mode, (), "refused", Comparison(True))
        elif isinstance(gold, str):
            yield cell.skip("gradients", f"{mode}: the definition has none")
        else:
            share = ALLOWED[cell.dtype_name]
            yield cell.record("gradients", mode, (), f"{share:g} of the norm", _compared(result, gold, kinds, share))


def _derived(mode: str, ran: Ran, upstream: Results) -> Results | str:
    return ran.second_order(upstream) if mode == "double backward" else ran.forward_mode()


def _compared(results: Results, gold: Results, kinds: Mapping[str, torch.Tensor], share: float) -> Comparison:
    if results.keys() != gold.keys():
        return Comparison(False, message=f"expected {', '.join(gold)}, got {', '.join(results)}")
    for name, value in results.items():
        wrong = described(value, kinds[name])
        if wrong:
            return Comparison(False, message=f"{name}: {wrong}")
        error, size = float((value.double() - gold[name]).norm()), float(gold[name].norm())
        # Written so that NaN fails.
        if not error <= share * size + 1e-6:
            return Comparison(False, message=f"{name}: off by {error:.3g}, where the definition's norm is {size:.3g}")
    return Comparison(True)
