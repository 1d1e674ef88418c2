"""What a check leaves behind: one record for each thing compared, and one for each thing left out."""

from __future__ import annotations

from dataclasses import dataclass

from rl_kernels.core.check.compare import Comparison


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

    @property
    def passed(self) -> bool:
        """Whether the comparison holds."""
        return self.comparison.passed


@dataclass(frozen=True)
class Skip:
    """Something that did not run, and why; never counted as passed."""

    operator: str
    candidate: str
    relation: str
    case: str
    reason: str


Record = Check | Skip
