"""The relation between backends: each may replace another, within the contract's tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rl_kernels.core.dispatch import AUTO, explain_call
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.candidate import Candidate, backend_candidate
from rl_kernels.lab.check.cell import Cell, call_of
from rl_kernels.lab.check.guard import Misbehaved
from rl_kernels.lab.check.relations.determinism import invariance
from rl_kernels.lab.check.result import Check, Record


def parity(cell: Cell) -> Iterator[Record]:
    """Compare outputs and gradients with every other backend that runs here and keeps the operator's promises."""
    if cell.candidate.backend is None:
        yield cell.skip("parity", "not a backend of the operator")
        return
    try:
        run = cell.run()
        upstream = cell.upstream(run)
        results = run.results(upstream)
    except Misbehaved as error:
        yield cell.failed("parity", "run", error)
        return
    candidates = list(_other_backends(cell))
    if not candidates:
        yield cell.skip("parity", "no other backend runs here")
    for other in candidates:
        peer = replace(cell, candidate=other)
        reason = _ineligible(peer)
        if reason:
            yield cell.skip("parity", f"{other.name} is not eligible: {reason}")
            continue
        try:
            expected = peer.run().results(upstream)
        except Misbehaved as error:
            yield cell.failed("parity", f"beside {other.name}", error)
            continue
        if results.keys() != expected.keys():
            message = f"expected {', '.join(expected)}, got {', '.join(results)}"
            yield cell.failed("parity", f"beside {other.name}", message)
            continue
        for item, value in results.items():
            row = cell.tolerance("parity", item, expected[item].dtype)
            comparison = compare.parity(value, expected[item], row)
            yield cell.record("parity", f"{item} beside {other.name}", tuple(value.shape), row, comparison)


def _other_backends(cell: Cell) -> Iterator[Candidate]:
    """Yield the backends that can run here, except the one that the candidate itself uses."""
    operator = cell.candidate.operator
    call = call_of(operator, cell.setting)
    chosen = [verdict.backend for verdict in explain_call(operator, call) if verdict.chosen]
    own = chosen if cell.candidate.backend == AUTO else [cell.candidate.backend]
    for backend in operator.backends:
        if backend.why_not(call) is None and backend.name not in own:
            yield backend_candidate(operator, backend.name, backend.name, cell.setting.device.type)


def _ineligible(peer: Cell) -> str | None:
    broken = peer.candidate.exemption("invariance")
    if broken:
        return broken
    for record in invariance(peer):
        if isinstance(record, Check) and not record.passed:
            return f"fails invariance ({record.item}: {record.comparison.message})"
    return None
