"""Layouts of rms_norm and layer_norm that must not change a bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Case, Draw, Inputs, Variant
from rl_kernels.lab.check.rows import RowLayout

STEP, STEP_OF_NARROW, NARROW = 16, 128, 512
"""Rows of a step, or a multiple of them, in the sums of weight and bias; the second for up to NARROW columns."""
ROWS = RowLayout(
    arguments={"x": 1, "residual": 1, "gate": 1},
    results=frozenset({"output", "sum", "gradient:x", "gradient:residual", "gradient:gate"}),
    functions=frozenset({"", "layer_norm"}),
)


def zero_rows(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Add rows with zero gradient, whole steps before or any number after the others: no sum changes a bit."""
    flat = {name: call[name].flatten(0, -2) for name in ROWS.arguments if name in call}
    count, width = flat["x"].shape
    step = STEP_OF_NARROW if width <= NARROW else STEP
    for before, after in ((0, 1), (0, 5), (0, step), (0, 40), (step, 0), (3 * step, 7)):
        longer = {
            name: torch.cat((draw.normal(before, width, scale=3.0), rows, draw.normal(after, width, scale=3.0)))
            for name, rows in flat.items()
        }

        def lift(_: str, value: torch.Tensor, before: int = before, after: int = after) -> torch.Tensor:
            return F.pad(value.flatten(0, -2), (0, 0, before, after))

        def find(name: str, value: torch.Tensor, before: int = before) -> torch.Tensor:
            return value[before : before + count] if name in ROWS.results else value

        yield Variant(f"{before} rows in front, {after} behind", {**call, **longer}, _flat, find, lift)


def _flat(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.flatten(0, -2) if name in ROWS.results else value


def exchanged(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Exchange x and residual: their sum stays the same."""
    if "residual" in call:
        yield Variant("x and residual exchanged", {**call, "x": call["residual"], "residual": call["x"]})


TRANSFORMS = {**ROWS.transforms(), "zero-rows": zero_rows, "exchanged": exchanged}
