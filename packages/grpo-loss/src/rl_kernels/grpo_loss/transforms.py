"""Layouts that must change no bit of the loss, its gradient or the advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Case, Draw, Inputs, Variant, options

GRADIENT = "gradient:current_logps"
TOKENS = ("current_logps", "old_logps", "ref_logps", "advantages", "completion_mask")
GARBAGE = (torch.nan, torch.inf, -torch.inf, 1e38)


def padding(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Pad completions on the right, with garbage under the mask; the gradient is exactly 0 there."""
    for width, garbage in zip((1, 7, 64, 4100), GARBAGE, strict=True):
        wide = {name: _longer(name, value, 1, width, garbage) for name, value in _tokens(call).items()}
        if wide:
            yield Variant(f"{width} on the right, {garbage}", {**call, **wide}, _with_zeros(0, width))


def masked(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Put garbage at masked positions, and in the advantage of a wholly masked completion."""
    if "completion_mask" not in call or call["completion_mask"].bool().all():
        return
    lanes = ~call["completion_mask"].bool()
    for garbage in GARBAGE:
        changed = {name: _filled(v, lanes, garbage) for name, v in _tokens(call).items() if name != "completion_mask"}
        if "advantages" in call and call["advantages"].ndim == 1:
            changed["advantages"] = _filled(call["advantages"], lanes.all(1), garbage)
        yield Variant(f"{garbage} under the mask", {**call, **changed})


def appended(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Append masked completions of garbage: whole groups, where there are groups."""
    tokens = _tokens(call)
    if not tokens:
        return
    first = call.get("samples_per_prompt", 1)
    for count, garbage in ((first, torch.nan), (3 * first, torch.inf)):
        changed: Inputs = {name: _longer(name, value, 0, count, garbage) for name, value in tokens.items()}
        for name in {"rewards", "advantages"} & call.keys() - changed.keys():
            changed[name] = _longer(name, call[name], 0, count, garbage)
        if "group_boundaries" in call:
            offsets = _offsets(call)
            longer = [*offsets, offsets[-1] + 1, *([offsets[-1] + count] if count > 1 else [])]
            is_tensor = isinstance(call["group_boundaries"], torch.Tensor)
            changed["group_boundaries"] = torch.tensor(longer) if is_tensor else longer
        yield Variant(f"{count} completions of {garbage}", {**call, **changed}, _with_zeros(count, 0))


def grouping(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Say the same groups in the other ways."""
    if "rewards" not in call:
        return
    offsets = _offsets(call)
    others = {name: value for name, value in call.items() if name not in ("samples_per_prompt", "group_boundaries")}
    ways = {"a list": offsets, "a tuple": tuple(offsets), "int64": torch.tensor(offsets)}
    ways["int32"] = torch.tensor(offsets, dtype=torch.int32)
    ways["on the device"] = torch.tensor(offsets, device=draw.device)
    for label, boundaries in ways.items():
        yield Variant(f"boundaries, {label}", {**others, "group_boundaries": boundaries})


def groups(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Take a group alone, among others, and all groups in another order: advantages depend on their group alone."""
    if case.function != "group_advantages":
        return
    others = {name: value for name, value in call.items() if name not in ("samples_per_prompt", "group_boundaries")}
    rewards = call["rewards"]
    bounds = list(pairwise(_offsets(call)))

    def variant(label: str, parts: list[torch.Tensor], pick: Part, find: Part) -> Variant:
        offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
        changed = {**others, "rewards": torch.cat(parts), "group_boundaries": offsets}
        return Variant(label, changed, lambda name, result: pick(result), lambda name, result: find(result))

    for start, end in {bounds[0], bounds[len(bounds) // 2], bounds[-1]}:
        part, take = rewards[start:end], _slice(start, end)
        neighbours = [part.new_full((3,), torch.nan), draw.normal(1000, dtype=part.dtype)]
        yield variant(f"group [{start}, {end}) alone", [part], take, _slice(0, end - start))
        yield variant(
            f"group [{start}, {end}) among others",
            [neighbours[0], part, neighbours[1]],
            take,
            _slice(3, 3 + end - start),
        )
    reverse = torch.cat([torch.arange(start, end) for start, end in reversed(bounds)]).to(rewards.device)
    parts = [rewards[start:end] for start, end in reversed(bounds)]
    yield variant("groups in reverse", parts, lambda result: result[reverse], lambda result: result)


def mask_dtypes(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Give the mask in every kind of dtype."""
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float64):
        if "completion_mask" in call:
            yield Variant(f"mask {dtype}", {**call, "completion_mask": call["completion_mask"].to(dtype)})


def unread(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Without a KL, give any reference log-probabilities, or none."""
    if "ref_logps" in call and not call.get("beta"):
        for label, value in {"no": None, "NaN": torch.full_like(call["current_logps"], torch.nan)}.items():
            yield Variant(f"{label} reference", {**call, "ref_logps": value})


TRANSFORMS = {
    "padding": padding,
    "appended": appended,
    "grouping": grouping,
    "groups": groups,
    "mask": mask_dtypes,
    "options": options(unchecked={"validate": False}),
}

HYGIENE = {"masked": masked, "unread": unread}

Part = Callable[[torch.Tensor], torch.Tensor]


def _slice(start: int, end: int) -> Part:
    return lambda result: result[start:end]


def _tokens(call: Inputs) -> dict[str, torch.Tensor]:
    return {name: v for name in TOKENS if isinstance(v := call.get(name), torch.Tensor) and v.ndim == 2}


def _offsets(call: Inputs) -> list[int]:
    if "samples_per_prompt" in call:
        return list(range(0, len(call["rewards"]) + 1, call["samples_per_prompt"]))
    return [int(offset) for offset in call["group_boundaries"]]


def _longer(name: str, value: torch.Tensor, dim: int, count: int, garbage: float) -> torch.Tensor:
    shape = [*value.shape]
    shape[dim] = count
    # Cast, not filled in its dtype: 1e38 is out of range for FP16, where it stands for inf.
    filler = torch.full(shape, 0.0 if name == "completion_mask" else garbage, device=value.device)
    return torch.cat((value, filler.to(value.dtype)), dim)


def _filled(value: torch.Tensor, lanes: torch.Tensor, garbage: float) -> torch.Tensor:
    return torch.where(lanes, torch.tensor(garbage, device=value.device).to(value.dtype), value)


def _with_zeros(rows: int, columns: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def pick(name: str, result: torch.Tensor) -> torch.Tensor:
        return F.pad(result, (0, columns, 0, rows)) if name == GRADIENT else result

    return pick
