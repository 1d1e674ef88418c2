"""Run the relations over operators, candidates and cases."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rl_kernels.core.check.candidate import Candidate, backend_candidate, reference_candidate
from rl_kernels.core.check.cell import Cell, Setting, call_of
from rl_kernels.core.check.isolation.remote import TIMEOUT
from rl_kernels.core.check.mutation import plant_bugs
from rl_kernels.core.check.relations import concerns, exempt, hold
from rl_kernels.core.check.result import Check, Mutation, Record, Skip
from rl_kernels.core.check.user import user_candidate
from rl_kernels.core.dispatch import AUTO, Verdict, explain_call
from rl_kernels.core.operator import Backend, Call, Operator, arch_of
from rl_kernels.core.testing import Spec, spec_of


class CannotRun(ValueError):
    """A candidate that was asked for cannot run here; the message says why."""


@dataclass(frozen=True)
class Part:
    """The candidates of one setting; a run has a part for each dtype."""

    setting: Setting
    candidates: Sequence[Candidate]


@dataclass(frozen=True)
class Plan:
    """What to run: everything is known to be usable before anything runs."""

    parts: Sequence[Part]
    relations: Sequence[str]
    suite: str = "quick"
    sizes: Mapping[str, int] = field(default_factory=dict)
    constant: tuple[float, int] | None = None
    """Also fill the inputs of every case with these."""
    case: str = ""
    """Run this case alone."""
    plants_bugs: bool = False
    """Also plant bugs, which the checks must catch."""
    fails_fast: bool = False
    """Stop at the first check that fails."""

    @property
    def setting(self) -> Setting:
        """The setting of the first part; the others differ from it by dtype only."""
        return self.parts[0].setting

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of all parts."""
        return [part.setting.dtype for part in self.parts]

    def cells(self) -> Iterator[Cell]:
        """Yield a cell for each candidate and case."""
        for part in self.parts:
            for candidate in part.candidates:
                for cell in self.of(candidate, part.setting):
                    # A case of its own dtype is the same in every part.
                    repeated = part is not self.parts[0] and cell.case.dtype
                    if self.case in ("", cell.case.name) and not repeated:
                        yield cell

    def of(self, candidate: Candidate, setting: Setting) -> Iterator[Cell]:
        """Yield the cells of one candidate."""
        spec = spec_of(candidate.operator)
        for case in spec.cases:
            if self.suite == "full" or case.suite == "quick":
                resized = case.resized({name: n for name, n in self.sizes.items() if name in case.sizes})
                yield Cell(candidate, spec, resized, setting)
                if self.constant is not None:
                    filled = replace(resized, name=f"{case.name}, constant")
                    yield Cell(candidate, spec, filled, replace(setting, constant=self.constant))

    def names(self) -> Iterator[str]:
        """Yield the case id of everything that would run."""
        for cell in self.cells():
            for relation in self.relations:
                if concerns(cell, relation) and not _exempt(cell, relation):
                    yield cell.case_id(relation)


def _exempt(cell: Cell, relation: str) -> bool:
    try:
        return exempt(cell, relation) is not None
    except Exception:  # Inputs that cannot be drawn: running it says so.
        return False


