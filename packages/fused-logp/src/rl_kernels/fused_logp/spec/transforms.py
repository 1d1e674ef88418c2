"""Layouts of fused_logp that must not change a bit, and garbage that must not reach other rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.testing import IGNORED, Case, Draw, Inputs, Variant
from rl_kernels.lab.check.rows import RowLayout
from rl_kernels.lab.check.transforms import as_int32, bad_ids, options, temperature_as_tensor

ROWS = RowLayout(
    arguments={"logits": 1, "target_ids": 0, "temperature": 0, "min_logit": 0, "out": 0},
    results=frozenset({"logp", "logsumexp", "entropy", "gradient:logits"}),
    ids="target_ids",
)


def indexed(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Compute only some rows: they keep their bits, while the other rows hold NaN and ids out of range.

    ``out`` keeps its values in the other rows.
    """
    if "row_indices" in call:
        return
    count = call["target_ids"].numel()
    rows = draw.permutation(count)[: max(count // 2, 1)].to(draw.device)
    inactive = torch.ones(count, dtype=torch.bool, device=draw.device).index_fill(0, rows, False)
    inactive = inactive.view(call["target_ids"].shape)
    changed = {
        "logits": call["logits"].masked_fill(inactive[..., None], torch.nan),
        "target_ids": call["target_ids"].masked_fill(inactive, -7),
        "row_indices": rows,
    }
    if "min_logit" in call:
        changed["min_logit"] = call["min_logit"].masked_fill(inactive, torch.nan)

    def computed_rows(name: str, result: torch.Tensor) -> torch.Tensor:
        return result.flatten(0, inactive.ndim - 1)[rows]

    def with_old_rows(name: str, result: torch.Tensor) -> torch.Tensor:
        return torch.where(inactive, call["out"], result)

    label = "half of the rows, by index"
    if "out" not in call:
        yield Variant(label, {**call, **changed}, computed_rows, computed_rows)
        return
    spread = torch.stack((call["out"], call["out"]), -1)[..., 0]
    for variant_label, out in (
        (label, call["out"]),
        (f"{label}, out spread", spread),
        (f"{label}, out turned", call["out"].mT.clone(memory_format=torch.contiguous_format).mT),
    ):
        yield Variant(variant_label, {**call, **changed, "out": out}, with_old_rows)


TRANSFORMS = {
    **ROWS.transforms(),
    "indexed": indexed,
    "temperature": temperature_as_tensor("target_ids"),
    "integers": as_int32("target_ids", "row_indices"),
    "options": options(
        with_statistics={"return_stats": True},
        with_ignore_index={"ignore_index": IGNORED},
        unchecked={"validate": False},
    ),
}
BAD_IDS = bad_ids("target_ids", lambda call: call["logits"].shape[-1], ("logp", "gradient:logits"))
HYGIENE = {**ROWS.hygiene(), "bad ids": BAD_IDS}
