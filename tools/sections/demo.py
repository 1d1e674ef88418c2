"""The table and picture of `rl-kernels demo --device cuda`."""

from __future__ import annotations

from sections.text import ran_on

from rl_kernels.demo.report import QUOTIENT, Recorded, side_by_side
from rl_kernels.lab.bench.report import as_table


def section(found: Recorded) -> str:
    """Return the table of both twins."""
    rows = [["", *found.histories, QUOTIENT], *map(list, side_by_side(found.histories))]
    return f"{as_table(rows)}\n\n{ran_on(found.environment)}"
