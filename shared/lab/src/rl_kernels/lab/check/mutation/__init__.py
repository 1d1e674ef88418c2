"""Test the checks themselves: each planted bug must fail a check that the unmodified implementation passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.mutation.controls import Call
from rl_kernels.lab.check.relations import check_relation
from rl_kernels.lab.check.result import Check

RELATIONS = ("accuracy", "gradients", "hygiene", "invariance", "repeatability")
"""Relations that may catch a bug in a backend, the quickest first."""

Plant = Callable[[], AbstractContextManager[None]]


class Baseline:
    """An unmodified implementation, with which modified ones are compared."""

    def __init__(self, candidate: Candidate, cells: Iterable[Cell]) -> None:
        self.candidate = candidate
        self._cells = list(cells)
        self._passes: dict[tuple[str, str], bool] = {}

    def modified(self, call: Call, relation: str) -> Check | None:
        """Return the first check of a relation that fails for a modified call and not for the original one."""
        return next(self._caught(replace(self.candidate, call=call), nullcontext, [relation]), None)

    def planted(self, modules: Sequence[str], bug: Bug) -> Check | None:
        """Return the first check that fails while the bug is planted in the modules, and not without it."""
        return next(self._caught(self.candidate, partial(planted, modules, bug), RELATIONS), None)

    def _caught(self, candidate: Candidate, plant: Plant, relations: Iterable[str]) -> Iterator[Check]:
        for generated in (False, True):
            # Named cases first: they are few, and check every relation.
            cells = [cell for cell in self._cells if bool(cell.case.relations) is generated]
            for relation, cell in product(relations, cells):
                check = _first_failure(replace(cell, candidate=candidate), relation, plant)
                if check is not None and self._passes_unmodified(cell, relation):
                    yield check

    def _passes_unmodified(self, cell: Cell, relation: str) -> bool:
        key = relation, cell.case.name
        if key not in self._passes:
            self._passes[key] = _first_failure(cell, relation, nullcontext) is None
        return self._passes[key]


def _first_failure(cell: Cell, relation: str, plant: Plant) -> Check | None:
    with plant():
        for record in check_relation(cell, relation):
            if isinstance(record, Check) and not record.passed:
                return record
    return None
