"""The records of a run: comparisons and skips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rl_kernels.core.contract import Key
from rl_kernels.lab.check.compare import Comparison


class CaseId(NamedTuple):
    """Id of one relation on one case: ``operator/candidate/dtype/relation/case``."""

    operator: str
    candidate: str
    dtype: str
    relation: str
    case: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def parse(cls, text: str) -> CaseId:
        """Parse a printed id; ``ValueError`` if it has too few parts."""
        # A candidate may be the path of a file; the other parts contain no slash.
        operator, *candidate, dtype, relation, case = text.split("/") if text.count("/") >= 4 else [""] * 5
        if not all((operator, "/".join(candidate), dtype, relation, case)):
            raise ValueError(f"expected OPERATOR/CANDIDATE/DTYPE/RELATION/CASE, got {text!r}")
        return cls(operator, "/".join(candidate), dtype, relation, case)


@dataclass(frozen=True)
class Check:
    """One comparison. ``item`` is an output, ``gradient:NAME``, the name of a transform or of an illegal call."""

    operator: str
    candidate: str
    relation: str
    case: str
    item: str
    dtype: str
    shape: tuple[int, ...]
    tolerance: str
    comparison: Comparison
    seed: int
    row: Key | None = None
    """Key of the tolerance in the contract, if the comparison is one of accuracy."""

    @property
    def passed(self) -> bool:
        """Whether the comparison passed."""
        return self.comparison.passed

    @property
    def case_id(self) -> str:
        """The id with which ``--replay`` runs this relation on this case again."""
        return str(CaseId(self.operator, self.candidate, self.dtype, self.relation, self.case))


@dataclass(frozen=True)
class Skip:
    """A check that did not run, and the reason; never counted as passed."""

    operator: str
    candidate: str
    relation: str
    case: str
    dtype: str
    reason: str


@dataclass(frozen=True)
class Launches:
    """Backends and kernels that ran when a backend was checked on a case.

    Attributes:
        operator: the operator.
        candidate: the candidate that was checked.
        dtype: dtype of the case's inputs.
        case: name of the case.
        backends: the backends that were chosen; ``auto`` may choose several.
        kernels: the kernels that were launched, none of them a peer's.
        own: the kernels that belong to the named backend; None for ``auto``, and for a backend made of PyTorch's ops.
    """

    operator: str
    candidate: str
    dtype: str
    case: str
    backends: tuple[str, ...]
    kernels: tuple[str, ...]
    own: tuple[str, ...] | None


Record = Check | Skip
Outcome = Check | Skip | Launches
"""A record that a task of a run yields."""
