"""Layouts of fused_logp that must not change a bit, and garbage that must not reach other rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.testing import (
    IGNORED,
    Case,
    Draw,
    Inputs,
    RowLayout,
    Variant,
    as_int32,
    bad_ids,
    options,
    temperature_as_tensor,
)

ROWS = RowLayout(
    arguments={"logits": 1, "target_ids": 0, "temperature": 0, "out": 0},
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
    others = torch.ones(count, dtype=torch.bool, device=draw.device).index_fill(0, rows, False)
    others = others.view(call["target_ids"].shape)
    changed = {
        "logits": call["logits"].masked_fill(others[..., None], torch.nan),
        "target_ids": call["target_ids"].masked_fill(others, -7),
        "row_indices": rows,
    }

    def taken(name: str, result: torch.Tensor) -> torch.Tensor:
        return result.flatten(0, others.ndim - 1)[rows]

    def kept(name: str, result: torch.Tensor) -> torch.Tensor:
        return torch.where(others, call["out"], result)

    label = "half of the rows, by index"
    if "out" not in call:
        yield Variant(label, {**call, **changed}, taken, taken)
        return
    apart = torch.stack((call["out"], call["out"]), -1)[..., 0]
    for how, out in (
        (label, call["out"]),
        (f"{label}, out spread", apart),
        (f"{label}, out turned", call["out"].mT.clone(memory_format=torch.contiguous_format).mT),
    ):
        yield Variant(how, {**call, **changed, "out": out}, kept)


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
