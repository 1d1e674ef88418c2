"""The advantage estimators: their checks, and the form in which raw ops take them."""

from __future__ import annotations

from typing import NamedTuple

from rl_kernels.core import validate as check

ESTIMATORS = ("population", "sample", "leave_one_out", "none", "batch")
PLACEMENTS = ("max", "add")


class Estimator(NamedTuple):
    """The formula of the advantages; ``text`` writes it as a string, ``parse`` reads it back.

    Attributes:
        kind: one of ``ESTIMATORS``.
        placement: of eps: ``max`` divides by max(std, eps), ``add`` by std + eps.
        nan: ``keep``, or ``skip``, which leaves members with a NaN reward out of their group.
    """

    kind: str = "population"
    placement: str = "max"
    nan: str = "keep"

    @classmethod
    def of(cls, advantage_estimator: str, eps_placement: str, skip_nan: bool, eps: float) -> Estimator:
        """Check the advantage keywords of a public function.

        Raises:
            TypeError, ValueError: a keyword has a value that is not allowed; the message names it.
        """
        check.number("eps", eps, above=0)
        check.choice("advantage_estimator", advantage_estimator, ESTIMATORS)
        check.choice("eps_placement", eps_placement, PLACEMENTS)
        check.flag("skip_nan", skip_nan)
        return cls(advantage_estimator, eps_placement, "skip" if skip_nan else "keep")

    @property
    def text(self) -> str:
        """Return the estimator as the string that a raw op takes."""
        return ",".join(self)

    @classmethod
    def parse(cls, text: str) -> Estimator:
        """Return the estimator of a string from ``text``."""
        return cls(*text.split(","))
