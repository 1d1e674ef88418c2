"""Test the checker itself: each planted bug must fail a check that the honest implementation passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

from rl_kernels.core.dispatch import AUTO, explain_call
from rl_kernels.core.operator import INVARIANT, Operator
from rl_kernels.core.testing import Bug, Mutants, spec_of
from rl_kernels.core.testing.planted import planted
from rl_kernels.lab.check.candidate import Candidate, backend_candidate
from rl_kernels.lab.check.cell import Cell, Setting, call_of
from rl_kernels.lab.check.mutation.controls import CONTROLS, Control
from rl_kernels.lab.check.relations import hold
from rl_kernels.lab.check.result import Check, Mutation, Skip

RELATIONS = ("accuracy", "gradients", "hygiene", "invariance", "repeatability")
"""Relations that may catch a bug in a backend, the quickest first."""

Cells = Callable[[Candidate], Iterator[Cell]]
Plant = Callable[[], AbstractContextManager[None]]


def bugs_of(operator: Operator, cells: Cells, setting: Setting) -> Iterator[tuple[str, Callable[[], Mutation | Skip]]]:
    """Yield every bug for an operator: its name, and a function that plants it and returns the outcome.

    The negative controls spoil the automatic choice from outside; each must be caught by the relation that it is meant
    for. An operator's own mutants are planted in copies of those backends that make all promises here, because a broken
    promise shows only where it was made.

    Args:
        operator: the operator whose backends get the bugs.
        cells: returns the cells of a candidate.
        setting: the setting of the cells.
    """
    call = call_of(operator, setting)
    device = setting.device.type

    def skip(candidate: str, reason: str) -> Skip:
        return Skip(operator.name, candidate, "mutation", "all", setting.dtype, reason)

    def spoilt(honest: Honest, name: str, control: Control, relation: str) -> Mutation | Skip:
        return honest.spoilt(name, control, relation) or skip(AUTO, f"{name}: does not apply to this operator")

    if any(verdict.chosen for verdict in explain_call(operator, call)):
        honest = Honest(backend_candidate(operator, AUTO, AUTO, device), cells)
        for relation, controls in CONTROLS.items():
            for name, control in controls.items():
                yield f"{operator.name}: {name}", partial(spoilt, honest, name, control, relation)
    else:
        reason = "no backend keeps all promises here, so no negative control is run"
        yield operator.name, partial(skip, AUTO, reason)

    for mutants in spec_of(operator).mutants:
        backend = operator.backend(mutants.backend)
        label = f"{operator.name} {backend.name}"
        if backend.why_not(call) is not None or backend.promises[device] != INVARIANT:
            reason = f"does not run here with all promises: {len(mutants.bugs)} bugs not planted"
            yield label, partial(skip, backend.name, reason)
            continue
        honest = Honest(backend_candidate(operator, backend.name, backend.name, device), cells)
        for bug in mutants.bugs:
            yield f"{label}: {bug.name}", partial(honest.planted, mutants, bug)


class Honest:
    """An unchanged implementation, with which spoilt ones are compared."""

    def __init__(self, candidate: Candidate, cells: Cells) -> None:
        self.candidate = candidate
        self._cells = list(cells(candidate))
        self._passes: dict[tuple[str, str], bool] = {}

    def spoilt(self, name: str, control: Control, relation: str) -> Mutation | None:
        """Check a relation on the candidate spoilt by a negative control; None if the control does not apply."""
        call = control(self.candidate.call, spec_of(self.candidate.operator))
        return None if call is None else self._judged(name, replace(self.candidate, call=call), nullcontext, [relation])

    def planted(self, mutants: Mutants, bug: Bug) -> Mutation:
        """Check the relations on the candidate while the bug is planted in its backend."""
        return self._judged(bug.name, self.candidate, partial(planted, mutants.modules, bug), RELATIONS)

    def _judged(self, name: str, candidate: Candidate, plant: Plant, relations: Sequence[str]) -> Mutation:
        return Mutation(
            self.candidate.operator.name,
            self.candidate.name,
            self._cells[0].setting.dtype,
            name,
            next(self._caught(candidate, plant, relations), None),
        )

    def _caught(self, candidate: Candidate, plant: Plant, relations: Iterable[str]) -> Iterator[Check]:
        for made in (False, True):
            # Named cases first: they are few, and check every relation.
            cells = [cell for cell in self._cells if bool(cell.case.relations) is made]
            for relation, cell in product(relations, cells):
                check = _first_failure(replace(cell, candidate=candidate), relation, plant)
                if check is not None and self._holds(cell, relation):
                    yield check

    def _holds(self, cell: Cell, relation: str) -> bool:
        key = relation, cell.case.name
        if key not in self._passes:
            self._passes[key] = _first_failure(cell, relation, nullcontext) is None
        return self._passes[key]


def _first_failure(cell: Cell, relation: str, plant: Plant) -> Check | None:
    with plant():
        for record in hold(cell, relation):
            if isinstance(record, Check) and not record.passed:
                return record
    return None