@dataclass(frozen=True)
class Report:
    """The records of a run, and what became of the bugs planted in it."""

    plan: Plan
    records: tuple[Record, ...]
    mutations: tuple[Mutation, ...] = ()
    interrupted: bool = False
    """Whether it was stopped before its end."""

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
        """At least one check ran, every one that ran holds, and no planted bug escaped."""
        holds = bool(self.checks) and all(check.passed for check in self.checks) and not self.interrupted
        return holds and all(mutation.caught for mutation in self.mutations)

    @property
    def pass_rate(self) -> float:
        """Share of the checks that hold, 0 if none ran."""
        return sum(check.passed for check in self.checks) / max(len(self.checks), 1)

    @property
    def mutation_score(self) -> float | None:
        """Share of the planted bugs that were caught, None if none was planted."""
        if not self.mutations:
            return None
        return sum(mutation.caught is not None for mutation in self.mutations) / len(self.mutations)

    def replay(self, check: Check) -> str:
        """Return the command that runs a check's relation on its case again, on the same inputs."""
        plan, setting = self.plan, self.plan.setting
        words = ["rl-kernels", "check", "--replay", check.case_id, "--device", str(setting.device)]
        words += ["--seed", str(setting.seed), "--grad-seed", str(setting.grad_seed)]
        if setting.grad_mode != "random":
            words += ["--grad-mode", setting.grad_mode]
        if setting.arch != arch_of(setting.device.type, setting.device.index):
            words += ["--arch-key", setting.arch]
        for name, size in plan.sizes.items():
            words += [f"--{name.replace('_', '-')}", str(size)]
        if plan.constant is not None:
            value, token = plan.constant
            # With "=": a value such as -1e-05 alone reads as an option.
            words += ["--input-mode", "constant", f"--constant-value={value}", "--token-value", str(token)]
        return shlex.join(words)


def candidates_of(
    operator: Operator, names: Sequence[str], setting: Setting, timeout: float = TIMEOUT
) -> tuple[list[Candidate], list[Skip]]:
    """Return the candidates by name; ``all`` takes what can run and skips the rest.

    ``timeout`` is in seconds, for each answer of a user's implementation.

    Raises:
        CannotRun: a candidate asked for by name does not exist or cannot run here.
    """
    spec, call = spec_of(operator), call_of(operator, setting)
    found: list[Candidate] = []
    skips: list[Skip] = []
    for name in names:
        if name != "all":
            found.append(_users(operator, name, timeout) if ":" in name else _candidate(operator, spec, name, call))
            continue
        for each in ("pytorch", AUTO, *(backend.name for backend in operator.backends)):
            try:
                found.append(_candidate(operator, spec, each, call))
            except CannotRun as error:
                skips.append(Skip(operator.name, each, "all", "all", setting.dtype, str(error)))
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


def _users(operator: Operator, name: str, timeout: float) -> Candidate:
    try:
        return user_candidate(operator, name, timeout)
    except ValueError as error:
        raise CannotRun(f"--candidate {name}: {error}") from error


def _asked_for(backend: Backend, call: Call) -> Verdict:
    reason = backend.why_not(call)
    return Verdict(backend.name, reason, chosen=reason is None)


def run(plan: Plan, skips: Sequence[Skip] = (), progress: Callable[[str], None] = lambda what: None) -> Report:
    """Run every relation of the plan on every cell, then plant bugs if the plan asks for it.

    Ctrl-C ends it early: the report then holds what is known so far.
    """
    records: list[Record] = list(skips)
    mutations: list[Mutation] = []
    interrupted = False
    try:
        for record in _records(plan, progress):
            records.append(record)
            if plan.fails_fast and isinstance(record, Check) and not record.passed:
                break
        else:
            for found in _planted(plan, progress):
                if isinstance(found, Mutation):
                    mutations.append(found)
                else:
                    records.append(found)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for part in plan.parts:
            for candidate in part.candidates:
                if candidate.worker is not None:
                    candidate.worker.stop()
    return Report(plan, tuple(records), tuple(mutations), interrupted)


def _records(plan: Plan, progress: Callable[[str], None]) -> Iterator[Record]:
    for cell in plan.cells():
        for relation in plan.relations:
            progress(cell.case_id(relation))
            yield from hold(cell, relation)


def _planted(plan: Plan, progress: Callable[[str], None]) -> Iterator[Mutation | Skip]:
    # The quick cases must catch them: they are what a developer runs.
    quick = replace(plan, suite="quick")
    for part in plan.parts if plan.plants_bugs else ():
        # Bugs are planted in our backends: they say nothing of an implementation of a user's.
        ours = [candidate for candidate in part.candidates if candidate.worker is None]
        for operator in {candidate.operator.name: candidate.operator for candidate in ours}.values():
            yield from plant_bugs(operator, partial(quick.of, setting=part.setting), part.setting, progress)
