"""The cases of grpo_loss: inputs and error budget."""

from __future__ import annotations

from itertools import cycle

import torch

from rl_kernels.core.testing import Case, Draw, Inputs, Spec
from rl_kernels.grpo_loss import reference
from rl_kernels.grpo_loss.extras import Extras, Normalizer
from rl_kernels.grpo_loss.objective import Objective
from rl_kernels.grpo_loss.spec.cases_dimensions import DIMENSIONS
from rl_kernels.grpo_loss.spec.cases_objectives import KEYWORDS, OBJECTIVES, RANGE, extras, pack
from rl_kernels.grpo_loss.spec.illegal import ILLEGAL
from rl_kernels.grpo_loss.spec.magnitudes import GRADIENT, magnitudes
from rl_kernels.grpo_loss.spec.transforms import HYGIENE, TRANSFORMS

HALF = torch.bfloat16
FROM = "grpo_loss_from_advantages"
GROUPS = "group_advantages"
RAGGED = {"group_sizes": (1, 4, 2)}
BATCH = {"advantage_estimator": "batch"}
ESTIMATED = {"advantage_estimator": "sample", "eps_placement": "add"}


def _sizes(prompts: int, samples: int, completion: int) -> dict[str, int]:
    return {"prompts": prompts, "samples": samples, "completion": completion}


def _groups(prompts: int, samples: int) -> dict[str, int]:
    return {"prompts": prompts, "samples": samples}


