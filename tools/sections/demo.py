"""The table and picture of `rl-kernels demo --device cuda`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sections.text import ran_on

from rl_kernels.demo.report import QUOTIENT, side_by_side
from rl_kernels.lab.bench.report import as_table


def section(document: Mapping[str, Any]) -> str:
    """Return the table of both twins."""
    rows = [["", *document["runs"], QUOTIENT], *map(list, side_by_side(document["runs"]))]
    return f"{as_table(rows)}\n\n{ran_on(document['environment'])}"
