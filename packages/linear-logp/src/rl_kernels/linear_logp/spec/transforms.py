"""Layouts of linear_logp that must not change a bit, and garbage that must not reach other rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from rl_kernels.core.testing import IGNORED, Case, Draw, Inputs, Variant
from rl_kernels.lab.check.rows import RowLayout
from rl_kernels.lab.check.transforms import as_int32, bad_ids, options, temperature_as_tensor

ROWS = RowLayout(
    arguments={"hidden": 1, "target_ids": 0, "temperature": 0, "min_logit": 0, "kept_ids": 1},
    results=frozenset({"logp", "logsumexp", "entropy", "gradient:hidden"}),
    ids="target_ids",
)
WEIGHTS = ("gradient:lm_head_weight", "gradient:bias")


def appended(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Append ignored rows of NaN: all results keep their bits, also the gradients of weight and bias."""
    count = call["target_ids"].numel()
    flat = {"hidden": call["hidden"].flatten(0, -2), "target_ids": call["target_ids"].flatten()}
    for name in ("temperature", "min_logit", "kept_ids"):
        if isinstance(call.get(name), torch.Tensor):
            flat[name] = call[name].flatten(0, call["target_ids"].ndim - 1)
    ignored = call.get("ignore_index", IGNORED)
    fills = {"hidden": torch.nan, "target_ids": ignored, "temperature": 1.0, "min_logit": torch.nan, "kept_ids": -1}

    def longer(value: torch.Tensor, fill: float, rows: int) -> torch.Tensor:
        return torch.cat((value, value.new_full((rows, *value.shape[1:]), fill)))

    def kept(name: str, result: torch.Tensor) -> torch.Tensor:
        return result if name in WEIGHTS else result.flatten(0, call["target_ids"].ndim - 1)

    def first(name: str, result: torch.Tensor) -> torch.Tensor:
        return result if name in WEIGHTS else result[:count]

    for rows in (1, 23):
        changed = {name: longer(value, fills[name], rows) for name, value in flat.items()}
        lift = functools.partial(_lift, rows)
        yield Variant(f"{rows} ignored rows appended", {**call, **changed, "ignore_index": ignored}, kept, first, lift)


def nan_weight(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Put NaN into the weight: the results and gradients of ignored rows stay 0."""
    if "ignore_index" not in call:
        return
    ignored = call["target_ids"] == call["ignore_index"]

    def picked(name: str, result: torch.Tensor) -> torch.Tensor | None:
        return None if name in WEIGHTS else result[ignored]

    def of_variant(name: str, result: torch.Tensor) -> torch.Tensor:
        return result[ignored]

    weight = call["lm_head_weight"].index_fill(0, call["target_ids"].new_zeros(1), torch.nan)
    yield Variant("weight of NaN, ignored rows", {**call, "lm_head_weight": weight}, picked, of_variant)


def _lift(rows: int, name: str, upstream: torch.Tensor) -> torch.Tensor:
    return torch.cat((upstream.flatten(), upstream.new_full((rows,), torch.nan)))


TRANSFORMS = {
    **ROWS.transforms(),
    "temperature": temperature_as_tensor("target_ids"),
    "integers": as_int32("target_ids"),
    "kept": options(some_kept={"saved_mib": 1}, all_kept={"saved_mib": 4096}),
    "workspace": options(small_workspace={"workspace_mib": 1}, large_workspace={"workspace_mib": 4096}),
    "options": options(
        with_statistics={"return_stats": True},
        with_ignore_index={"ignore_index": IGNORED},
        unchecked={"validate": False},
    ),
}
BAD_IDS = bad_ids("target_ids", lambda call: len(call["lm_head_weight"]), ("logp", "gradient:hidden"), WEIGHTS)
HYGIENE = {**ROWS.hygiene(), "appended": appended, "bad ids": BAD_IDS, "weight of NaN": nan_weight}