CASES = (
    Case("plain", _sizes(2, 4, 16)),
    Case("kl", _sizes(3, 4, 19), {"beta": 0.04, "density": 0.7}),
    Case("small-kl", _sizes(2, 3, 40), {"beta": 1.0, "drift": 1e-3, "old": None}),
    Case("medium-kl", _sizes(2, 3, 40), {"beta": 1.0, "drift": 0.03, "old": None}),
    Case("large-kl", _sizes(2, 2, 30), {"beta": 0.5, "drift": 3.0, "clip_eps": 0.3}),
    Case("ragged", _sizes(3, 4, 11), {**RAGGED, "beta": 0.1, "density": 0.6, "masked_sequence": True}),
    # The first size equals the mean of all sizes.
    Case("ragged-as-if-even", _sizes(4, 3, 8), {"group_sizes": (3, 2, 4)}),
    Case("boundaries-tensor", _sizes(4, 3, 9), {**RAGGED, "boundaries": torch.tensor, "density": 0.5}),
    Case("on-policy", _sizes(2, 5, 13), {"old": None, "ref": None, "density": 0.8}),
    Case("unread-reference", _sizes(2, 4, 10), {"ref": torch.nan, "clip_eps": 0.1}),
    Case("no-clip-range", _sizes(2, 3, 12), {"clip_eps": 0.0, "beta": 0.02, "ties": True}),
    Case("wide-clip-range", _sizes(2, 3, 12), {"clip_eps": 1.5}),
    Case("reward-offset", _sizes(3, 4, 8), {"offset": 1000.0}),
    Case("large-eps", _sizes(3, 4, 8), {"eps": 0.9}),
    Case("equal-rewards", _sizes(2, 4, 8), {"equal": True, "beta": 0.3}),
    Case("float-mask", _sizes(2, 3, 14), {"mask": torch.float32, "density": 0.5, "beta": 0.1}),
    Case("half-operands", _sizes(2, 4, 15), {"old": HALF, "ref": HALF, "beta": 0.2}),
    Case("all-masked", _sizes(2, 2, 7), {"density": 0.0, "beta": 0.1}),
    Case("one-token", _sizes(1, 2, 1), {"beta": 0.1}),
    # More tokens than a backend processes at once, in sequences longer than one tree of a sum.
    Case("two-segments", _sizes(4, 4, 4500), {"beta": 0.1, "density": 0.9}),
    Case("advantages", _sizes(2, 4, 12), {"beta": 0.05, "clip_eps": 0.3, "density": 0.6}, FROM),
    Case("advantages-per-token", _sizes(2, 3, 21), {"per_token": True, "beta": 0.05, "density": 0.6}, FROM),
    # Advantage options of an objective are not read if advantages are given.
    Case("advantages-of-others", _sizes(2, 3, 9), {**ESTIMATED, "eps": 0.5, "skip_nan": True}, FROM),
    Case("advantages-on-policy", _sizes(1, 3, 9), {"old": None, "ref": None, "masked_sequence": True}, FROM),
    Case("groups", _groups(5, 4), {}, GROUPS),
    Case("groups-ragged", _groups(7, 4), RAGGED, GROUPS),
    Case("groups-of-300", _groups(2, 300), {}, GROUPS),
    Case("groups-offset", _groups(4, 8), {"offset": 10000.0, "eps": 1e-3}, GROUPS),
    # FP64 rewards, because FP64 sums of FP32 rewards are exact and hide the order of the sum.
    Case("groups-double", _groups(6, 7), {"rewards": torch.float64, "offset": 10000.0, "equal": True}, GROUPS),
    # The first of equal rewards is missing; a small eps magnifies any deviation that is not exactly 0.
    Case("groups-equal-of-40", _groups(3, 40), {"equal": True}, GROUPS),
    Case("groups-batch-of-2080", _groups(260, 8), BATCH, GROUPS, relations=("accuracy", "invariance")),
    Case("groups-equal-missing", _groups(3, 7), {"equal": True, "missing": 7, "eps": 1e-12}, GROUPS),
    *OBJECTIVES,
    Case("many-prompts", _sizes(64, 8, 128), {"beta": 0.04, "density": 0.7}, suite="full"),
    Case("long-completions", _sizes(1, 4, 20000), {"beta": 0.04, "density": 0.9}, suite="full"),
    Case("large-group", _groups(1, 5000), {"group_sizes": (1, 4998, 1)}, GROUPS, suite="full"),
    *DIMENSIONS,
)
EMPTY = (
    Case("no-completions", _sizes(0, 4, 6), {"beta": 0.1}),
    Case("no-completions-metrics", _sizes(0, 4, 6), {"beta": 0.1, "return_metrics": True}),
    Case("no-tokens", _sizes(2, 4, 0), {"beta": 0.1}),
    Case("no-rewards", _groups(0, 4), {}, GROUPS),
)
LEVELS = (0.0, 0.1, 0.37)
"""Steps of rewards with an offset: a mean of a few never equals one of them, so no exact advantage is 0."""
NUMBERS = ("clip_eps", "beta", "eps", *KEYWORDS)
"""Options that become keyword arguments of the call; all others shape the inputs."""


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw log-probabilities ``[prompts * samples, completion]`` <= 0, rewards, mask, and what the options need."""
    options = case.options
    numbers = {name: options[name] for name in NUMBERS if name in options}
    if "missing" in options:
        numbers["skip_nan"] = True
    if "rollout_mode" in options:
        numbers = {**RANGE, **numbers}
    groups = {"rewards": _rewards(case, draw), **_grouping(case, draw)}
    if case.function == GROUPS:
        return {**groups, **numbers}
    batch, length = case.sizes["prompts"] * case.sizes["samples"], case.sizes["completion"]
    current = draw.uniform(1e-3, 1.0, batch, length, dtype=torch.float64).log()
    mask = draw.mask(options.get("density", 1.0), batch, length)
    if options.get("masked_sequence"):
        mask[batch // 2] = False
    call: Inputs = {
        "current_logps": current.to(draw.dtype),
        "old_logps": _near(
            current, options.get("noise", 0.3), draw, None if "on_policy" in options else options.get("old", draw.dtype)
        ),
        "ref_logps": _near(current, options.get("drift", 0.3), draw, options.get("ref", draw.dtype)),
        "completion_mask": mask.to(options.get("mask", torch.bool)),
        **numbers,
    }
    if "special" in options:
        call[options["special"]][-1, length // 2] = torch.nan
    if "shift" in options:
        call["old_logps"] += options["shift"]
    if options.get("ties"):
        call["old_logps"][:, ::2] = call["current_logps"][:, ::2]
    if options.get("equal"):
        # An advantage of 0 with a ratio that is infinite in FP32; it is finite in the FP64 gold result.
        call["old_logps"][0, 0] = -500.0
    if case.function == FROM:
        shape = (batch, length) if options.get("per_token") else (batch,)
        call["advantages"] = draw.normal(*shape)
    else:
        call |= groups
    call |= extras(options, call, draw)
    return pack(call, draw, options.get("offsets", torch.int32)) if options.get("packed") else call


def _near(current: torch.Tensor, noise: float, draw: Draw, kind: torch.dtype | float | None) -> torch.Tensor | None:
    """Return log-probabilities of another policy: in dtype ``kind``, all of the value ``kind``, or None."""
    other = (current + draw.normal(*current.shape, scale=noise, dtype=torch.float64)).clamp(max=0.0)
    if kind is None:
        return None
    return other.to(kind) if isinstance(kind, torch.dtype) else torch.full_like(other, kind, dtype=draw.dtype)


def _rewards(case: Case, draw: Draw) -> torch.Tensor:
    batch = case.sizes["prompts"] * case.sizes["samples"]
    if "offset" in case.options:
        levels = torch.tensor(LEVELS, dtype=case.options.get("rewards", torch.float32), device=draw.device)
        rewards = case.options["offset"] + levels[draw.ids(len(LEVELS), batch)]
    else:
        rewards = draw.normal(batch)
    if case.options.get("equal"):
        rewards[: case.sizes["samples"]] = 0.3
    if case.options.get("missing"):
        rewards[:: case.options["missing"]] = torch.nan
    return rewards


def _grouping(case: Case, draw: Draw) -> Inputs:
    """Return the grouping argument; the group sizes of the case are repeated until all rewards are in a group.

    Boundaries in a tensor start at a random size of the list, so that other draws have other groups.
    """
    batch, samples = case.sizes["prompts"] * case.sizes["samples"], case.sizes["samples"]
    if "group_sizes" not in case.options and samples > 1:
        return {"samples_per_prompt": samples}
    offsets, sizes = [0], case.options.get("group_sizes", (1,))
    first = draw.integer(0, len(sizes)) if "boundaries" in case.options else 0
    for size in cycle((*sizes[first:], *sizes[:first])):
        if offsets[-1] >= batch:
            break
        offsets.append(min(offsets[-1] + size, batch))
    return {"group_boundaries": case.options.get("boundaries", list)(offsets)}


SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={
        "": reference.grpo_loss,
        FROM: reference.grpo_loss_from_advantages,
        GROUPS: reference.group_advantages,
    },
    classes=dict.fromkeys(("loss", "policy_loss", "kl", "metrics", "advantages", GRADIENT), "reduction"),
    differentiable=("current_logps",),
    magnitudes=magnitudes,
    transforms=TRANSFORMS,
    illegal=ILLEGAL,
    hygiene=HYGIENE,
    empty=EMPTY,
    groups={"objective": Objective, "extras": Extras, "normalizer": Normalizer},
    masks=("completion_mask",),
    on_host=frozenset({"group_boundaries"}),
    spared=frozenset({"return_metrics"}),
    unread=frozenset({"validate", "backend", "process_group"}),
    output="advantages",
)
