"""The table and picture of `rl-kernels demo --device cuda`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sections.text import ran_on

from rl_kernels.demo.report import QUOTIENT, side_by_side
from rl_kernels.lab.bench.report import as_table


def section(found: Mapping[str, Any]) -> str:
    """Return the table of both twins."""
    rows = [["", *found["runs"], QUOTIENT], *map(list, side_by_side(found["runs"]))]
    return f"{as_table(rows)}\n\n{ran_on(found['environment'])}"
