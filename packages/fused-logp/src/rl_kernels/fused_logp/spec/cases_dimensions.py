"""Sweeps of fused_logp: rows, vocabulary, values of logits, and every pair of options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_kernels.core.testing import IGNORED, Case
from rl_kernels.lab.dimensions import CHECKED, EDGES, ROWS, drawn, paired, swept

AXES = {
    "return_stats": (None, True),
    "temperature": (None, 0.7, 0.703, 3, "tensor", "cold"),
    "min_logit": (None, True),
    "ignore_index": (None, IGNORED, 0, 7),
    "row_indices": (None, True, "twice"),
    "inplace_backward": (None, True),
    "out_dtype": (None, torch.bfloat16, torch.float64),
    "out": (None, True),
    "ids": (None, torch.int32),
    "values": (None, "ties", "huge", "small", "subnormal", "minus_inf", "offset", "below", "lowest"),
    "dtype": (None, "bf16", "fp16", "fp64"),
}
TURNS: tuple[Mapping[str, Any], ...] = (
    {"return_stats": True},
    {"return_stats": True, "temperature": "tensor", "ignore_index": IGNORED},
    {"temperature": 0.7},
    {"return_stats": True, "row_indices": True},
    {},
    {"return_stats": True, "temperature": 1.3, "ids": torch.int32, "min_logit": True},
)
"""Options of the sweeps; the cases take them in turn."""
VOCABS = (*EDGES, 2048, 4096, 4097, 8191, 8192, 16384, 32767, 32768)
"""Sizes at and next to multiples of the segments, steps and units of all backends."""
WHOLE = (16384, 16391, 33000)
"""Sizes of rows that GPU backends do not split, if there are 2,048 of them or more: whole steps, rows of any alignment,
and two segments."""
LARGE_VOCABS = (50257, 65537, 128256, 151936, 160001, 202048, 262144)
SWEEP = {"batch": 1, "seq": 5, "vocab": 40}
WIDE, NARROW = {"batch": 1, "seq": 2, "vocab": 40}, {"batch": 1, "seq": 8200, "vocab": 40}


def _possible(options: Mapping[str, Any]) -> bool:
    """Return whether the options can be combined.

    ``out`` allows no gradient, and keeps its old values in rows where the definition gives 0. The lowest numbers
    overflow at a cold temperature, because plain PyTorch divides first.
    """
    if (options.get("values"), options.get("temperature")) == ("lowest", "cold"):
        return False
    return "out" not in options or not {"row_indices", "inplace_backward"} & options.keys()


DIMENSIONS: tuple[Case, ...] = (
    *paired("pairs", {"batch": 3, "seq": 4, "vocab": 67}, AXES, _possible),
    *drawn("drawn", {"batch": 2, "seq": 9, "vocab": 261}, AXES, 24, _possible),
    *drawn("drawn-more", {"batch": 2, "seq": 9, "vocab": 261}, AXES, 150, _possible, suite="full"),
    *swept("seq", SWEEP, ROWS, TURNS),
    # The quick suite has every second size.
    *swept("vocab", WIDE, VOCABS[1::2], TURNS),
    *swept("vocab", WIDE, VOCABS[::2], TURNS, suite="full"),
    # Each exceeds one limit (a grid size, a table, an index held in FP32 or 16 bits) and is small otherwise.
    Case("vocab-262208", {"batch": 1, "seq": 1, "vocab": 262208}, {"return_stats": True}, relations=CHECKED),
    Case(
        "edges", {"batch": 1, "seq": 66, "vocab": 32769}, {**TURNS[0], "edges": True}, relations=CHECKED, dtype="bf16"
    ),
    Case("rows-65600", {"batch": 1, "seq": 65600, "vocab": 3}, TURNS[1], relations=CHECKED, dtype="bf16"),
    Case("rows-8200-narrow", NARROW, TURNS[1], relations=("invariance",), dtype="bf16"),
    Case("rows-8200", {"batch": 1, "seq": 8200, "vocab": 4104}, relations=("invariance",), suite="full"),
    Case("numbers-2^24", {"batch": 1, "seq": 66, "vocab": 262208}, relations=CHECKED, suite="full"),
    *(
        Case(
            f"whole-{vocab}", {**WIDE, "seq": 2049, "vocab": vocab}, turn, relations=(*CHECKED, "invariance"), gpu=True
        )
        for vocab, turn in zip(WHOLE, TURNS, strict=False)
    ),
    *swept("vocab", WIDE, LARGE_VOCABS, TURNS, suite="full"),
    *swept("seq", {**SWEEP, "vocab": 520}, (4096, 8193), TURNS, suite="full"),
    *paired("long-pairs", {"batch": 1, "seq": 3, "vocab": 9001}, AXES, _possible, suite="full"),
)


def with_values(logits: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Return the logits changed to a kind of values: with ties, as large as FP16 holds, tiny, or far from 0."""
    if kind == "ties":
        return logits.round()
    if kind == "huge":
        return (logits * 3e4).clamp(-65504, 65504)
    if kind == "lowest":
        # A whole row at the lowest number, as masking with finfo.min leaves it.
        lowest = logits.new_full(logits.shape[-1:], max(-1e37, torch.finfo(logits.dtype).min))
        return torch.cat((lowest.expand(*logits.shape[:-2], 1, -1), logits[..., 1:, :]), -2)
    if kind in ("offset", "below"):
        return logits + (1e4 if kind == "offset" else -3e4)
    return logits * {"small": 1e-6, "subnormal": 1e-40}.get(kind or "", 1.0)
