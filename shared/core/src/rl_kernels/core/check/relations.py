"""The relations by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rl_kernels.core.check.accuracy import accuracy, gradients
from rl_kernels.core.check.cell import Cell
from rl_kernels.core.check.determinism import invariance, repeatability
from rl_kernels.core.check.result import Record
from rl_kernels.core.check.robustness import robustness

RELATIONS: dict[str, Callable[[Cell], Iterator[Record]]] = {
    "accuracy": accuracy,
    "gradients": gradients,
    "repeatability": repeatability,
    "invariance": invariance,
    "robustness": robustness,
}
"""Each turns a cell into records; a candidate that misbehaves leaves a failed check, and the suite goes on."""
