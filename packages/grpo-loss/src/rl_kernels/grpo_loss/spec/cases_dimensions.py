"""Sweeps of grpo_loss: lengths, groups, batches, and every pair of options."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from rl_kernels.core.testing import Case
from rl_kernels.core.testing.grouped import members
from rl_kernels.grpo_loss.call import ESTIMATORS, FORMS
from rl_kernels.grpo_loss.extras import Normalizer, divisor_of
from rl_kernels.grpo_loss.objective import Objective
from rl_kernels.lab.dimensions import CHECKED, EDGES, drawn, paired, swept

FROM, GROUPS = "grpo_loss_from_advantages", "group_advantages"
LOSS = {
    "loss_type": tuple(FORMS),
    "importance_level": (None, "sequence"),
    "kl_estimator": (None, "k1", "k2"),
    "kl_correction": (None, True),
    "beta": (0.1, 0.103, None),
    "clip_low": (None, 0.1, 0.0),
    "clip_high": (None, 0.4, 0.0),
    "delta": (None, 1.4),
    "dual_clip": (None, 1.3),
    "rollout": (None, "token", "sequence", "token mask", "token truncate", "sequence mask", "sequence truncate"),
    "tokens": (None, 50.0, 70000.0),
    "sequences": (None, 9.0),
    "return_metrics": (None, True),
}
TOKENS = {
    "on_policy": (None, True),
    "noise": (None, 0.8),
    "density": (None, 0.6),
    "masked_sequence": (None, True),
    "mask": (None, torch.float32, torch.int64, torch.bfloat16),
    "entropy": (None, True),
    "packed": (None, True, "to a length", "long offsets"),
    "old": (None, torch.float32, torch.bfloat16),
    "ref": (None, torch.float32),
    "dtype": (None, "bf16", "fp16", "fp64"),
}
REWARDS = {
    "advantage_estimator": (None, *ESTIMATORS[1:]),
    "eps_placement": (None, "add"),
    "eps": (None, 2.0),
    "missing": (None, 3),
    "group_sizes": (None, (1, 4, 2)),
}
LONG = {**LOSS, **TOKENS, "packed": (None, True, "long offsets")}
FEW = {
    **{name: LOSS[name] for name in ("loss_type", "importance_level", "kl_correction", "beta", "return_metrics")},
    **{name: TOKENS[name] for name in ("on_policy", "noise", "density", "masked_sequence", "packed")},
    "rollout": (None, "token", "sequence", "sequence mask"),
    "per_token": (None, True),
    "dtype": (None, "bf16", "fp64"),
}
"""Options in pairs for the loss with given advantages; the pairs of ``grpo_loss`` cover the remaining options."""
TOGETHER: dict[str, dict[str, Any]] = {
    **{
        f"{of} {mode}": {"rollout": of, "rollout_mode": mode}
        for of in ("token", "sequence")
        for mode in ("mask", "truncate")
    },
    "to a length": {"packed": True, "max_seqlen": 12},
    "long offsets": {"packed": True, "offsets": torch.int64},
}
"""Options that are valid only together, by the value that expands to them."""
SIZES = {"prompts": 2, "samples": 4, "completion": 11}
TURNS: tuple[Mapping[str, Any], ...] = (
    {"beta": 0.1, "density": 0.7},
    {"loss_type": "grpo", "return_metrics": True, "noise": 0.8},
    {"loss_type": "gspo", "clip_low": 0.03, "density": 0.8},
    {"loss_type": "dapo", "on_policy": True, "packed": True},
    {"loss_type": "cispo", "noise": 0.8, "density": 0.5, "rollout": "token"},
)
"""Options of the sweeps; the cases take them in turn."""
HALF_MASK = {"loss_type": "grpo", "mask": torch.bfloat16}
FAR = {"loss_type": "gspo", "packed": True, "noise": 6.0, "density": 0.9}
"""Log-ratios of neighbors that add up to thousands."""
LENGTHS = (1, 2, 3, 16, 17, 31, 33, 64, 65, 127, 129, 255, 257, 1000, 1023, 1025, 4096, 4097, 8193)
MORE_LENGTHS = (*(size for size in EDGES if size not in LENGTHS), 2048, 32768, 32769, 131080)
MEMBERS = (2, 3, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 512, 513, 1024)
PROMPTS, MORE_PROMPTS = (1, 2, 33, 64, 65, 128, 257), (63, 127, 129, 520, 1025, 2049)
"""Sizes around segments, lanes and blocks; ``MORE_`` sizes are in the full suite only."""


def _possible(options: Mapping[str, Any]) -> bool:
    """Return whether the loss type, or any type if none is given, accepts these options."""
    types = (options["loss_type"],) if "loss_type" in options else tuple(FORMS)
    return any(_accepted(loss_type, tuple(sorted(_keywords(options).items()))) for loss_type in types)


def _keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    options = _expanded(options)
    named = {name: value for name, value in options.items() if name in members(Objective) and name != "loss_type"}
    renamed = {f"num_{name}": options[name] for name in ("tokens", "sequences") if name in options}
    return {**named, **renamed}


def _expanded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with each value of ``TOGETHER`` expanded."""
    expanded: dict[str, Any] = {}
    for name, value in options.items():
        expanded |= TOGETHER[value] if isinstance(value, str) and value in TOGETHER else {name: value}
    return expanded


