"""Layouts that must change no bit of the loss, its gradient or the advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Case, Draw, Inputs, Variant
from rl_kernels.grpo_loss.spec.magnitudes import GRADIENT
from rl_kernels.lab.check.transforms import options

TOKENS = ("current_logps", "old_logps", "ref_logps", "advantages", "completion_mask", "rollout_ratio", "entropy")
SEQUENCES = ("rewards", "advantages", "rollout_ratio")
OF_SEQUENCES = ("grpo", "gspo", "sapo", "dr_grpo", "luspo")
"""Loss types that are divided by a number of sequences."""
GARBAGE = (torch.nan, torch.inf, -torch.inf, 1e38)


def padding(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Pad completions on the right, with garbage under the mask; the gradient is exactly 0 there."""
    if "cu_seqlens" in call or "completion_mask" not in call:
        return
    counted = {"max_completion_length": call["completion_mask"].shape[1], **call}
    divided = counted if call.get("loss_type") == "dr_grpo" else call
    for width, garbage in zip((1, 7, 64, 4100), GARBAGE, strict=True):
        wide = {name: _longer(name, value, 1, width, garbage) for name, value in _tokens(call).items()}
        yield Variant(f"{width} on the right, {garbage}", {**divided, **wide}, _with_zeros(0, width))


