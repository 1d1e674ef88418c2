"""Sweeps of linear_logp: rows, hidden size, vocabulary, values, and every pair of options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_kernels.core.testing import IGNORED, Case
from rl_kernels.lab.dimensions import CHECKED, EDGES, ROWS, drawn, paired, swept

AXES = {
    "return_stats": (None, True),
    "bias": (None, True),
    "temperature": (None, 0.7, 0.703, 3, "tensor", "cold"),
    "min_logit": (None, True),
    "softcap": (None, 30.0, 4.0),
    "logit_scale": (None, 0.0625, 3),
    "ignore_index": (None, IGNORED, 0, 7),
    "workspace_mib": (None, 1, 4096),
    "saved_mib": (None, 1, 4096),
    "vocab_segments": (None, 8),
    "ids": (None, torch.int32),
    "values": (None, "ties", "large", "small", "zero-rows"),
    "dtype": (None, "bf16", "fp16", "fp64"),
}
TURNS = (
    {"return_stats": True, "bias": True},
    {"return_stats": True, "temperature": "tensor", "ignore_index": IGNORED},
    {"temperature": 0.7},
    {"return_stats": True, "workspace_mib": 1, "ids": torch.int32, "min_logit": True},
    {"bias": True},
)
"""Options of the sweeps; the cases take them in turn."""
LITTLE = {"bias": True, "workspace_mib": 1, "scale": 0.25}
PIECES = {"batch": 1, "seq": 300, "hidden": 24, "vocab": 6200}
BLOCKS = {"batch": 1, "seq": 400, "hidden": 1024, "vocab": 40}
EDGED = {"batch": 1, "seq": 66, "hidden": 8, "vocab": 32769}
ROWS_8200 = {"batch": 1, "seq": 8200, "hidden": 8, "vocab": 40}
HEAD = {"return_stats": True, "bias": True, "minus_inf_first": 16384}
VOCABS = (*EDGES, 2048, 4095, 4096, 4097, 8192)
LARGE_VOCABS = (32768, 50257, 128256, 151936, 160001, 202048, 262144)
HIDDEN = (*EDGES, 2048)
LARGE_HIDDEN = (1536, 3584, 4096, 5120, 8192)
SIZES = {"batch": 1, "seq": 3, "hidden": 16, "vocab": 40}
"""The hidden size is a multiple of 8, which TMA needs, here and below; `drawn` and its own sweep have others."""


def _possible(options: Mapping[str, Any]) -> bool:
    """Return whether the options can be combined: the absolute tolerance of 16-bit gradients excludes large states."""
    return options.get("values") != "large" or options.get("dtype") not in ("bf16", "fp16")


DIMENSIONS: tuple[Case, ...] = (
    *paired("pairs", {"batch": 3, "seq": 4, "hidden": 24, "vocab": 67}, AXES, _possible),
    *drawn("drawn", {"batch": 2, "seq": 9, "hidden": 37, "vocab": 261}, AXES, 24, _possible),
    *drawn("drawn-more", {"batch": 2, "seq": 9, "hidden": 40, "vocab": 261}, AXES, 150, _possible, suite="full"),
    *swept("seq", SIZES, ROWS, TURNS),
    # The quick suite has every second size of each; together they have all.
    *swept("hidden", SIZES, HIDDEN[::2], TURNS),
    *swept("hidden", SIZES, HIDDEN[1::2], TURNS, suite="full"),
    *swept("vocab", {**SIZES, "hidden": 8}, VOCABS[1::2], TURNS),
    *swept("vocab", {**SIZES, "hidden": 8}, VOCABS[::2], TURNS, suite="full"),
    # Each exceeds one limit (a grid size, a table, a workspace) and is small otherwise.
    Case(
        "vocab-262208", {"batch": 1, "seq": 1, "hidden": 8, "vocab": 262208}, TURNS[0], relations=CHECKED, dtype="bf16"
    ),
    Case("rows-65600", {"batch": 1, "seq": 65600, "hidden": 8, "vocab": 3}, TURNS[1], relations=CHECKED, dtype="bf16"),
    # NaN of a diverged model must reach the results.
    Case("nan-row", SIZES, {**TURNS[0], "values": "nan-row"}, relations=("accuracy",)),
    Case("rows-8200", ROWS_8200, TURNS[1], relations=("invariance",), dtype="bf16"),
    Case("hidden-12296", {"batch": 1, "seq": 2, "hidden": 12296, "vocab": 5}, TURNS[0], relations=CHECKED),
    Case("hidden-8200", {"batch": 1, "seq": 2, "hidden": 8200, "vocab": 5}, {}, relations=CHECKED, dtype="bf16"),
    Case("small-workspace", BLOCKS, LITTLE, relations=(*CHECKED, "invariance"), dtype="fp32"),
    Case("small-workspace-half", BLOCKS, LITTLE, relations=CHECKED, dtype="bf16"),
    Case("many-pieces-half", PIECES, {"temperature": 0.7, "workspace_mib": 1}, relations=CHECKED, dtype="bf16"),
    Case("logits-256MiB", {"batch": 1, "seq": 1030, "hidden": 8, "vocab": 65600}, relations=CHECKED[1:], suite="full"),
    Case("edges", EDGED, {**TURNS[0], "edges": True}, relations=CHECKED, dtype="bf16"),
    Case("masked-head", {"batch": 1, "seq": 3, "hidden": 8, "vocab": 20000}, HEAD, relations=CHECKED),
    *swept("vocab", {**SIZES, "hidden": 8}, LARGE_VOCABS, TURNS, suite="full"),
    *swept("hidden", SIZES, LARGE_HIDDEN, TURNS, suite="full"),
    *swept("seq", {**SIZES, "hidden": 40, "vocab": 300}, (4096, 4100), TURNS, suite="full"),
    *paired("long-pairs", {"batch": 1, "seq": 9, "hidden": 40, "vocab": 4500}, AXES, _possible, suite="full"),
    Case("model", {"batch": 2, "seq": 64, "hidden": 896, "vocab": 8192}, TURNS[0], suite="full", relations=CHECKED),
)


def with_values(hidden: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Return the hidden states changed to a kind of values: a NaN row, whole numbers, zero rows, large or tiny."""
    if kind == "nan-row":
        middle = torch.tensor([hidden.shape[-2] // 2], device=hidden.device)
        return hidden.index_fill(-2, middle, torch.nan)
    if kind == "ties":
        return hidden.round()
    if kind == "zero-rows":
        return hidden * (torch.arange(hidden.shape[-2], device=hidden.device) % 2)[:, None].to(hidden.dtype)
    return hidden * {"large": 30.0, "small": 1e-6}.get(kind or "", 1.0)
