"""Sweeps of experts: tokens and widths around tile sizes, and every pair of options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rl_kernels.core.testing import Case
from rl_kernels.lab.dimensions import ROWS, paired, swept


def sizes(tokens: int, width: int, inner: int, experts: int, slots: int) -> dict[str, int]:
    """Return the sizes of a case by their names: T, D, F, E and k."""
    return {"tokens": tokens, "width": width, "inner": inner, "experts": experts, "slots": slots}


AXES = {
    "activation": (None, "gelu_tanh", "clamped_swiglu"),
    "interleaved": (None, True),
    "transposed": (None, True),
    "biases": (None, True),
    "shared": (None, True),
    "chosen": (None, "first", "absent"),
    "dtype": (None, "bf16", "fp16"),
}
"""Values of each option; None leaves it out. ``dtype`` is the dtype of the case, not an option."""


def _swept(
    name: str, others: dict[str, int], values: Sequence[int], options: dict[str, object], **kind: Any
) -> Iterator[Case]:
    """Yield a case for each value of one size; every other one has the options."""
    del others[name]
    yield from swept(name, others, values, ({}, options), **kind)


FEW = (1, 2, 33, 65)
"""Tokens for less and more than a tile of 64 routes; Triton's interpreter takes milliseconds for each row."""
EDGES, MORE = (2, 17, 65), (1, 15, 16, 33, 63, 64, 128, 257, 1025)
"""Widths around those of tiles and blocks, with gradients and without."""
DIMENSIONS: tuple[Case, ...] = (
    *paired("pairs", sizes(4, 16, 12, 3, 2), AXES),
    *_swept("tokens", sizes(0, 8, 5, 3, 2), FEW, {"shared": True}),
    *_swept("tokens", sizes(0, 8, 5, 3, 2), [count for count in ROWS if count not in FEW], {}, suite="full"),
    *_swept("width", sizes(3, 0, 5, 3, 2), EDGES, {"biases": True}),
    *_swept("inner", sizes(3, 8, 0, 3, 2), EDGES, {"transposed": True}),
    *_swept("width", sizes(3, 0, 5, 3, 2), MORE, {"biases": True}, relations=("accuracy",)),
    *_swept("inner", sizes(3, 8, 0, 3, 2), MORE, {"transposed": True}, relations=("accuracy",)),
)