def masked(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Put garbage at masked positions, and in the advantages of fully masked completions."""
    if "completion_mask" not in call or call["completion_mask"].bool().all():
        return
    lanes = ~call["completion_mask"].bool()
    for garbage in GARBAGE:
        changed = {name: _filled(v, lanes, garbage) for name, v in _tokens(call).items() if name != "completion_mask"}
        for name in {"advantages", "rollout_ratio"} & call.keys() - changed.keys() if lanes.ndim == 2 else ():
            changed[name] = _filled(call[name], lanes.all(1), garbage)
        yield Variant(f"{garbage} under the mask", {**call, **changed})


def appended(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Append masked completions of garbage, as whole groups if there are groups."""
    tokens = _tokens(call)
    if not tokens or "cu_seqlens" in call or call.get("advantage_estimator") == "batch":
        return
    if call.get("loss_type") in OF_SEQUENCES:
        call = {"num_sequences": len(call["completion_mask"]), **call}
    first = call.get("samples_per_prompt", 1)
    for count, garbage in ((first, torch.nan), (3 * first, torch.inf)):
        changed: Inputs = {name: _longer(name, value, 0, count, garbage) for name, value in tokens.items()}
        for name in {*SEQUENCES} & call.keys() - changed.keys():
            changed[name] = _longer(name, call[name], 0, count, garbage)
        if "group_boundaries" in call:
            offsets = _offsets(call)
            longer = [*offsets, offsets[-1] + 1, *([offsets[-1] + count] if count > 1 else [])]
            is_tensor = isinstance(call["group_boundaries"], torch.Tensor)
            changed["group_boundaries"] = torch.tensor(longer) if is_tensor else longer
        yield Variant(f"{count} completions of {garbage}", {**call, **changed}, _with_zeros(count, 0))


def grouping(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Pass the same groups as boundaries of every type."""
    if "rewards" not in call:
        return
    offsets = _offsets(call)
    ungrouped = {name: value for name, value in call.items() if name not in ("samples_per_prompt", "group_boundaries")}
    ways = {"a list": offsets, "a tuple": tuple(offsets), "int64": torch.tensor(offsets)}
    ways["int32"] = torch.tensor(offsets, dtype=torch.int32)
    ways["on the device"] = torch.tensor(offsets, device=draw.device)
    for label, boundaries in ways.items():
        yield Variant(f"boundaries, {label}", {**ungrouped, "group_boundaries": boundaries})


def groups(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Run a group alone, among other groups, and all groups in reverse: advantages depend on their group alone."""
    if case.function != "group_advantages" or call.get("advantage_estimator") == "batch":
        return
    ungrouped = {name: value for name, value in call.items() if name not in ("samples_per_prompt", "group_boundaries")}
    rewards = call["rewards"]
    bounds = list(pairwise(_offsets(call)))

    def variant(label: str, parts: list[torch.Tensor], pick: Part, find: Part) -> Variant:
        offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
        changed = {**ungrouped, "rewards": torch.cat(parts), "group_boundaries": offsets}
        return Variant(label, changed, lambda name, result: pick(result), lambda name, result: find(result))

    for start, end in {bounds[0], bounds[len(bounds) // 2], bounds[-1]}:
        part, take = rewards[start:end], _slice(start, end)
        neighbors = [part.new_full((3,), torch.nan), draw.normal(1000, dtype=part.dtype)]
        yield variant(f"group [{start}, {end}) alone", [part], take, _slice(0, end - start))
        yield variant(
            f"group [{start}, {end}) among others",
            [neighbors[0], part, neighbors[1]],
            take,
            _slice(3, 3 + end - start),
        )
    reverse = torch.cat([torch.arange(start, end) for start, end in reversed(bounds)]).to(rewards.device)
    parts = [rewards[start:end] for start, end in reversed(bounds)]
    yield variant("groups in reverse", parts, lambda result: result[reverse], lambda result: result)


def mask_dtypes(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Pass the mask in every kind of dtype."""
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float64):
        if "completion_mask" in call:
            yield Variant(f"mask {dtype}", {**call, "completion_mask": call["completion_mask"].to(dtype)})


def unread(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Without a KL, pass NaN or no reference log-probabilities."""
    if "ref_logps" in call and not call.get("beta"):
        for label, value in {"no": None, "NaN": torch.full_like(call["current_logps"], torch.nan)}.items():
            yield Variant(f"{label} reference", {**call, "ref_logps": value})


def packed(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Pack the sequences: at full length, and cut after the last active token."""
    if "completion_mask" not in call or "cu_seqlens" in call or not call["completion_mask"].numel():
        return
    mask = call["completion_mask"].bool()
    length = mask.shape[1]
    if call.get("loss_type") == "dr_grpo":
        call = {"max_completion_length": length, **call}
    tokens, place = _tokens(call), torch.arange(length, device=mask.device)
    ends = torch.where(mask, place + 1, 0).amax(1)
    ways = {"whole": torch.full_like(ends, length), "to the last active token": ends, "with a gap": ends}
    for label, lengths in ways.items():
        inside = place < lengths[:, None]
        total = int(inside.sum())
        if len(tokens) > 1 and total == len(mask) and any(name in tokens for name in SEQUENCES):
            continue
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        changed: Inputs = {name: value[inside] for name, value in tokens.items()}
        changed["cu_seqlens"] = offsets.int() if label == "whole" else offsets
        changed["max_seqlen"] = length if label == "with a gap" else int(lengths.max())
        yield Variant(label, {**call, **changed}, _inside(inside))


def normalizer(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Pass the divisor that is otherwise counted."""
    if "completion_mask" not in call or {"num_tokens", "num_sequences"} & call.keys() or "cu_seqlens" in call:
        return
    mask, of_sequences = call["completion_mask"].bool(), call.get("loss_type") in OF_SEQUENCES
    name, count = ("num_sequences", len(mask)) if of_sequences else ("num_tokens", max(int(mask.sum()), 1))
    for value in (count, torch.tensor(count, device=mask.device), torch.tensor(float(count), device=mask.device)):
        yield Variant(f"{name} {value}", {**call, name: value})


def metrics(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Request the metrics too."""
    if "completion_mask" in call and "return_metrics" not in call:
        yield Variant("with metrics", {**call, "return_metrics": True})


TRANSFORMS = {
    "packed": packed,
    "normalizer": normalizer,
    "padding": padding,
    "appended": appended,
    "grouping": grouping,
    "groups": groups,
    "mask": mask_dtypes,
    "options": options(unchecked={"validate": False}),
    "metrics": metrics,
}

HYGIENE = {"masked": masked, "unread": unread}

Part = Callable[[torch.Tensor], torch.Tensor]


def _slice(start: int, end: int) -> Part:
    return lambda result: result[start:end]


def _tokens(call: Inputs) -> dict[str, torch.Tensor]:
    mask = call.get("completion_mask")
    if mask is None:
        return {}
    return {name: v for name in TOKENS if isinstance(v := call.get(name), torch.Tensor) and v.shape == mask.shape}


def _offsets(call: Inputs) -> list[int]:
    if "samples_per_prompt" in call:
        return list(range(0, len(call["rewards"]) + 1, call["samples_per_prompt"]))
    return [int(offset) for offset in call["group_boundaries"]]


def _longer(name: str, value: torch.Tensor, dim: int, count: int, garbage: float) -> torch.Tensor:
    shape = [*value.shape]
    shape[dim] = count
    # Filled in FP32 and then cast: 1e38 is out of range for FP16, and becomes inf.
    filler = torch.full(shape, 0.0 if name == "completion_mask" else garbage, device=value.device)
    return torch.cat((value, filler.to(value.dtype)), dim)


def _filled(value: torch.Tensor, lanes: torch.Tensor, garbage: float) -> torch.Tensor:
    return torch.where(lanes, torch.tensor(garbage, device=value.device).to(value.dtype), value)


def _inside(inside: torch.Tensor) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda name, result: result[inside] if name == GRADIENT else result


def _with_zeros(rows: int, columns: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def pick(name: str, result: torch.Tensor) -> torch.Tensor:
        return F.pad(result, (0, columns, 0, rows)) if name == GRADIENT else result

    return pick
