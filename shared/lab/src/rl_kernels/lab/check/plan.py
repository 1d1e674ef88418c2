"""The parts of a run: the candidates of each setting, and their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rl_kernels.core.testing import spec_of
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.launches import check_relations
from rl_kernels.lab.check.relations import concerns, exempt
from rl_kernels.lab.check.result import Outcome


@dataclass(frozen=True)
class Part:
    """The candidates of one setting; a run has a part for each dtype."""

    setting: Setting
    candidates: Sequence[Candidate]


@dataclass(frozen=True)
class Task:
    """An independent part of a run: all relations on one cell."""

    name: str
    run: Callable[[], Iterator[Outcome]]


@dataclass(frozen=True)
class Plan:
    """The candidates, relations and cases to run; all are validated before anything runs."""

    parts: Sequence[Part]
    relations: Sequence[str]
    suite: str = "quick"
    sizes: Mapping[str, int] = field(default_factory=dict)
    constant: tuple[float, int] | None = None
    """(value, token): also run every case with inputs filled with these."""
    case: str = ""
    """Run only this case."""
    fails_fast: bool = False
    """Stop at the first check that fails."""

    @property
    def setting(self) -> Setting:
        """The setting of the first part; other parts differ from it by dtype only."""
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
                    # A case with its own dtype is the same in every part.
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

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks of the run: one for each cell."""
        for cell in self.cells():
            yield Task(cell.name, partial(check_relations, cell, self.relations))

    def stop(self) -> None:
        """End the processes of the candidates that have one."""
        for part in self.parts:
            for candidate in part.candidates:
                if candidate.worker is not None:
                    candidate.worker.stop()

    def names(self) -> Iterator[str]:
        """Yield the case id of everything that would run."""
        for cell in self.cells():
            for relation in self.relations:
                if concerns(cell, relation) and not _exempt(cell, relation):
                    yield cell.case_id(relation)


def _exempt(cell: Cell, relation: str) -> bool:
    try:
        return exempt(cell, relation) is not None
    except Exception:  # If the inputs cannot be drawn, running the case reports it.
        return False
