"""The table and picture of `rl-kernels demo --device cuda`."""

from __future__ import annotations

from pathlib import Path

from sections.text import ran_on

from rl_kernels.demo.gpu import plot, record
from rl_kernels.demo.gpu.report import QUOTIENT, side_by_side
from rl_kernels.lab.bench.report import as_table


def section(found: record.Recorded) -> str:
    """Return the table of both twins."""
    rows = [["", *found.summaries, QUOTIENT], *map(list, side_by_side(found.summaries))]
    return f"{as_table(rows)}\n\n{ran_on(found.environment)}"


def draw(found: record.Recorded, path: Path) -> None:
    """Draw the curves of both twins."""
    plot.draw(found.histories, found.summaries, found.parameters, path)
