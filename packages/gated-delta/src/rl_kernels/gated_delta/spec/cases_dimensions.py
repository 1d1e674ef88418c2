"""Sweeps of gated_delta_rule: tokens around blocks and chunks, heads and sizes, and every pair of options."""

from __future__ import annotations

from rl_kernels.core.testing import Case
from rl_kernels.lab.dimensions import paired, swept


def sizes(
    batch: int, tokens: int, key_heads: int = 1, group: int = 2, key_size: int = 16, value_size: int = 16
) -> dict[str, int]:
    """Return the sizes of a case by their names."""
    heads = {"key_heads": key_heads, "group": group, "key_size": key_size, "value_size": value_size}
    return {"batch": batch, "tokens": tokens, **heads}


AXES = {
    "layout": (None, "left", "packed"),
    "normalize_qk": (None, False),
    "initial_state": (None, True),
    "return_state": (None, True),
    "decays": (None, "none", "steep"),
    "strength": (None, 0.0, 1.0),
    "dtype": (None, "bf16", "fp16", "fp64"),
}
"""Values of each option; None leaves it out. ``dtype`` is the dtype of the case, not an option."""
FEW, MORE = (1, 15, 16, 17, 63, 64, 65), (127, 128, 129, 191, 193)
"""Tokens around blocks and chunks."""
OTHERS = {name: value for name, value in sizes(1, 0).items() if name != "tokens"}
DIMENSIONS: tuple[Case, ...] = (
    *paired("pairs", sizes(3, 19), AXES),
    *swept("tokens", OTHERS, FEW, ({"return_state": True}, {"initial_state": True})),
    *swept("tokens", OTHERS, MORE, ({"return_state": True}, {}), relations=("accuracy",)),
)
