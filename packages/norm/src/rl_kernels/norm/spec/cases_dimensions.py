"""Cases of rms_norm and layer_norm along their dimensions: rows and widths around tiles, options in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_kernels.core.testing import Case
from rl_kernels.lab.dimensions import CHECKED, drawn, paired, swept

LAYER_NORM = "layer_norm"
SHARED = {
    "weight": (None, "bf16", "fp32", "none"),
    "residual": (None, True),
    "eps": (None, 0.0, 1e-3),
    "values": (None, "offset", "small", "large"),
    "dtype": (None, "bf16", "fp16", "fp64"),
}
AXES = {**SHARED, "offset": (None, 1.0, -0.5), "cast_first": (None, False)}
AXES_LAYER = {**SHARED, "bias": (None, True)}
AXES_GATED = {**AXES, "residual": (None,), "gate": (True,)}
"""Values of each option; None leaves it out. ``dtype`` is the dtype of the case, not an option."""
TURNS: tuple[Mapping[str, Any], ...] = (
    {},
    {"residual": True},
    {"offset": 1.0, "cast_first": False},
    {"weight": "none"},
)
TURNS_LAYER: tuple[Mapping[str, Any], ...] = ({"bias": True}, {"residual": True, "bias": True}, {})
TURNS_GATED: tuple[Mapping[str, Any], ...] = ({"gate": True}, {"gate": True, "offset": 1.0, "cast_first": False})
BATCHES, MORE_BATCHES = (1, 64, 65, 129, 2049), (2, 63, 127, 128, 256)
WIDTHS = (2, 3, 16, 17, 31, 33, 127, 256, 257, 1000, 1025)
MORE_WIDTHS = (8, 15, 32, 63, 64, 65, 128, 129, 255, 512, 1023, 1024)
"""Rows and columns around tiles; those with MORE are in the full suite."""
ONE_ROW, WIDEST = (2048, 4096, 4097), (16384, 16385)
"""Widths of tiles with one row; the widest row of a program, and one that is wider."""


def _possible(options: Mapping[str, Any]) -> bool:
    """Leave out rows of tiny numbers without eps: their inverse overflows."""
    return not (options.get("eps") == 0.0 and options.get("values") == "small")


DIMENSIONS: tuple[Case, ...] = (
    *paired("pairs", {"batch": 5, "hidden": 40}, AXES, _possible),
    *paired("layer-pairs", {"batch": 5, "hidden": 40}, AXES_LAYER, _possible, function=LAYER_NORM),
    *paired("gated-pairs", {"batch": 5, "hidden": 40}, AXES_GATED, _possible),
    *drawn("drawn", {"batch": 18, "hidden": 130}, AXES, 12, _possible),
    *drawn("drawn-more", {"batch": 18, "hidden": 130}, AXES, 60, _possible, suite="full"),
    *drawn("gated-drawn", {"batch": 18, "hidden": 130}, AXES_GATED, 30, _possible, suite="full"),
    *drawn("layer-drawn", {"batch": 18, "hidden": 130}, AXES_LAYER, 60, _possible, suite="full", function=LAYER_NORM),
    *swept("batch", {"hidden": 24}, BATCHES, TURNS),
    *swept("hidden", {"batch": 3}, WIDTHS, TURNS),
    *swept("hidden", {"batch": 17}, ONE_ROW, TURNS),
    *swept("hidden", {"batch": 2}, WIDEST, TURNS),
    *swept("batch", {"hidden": 24}, MORE_BATCHES, TURNS, suite="full"),
    *swept("hidden", {"batch": 3}, MORE_WIDTHS, TURNS, suite="full"),
    *swept("hidden", {"batch": 17}, (8192,), TURNS, suite="full"),
    *(
        Case(f"layer-{case.name}", case.sizes, case.options, LAYER_NORM, relations=CHECKED)
        for case in swept("hidden", {"batch": 17}, (2, 33, 255, 256, 1000, 4096, 8191), TURNS_LAYER)
    ),
    *(
        Case(f"gated-{case.name}", case.sizes, case.options, relations=CHECKED)
        for case in swept("hidden", {"batch": 17}, (2, 33, 128, 1000, 4096, 16384), TURNS_GATED)
    ),
    *(
        Case(f"gated-{case.name}", case.sizes, case.options, relations=CHECKED)
        for case in swept("batch", {"hidden": 24}, (1, 129, 2049), TURNS_GATED)
    ),
    *swept("batch", {"hidden": 4096}, (4096,), TURNS, suite="full"),
)


def with_values(x: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Return rows of another kind: far from 0, tiny, so large that FP16 squares overflow, or of few digits."""
    if kind == "coarse":
        return (x * 16).round() / 16
    if kind == "offset":
        return x + 30
    return x * {"small": 1e-4, "large": 500.0}.get(kind or "", 1.0)
