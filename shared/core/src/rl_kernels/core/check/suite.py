"""Run the relations over operators, candidates and cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl_kernels.core.check.candidate import Candidate, backend_candidate, reference_candidate
from rl_kernels.core.check.cell import Cell, Setting
from rl_kernels.core.check.relations import RELATIONS
from rl_kernels.core.check.result import Check, Record, Skip
from rl_kernels.core.contract import DTYPES
from rl_kernels.core.dispatch import AUTO, Verdict, explain_call
from rl_kernels.core.operator import Backend, Call, Operator
from rl_kernels.core.testing import Draw, Spec, spec_of


class CannotRun(ValueError):
    """A candidate that was asked for cannot run here; the message says why."""


@dataclass(frozen=True)
class Plan:
    """What to run: everything is known to be usable before anything runs."""

    candidates: Sequence[Candidate]
    setting: Setting
    relations: Sequence[str]
    suite: str = "quick"
    sizes: Mapping[str, int] = field(default_factory=dict)
    constant: tuple[float, int] | None = None
    """Also fill the inputs of every case with these."""

    def cells(self) -> Iterator[Cell]:
        """Yield a cell for each candidate and case."""
        for candidate in self.candidates:
            spec = spec_of(candidate.operator)
            for case in spec.cases:
                if self.suite == "full" or case.suite == "quick":
                    resized = case.resized({name: n for name, n in self.sizes.items() if name in case.sizes})
                    yield Cell(candidate, spec, resized, self.setting)
                    if self.constant is not None:
                        filled = replace(resized, name=f"{case.name}, constant")
                        yield Cell(candidate, spec, filled, replace(self.setting, constant=self.constant))

    def names(self) -> Iterator[str]:
        """Yield ``operator/candidate/dtype/relation/case`` for everything that would run."""
        for cell in self.cells():
            for relation in self.relations:
                if not exempt(cell, relation):
                    where = (cell.candidate.operator.name, cell.candidate.name, self.setting.dtype, relation)
                    yield "/".join((*where, cell.case.name))


@dataclass(frozen=True)
class Report:
    """The records of a run."""

    plan: Plan
    records: tuple[Record, ...]

    @property
    def checks(self) -> list[Check]:
        """What ran."""
        return [record for record in self.records if isinstance(record, Check)]

    @property
    def skips(self) -> list[Skip]:
        """What did not run."""
        return [record for record in self.records if isinstance(record, Skip)]

    @property
    def passed(self) -> bool:
        """At least one check ran, and every one that ran holds."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def pass_rate(self) -> float:
        """Share of the checks that hold, 0 if none ran."""
        return sum(check.passed for check in self.checks) / max(len(self.checks), 1)


def candidates_of(operator: Operator, names: Sequence[str], setting: Setting) -> tuple[list[Candidate], list[Skip]]:
    """Return the candidates by name; ``all`` takes what can run and skips the rest.

    Raises:
        CannotRun: a candidate asked for by name does not exist or cannot run here.
    """
    spec = spec_of(operator)
    call = operator.describe(**spec.inputs(spec.case(), Draw(DTYPES[setting.dtype], "cpu")))
    call = replace(call, device=setting.device, arch=setting.arch)
    found: list[Candidate] = []
    skips: list[Skip] = []
    for name in names:
        if name != "all":
            found.append(_candidate(operator, spec, name, call))
            continue
        for each in ("pytorch", AUTO, *(backend.name for backend in operator.backends)):
            try:
                found.append(_candidate(operator, spec, each, call))
            except CannotRun as error:
                skips.append(Skip(operator.name, each, "all", "all", str(error)))
    return found, skips


def _candidate(operator: Operator, spec: Spec, name: str, call: Call) -> Candidate:
    if name == "pytorch":
        return reference_candidate(operator, spec)
    if name == AUTO:
        verdicts = explain_call(operator, call)
    elif name == "cuda":
        if call.device.type != "cuda":
            raise CannotRun(f"--candidate cuda: runs on a GPU, but the device is {call.device.type}")
        verdicts = [_asked_for(backend, call) for backend in operator.backends if backend.name.startswith("cuda-")]
    else:
        verdicts = [_asked_for(backend, call) for backend in operator.backends if backend.name == name]
    if not verdicts:
        known = ", ".join(backend.name for backend in operator.backends)
        raise CannotRun(f"--candidate {name}: {operator.name} has no such backend; it has: {known}")
    for verdict in verdicts:
        if verdict.chosen:
            return backend_candidate(operator, name, AUTO if name == AUTO else verdict.backend, call.device.type)
    reasons = "; ".join(map(str, verdicts))
    raise CannotRun(f"--candidate {name}: {operator.name} cannot run it here: {reasons}")


def _asked_for(backend: Backend, call: Call) -> Verdict:
    reason = backend.why_not(call)
    return Verdict(backend.name, reason, chosen=reason is None)


def run(plan: Plan, skips: Sequence[Skip] = (), progress: Callable[[Cell], None] = lambda cell: None) -> Report:
    """Run every relation of the plan on every cell."""
    records: list[Record] = list(skips)
    for cell in plan.cells():
        progress(cell)
        for relation in plan.relations:
            reason = exempt(cell, relation)
            records += [cell.skip(relation, reason)] if reason else RELATIONS[relation](cell)
    return Report(plan, tuple(records))


def exempt(cell: Cell, relation: str) -> str | None:
    """Say why a candidate or an operator is not held to a relation, or return None."""
    return cell.candidate.exempt.get(relation) or cell.spec.exempt.get(relation)
