"""Cases of det_attention along its dimensions: queries, keys, heads, and options in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_kernels.core.testing import Case
from rl_kernels.lab.dimensions import CHECKED, drawn, paired, swept

AXES = {
    "causal": (None, False),
    "window": (None, (7, 0), (3, 40), (None, 2), (50, -1)),
    "softcap": (None, 1.5, 30.0),
    "sinks": (None, True),
    "scale": (None, 0.05, 1),
    "return_lse": (None, True),
    "layout": (None, "left", "right", "packed"),
    "value_head": (None, 8, 24),
    "ints": (None, torch.int32),
    "values": (None, "ties", "small", "subnormal"),
    "dtype": (None, "bf16", "fp16"),
}
CACHES = {
    **{name: AXES[name] for name in ("causal", "window", "softcap", "sinks", "return_lse", "ints", "dtype")},
    "layout": ("cache", "paged", "packed-paged"),
    "page": (16, 48, 64),
}
TURNS: tuple[Mapping[str, Any], ...] = (
    {"return_lse": True},
    {"return_lse": True, "window": (70, 0)},
    {"return_lse": True, "causal": False},
    {"return_lse": True, "layout": "packed", "sinks": True},
    {"return_lse": True, "layout": "left", "softcap": 3.0},
)
"""Options that the cases of a sweep take in turn."""
COUNTS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
KEYS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 513, 1023, 1024, 1025, 2049)
HEADS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256)
SMALL = {"batch": 3, "queries": 12, "keys": 12, "kv_heads": 2, "group": 2, "head": 8}
ONE = {"batch": 1, "queries": 5, "keys": 21, "kv_heads": 1, "group": 2, "head": 8}


def _possible(options: Mapping[str, Any]) -> bool:
    """Say whether a case is possible: subnormal values are not in 16 bits, where FP16 rounds them to 0."""
    return not (options.get("values") == "subnormal" and options.get("dtype") in ("bf16", "fp16"))


DIMENSIONS: tuple[Case, ...] = (
    *paired("pairs", SMALL, AXES, _possible),
    *drawn("drawn", {**SMALL, "keys": 19}, AXES, 20, _possible),
    *drawn("drawn-more", {**SMALL, "queries": 40, "keys": 70}, AXES, 100, _possible, suite="full"),
    *paired("caches", {**SMALL, "keys": 70}, CACHES, grad=False, relations=("accuracy",)),
    *swept("queries", {**ONE, "keys": 140}, COUNTS, TURNS),
    *swept("keys", ONE, KEYS, TURNS),
    *swept("head", ONE, HEADS, TURNS),
    *swept("group", {**ONE, "queries": 9}, (1, 3, 4, 5, 7, 8, 16), TURNS),
    *swept("kv_heads", ONE, (3, 8, 16), TURNS),
    *swept("batch", {**ONE, "queries": 3}, (2, 7, 33), TURNS[3:]),
    Case("prompt-300", {**ONE, "queries": 300, "keys": 300}, TURNS[0], relations=CHECKED),
    Case("prompt-1100", {**ONE, "queries": 1100, "keys": 1100}, TURNS[1], relations=CHECKED, suite="full"),
    Case("batch-300", {**ONE, "batch": 300, "queries": 1, "keys": 3}, relations=CHECKED, dtype="bf16"),
)
