"""Sweeps of gated_delta_rule: rows and widths around the tile sizes, and every pair of options."""

from __future__ import annotations

from rl_kernels.core.testing import Case
from rl_kernels.lab.dimensions import EDGES, ROWS, paired, swept

AXES = {"scale": (None, 0.0, -2.5, 1e4), "dtype": (None, "bf16", "fp16", "fp64")}
"""Values of each option; None leaves it out. ``dtype`` is the dtype of the case, not an option."""

DIMENSIONS: tuple[Case, ...] = (
    *paired("pairs", {"batch": 3, "width": 9}, AXES),
    *swept("batch", {"width": 5}, ROWS, ({}, {"scale": 0.3})),
    *swept("width", {"batch": 2}, EDGES, ({"scale": -1.5}, {})),
)