@functools.cache
def _accepted(loss_type: str, options: tuple[tuple[str, Any], ...]) -> bool:
    keywords = dict(options)
    try:
        divisor_of(
            loss_type, Normalizer(**{name: keywords.pop(name) for name in Normalizer._fields if name in keywords})
        )
        Objective(loss_type=loss_type, **keywords)
    except (TypeError, ValueError):
        return False
    return True


def _of_advantages(cases: Iterator[Case]) -> Iterator[Case]:
    """Return cases of ``group_advantages``, whose names do not clash with the cases of the loss."""
    return (replace(case, name=f"groups-{case.name}") for case in cases)


_CASES = (
    *paired("pairs", SIZES, {**LOSS, **TOKENS, **REWARDS}, _possible),
    # The same draws as the pairs; these two cases differ in eps only.
    Case("rewards", SIZES, relations=CHECKED, drawn_as="pairs"),
    Case("rewards-eps", SIZES, {"eps": 2.0}, relations=CHECKED, drawn_as="pairs"),
    *paired("from-few-pairs", SIZES, FEW, _possible, function=FROM),
    *paired("from-pairs", SIZES, {**LOSS, **TOKENS, "per_token": (None, True)}, _possible, function=FROM, suite="full"),
    *paired(
        "groups-pairs", {"prompts": 5, "samples": 4}, {**REWARDS, "dtype": (None, "bf16", "fp64")}, function=GROUPS
    ),
    *drawn("drawn", SIZES, {**LOSS, **TOKENS, **REWARDS}, 48, _possible),
    # Alone, because a NaN hides the effect of every other option.
    *drawn("special", SIZES, {**LOSS, **TOKENS, **REWARDS, "special": ("current_logps",)}, 12, _possible),
    *swept("completion", {**SIZES, "prompts": 1, "samples": 2}, LENGTHS, TURNS),
    Case("completion-65600", {**SIZES, "prompts": 1, "samples": 2, "completion": 65600}, TURNS[0], relations=CHECKED),
    # All ratios above 1, or all below: the smallest and the largest are not 1.
    Case("ratios-above-1", SIZES, {"shift": -3.0, "return_metrics": True}, relations=CHECKED),
    Case("ratios-below-1", SIZES, {"shift": 3.0, "return_metrics": True}, relations=CHECKED),
    # More tokens than a 16-bit mask can count, a mean that is subnormal in FP16, sequences longer than one segment.
    Case("completion-600-mask", {**SIZES, "samples": 2, "completion": 600}, HALF_MASK, relations=CHECKED),
    Case(
        "completion-20000", {**SIZES, "prompts": 1, "samples": 2, "completion": 20000}, relations=CHECKED, dtype="fp16"
    ),
    Case(
        "prompts-2052", {"prompts": 2052, "samples": 2, "completion": 1}, TURNS[0], relations=(*CHECKED, "invariance")
    ),
    Case("samples-300-offset", {"prompts": 2, "samples": 300, "completion": 2}, {"offset": 10000.0}, relations=CHECKED),
    Case("packed-far-off", {**SIZES, "completion": 1500}, FAR, relations=CHECKED),
    Case("packed-to-a-length", SIZES, {"loss_type": "dr_grpo", "packed": True, "max_seqlen": 15}, relations=CHECKED),
    # The loss and the advantages alone have every second size each in the quick suite.
    *swept("samples", {**SIZES, "prompts": 2, "completion": 3}, MEMBERS[::2], TURNS),
    *swept("samples", {**SIZES, "prompts": 2, "completion": 3}, (*MEMBERS[1::2], 2048, 4999), TURNS, suite="full"),
    *swept("prompts", {**SIZES, "samples": 2, "completion": 3}, PROMPTS, TURNS),
    *_of_advantages(swept("samples", {"prompts": 2}, MEMBERS[1::2], function=GROUPS)),
    *_of_advantages(swept("samples", {"prompts": 2}, MEMBERS[::2], function=GROUPS, suite="full")),
    *drawn("drawn-more", SIZES, {**LOSS, **TOKENS, **REWARDS}, 300, _possible, suite="full"),
    *swept("completion", {**SIZES, "prompts": 1, "samples": 2}, MORE_LENGTHS, TURNS, suite="full"),
    *swept("prompts", {**SIZES, "samples": 2, "completion": 5}, MORE_PROMPTS, TURNS, suite="full"),
    *paired("long-pairs", {"prompts": 3, "samples": 3, "completion": 700}, LONG, _possible, suite="full"),
)
DIMENSIONS: tuple[Case, ...] = tuple(
    # A NaN at A = 0 contributes nothing, but autograd of the definition turns it into NaN, so only accuracy is checked.
    replace(
        case, options=_expanded(case.options), relations=("accuracy",) if "special" in case.options else case.relations
    )
    for case in _CASES
)
