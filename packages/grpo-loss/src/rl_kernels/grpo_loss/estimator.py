"""How advantages come from rewards: the estimators of the field, checked, and the form in which raw ops take them."""

from __future__ import annotations

from typing import NamedTuple

from rl_kernels.core import validate as check

ESTIMATORS = ("population", "sample", "leave_one_out", "none", "batch")
PLACEMENTS = ("max", "add")


class Estimator(NamedTuple):
    """Which formula gives the advantages; ``text`` and ``parse`` are there and back.

    Attributes:
        kind: one of ``ESTIMATORS``.
        placement: of eps: ``max`` of it and the deviation, or ``add`` to it.
        nan: ``keep``, or ``skip`` for members without a reward, which are left out of their group.
    """

    kind: str = "population"
    placement: str = "max"
    nan: str = "keep"

    @classmethod
    def of(cls, advantage_estimator: str, eps_placement: str, skip_nan: bool, eps: float) -> Estimator:
        """Check the advantage keywords of a public function.

        Raises:
            TypeError, ValueError: a keyword is none of its values; the message names it.
        """
        check.number("eps", eps, above=0)
        check.choice("advantage_estimator", advantage_estimator, ESTIMATORS)
        check.choice("eps_placement", eps_placement, PLACEMENTS)
        check.flag("skip_nan", skip_nan)
        return cls(advantage_estimator, eps_placement, "skip" if skip_nan else "keep")

    @property
    def text(self) -> str:
        """Return the estimator as a raw op takes it."""
        return ",".join(self)

    @classmethod
    def parse(cls, text: str) -> Estimator:
        """Return the estimator that a text says."""
        return cls(*text.split(","))
